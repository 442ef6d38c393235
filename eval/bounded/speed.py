"""What a far field costs a decode step of a whole model: policies of the same bytes, in turns, in one run.

Every cache gets the same text in chunks, under the attention that it is read by, so that windows, heavy hitters and clusters are what they are in use. Then
all of them take each step in turns. Steps in which a block leaves the window do more than others, and there is one in every `BLOCK`: so a row has the median of all steps, the
medians of both sorts, and the mean over a whole block, which is what a long answer pays. Without a far field a token leaves at every step, and no step is special.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from eval.bounded.policies import BLOCK, FULL, Policy
from eval.speed.caches import step
from eval.speed.timing import in_turns, ratio_spread, spread
from hf_kvq import QuantizedSlidingWindowCache
from hf_kvq.evaluation.models import cache_argument

__all__ = ["BASELINE", "CONTEXT", "STEPS", "speed", "table"]

CONTEXT, STEPS, CHUNK = 4096, 3 * BLOCK, 512
BASELINE = "sinks + window"
"""The kind that others of its budget are compared with."""


@torch.inference_mode()
def speed(
    model: PreTrainedModel,
    ids: Tensor,
    policies: Sequence[Policy],
    *,
    context: int = CONTEXT,
    steps: int = STEPS,
    chunk: int = CHUNK,
    scheme: str = "int8",
) -> list[dict[str, Any]]:
    """One row a policy: milliseconds of a step, and ratios to `BASELINE` of the same budget.

    Args:
        model: Its attention is set for each turn, and stays as the last one needed it.
        ids: At least `context + BLOCK + steps` tokens.
        policies: What to compare; each once.
        context: Tokens before the first step.
        steps: Timed ones, whole blocks; as many as one block come before them.
        chunk: Tokens of a forward of the context.
        scheme: Of the bounded caches.

    Raises:
        ValueError: If `steps` are not whole blocks, there are too few tokens, or logits are not finite.
    """
    if steps < BLOCK or steps % BLOCK:
        raise ValueError(
            f"steps must be whole blocks of {BLOCK}, got {steps}; try {max(round(steps / BLOCK), 1) * BLOCK}"
        )
    if len(ids) < context + BLOCK + steps:
        raise ValueError(
            f"the text has {len(ids)} tokens, {context + BLOCK + steps} are needed; try fewer tokens or another text"
        )
    caches = {policy: policy.make(model.config, scheme) for policy in policies}
    for policy, cache in tqdm(caches.items(), desc="context", leave=False, file=sys.stderr):
        _attend(model, policy)
        for part in ids[:context].split(chunk):
            model(part[None], **{cache_argument(model): cache}, logits_to_keep=1)
    tokens = ids[context:].view(-1, 1, 1)
    left: dict[Policy, list[bool]] = {policy: [] for policy in policies}

    def run(policy: Policy, number: int) -> Tensor:
        before = _blocks_gone(caches[policy])
        logits = step(model, tokens[number], caches[policy])
        left[policy].append(_blocks_gone(caches[policy]) > before)
        return logits

    def check(logits: dict[Policy, Tensor]) -> None:
        for policy, got in logits.items():
            if not bool(got.isfinite().all()):
                raise ValueError(f"{policy.kind}, budget {policy.budget}: logits are not finite; nothing is recorded")

    times = in_turns(
        list(caches), steps, prepare=lambda policy: _attend(model, policy), run=run, check=check, warm_up=BLOCK
    )
    baselines = {policy.budget: times[policy] for policy in policies if policy.kind == BASELINE}
    return [
        {
            "kind": policy.kind,
            "budget": policy.budget,
            "label": policy.label,
            "scheme": None if policy.kind == FULL else scheme,
            "context": context,
            "steps": steps,
            **_figures(times[policy], left[policy][BLOCK:], baselines.get(policy.budget)),
        }
        for policy in policies
    ]


def table(record: dict[str, Any]) -> str:
    """The `rows` of a record as markdown; milliseconds, and ratios of times (lower is better)."""
    lines = [
        [
            "policy", "budget", "kept", "ms a step", "no block leaves", "a block leaves", f"mean over {BLOCK} steps",
            f"step / {BASELINE}", f"mean / {BASELINE}",
        ],
        ["---", "---:", "---", *["---:"] * 6],
    ]  # fmt: skip
    for row in record["rows"]:
        ms = row["ms"]
        ratio, mean_ratio = row["ratio"], row["ratio_of_means"]
        lines.append(
            [
                row["kind"],
                f"{row['budget']:,}" if row["budget"] else "-",
                row["label"] or f"all, from {row['context']:,} on",
                f"{ms['median']:.1f} ({ms['p20']:.1f} to {ms['p80']:.1f})",
                _number(row["ms_quiet"], 1),
                _number(row["ms_leaving"], 1),
                _number(row["ms_block_mean"], 1),
                "-" if ratio is None else f"{ratio['median']:.2f} ({ratio['p20']:.2f} to {ratio['p80']:.2f})",
                _number(mean_ratio, 2),
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _attend(model: PreTrainedModel, policy: Policy) -> None:
    attention = "sdpa" if policy.kind == FULL else "hf_kvq"
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)


def _blocks_gone(cache: Cache) -> int:
    """Blocks that left the window of the first bounded layer; 0 where tokens leave one by one, or never."""
    if not isinstance(cache, QuantizedSlidingWindowCache) or cache.block == 1:
        return 0
    store = cache.bounded_layers[0].store
    return 0 if store is None else max(*store.rows.steps, 0)


def _figures(taken: Sequence[float], left: Sequence[bool], baseline: Sequence[float] | None) -> dict[str, Any]:
    """What the times of one policy come to."""
    quiet = [ms for ms, leaves in zip(taken, left, strict=True) if not leaves]
    leaving = [ms for ms, leaves in zip(taken, left, strict=True) if leaves]
    means = _block_means(taken)
    ratios = None if baseline is None else [a / b for a, b in zip(means, _block_means(baseline), strict=True)]
    return {
        "ms": spread(taken),
        "ms_quiet": statistics.median(quiet) if quiet else None,
        "ms_leaving": statistics.median(leaving) if leaving else None,
        "leaving": len(leaving),
        # The median of the means: one interruption by something else must not enter.
        "ms_block_mean": statistics.median(means),
        "ms_block_means": means,
        "ratio": None if baseline is None else ratio_spread(taken, baseline),
        "ratio_of_means": None if ratios is None else statistics.median(ratios),
    }


def _block_means(taken: Sequence[float]) -> list[float]:
    return [statistics.fmean(taken[begin : begin + BLOCK]) for begin in range(0, len(taken), BLOCK)]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
