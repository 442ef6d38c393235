"""Tokens that left the window, merged into Gaussian clusters that still answer a query: the seed's bank, kept for parity and research.

Source: E2 of the seed, `ClusterBank`, `birth_and_merge` and `ingest` of `moment_closure_attention`, as the document of
`mixle.experimental.kv_cache_quant` describes them. A cluster of n tokens has keys k ~ N(mu, diag S) and values that are affine in
them; with t = scaling * q the moment generating function closes the sums of attention:

    sum exp(t.k) ~ n exp(t.mu + t'St / 2)        mean value under these weights = vbar + C t,   C = cov(value, key)

Departs from it, where the document leaves it open: everything is per row and kv head, nothing is shared between them; a token joins
one cluster as a whole, so counts are whole numbers and every token has one place in a receipt; thresholds are relative, so they mean
the same for every model. Nothing here is a default: on real keys the quadratic term makes a bank worse than none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from hf_kvq.far_field.fit import floored, mixed, one_hot, residual_of, scored_variance
from hf_kvq.far_field.moments import Moments
from hf_kvq.far_field.receipt import BankReceipt
from hf_kvq.kernels import Partial, Query, compute_dtype

__all__ = ["ClusterBank", "birth_and_merge", "cluster_responsibilities", "ingest", "update"]


@final
class ClusterBank:
    """Clusters of every row and kv head; its memory does not grow with the tokens that it has merged.

    Every change makes new tensors, so a shallow copy of this object is a snapshot of it.

    Args:
        count: Clusters of a row and kv head.
        batch: Rows.
        birth_threshold: Tokens with a larger residual found a cluster of their own; see `birth_and_merge`.
        outlier_top_k: Tokens that a receipt lists for each cluster, those with the largest residual.
    """

    def __init__(self, count: int, *, batch: int, birth_threshold: float = 4.0, outlier_top_k: int = 4) -> None:
        for label, number, least in (
            ("count", count, 1),
            ("batch", batch, 1),
            ("outlier_top_k", outlier_top_k, 0),
        ):
            if number < least:
                raise ValueError(f"{label} must be at least {least}, got {number}")
        if not birth_threshold > 0:
            raise ValueError(
                f"birth_threshold must be positive, got {birth_threshold}; a token that fits well has a residual of about 2"
            )
        self.clusters = count
        self.birth_threshold = birth_threshold
        self.outlier_top_k = outlier_top_k
        # The shape of a state is known from the first tokens on; until then there are rows with one head and no channels.
        self.moments = Moments.empty(batch, 1, count, 0, 0, torch.device("cpu"))

    @property
    def is_allocated(self) -> bool:
        """Whether tokens have come, and with them the shape of the state."""
        return self.moments.mean_key.shape[3] > 0

    @property
    def counts(self) -> Int64[Tensor, "batch kv_heads"]:
        """Tokens merged; one head stands for all before the first came."""
        return self.moments.count.sum(dim=-1).round().long()

    @property
    def nbytes(self) -> int:
        """Bytes of the state; 0 before the first tokens came."""
        return sum(tensor.nbytes for tensor in self.moments.tensors) if self.is_allocated else 0

    @property
    def nbytes_used(self) -> int:
        """Bytes of the clusters that hold something."""
        live = int((self.moments.count > 0).sum())
        return live * self.bytes_per_cluster(self.moments.mean_key.shape[3], self.moments.mean_value.shape[3])

    @staticmethod
    def bytes_per_cluster(key_dim: int, value_dim: int) -> int:
        """Bytes of a slot: the count in float64, all else in float32."""
        return 8 + 4 * (2 * key_dim + value_dim + value_dim * key_dim)

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move all of the state together; rows are the first axis."""
        self.moments = self.moments.map(move)

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Keep these rows, in this order; a row may come more than once."""
        self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def observe(self, query: Query, real: Bool[Tensor, "batch queries"] | None) -> None:
        """Nothing: this bank needs no statistics of the queries."""

    def absorb(
        self,
        rows: Int[Tensor, " rows"],
        keys: Float[Tensor, "rows kv_heads tokens key_dim"],
        values: Float[Tensor, "rows kv_heads tokens value_dim"],
        positions: Int64[Tensor, "rows kv_heads tokens"],
        valid: Bool[Tensor, "rows kv_heads tokens"],
    ) -> BankReceipt:
        """Merge a chunk of tokens into these rows and no others.

        Args:
            rows: Rows that the chunk belongs to, each once.
            keys: After RoPE.
            values: Their values.
            positions: For the receipt alone: keys are clustered as attention reads them.
            valid: False where there is no token; what stands there is never read.

        Raises:
            ValueError: If the states have other heads or channels than those before.
        """
        self._allocate(keys, values)
        rows = rows.to(keys.device)
        part = copy.copy(self)
        part.select_rows(rows)
        receipt = ingest(part, keys, values, valid=valid)
        updated = part.moments.tensors
        self.moments = Moments(
            *(old.index_copy(0, rows, new) for old, new in zip(self.moments.tensors, updated, strict=True))
        )
        return replace(receipt, positions=positions)

    def attend(self, query: Query, scaling: float, oldest: Int[Tensor, " batch"] | None = None) -> Partial:
        """Attention over all merged tokens in closed form, exact for a cluster of one token; logits in at least float32.

        Args:
            query: After RoPE, unscaled.
            scaling: Factor of the dot products.
            oldest: Not used: clusters have no positions.

        Returns:
            Output 0 and lse -inf for rows that merged nothing; before the first tokens came, values are taken to be as wide as keys.
        """
        shape = query.shape[:4]
        dtype = compute_dtype(query.dtype)
        if not self.is_allocated:
            zeros = query.new_zeros(query.shape, dtype=dtype)
            return Partial(zeros, torch.full_like(zeros[..., 0], -torch.inf))
        moments = self.moments
        tilt = query.flatten(2, 3).to(dtype) * scaling
        mean_key, variance = moments.mean_key.to(dtype), moments.key_variance.to(dtype)
        # log 0 is -inf, which is what an empty slot adds.
        logits = tilt @ mean_key.mT + tilt.square() @ variance.mT / 2 + moments.count.log().to(dtype)[:, :, None]
        lse = logits.logsumexp(dim=-1)
        weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        output = weights @ moments.mean_value.to(dtype) + mixed(weights, moments.value_on_key.to(dtype), tilt)
        return Partial(output.view(*shape, -1), lse.view(shape))

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make room for states of this shape, or check that there is."""
        came = (keys.shape[1], keys.shape[3], values.shape[3])
        if not self.is_allocated:
            rows = self.moments.count.shape[0]
            self.moments = Moments.empty(rows, came[0], self.clusters, came[1], came[2], keys.device)
        held = (*self.moments.mean_key.shape[1::2], self.moments.mean_value.shape[3])
        if came != held:
            raise ValueError(
                f"kv_heads, key_dim and value_dim must stay {held}, as the first tokens had them, got {came}; "
                "use one bank for each layer"
            )


