"""A slow and obvious bounded cache: one head, one row, one query at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def turned(x: Tensor, by: float, inv_freq: list[float]) -> Tensor:
    """RoPE of Llama: channel j and j + half turn together by `by` positions."""
    half = len(inv_freq)
    out = x.clone()
    for j, frequency in enumerate(inv_freq):
        cos, sin = math.cos(by * frequency), math.sin(by * frequency)
        out[j] = x[j] * cos - x[j + half] * sin
        out[j + half] = x[j + half] * cos + x[j] * sin
    return out


def stream(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    window: int,
    sinks: int,
    block: int,
    kept: int,
    decay: float = 0.9,
    longest: int | None = None,
    inv_freq: list[float] | None = None,
) -> tuple[Tensor, list[int]]:
    """Outputs of every query, and the positions that are kept at the end.

    Args:
        queries: `[groups, tokens, dim]` of one kv head, scaled.
        keys: `[tokens, dim]`.
        values: `[tokens, dim]`.
        window: Tokens that a query sees at least.
        sinks: First tokens, which stay.
        block: Tokens that leave together.
        kept: Heavy hitters at most.
        decay: Of the mass, each time `block` tokens have come.
        longest: Distance beyond which no key stands.
        inv_freq: Of RoPE.
    """
    queries, keys, values = queries.double(), keys.double(), values.double()
    groups, tokens, _ = queries.shape
    outputs = torch.zeros(groups, tokens, values.shape[1], dtype=torch.float64)
    mass = dict.fromkeys(range(tokens), 0.0)
    heavy: list[int] = []
    gone = sinks
    for n in range(tokens):
        # A block leaves with the first query whose window begins behind it.
        if n > 0 and (n + 1 - window - sinks) % block == 0:
            for t in mass:
                mass[t] *= decay
            if n + 1 - window - sinks > 0:
                candidates = heavy + list(range(gone, gone + block))
                heavy = sorted(sorted(candidates, key=lambda t: -mass[t])[:kept])
                gone += block
        seen = [t for t in range(min(sinks, n + 1))] + [t for t in heavy] + [t for t in range(gone, n + 1)]
        # The furthest query that sees the same says how far keys are moved ahead.
        step = (n + 1 - window - sinks) // block
        last = block * (step + 1) + window + sinks - 2
        oldest = -1 if longest is None else last - longest
        for g in range(groups):
            logits = []
            for t in seen:
                key = keys[t]
                if inv_freq is not None and t < sinks and oldest > 0:
                    key = turned(key, oldest, inv_freq)
                elif inv_freq is not None and t < gone and t < oldest:
                    key = turned(key, oldest - t, inv_freq)
                logits.append(float(queries[g, n] @ key))
            weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
            for t, weight in zip(seen, weights.tolist(), strict=True):
                outputs[g, n] += weight * values[t]
                mass[t] += weight
    return outputs, heavy
