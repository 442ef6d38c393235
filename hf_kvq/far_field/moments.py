"""First and second moments of clusters of tokens, and how two of them become one.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), which is
Welford's update for whole sets of tokens.
Departs from it: tokens carry weights, and the covariance of keys is kept on its diagonal only, that of values with keys in full.

Everything is computed in float64 and kept in float32: a cluster of one token is that token exactly, with variances of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Moments"]


@dataclass(frozen=True)
class Moments:
    """Clusters of every row and kv head; a slot with count 0 is empty, and all of it is 0.

    Attributes:
        count: Sum of the weights. float64: whole numbers stay exact past any context, and sums of soft weights nearly so.
        mean_key: Weighted mean.
        mean_value: Likewise.
        key_variance: Diagonal of the keys' covariance, divided by the count.
        value_on_key: Covariance of values with keys, divided by the count.
    """

    count: Float[Tensor, "rows kv_heads clusters"]
    mean_key: Float[Tensor, "rows kv_heads clusters key_dim"]
    mean_value: Float[Tensor, "rows kv_heads clusters value_dim"]
    key_variance: Float[Tensor, "rows kv_heads clusters key_dim"]
    value_on_key: Float[Tensor, "rows kv_heads clusters value_dim key_dim"]

    @classmethod
    def empty(
        cls, rows: int, kv_heads: int, clusters: int, key_dim: int, value_dim: int, device: torch.device
    ) -> Moments:
        """Empty slots."""
        shape = (rows, kv_heads, clusters)
        return cls(
            torch.zeros(shape, dtype=torch.float64, device=device),
            torch.zeros(*shape, key_dim, device=device),
            torch.zeros(*shape, value_dim, device=device),
            torch.zeros(*shape, key_dim, device=device),
            torch.zeros(*shape, value_dim, key_dim, device=device),
        )

    @classmethod
    def of(
        cls,
        weights: Float[Tensor, "rows kv_heads tokens clusters"],
        keys: Float[Tensor, "rows kv_heads tokens key_dim"],
        values: Float[Tensor, "rows kv_heads tokens value_dim"],
    ) -> Moments:
        """Moments of tokens that belong to clusters by these weights, none of them negative; all states finite."""
        weights, keys, values = (tensor.detach().double() for tensor in (weights, keys, values))
        count = weights.sum(dim=2)
        share = weights / _positive(count)[:, :, None]
        mean_key, mean_value = share.mT @ keys, share.mT @ values
        # E[xy] - E[x]E[y] cancels, and float64 has the digits for it; the products of a single token are the same and leave exactly 0.
        key_variance = (share.mT @ keys.square() - mean_key.square()).clamp_(min=0)
        weighted = (share[..., None] * values[:, :, :, None]).flatten(3)
        product = (weighted.mT @ keys).unflatten(2, mean_value.shape[2:])
        value_on_key = product - mean_value[..., None] * mean_key[..., None, :]
        return cls(count, mean_key.float(), mean_value.float(), key_variance.float(), value_on_key.float())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the attributes."""
        return self.count, self.mean_key, self.mean_value, self.key_variance, self.value_on_key

    def map(self, move: Callable[[Tensor], Tensor]) -> Moments:
        """The same function of every tensor."""
        return Moments(*(move(tensor) for tensor in self.tensors))

    def with_moments(self, other: Moments) -> Moments:
        """Clusters of both sets of tokens, slot by slot: the moments of the pooled tokens, up to rounding."""
        n_self, n_other = self.count, other.count
        count = n_self + n_other
        share = n_other / _positive(count)
        mixing = share * (1 - share)
        key_step, value_step = (other.mean_key - self.mean_key).double(), (other.mean_value - self.mean_value).double()

        def pooled(one: Tensor, two: Tensor, between: Tensor) -> Tensor:
            weight, between_weight = (x[(...,) + (None,) * (one.ndim - 3)] for x in (share, mixing))
            return (one + (two.double() - one) * weight + between * between_weight).float()

        return Moments(
            count,
            pooled(self.mean_key, other.mean_key, torch.zeros_like(key_step)),
            pooled(self.mean_value, other.mean_value, torch.zeros_like(value_step)),
            pooled(self.key_variance, other.key_variance, key_step.square()),
            pooled(self.value_on_key, other.value_on_key, value_step[..., None] * key_step[..., None, :]),
        )

    def slot(self, index: Int[Tensor, "rows kv_heads"]) -> Moments:
        """One cluster of every row and kv head, as a bank with one slot."""
        return self.map(lambda tensor: tensor.gather(2, _expanded(index, tensor)))

    def with_slot(self, index: Int[Tensor, "rows kv_heads"], one: Moments) -> Moments:
        """The same with one cluster of every row and kv head replaced."""
        return Moments(
            *(
                tensor.scatter(2, _expanded(index, tensor), new)
                for tensor, new in zip(self.tensors, one.tensors, strict=True)
            )
        )

    def total_variance(self) -> Float[Tensor, "rows kv_heads key_dim"]:
        """Variance of all keys in all clusters, in float64: that within clusters and that between them."""
        share = (self.count / _positive(self.count.sum(dim=-1, keepdim=True)))[..., None]
        grand = (share * self.mean_key).sum(dim=2, keepdim=True)
        return (share * (self.key_variance + (self.mean_key - grand).square())).sum(dim=2)


def _positive(count: Tensor) -> Tensor:
    """A divisor: 1 for what is empty."""
    return torch.where(count > 0, count, torch.ones_like(count))


def _expanded(index: Tensor, like: Tensor) -> Tensor:
    return index.view(*index.shape, *(1,) * (like.ndim - 2)).expand(-1, -1, 1, *like.shape[3:])