def cluster_responsibilities(
    bank: ClusterBank, keys: Float[Tensor, "rows kv_heads tokens key_dim"]
) -> Float[Tensor, "rows kv_heads tokens clusters"]:
    """Posterior of the clusters for each key: diagonal Gaussians, with the clusters' counts as prior; 0 everywhere in an empty bank.

    These are soft. `ingest` gives each token whole to its most likely cluster instead: then counts stay whole numbers, a token has one
    place in a receipt, and a cluster's moments are those of tokens that can be named.
    """
    moments = bank.moments
    precision, mean = 1 / scored_variance(moments), moments.mean_key.double()
    keys = keys.double()
    distance = (
        keys.square() @ precision.mT
        - 2 * keys @ (mean * precision).mT
        + (mean.square() * precision - precision.log()).sum(dim=-1)[:, :, None]
    )
    live = (moments.count > 0)[:, :, None]
    logits = (moments.count.log()[:, :, None] - distance / 2).masked_fill(~live, -torch.inf)
    return logits.softmax(dim=-1).masked_fill(~live, 0.0)


def update(
    bank: ClusterBank,
    keys: Float[Tensor, "rows kv_heads tokens key_dim"],
    values: Float[Tensor, "rows kv_heads tokens value_dim"],
    weights: Float[Tensor, "rows kv_heads tokens clusters"],
) -> None:
    """Add tokens to the clusters by these weights: moments as if all tokens had been pooled, up to rounding."""
    bank._allocate(keys, values)
    bank.moments = bank.moments.with_moments(Moments.of(weights, keys, values))


