"""A text much longer than the model was trained for, through one cache: perplexity and bytes by position.

Source: StreamingLLM, arXiv:2309.17453, figure 5. Departs from it: bytes are counted beside perplexity, and full attention is run only as far as `exact_until`;
its bytes beyond follow from a closed formula.

The text goes through in stretches of `every` tokens. A stretch feeds tokens a to b - 1 and is scored on tokens a + 1 to b; the next one feeds b first. So every
token but the first is predicted once, from all that came before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from eval.bounded.policies import FULL, Policy
from eval.bounded.quality import nll_of
from hf_kvq import QuantizedSlidingWindowCache, expected_nbytes

__all__ = ["CHUNK", "EVERY", "EXACT_UNTIL", "TOKENS", "plot", "stream"]

TOKENS, CHUNK, EVERY, EXACT_UNTIL = 65536, 512, 2048, 12288


def stream(
    model: PreTrainedModel,
    ids: Tensor,
    policies: Sequence[Policy],
    *,
    chunk: int = CHUNK,
    every: int = EVERY,
    exact_until: int = EXACT_UNTIL,
    scheme: str = "int8",
    progress: Any = None,
) -> list[dict[str, Any]]:
    """One row a policy, each with its stretches: where it ends, mean nll, and bytes of the whole cache.

    Args:
        model: Its attention is set for each policy, and stays as the last one needed it.
        ids: `[tokens + 1]`; the last one is only predicted.
        policies: What to compare; full attention has no nll behind `exact_until`.
        chunk: Tokens of a forward; should divide `every`.
        every: Tokens of a stretch.
        exact_until: Tokens that full attention reads.
        scheme: Of the bounded caches.
        progress: Gets `update(1)` for every stretch.

    Raises:
        ValueError: If a stretch or a chunk holds no token, or there is none to predict.
    """
    if min(chunk, every) < 1 or len(ids) < 2:
        raise ValueError(
            f"chunk and every must be at least 1, and ids at least 2, got {chunk}, {every} and {len(ids)}"
        )
    rows = []
    for policy in policies:
        cache, started = policy.make(model.config, scheme), time.perf_counter()
        model.set_attn_implementation("sdpa" if policy.kind == FULL else "hf_kvq")
        stretches = []
        for begin in range(0, len(ids) - 1, every):
            end = min(begin + every, len(ids) - 1)
            if policy.kind == FULL and end > exact_until:
                nbytes = expected_nbytes(model.config, "exact", end, dtype=model.dtype)
                stretches.append(_stretch(begin, end, None, nbytes, nbytes))
            else:
                nll = nll_of(model, ids[begin : end + 1], cache, chunk=chunk).double().mean().item()
                stretches.append(_stretch(begin, end, nll, *_nbytes(cache)))
            if progress is not None:
                progress.update(1)
        rows.append(
            {
                "kind": policy.kind,
                "budget": policy.budget,
                "label": policy.label,
                "scheme": None if policy.kind == FULL else scheme,
                "stretches": stretches,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    return rows


def plot(record: dict[str, Any], path: str | Path) -> None:
    """Save a picture: perplexity by position on the left, bytes by position on the right, both logarithmic.

    Args:
        record: With the `rows` of `stream` and the `trained_length` of the model, or None.
        path: Of the file; its suffix says the format.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    # The object interface draws without pyplot, and so without a display or global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for index, row in enumerate(record["rows"]):
        name = row["kind"] + (f", budget {row['budget']}" if row["budget"] else "")
        colour = f"C{index % 10}"
        measured = [stretch for stretch in row["stretches"] if stretch["nll"] is not None]
        left.plot(
            [(stretch["begin"] + stretch["end"]) / 2 for stretch in measured],
            [math.exp(stretch["nll"]) for stretch in measured],
            color=colour,
            label=name,
        )
        right.plot(
            [stretch["end"] for stretch in measured],
            [stretch["nbytes"] for stretch in measured],
            color=colour,
            label=name,
        )
        if len(measured) < len(row["stretches"]):
            computed = [*measured[-1:], *row["stretches"][len(measured) :]]
            right.plot(
                [stretch["end"] for stretch in computed],
                [stretch["nbytes"] for stretch in computed],
                color=colour,
                linestyle="--",
                label=f"{name}, computed",
            )
    for axes, what in ((left, "perplexity"), (right, "bytes of the cache")):
        axes.set_yscale("log")
        axes.set_xlabel("position")
        axes.set_ylabel(what)
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
        if record.get("trained_length"):
            axes.axvline(record["trained_length"], color="0.5", linewidth=1, linestyle=":", label="trained length")
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _stretch(begin: int, end: int, nll: float | None, nbytes: int, nbytes_used: int) -> dict[str, Any]:
    return {"begin": begin, "end": end, "nll": nll, "nbytes": nbytes, "nbytes_used": nbytes_used}


def _nbytes(cache: Cache) -> tuple[int, int]:
    """Bytes of all storages, and those in use."""
    if isinstance(cache, QuantizedSlidingWindowCache):
        return cache.nbytes, cache.nbytes_used
    held = sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))
    return held, held
