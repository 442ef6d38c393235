"""Windows scored with several caches side by side, in forwards of stated sizes: the figures of one row a cache.

As `hf_kvq.evaluation.protocols.measure`, from whose parts it is made. Departs from it: the sizes of the forwards are free, so that a first one that stock
caches answer exactly can be short; seconds are kept; and a cache that fails is named and left out, while the others go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hf_kvq.evaluation.candidates import Candidate, Exact
from hf_kvq.evaluation.divergence import Divergence, compare_logits
from hf_kvq.evaluation.models import forward
from hf_kvq.evaluation.protocols import Measured
from hf_kvq.evaluation.summary import summarize

__all__ = ["BEGIN", "Scored", "forwards", "score"]

BEGIN = 4
"""Tokens of the first forward: hqq packs the rows of four tokens together, whatever the number of heads, and fails on fewer."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What came out.

    Attributes:
        rows: Figures of each cache, in order.
        failed: What the others said, by name.
    """

    rows: list[dict[str, Any]]
    failed: dict[str, str]


def forwards(tokens: int, *, chunk: int = 1, single_from: int | None = None) -> list[int]:
    """Sizes of the forwards of a window: `BEGIN` tokens, then `chunk` at a time up to `single_from`, then one at a time.

    Args:
        tokens: Of the window.
        chunk: Tokens of a forward.
        single_from: Position from which on tokens come alone; None: none do.

    Raises:
        ValueError: If they are not positive, or the window ends first.
    """
    until = tokens if single_from is None else single_from
    if chunk < 1 or not 0 <= until <= tokens:
        raise ValueError(
            f"chunk must be at least 1, and from between 0 and the window of {tokens}, got {chunk} and {until}"
        )
    sizes = [min(BEGIN, tokens)]
    while (left := tokens - sum(sizes)) > 0:
        ahead = until - sum(sizes)
        sizes.append(min(chunk, ahead, left) if ahead > 0 else 1)
    return sizes


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows tokens"],
    candidates: Sequence[Candidate],
    *,
    sizes: Sequence[int],
    step: Callable[[str], None],
) -> Scored:
    """Score every window with every cache against exact logits, which are computed once a window.

    Args:
        model: In evaluation mode, set to the attention that reads the caches.
        windows: Token ids; each row is scored from its second token on.
        candidates: The caches.
        sizes: Tokens of each forward, a window in all.
        step: Called with a few words before each scoring.
    """
    exact_nbytes = 0
    running, failed, memories = list(candidates), {}, {}
    divergences: dict[str, list[Divergence]] = {candidate.name: [] for candidate in candidates}
    seconds = dict.fromkeys(divergences, 0.0)
    for number, tokens in enumerate(windows, start=1):
        step(f"exact, window {number} of {len(windows)}")
        reference = Exact().build(model.config)
        exact = _logits(model, tokens, reference, sizes)
        exact_nbytes = Exact().memory(reference).nbytes_used
        for candidate in list(running):
            name, started = candidate.name, time.perf_counter()
            step(f"{name}, window {number} of {len(windows)}")
            try:
                cache = candidate.build(model.config)
                coded = _logits(model, tokens, cache, sizes)
                memories[name] = candidate.memory(cache)
            except (ImportError, RuntimeError, ValueError) as error:
                failed[name] = " ".join(str(error).split())
                running.remove(candidate)
                continue
            seconds[name] += time.perf_counter() - started
            divergences[name].append(compare_logits(exact, coded, tokens[1:]))
    rows = []
    for candidate in running:
        measured = Measured(divergences=tuple(divergences[candidate.name]), memory=memories[candidate.name])
        rows.append(
            {
                "scheme": candidate.name,
                "config": candidate.to_dict(),
                **_figures(measured, exact_nbytes),
                "seconds_per_window": round(seconds[candidate.name] / len(windows), 2),
            }
        )
    return Scored(rows=rows, failed=failed)


def _logits(
    model: PreTrainedModel, tokens: Int[Tensor, " tokens"], cache: Cache, sizes: Sequence[int]
) -> Float[Tensor, "predicted vocabulary"]:
    """At every token that has a next one."""
    return torch.cat([forward(model, part[None], cache)[0] for part in tokens.split(list(sizes))])[:-1]


def _figures(measured: Measured, exact_nbytes: int) -> dict[str, Any]:
    """JSON values; None stands for what is no finite number."""
    results = summarize(measured, exact_nbytes=exact_nbytes, floor=None, speed=None)
    by_window = torch.stack([found.kl.mean() for found in measured.divergences])
    kl = by_window.tolist()
    figures = {
        "bits_per_element": results.bits_per_element,
        "delta_percent": results.delta_percent,
        "delta_percent_se": results.delta_percent_se,
        "kl_mean": results.kl_mean,
        "kl_mean_se": by_window.std().item() / math.sqrt(len(kl)) if len(kl) > 1 else None,
        "same_top1": results.same_top1,
        "perplexity": results.perplexity,
        "exact_perplexity": results.exact_perplexity,
        "nbytes": results.nbytes,
        "nbytes_used": results.nbytes_used,
        "exact_nbytes": results.exact_nbytes,
        "tokens_coded": results.tokens_coded,
    }
    lists = {
        "nll_by_window": [found.coded_nll.mean().item() for found in measured.divergences],
        "exact_nll_by_window": [found.exact_nll.mean().item() for found in measured.divergences],
        "kl_by_window": kl,
    }
    return {name: _finite(figure) for name, figure in figures.items()} | {
        name: [_finite(figure) for figure in found] for name, found in lists.items()
    }


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None
