"""Runs that take turns, and what their times come to."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

__all__ = ["WARM_UP", "in_turns", "ratio_spread", "spread"]

WARM_UP = 2
"""First rounds, which are not timed: kernels are compiled, and storage grows."""

Key = TypeVar("Key", bound=Hashable)


def in_turns(
    keys: Sequence[Key],
    rounds: int,
    *,
    prepare: Callable[[Key], None],
    run: Callable[[Key, int], Any],
    check: Callable[[dict[Key, Any]], None],
    warm_up: int = WARM_UP,
    title: str = "steps",
) -> dict[Key, list[float]]:
    """Milliseconds of each timed round.

    Args:
        keys: The contenders.
        rounds: Timed ones.
        prepare: What is done for a contender before its turn, untimed.
        run: Its turn in a round of this number.
        check: Gets the results of every round.
        warm_up: Rounds before them.
        title: Of the progress bar.
    """
    taken: dict[Key, list[float]] = {key: [] for key in keys}
    order = list(keys)
    for number in tqdm(range(warm_up + rounds), desc=title, leave=False, file=sys.stderr):
        results = {}
        for key in order:
            prepare(key)
            start = time.perf_counter()
            results[key] = run(key, number)
            taken[key].append(1000 * (time.perf_counter() - start))
        check(results)
        order.append(order.pop(0))
    return {key: times[warm_up:] for key, times in taken.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": p20, "p80": p80}


def ratio_spread(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """`spread` of the ratios of each round."""
    return spread([a / b for a, b in zip(above, below, strict=True)])
