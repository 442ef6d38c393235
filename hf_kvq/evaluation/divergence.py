"""How far coded logits are from exact ones, position by position.

Source: llama.cpp's `perplexity --kl-divergence`, which publishes the divergence from the model's own exact logits beside the
perplexity. Departs from it: every position is scored, and all sums are in float64, since the divergence of an 8-bit cache is
near the rounding of a float32 softmax over 50,000 words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

__all__ = ["Divergence", "compare_logits"]

_CHUNK = 64  # positions: bounds the float64 copies at 64 x vocabulary


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Per-position figures of coded logits against exact ones, on the CPU.

    Attributes:
        exact_nll: Negative log-likelihood of the next token, in nats, under the exact logits.
        coded_nll: The same under the coded logits.
        kl: KL(exact || coded) of the two next-token distributions, in nats.
        same_top1: Whether both put the same token first.
    """

    exact_nll: Float64[Tensor, " positions"]
    coded_nll: Float64[Tensor, " positions"]
    kl: Float64[Tensor, " positions"]
    same_top1: Bool[Tensor, " positions"]


def compare_logits(
    exact: Float[Tensor, "positions vocabulary"],
    coded: Float[Tensor, "positions vocabulary"],
    targets: Int[Tensor, " positions"],
) -> Divergence:
    """Compare two sets of logits at the same positions.

    Args:
        exact: Logits with the exact cache.
        coded: Logits with the cache under test.
        targets: The token that followed at each position.
    """
    parts = [
        _compare(exact_part.double().log_softmax(-1), coded_part.double().log_softmax(-1), target)
        for exact_part, coded_part, target in zip(
            exact.split(_CHUNK), coded.split(_CHUNK), targets.split(_CHUNK), strict=True
        )
    ]
    exact_nll, coded_nll, kl = (torch.cat(figures).cpu() for figures in zip(*parts, strict=True))
    same_top1 = (exact.argmax(-1) == coded.argmax(-1)).cpu()
    return Divergence(exact_nll=exact_nll, coded_nll=coded_nll, kl=kl, same_top1=same_top1)


def _compare(
    exact: Float64[Tensor, "positions vocabulary"],
    coded: Float64[Tensor, "positions vocabulary"],
    target: Int[Tensor, " positions"],
) -> tuple[Float64[Tensor, " positions"], ...]:
    """Both negative log-likelihoods and the divergence, from log-probabilities."""
    picked = target[:, None]
    terms = exact.exp().mul_(exact - coded)
    if exact.amin().isneginf():
        # A word that the model rules out has probability 0 and adds nothing; 0 * (-inf - -inf) would be NaN.
        terms = torch.where(exact.isneginf(), 0.0, terms)
    return -exact.gather(-1, picked)[:, 0], -coded.gather(-1, picked)[:, 0], terms.sum(-1)