def birth_and_merge(
    bank: ClusterBank,
    keys: Float[Tensor, "rows kv_heads tokens key_dim"],
    values: Float[Tensor, "rows kv_heads tokens value_dim"],
    *,
    valid: Bool[Tensor, "rows kv_heads tokens"] | None = None,
) -> BankReceipt:
    """Assign a chunk's tokens, and give those that no cluster explains a cluster of their own.

    Tokens whose residual (`fit.residual_of`) is beyond `bank.birth_threshold` found one cluster for each row and kv head: in a free slot,
    or else in the one that merging the two closest clusters (by Ward's cost) frees. A chunk that finds no cluster founds the first one as
    a whole. A bank with one slot never founds a second.

    The founders are in the bank afterwards; `ingest` adds the others.
    """
    bank._allocate(keys, values)
    valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device) if valid is None else valid
    # What no token stands for may be anything, and 0 times NaN is NaN.
    keys, values = (states.detach().masked_fill(~valid[..., None], 0.0) for states in (keys, values))
    first = valid & (bank.moments.count.sum(dim=-1) == 0)[..., None]
    start = torch.zeros(valid.shape[:2], dtype=torch.long, device=keys.device)
    _found(bank, keys, values, first, start)
    assignments = cluster_responsibilities(bank, keys).argmax(dim=-1)
    residual = residual_of(bank.moments, keys, values, valid, assignments)
    founders = ~first & (residual > bank.birth_threshold) & (bank.clusters > 1)
    born = founders.any(dim=-1)
    merged = _free_a_slot(bank, born & (bank.moments.count > 0).all(dim=-1))
    slot = (bank.moments.count == 0).int().argmax(dim=-1)
    gone = (assignments == merged[..., 1:]) & (merged[..., 1:] >= 0)
    assignments = torch.where(gone, merged[..., :1], assignments)
    assignments = torch.where(founders, slot[..., None], assignments).masked_fill(~valid, -1)
    _found(bank, keys, values, founders, slot)
    birthed = torch.where(born, slot, torch.where(first.any(dim=-1), start, -1))
    members = one_hot(assignments, bank.clusters)
    misfit = (members.mT @ residual[..., None].double())[..., 0] / members.sum(dim=2)  # NaN where no token came
    return BankReceipt(
        birthed=birthed,
        merged=merged,
        misfit=misfit.float(),
        residual=residual,
        assignments=assignments,
        chunk_keys=keys,
        chunk_values=values,
        positions=torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3]),
        outlier_top_k=bank.outlier_top_k,
    )


def ingest(
    bank: ClusterBank,
    keys: Float[Tensor, "rows kv_heads tokens key_dim"],
    values: Float[Tensor, "rows kv_heads tokens value_dim"],
    *,
    valid: Bool[Tensor, "rows kv_heads tokens"] | None = None,
) -> BankReceipt:
    """`birth_and_merge`, then `update` with the tokens that founded nothing: the counts grow by exactly the valid tokens."""
    receipt = birth_and_merge(bank, keys, values, valid=valid)
    founded = receipt.assignments == receipt.birthed[..., None]
    weights = one_hot(receipt.assignments.masked_fill(founded, -1), bank.clusters)
    update(bank, receipt.chunk_keys, receipt.chunk_values, weights)
    return receipt


def _found(bank: ClusterBank, keys: Tensor, values: Tensor, founders: Tensor, slot: Tensor) -> None:
    """Put the founders of every row and kv head into an empty slot."""
    weights = one_hot(torch.where(founders, slot[..., None], -1), bank.clusters)
    bank.moments = bank.moments.with_moments(Moments.of(weights, keys, values))


def _free_a_slot(bank: ClusterBank, needed: Bool[Tensor, "rows kv_heads"]) -> Int64[Tensor, "rows kv_heads 2"]:
    """Merge the two closest clusters where a slot is needed: the one that stays and the one that is freed, -1 where none is."""
    if not bool(needed.any()):
        return torch.full((*needed.shape, 2), -1, device=needed.device)
    moments = bank.moments
    count, unit = moments.count, floored(moments.total_variance(), moments)[:, :, None]
    mean = moments.mean_key.double() / unit.sqrt()
    ward = torch.cdist(mean, mean, compute_mode="donot_use_mm_for_euclid_dist").square()
    ward = ward * count[..., None] * count[:, :, None] / (count[..., None] + count[:, :, None]).clamp(min=1)
    earlier = torch.ones_like(ward, dtype=torch.bool).triu(1)
    pair = ward.masked_fill(~earlier, torch.inf).flatten(2).argmin(dim=-1)
    keep, free = pair // bank.clusters, pair % bank.clusters
    both = moments.slot(keep).with_moments(moments.slot(free))
    merged = moments.with_slot(keep, both).with_slot(free, both.map(torch.zeros_like))
    bank.moments = Moments(
        *(
            torch.where(needed.view(*needed.shape, *(1,) * (old.ndim - 2)), new, old)
            for old, new in zip(moments.tensors, merged.tensors, strict=True)
        )
    )
    return torch.stack([keep, free], dim=-1).masked_fill(~needed[..., None], -1)
