"""From positions to figures: perplexities, paired differences with their standard error, and quantiles.

Source: standard error of a paired mean over windows; the percent follows by the delta method. Windows, not positions, are the
units: neighbouring positions of one text are far from independent.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.evaluation.protocols import DecodeSpeed, Measured, NoiseFloor
from hf_kvq.evaluation.receipts import PositionBucket, Results

__all__ = ["summarize"]

_BUCKETS = 8


def summarize(
    measured: Measured,
    *,
    exact_nbytes: int,
    floor: NoiseFloor | None,
    speed: DecodeSpeed | None,
) -> Results:
    """Reduce one scheme's divergences on all windows, which have equally many positions."""
    exact_nll = torch.stack([found.exact_nll for found in measured.divergences])
    coded_nll = torch.stack([found.coded_nll for found in measured.divergences])
    kl = torch.cat([found.kl for found in measured.divergences])
    same_top1 = torch.cat([found.same_top1 for found in measured.divergences])
    delta_nll = (coded_nll - exact_nll).mean().item()
    delta_nll_se = _standard_error((coded_nll - exact_nll).mean(dim=1))
    perplexity, exact_perplexity = math.exp(coded_nll.mean().item()), math.exp(exact_nll.mean().item())
    return Results(
        perplexity=perplexity,
        exact_perplexity=exact_perplexity,
        delta_perplexity=perplexity - exact_perplexity,
        delta_percent=100 * math.expm1(delta_nll),
        # d(100 (exp(x) - 1)) = 100 exp(x) dx
        delta_percent_se=None if delta_nll_se is None else 100 * math.exp(delta_nll) * delta_nll_se,
        delta_nll=delta_nll,
        delta_nll_se=delta_nll_se,
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        kl_max=kl.max().item(),
        same_top1=same_top1.double().mean().item(),
        scored_tokens=kl.numel(),
        nll_by_position=_buckets(exact_nll, coded_nll),
        noise_floor=floor,
        nbytes=measured.memory.nbytes,
        nbytes_used=measured.memory.nbytes_used,
        exact_nbytes=exact_nbytes,
        bits_per_element=measured.memory.bits_per_element,
        tokens_coded=measured.memory.tokens_coded,
        ms_per_token=speed.ms_per_token if speed else None,
        ms_per_token_ratio=speed.ratio if speed else None,
    )


def _standard_error(differences: Float[Tensor, " windows"]) -> float | None:
    """Of the mean of `differences`; one window has none."""
    if len(differences) < 2:
        return None
    return (differences.std(correction=1) / math.sqrt(len(differences))).item()


def _buckets(
    exact_nll: Float[Tensor, "windows positions"], coded_nll: Float[Tensor, "windows positions"]
) -> tuple[PositionBucket, ...]:
    positions = torch.arange(exact_nll.shape[1])
    return tuple(
        PositionBucket(
            first=int(part[0]),
            last=int(part[-1]),
            exact_nll=exact_nll[:, part].mean().item(),
            coded_nll=coded_nll[:, part].mean().item(),
        )
        for part in positions.tensor_split(min(_BUCKETS, len(positions)))
    )
