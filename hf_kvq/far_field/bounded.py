"""Tokens that left the window, in a bounded number of clusters that a query attends as if they were tokens.

Source: a cluster of n tokens is attended as one token with log n in its logit, the proportional attention of Token Merging
(arXiv:2210.09461). Departs from it:

- keys are averaged BEFORE RoPE, as R(-p) k, and turned to the mean position of their cluster when they are read; where positions
  spread, pair j of the mean is damped by exp(-w_j^2 var(p) / 2), the mean of a rotation by a normal angle;
- what counts in a merge is what queries see: features are k_pre * sqrt(Q / d), with Q_c the mean of q_c^2, averaged over the pairs that
  RoPE turns together, so that it is the same before and after it;
- the spread of the scores within a cluster adds log(1 + s2 / 2) to its logit. The moment generating function would add s2 / 2,
  which has no bound.

A cluster keeps tau = (1/d) sum_c Q_c var_c and takes var_c to be tau / Q_c. So its scores scaling * q.k have the variance
s2(q) = scaling^2 * tau * sum_c q_c^2 / Q_c, whatever the scaling. It is tau that is stored: a variance may be beyond any half precision.

Means are int8 codes with a scale. Merging decodes them, averages in float32 and rounds again: tokens that move the mean of a large
cluster by less than half a step are lost in the mean, never in the counts, positions and variances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from hf_kvq.codecs.affine import PerTokenAffineCodec
from hf_kvq.far_field.pooled import Items, changed, mean_position, pooled
from hf_kvq.far_field.ward import place
from hf_kvq.kernels import Partial, Query, compute_dtype
from hf_kvq.rope import Rope

__all__ = ["BoundedBank"]

STATISTICS_FLOOR = 1e-3
"""Least Q_c, as a fraction of the mean over channels: a channel that queries leave alone must not divide by zero."""

CODEC = PerTokenAffineCodec("int8")


@final
class BoundedBank:
    """Clusters of every row and kv head; their memory does not grow with the tokens that they have taken in.

    Every change makes new tensors, so a shallow copy of this object is a snapshot of it.

    Args:
        count: Clusters of a row and kv head.
        batch: Rows.
        rope: How keys were turned; None where they were not.
        query_tokens: Queries of each row that Q is taken from; it is frozen afterwards.
        most_births: Clusters that a block may found once all slots are taken.
    """

    def __init__(
        self, count: int, *, batch: int, rope: Rope | None, query_tokens: int = 512, most_births: int = 32
    ) -> None:
        for label, number, least in (
            ("count", count, 1),
            ("batch", batch, 1),
            ("query_tokens", query_tokens, 0),
            ("most_births", most_births, 0),
        ):
            if number < least:
                raise ValueError(f"{label} must be at least {least}, got {number}")
        self.count = count
        self.batch = batch
        self.rope = rope
        self.query_tokens = query_tokens
        self.most_births = most_births
        self._clusters: dict[str, Tensor] = {}
        """Named tensors, each [batch, kv_heads, clusters, ...]."""
        self._statistics: dict[str, Tensor] = {}
        """`energy` [batch, kv_heads, key_dim], the sum of q^2 over query heads and queries; `queries` [batch], how many those were."""
        self._energy = torch.ones(batch, 1, 1)
        """Q as each row's last block was merged with it: a query is answered by what was known then, whatever came with it."""
        self._surely_seen = 0
        """Queries that every row has surely seen, known without asking a device."""

    @property
    def is_allocated(self) -> bool:
        """Whether a token ever came."""
        return bool(self._clusters)

    @property
    def counts(self) -> Int64[Tensor, "batch kv_heads"]:
        """Tokens taken in; one head stands for all before the first came."""
        if not self._clusters:
            return torch.zeros(self.batch, 1, dtype=torch.int64)
        return self._clusters["count"].sum(dim=2, dtype=torch.int64)

    @property
    def live(self) -> Int64[Tensor, "batch kv_heads"]:
        """Slots in use."""
        return (self._clusters["count"] > 0).sum(dim=2) if self._clusters else torch.zeros_like(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of clusters and statistics, empty slots included; 0 before the first states came."""
        if not self._clusters and not self._statistics:
            return 0
        return sum(tensor.nbytes for tensor in (*self._clusters.values(), *self._statistics.values(), self._energy))

    @property
    def nbytes_used(self) -> int:
        """Bytes of the slots in use, and of the statistics."""
        statistics = sum(tensor.nbytes for tensor in self._statistics.values())
        statistics += self._energy.nbytes if self._clusters or self._statistics else 0
        if not self._clusters:
            return statistics
        clusters = sum(tensor[0, 0, 0].nbytes for tensor in self._clusters.values())
        return int(self.live.sum()) * clusters + statistics

    @staticmethod
    def bytes_per_cluster(key_dim: int, value_dim: int) -> int:
        """Bytes of a slot: both means with their bfloat16 scales, count, sum and variance of positions, and tau."""
        return (key_dim + 2) + (value_dim + 2) + 4 + 8 + 4 + 4

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move all of the state together; rows are the first axis of every tensor."""
        self._clusters = {name: move(tensor) for name, tensor in self._clusters.items()}
        self._statistics = {name: move(tensor) for name, tensor in self._statistics.items()}
        self._energy = move(self._energy)
        self.batch = len(self._energy)

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Keep these rows, in this order; a row may come more than once."""
        self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def observe(self, query: Query, real: Bool[Tensor, "batch queries"] | None) -> None:
        """Take Q from the first `query_tokens` queries of each row; later ones change nothing.

        Args:
            query: After RoPE, unscaled.
            real: False where a query is padding; None where none is.
        """
        if self._surely_seen >= self.query_tokens:
            return
        if real is None:
            query = query[:, :, :, : self.query_tokens]
        batch, kv_heads, _, queries, key_dim = query.shape
        device = query.device
        if not self._statistics:
            self._statistics = {
                "energy": torch.zeros(batch, kv_heads, key_dim, dtype=torch.float32, device=device),
                "queries": torch.zeros(batch, dtype=torch.int64, device=device),
            }
        seen = self._statistics["queries"]
        counted = torch.ones(batch, queries, dtype=torch.bool, device=device) if real is None else real.to(device)
        counted = counted & (seen[:, None] + counted.cumsum(dim=1) <= self.query_tokens)
        # What stands in padding may be anything, and 0 times NaN is NaN.
        energy = query.detach().float().square().masked_fill(~counted[:, None, None, :, None], 0.0).sum(dim=3)
        self._statistics = {
            "energy": self._statistics["energy"] + energy.mean(dim=2),
            "queries": seen + counted.sum(dim=1),
        }
        if real is None:
            self._surely_seen += queries
        elif device.type == "cpu":
            self._surely_seen = int(self._statistics["queries"].min())

    def absorb(
        self,
        rows: Int[Tensor, " rows"],
        keys: Float[Tensor, "rows kv_heads tokens key_dim"],
        values: Float[Tensor, "rows kv_heads tokens value_dim"],
        positions: Int[Tensor, "rows kv_heads tokens"],
        valid: Bool[Tensor, "rows kv_heads tokens"],
    ) -> Mapping[str, Tensor]:
        """Merge a block of tokens into these rows and no others.

        Args:
            rows: Rows that the block belongs to, each once.
            keys: After RoPE.
            values: Their values.
            positions: The positions that the keys were turned to.
            valid: False where there is no token; what stands there is never read.

        Returns:
            `birthed` and `merged`, `[rows, kv_heads]`: how many tokens founded a cluster and how many joined one.
            `assignments`, `[rows, kv_heads, tokens]`: the slot of each token after the block, -1 where there is none.
            `misfit`, `[rows, kv_heads, tokens]`: what Ward's criterion charged for the tokens that joined, 0 for others.

        Raises:
            ValueError: If the states have other heads or channels than those before.
        """
        self._allocate(keys, values)
        shape = keys.shape[:3]
        rows = rows.to(keys.device)
        absent = ~valid[..., None]
        keys, values = (states.detach().float().masked_fill(absent, 0.0) for states in (keys, values))
        positions = positions.long()
        if self.rope is not None:
            keys = self.rope.rotate(keys, -positions)
        old = {name: tensor.index_select(0, rows) for name, tensor in self._clusters.items()}
        nothing = torch.zeros_like(positions, dtype=torch.float32)
        items = Items(
            count=torch.cat((old["count"], valid.int()), dim=2).flatten(0, 1),
            keys=torch.cat((_decode(old, "key"), keys), dim=2).flatten(0, 1),
            values=torch.cat((_decode(old, "value"), values), dim=2).flatten(0, 1),
            position_sum=torch.cat((old["position_sum"], positions), dim=2).flatten(0, 1),
            position_variance=torch.cat((old["position_variance"], nothing), dim=2).flatten(0, 1),
            tau=torch.cat((old["tau"], nothing), dim=2).flatten(0, 1),
        )
        energy = self._query_energy(old["count"].shape[1], keys.shape[3], keys.device).index_select(0, rows)
        self._energy = self._energy.index_copy(0, rows, energy)
        features = items.keys * (energy / keys.shape[3]).sqrt().flatten(0, 1)[:, None]
        placement = place(
            features[:, : self.count],
            items.count[:, : self.count].float(),
            features[:, self.count :],
            valid.flatten(0, 1),
            most_births=self.most_births,
        )
        self._write(
            rows, old, pooled(items, features, placement.home, self.count), changed(placement.home, self.count)
        )
        founded = placement.founded.view(shape)
        return {
            "birthed": founded.sum(dim=2),
            "merged": (valid & ~founded).sum(dim=2),
            "misfit": placement.misfit.view(shape),
            "assignments": placement.home[:, self.count :].reshape(shape),
        }

    def attend(self, query: Query, scaling: float, oldest: Int[Tensor, " batch"] | None = None) -> Partial:
        """Attention over all tokens taken in, each cluster as `count` tokens at its mean; in at least float32.

        Args:
            query: After RoPE, unscaled.
            scaling: Factor of the dot products.
            oldest: Clusters with an earlier mean position are moved ahead to this one, so that none is further away than the model was trained for.

        Returns:
            Output 0 and lse -inf for rows that took in nothing; before the first tokens came, values are taken to be as wide as keys.
        """
        dtype = compute_dtype(query.dtype)
        if not self._clusters:
            zeros = torch.zeros_like(query, dtype=dtype)
            return Partial(zeros, torch.full_like(zeros[..., 0], -torch.inf))
        held = self._clusters
        count, tau = held["count"].to(dtype), held["tau"].to(dtype)
        keys, values = self._keys(oldest).to(dtype), _decode(held, "value").to(dtype)
        flat = query.to(dtype).flatten(2, 3)
        energy = self._energy.to(dtype)
        spread = (flat.square() @ (1 / energy)[..., None]) * (tau * scaling**2)[:, :, None]
        # log 0 is -inf, which is what an empty slot adds.
        logits = (flat @ keys.mT) * scaling + count.log()[:, :, None] + (spread / 2).log1p()
        lse = logits.logsumexp(dim=3)
        weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        return Partial((weights @ values).unflatten(2, query.shape[2:4]), lse.unflatten(2, query.shape[2:4]))

    def _keys(self, oldest: Tensor | None) -> Float[Tensor, "batch kv_heads clusters key_dim"]:
        """Mean keys, damped and turned to where they stand."""
        held = self._clusters
        keys = _decode(held, "key")
        if self.rope is None:
            return keys
        position = mean_position(held["position_sum"], held["count"])
        if oldest is not None:
            position = position.maximum(oldest.to(position)[:, None, None])
        frequencies = self.rope.frequencies(keys.device).float()
        damping = torch.exp(frequencies.square() * held["position_variance"][..., None] / -2)
        keys = keys * self.rope.spread(damping, torch.ones_like(keys[..., self.rope.rotary_dim :]))
        return self.rope.rotate(keys, position)

    def _query_energy(
        self, kv_heads: int, key_dim: int, device: torch.device
    ) -> Float[Tensor, "batch kv_heads key_dim"]:
        """Q, pooled over pairs and with its floor; 1 where no query was seen."""
        if not self._statistics:
            return torch.ones(self.batch, kv_heads, key_dim, dtype=torch.float32, device=device)
        seen = self._statistics["queries"][:, None, None]
        energy = self._statistics["energy"] / seen.clamp(min=1)
        if self.rope is not None:
            energy = self.rope.pool(energy)
        mean = energy.mean(dim=2, keepdim=True)
        # Queries that are zero say as little as none.
        return torch.where(mean > 0, energy.maximum(mean * STATISTICS_FLOOR), 1.0)

    def _write(self, rows: Tensor, old: dict[str, Tensor], new: Items, where: Bool[Tensor, "lanes slots"]) -> None:
        """Replace the slots that something came into; the others keep their codes bit for bit."""
        shape = old["count"].shape
        fresh = {
            "count": new.count.view(shape),
            "position_sum": new.position_sum.view(shape),
            "position_variance": new.position_variance.view(shape),
            "tau": new.tau.view(shape),
        }
        for name, states in (("key", new.keys), ("value", new.values)):
            fresh |= {f"{name}_{part}": codes for part, codes in CODEC.encode(states.view(*shape, -1)).items()}
        written = {}
        for name, tensor in self._clusters.items():
            came = where.view(*shape, *(1,) * (tensor.ndim - 3))
            written[name] = tensor.index_copy(0, rows, torch.where(came, fresh[name], old[name]))
        self._clusters = written

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make room for states of this shape, or check that there is."""
        came = (keys.shape[1], keys.shape[3], values.shape[3])
        if not self._clusters:
            lead, device = (self.batch, keys.shape[1], self.count), keys.device
            numbers = {"count": torch.int32, "position_sum": torch.int64}
            numbers |= {"position_variance": torch.float32, "tau": torch.float32}
            self._clusters = {name: torch.zeros(lead, dtype=dtype, device=device) for name, dtype in numbers.items()}
            for name, width in (("key", keys.shape[3]), ("value", values.shape[3])):
                codes = CODEC.encode(torch.zeros(*lead, width, dtype=torch.float32, device=device))
                self._clusters |= {f"{name}_{part}": tensor for part, tensor in codes.items()}
            self._energy = torch.ones(*lead[:2], keys.shape[3], dtype=torch.float32, device=device)
        codes = self._clusters["key_codes"]
        held = (codes.shape[1], codes.shape[3], self._clusters["value_codes"].shape[3])
        if came != held:
            raise ValueError(
                f"kv_heads, key_dim and value_dim must stay {held}, as the first tokens had them, got {came}; "
                "use one bank for each layer"
            )


def _decode(clusters: Mapping[str, Tensor], name: str) -> Float[Tensor, "batch kv_heads clusters dim"]:
    codes = {"codes": clusters[f"{name}_codes"], "scale": clusters[f"{name}_scale"]}
    return CODEC.decode(codes, head_dim=codes["codes"].shape[3])
