"""One forward of many tokens into an empty cache: its time, and the memory that it holds at most.

The peak is measured in a process of its own for each cache, which has nothing else in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.speed.caches import BOUNDS, CONTENDERS, DENSE, DYNAMIC, INT8, Q4, Q8, attend_with, difference, require_equal
from eval.speed.model import add_sources, sources
from eval.speed.timing import in_turns, ratio_spread, spread
from hf_kvq.evaluation.models import cache_argument

__all__ = ["CACHES", "add_options", "measure", "one_forward"]

CACHES = (DYNAMIC, INT8, Q8, Q4, DENSE)


def add_options(parser: ArgumentParser) -> None:
    add_sources(parser)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the forward")
    parser.add_argument("--repeats", type=int, default=3, help="timed forwards of each cache")


@torch.inference_mode()
def measure(given: Namespace) -> dict[str, Any]:
    """The record's own part."""
    peaks = {name: _peak(given, name) for name in CACHES}  # first: this process still leaves them the memory
    model, ids, identity = sources(given, given.tokens)
    for name in CACHES:  # what the first call of a path takes
        one_forward(model, name, ids[:64])
    differences = dict.fromkeys(CACHES, 0.0)

    def check(logits: dict[str, Tensor]) -> None:
        for name, got in logits.items():
            differences[name] = max(differences[name], difference(got, logits[DYNAMIC]))
            # The tokens of a first forward see each other as they are, so all three are equal.
            require_equal(f"{name} against {DYNAMIC}", differences[name], BOUNDS["float32"])

    times = in_turns(
        CACHES,
        given.repeats,
        prepare=lambda name: attend_with(model, name),
        run=lambda name, _: one_forward(model, name, ids),
        check=check,
        warm_up=0,
        title="forwards",
    )
    caches = {
        name: {
            "ms": spread(taken),
            "time_to_dynamic": ratio_spread(taken, times[DYNAMIC]),
            "peak_bytes": peaks[name],
            "difference": differences[name],
        }
        for name, taken in times.items()
    }
    equality = {"bound": BOUNDS["float32"], **differences}
    return {**identity, "tokens": given.tokens, "repeats": given.repeats, "equality": equality, "caches": caches}


def one_forward(model: Any, name: str, ids: Tensor) -> Tensor:
    """Logits of the last token."""
    attend_with(model, name)
    cache = CONTENDERS[name].build(model.config, len(ids))
    return model(ids[None], use_cache=True, logits_to_keep=1, **{cache_argument(model): cache}).logits[:, -1]


def _peak(given: Namespace, name: str) -> int:
    """Bytes that the forward holds at most beyond what the process held before it."""
    command = [sys.executable, "-m", "eval.speed.resident", "--cache", name, "--tokens", str(given.tokens)]
    options = {"--model": given.model, "--text": given.text, "--threads": torch.get_num_threads()}
    command += [str(part) for option, value in options.items() if value is not None for part in (option, value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[2])
    return json.loads(done.stdout.splitlines()[-1])
