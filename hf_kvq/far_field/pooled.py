"""Moments of clusters that are put together: counts, means, and the spread around the means.

Source: Chan, Golub and LeVeque, COMPSTAT 1982: the squared deviations of a whole are those of its parts, plus those of the parts' means
weighted by their counts. Departs from it: any number of clusters and tokens is pooled at once, by one product with their shares.

A lane is one row and kv head. Its items are first the clusters that were there, then the tokens of a block, each a cluster of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from hf_kvq.rope import position_dtype

__all__ = ["Items", "changed", "mean_position", "pooled"]


@dataclass(frozen=True, eq=False)
class Items:
    """Clusters, some of which may be single tokens, and some empty.

    Attributes:
        count: Tokens; 0 in an empty item.
        keys: Mean keys before RoPE.
        values: Mean values.
        position_sum: Sum of the tokens' positions: exact, however many and however far.
        position_variance: Variance of the tokens' positions.
        tau: Variance of the tokens' features, summed over the features.
    """

    count: Int32[Tensor, "lanes items"]
    keys: Float[Tensor, "lanes items key_dim"]
    values: Float[Tensor, "lanes items value_dim"]
    position_sum: Int64[Tensor, "lanes items"]
    position_variance: Float[Tensor, "lanes items"]
    tau: Float[Tensor, "lanes items"]


def pooled(
    items: Items, features: Float[Tensor, "lanes items features"], home: Int64[Tensor, "lanes items"], slots: int
) -> Items:
    """The items that share a home, as one.

    Args:
        items: What to pool.
        features: A linear map of the items' keys, in which `tau` is measured.
        home: Slot that each item goes to; -1 leaves it out.
        slots: Items of the answer.
    """
    at = torch.where(home >= 0, home, slots)
    lanes = home.shape[0]
    count = items.count.new_zeros(lanes, slots + 1).scatter_add_(1, at, items.count)
    position_sum = items.position_sum.new_zeros(lanes, slots + 1).scatter_add_(1, at, items.position_sum)
    share = items.count.float() / count.gather(1, at).clamp(min=1)
    shares = features.new_zeros(lanes, home.shape[1], slots + 1).scatter_(2, at[..., None], share[..., None])
    shares = shares[..., :slots].mT
    # What falls short of a mean is taken from the mean of the features themselves, so a single token is at no distance from its own.
    means = torch.nn.functional.pad(shares @ features, (0, 0, 0, 1))
    apart = (features - means.gather(1, at[..., None].expand_as(features))).square().sum(dim=2)
    position = mean_position(items.position_sum, items.count)
    moved = position - mean_position(position_sum, count).gather(1, at)
    spreads = torch.stack((items.tau + apart, items.position_variance + moved.square().float()), dim=2)
    tau, position_variance = (shares @ spreads).unbind(dim=2)
    return Items(
        count=count[:, :slots],
        keys=shares @ items.keys,
        values=shares @ items.values,
        position_sum=position_sum[:, :slots],
        position_variance=position_variance,
        tau=tau,
    )


def changed(home: Int64[Tensor, "lanes items"], slots: int) -> Bool[Tensor, "lanes slots"]:
    """Slots that hold something else than the one cluster that was in them before.

    The others are better left alone than written again: matrix products may be allowed fewer bits than float32 has.
    """
    own = torch.arange(slots, device=home.device)
    came = torch.ones_like(home, dtype=torch.bool)
    came[:, :slots] = home[:, :slots] != own
    at = torch.where((home >= 0) & came, home, slots)
    return torch.zeros(home.shape[0], slots + 1, dtype=torch.bool, device=home.device).scatter_(1, at, True)[:, :slots]


def mean_position(position_sum: Int64[Tensor, "*axes"], count: Int[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """float64, since float32 has no fractions left past 2^23, and float16 none past 1,024."""
    return position_sum.to(position_dtype(position_sum.device)) / count.clamp(min=1)
