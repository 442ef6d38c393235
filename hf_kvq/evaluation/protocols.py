"""Teacher-forced scoring of windows with several caches side by side, the noise floor beneath it, and decode speed.

Source: the perplexity protocol of QuaRot (arXiv:2404.00456) and KVQuant (arXiv:2401.18079) for one pass over a window. Departs
from it: the states are quantized by a real cache, whose bytes are counted, and the same function feeds the window in chunks to
measure what decoding sees.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hf_kvq.evaluation.candidates import CacheMemory, Candidate, Exact
from hf_kvq.evaluation.divergence import Divergence, compare_logits
from hf_kvq.evaluation.models import forward

__all__ = ["DecodeSpeed", "Measured", "NoiseFloor", "decode_speed", "measure", "noise_floor", "teacher_forced"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One scheme on all windows: a divergence for each window, and what the cache held after the last one."""

    divergences: tuple[Divergence, ...]
    memory: CacheMemory


@dataclass(frozen=True, kw_only=True)
class DecodeSpeed:
    """Medians over single-token forwards.

    Attributes:
        ms_per_token: Milliseconds of one.
        ratio: Of its time to the exact cache's time on the same token. Both meet the same moment of the machine, so this
            is steadier than a ratio of two medians.
    """

    ms_per_token: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """Exact in one pass against exact token by token: the same model, the same cache, another order of additions.

    Attributes:
        tokens: On how many tokens.
        nll_difference: Mean negative log-likelihood, token by token minus one pass.
        kl_mean: Mean KL divergence.
        kl_max: Largest KL divergence.
        max_logit_difference: Largest absolute difference of two logits.
    """

    tokens: int
    nll_difference: float
    kl_mean: float
    kl_max: float
    max_logit_difference: float


def teacher_forced(
    model: PreTrainedModel, tokens: Int[Tensor, " tokens"], cache: Cache, *, chunk: int | None
) -> Float[Tensor, "tokens vocabulary"]:
    """Logits at every token of a window, fed to the model in forwards of `chunk` tokens; None: in one."""
    parts = tokens.to(model.device).split(chunk or len(tokens))
    return torch.cat([forward(model, part[None], cache)[0] for part in parts])


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows tokens"],
    candidates: Sequence[Candidate],
    *,
    chunk: int | None,
    step: Callable[[str], None],
) -> dict[str, Measured]:
    """Score every window with every candidate against exact logits, which are computed once per window.

    Args:
        model: In evaluation mode.
        windows: Token ids; each row is scored from its second token on.
        candidates: The caches; `Exact` costs no forward of its own.
        chunk: Tokens of one forward; None: the window in one.
        step: Called with a few words before each scoring.

    Raises:
        RuntimeError: If a candidate coded nothing.
    """
    reference = Exact()
    divergences: dict[str, list[Divergence]] = {candidate.name: [] for candidate in candidates}
    memories: dict[str, CacheMemory] = {}
    for number, tokens in enumerate(windows, start=1):
        targets = tokens[1:].to(model.device)
        exact_cache = reference.build(model.config)
        step(f"{reference.name}, window {number} of {len(windows)}")
        exact = teacher_forced(model, tokens, exact_cache, chunk=chunk)[:-1]
        for candidate in candidates:
            coded, cache = exact, exact_cache
            if candidate.name != reference.name:
                step(f"{candidate.name}, window {number} of {len(windows)}")
                cache = candidate.build(model.config)
                coded = teacher_forced(model, tokens, cache, chunk=chunk)[:-1]
            memories[candidate.name] = candidate.memory(cache)
            divergences[candidate.name].append(compare_logits(exact, coded, targets))
    return {name: Measured(divergences=tuple(found), memory=memories[name]) for name, found in divergences.items()}


@torch.inference_mode()
def noise_floor(model: PreTrainedModel, tokens: Int[Tensor, " tokens"]) -> NoiseFloor:
    """Compare the exact cache in one pass with the exact cache token by token."""
    reference = Exact()
    one_pass = teacher_forced(model, tokens, reference.build(model.config), chunk=None)[:-1]
    by_token = teacher_forced(model, tokens, reference.build(model.config), chunk=1)[:-1]
    found = compare_logits(one_pass, by_token, tokens[1:].to(model.device))
    return NoiseFloor(
        tokens=len(tokens),
        nll_difference=(found.coded_nll - found.exact_nll).mean().item(),
        kl_mean=found.kl.mean().item(),
        kl_max=found.kl.max().item(),
        max_logit_difference=(one_pass - by_token).abs().max().item(),
    )


@torch.inference_mode()
def decode_speed(
    model: PreTrainedModel, tokens: Int[Tensor, " tokens"], candidates: Sequence[Candidate], *, timed: int
) -> dict[str, DecodeSpeed]:
    """Time single-token forwards at the end of a window, by candidate.

    All candidates take each token in turn, so whatever else the machine does meets all of them alike. The first token is a
    warm-up; at least one token comes before it.

    Args:
        model: In evaluation mode.
        tokens: The window.
        candidates: The caches to time; `Exact` among them.
        timed: Forwards to take the median of; fewer where the window has fewer.

    Raises:
        ValueError: If the window is too short to time one token.
    """
    timed = min(timed, len(tokens) - 2)
    if timed < 1:
        raise ValueError(
            f"timing one token needs a window of at least 3 tokens, got {len(tokens)}; try timed_tokens=0"
        )
    tokens = tokens.to(model.device)
    context = len(tokens) - timed - 1
    caches = [candidate.build(model.config) for candidate in candidates]
    for cache in caches:
        forward(model, tokens[None, :context], cache)
    milliseconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for token in tokens[None, context:].split(1, dim=1):
        for taken, cache in zip(milliseconds.values(), caches, strict=True):
            _finish(model.device)
            start = time.perf_counter()
            forward(model, token, cache)
            _finish(model.device)
            taken.append(1000 * (time.perf_counter() - start))
    exact = milliseconds[Exact().name][1:]
    return {
        name: DecodeSpeed(
            ms_per_token=statistics.median(taken[1:]),
            ratio=statistics.median(mine / its for mine, its in zip(taken[1:], exact, strict=True)),
        )
        for name, taken in milliseconds.items()
    }


def _finish(device: torch.device) -> None:
    """Wait for what runs on the device, so that a clock reading means something."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
