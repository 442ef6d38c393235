"""How tokens and clusters fit together: what a bank compares by.

Source: E2 of the seed measures "the residual against the cluster's Gaussian-affine fit"; its document gives no formula.
Departs from it: residuals have no unit, so one threshold serves every model and layer; variances of young clusters lean on the bank's
total variance, and their regressions count for little.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hf_kvq.far_field.moments import Moments

__all__ = ["floored", "mixed", "one_hot", "residual_of", "scored_variance"]

FLOOR = 1e-6
"""Least variance of a channel when tokens are compared with clusters, as a share of the keys' mean square."""

LARGEST = 1e30
"""Largest residual."""

TOKENS = 64
"""Tokens, or queries, of a tile: it holds as many values for each cluster."""


def residual_of(
    moments: Moments,
    keys: Float[Tensor, "rows kv_heads tokens key_dim"],
    values: Float[Tensor, "rows kv_heads tokens value_dim"],
    valid: Bool[Tensor, "rows kv_heads tokens"],
    assignments: Int64[Tensor, "rows kv_heads tokens"],
) -> Float[Tensor, "rows kv_heads tokens"]:
    """How badly each token fits its cluster, 0 where there is none; about 2 at most for one that fits well.

    The mean over channels of the key's squared distance to the cluster's mean, in units of the cluster's variance, plus the mean squared
    error of the value that the cluster's regression predicts, in units of the chunk's mean square value. States are 0 where `valid` is not.
    """

    def own(tensor: Tensor) -> Tensor:
        return tensor.double().gather(2, assignments[..., None].expand(-1, -1, -1, tensor.shape[3]))

    variance = scored_variance(moments)
    centred = keys.double() - own(moments.mean_key)
    key_part = (centred.square() / own(variance)).mean(dim=-1)
    # A regression on key_dim channels from few tokens is mostly noise: it is trusted as far as tokens outnumber channels.
    trust = moments.count / (moments.count + keys.shape[3])
    weights = one_hot(assignments, moments.count.shape[2]) * trust[:, :, None]
    predicted = own(moments.mean_value) + mixed(weights, moments.value_on_key.double(), centred / own(variance))
    energy = values.double().square().mean(dim=-1)
    scale = energy.sum(dim=-1, keepdim=True) / valid.sum(dim=-1, keepdim=True).clamp(min=1)
    value_part = (values.double() - predicted).square().mean(dim=-1) / torch.where(scale > 0, scale, 1.0)
    # A bank of zeros has no scale to measure by, and an infinite residual would turn every mean over it into NaN.
    return (key_part + value_part).masked_fill(~valid, 0.0).clamp(max=LARGEST).float()


def scored_variance(moments: Moments) -> Float[Tensor, "rows kv_heads clusters key_dim"]:
    """The clusters' variances with one token's worth of the bank's total variance, so a single token is no point without width."""
    total = moments.total_variance()
    count = moments.count[..., None]
    return floored((count * moments.key_variance + total[:, :, None]) / (count + 1), moments)


def floored(variance: Float[Tensor, "rows kv_heads *clusters key_dim"], moments: Moments) -> Tensor:
    """Variances that can be divided by."""
    share = moments.count / moments.count.sum(dim=-1, keepdim=True).clamp(min=1)
    square = (share[..., None] * (moments.key_variance + moments.mean_key.square())).sum(dim=2).mean(dim=-1)
    floor = FLOOR * square + torch.finfo(torch.float32).tiny
    return variance.maximum(floor.view(*floor.shape, *(1,) * (variance.ndim - 2)))


def mixed(
    weights: Float[Tensor, "rows kv_heads tokens clusters"],
    value_on_key: Float[Tensor, "rows kv_heads clusters value_dim key_dim"],
    vectors: Float[Tensor, "rows kv_heads tokens key_dim"],
) -> Float[Tensor, "rows kv_heads tokens value_dim"]:
    """`sum_c w_c C_c x` for every x."""
    flat, clusters = value_on_key.flatten(2, 3), value_on_key.shape[2]
    tiles = []
    for weight, vector in zip(weights.split(TOKENS, dim=2), vectors.split(TOKENS, dim=2), strict=True):
        moved = (flat @ vector.mT).unflatten(2, (clusters, -1))
        tiles.append(torch.einsum("bhtc,bhcvt->bhtv", weight, moved))
    return torch.cat(tiles, dim=2)


def one_hot(
    assignments: Int64[Tensor, "rows kv_heads tokens"], clusters: int
) -> Float[Tensor, "rows kv_heads tokens clusters"]:
    """Weight 1 for a token's cluster; none at all for cluster -1."""
    return (assignments[..., None] == torch.arange(clusters, device=assignments.device)).double()
