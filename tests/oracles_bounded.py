"""Slow and obvious references for rotations and for the bounded bank: complex numbers, lists of members, one number at a time, float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from oracles import int8_per_token
from torch import Tensor

from hf_kvq.rope import Rope


def turned(x: Tensor, rope: Rope | None, by: Tensor) -> Tensor:
    """`x` moved by positions, one pair at a time, in complex128."""
    out = x.double().clone()
    if rope is None:
        return out
    half = len(rope.inv_freq)
    for j, frequency in enumerate(rope.inv_freq):
        a, b = (2 * j, 2 * j + 1) if rope.interleaved else (j, j + half)
        unit = torch.polar(torch.ones_like(by, dtype=torch.float64), by.double() * frequency)
        pair = torch.complex(x[..., a].double(), x[..., b].double()) * unit
        out[..., a], out[..., b] = pair.real, pair.imag
    return out


def query_energy(query: Tensor, rope: Rope | None) -> Tensor:
    """Q of one head from its queries `[count, key_dim]`: mean squares, averaged over pairs, with a floor of 1e-3 of their mean."""
    energy = query.double().square().mean(dim=0)
    numbers = [-1] * energy.numel() if rope is None else rope.pairs(energy.numel()).tolist()
    pooled = energy.clone()
    for channel, number in enumerate(numbers):
        if number >= 0:
            both = [other for other, its in enumerate(numbers) if its == number]
            pooled[channel] = energy[both].mean()
    return pooled.clamp(min=1e-3 * float(pooled.mean()))


@dataclass(eq=False)
class Cluster:
    """Moments of `n` tokens; a token is a cluster of one."""

    n: int
    key: Tensor
    value: Tensor
    position_sum: int
    position_variance: float = 0.0
    tau: float = 0.0

    @property
    def position(self) -> float:
        return self.position_sum / self.n


def chan(a: Cluster, b: Cluster, energy: Tensor) -> Cluster:
    """Two clusters as one."""
    n = a.n + b.n
    feature = (energy / len(energy)).sqrt()
    apart = float(((a.key - b.key) * feature).square().sum())
    moved = (a.position - b.position) ** 2
    weight = a.n * b.n / n**2
    return Cluster(
        n,
        (a.n * a.key + b.n * b.key) / n,
        (a.n * a.value + b.n * b.value) / n,
        a.position_sum + b.position_sum,
        (a.n * a.position_variance + b.n * b.position_variance) / n + weight * moved,
        (a.n * a.tau + b.n * b.tau) / n + weight * apart,
    )


class Bank:
    """One row and kv head."""

    def __init__(self, count: int, most_births: int) -> None:
        self.count = count
        self.most_births = most_births
        self.clusters: list[Cluster] = []

    def absorb(self, tokens: list[Cluster], energy: Tensor) -> list[int]:
        """Take in a block, keys before RoPE; the slot of each token."""
        slots: list[list[Cluster]] = [[cluster] for cluster in self.clusters]
        before = list(slots)
        feature = (energy / len(energy)).sqrt()

        def cost(a: list[Cluster], b: list[Cluster]) -> float:
            n, m = sum(part.n for part in a), sum(part.n for part in b)
            mean_a = sum(part.n * part.key for part in a) / n
            mean_b = sum(part.n * part.key for part in b) / m
            return n * m / (n + m) * float(((mean_a - mean_b) * feature).square().sum())

        pending = list(tokens)
        while pending and len(slots) < self.count:
            slots.append([pending.pop(0)])
        for _ in range(self.most_births):
            if not pending or self.count < 2:
                break
            charged = [min(cost([token], slot) for slot in slots) for token in pending]
            pairs = [(cost(slots[i], slots[j]), i, j) for j in range(len(slots)) for i in range(j)]
            cheapest, kept, freed = min(pairs)
            if not cheapest < max(charged):
                break
            slots[kept] = slots[kept] + slots[freed]
            slots[freed] = [pending.pop(charged.index(max(charged)))]
        joined = [min(range(len(slots)), key=lambda i: cost([token], slots[i])) for token in pending]
        for token, slot in zip(pending, joined, strict=True):
            slots[slot] = [*slots[slot], token]
        self.clusters = [
            parts[0] if i < len(before) and parts == before[i] else _coded(_pool(parts, energy))
            for i, parts in enumerate(slots)
        ]
        return [next(i for i, parts in enumerate(slots) if any(part is token for part in parts)) for token in tokens]

    def attend(
        self, query: Tensor, energy: Tensor, rope: Rope | None, scaling: float, oldest: float = -math.inf
    ) -> tuple[Tensor, float]:
        """Output and lse of one query."""
        logits = []
        for cluster in self.clusters:
            key = cluster.key.clone()
            numbers = [-1] * len(key) if rope is None else rope.pairs(len(key)).tolist()
            for channel, number in enumerate(numbers):
                if rope is not None and number >= 0:
                    key[channel] *= math.exp(-(rope.inv_freq[number] ** 2) * cluster.position_variance / 2)
            key = turned(key, rope, torch.tensor(max(cluster.position, oldest)))
            variance = scaling**2 * sum(
                float(q) ** 2 * cluster.tau / float(weight) for q, weight in zip(query, energy, strict=True)
            )
            logits.append(scaling * float(query.double() @ key) + math.log(cluster.n) + math.log1p(variance / 2))
        if not logits:
            return torch.zeros(0), -math.inf
        weights = torch.tensor(logits, dtype=torch.float64)
        values = torch.stack([cluster.value for cluster in self.clusters])
        return weights.softmax(0) @ values, float(weights.logsumexp(0))


def _pool(parts: list[Cluster], energy: Tensor) -> Cluster:
    whole = parts[0]
    for part in parts[1:]:
        whole = chan(whole, part, energy)
    return whole


def _coded(cluster: Cluster) -> Cluster:
    key, value = (int8_per_token(mean.float()[None, None, None])[0, 0, 0] for mean in (cluster.key, cluster.value))
    return Cluster(cluster.n, key, value, cluster.position_sum, cluster.position_variance, cluster.tau)
