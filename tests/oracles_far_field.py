"""Slow and obvious references of the far field: one token at a time, in Python's float64, with every merged token still there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

Vector = list[float]


def mean(vectors: list[Vector], weights: Vector) -> Vector:
    """Weighted mean."""
    total = math.fsum(weights)
    return [math.fsum(w * v[j] for w, v in zip(weights, vectors, strict=True)) / total for j in range(len(vectors[0]))]


def covariance(left: list[Vector], right: list[Vector], weights: Vector) -> list[Vector]:
    """`cov[i][j]` of the left's channel i with the right's channel j, divided by the sum of the weights."""
    total, of_left, of_right = math.fsum(weights), mean(left, weights), mean(right, weights)
    return [
        [
            math.fsum(
                w * (a[i] - of_left[i]) * (b[j] - of_right[j]) for w, a, b in zip(weights, left, right, strict=True)
            )
            / total
            for j in range(len(of_right))
        ]
        for i in range(len(of_left))
    ]


def variances(vectors: list[Vector], weights: Vector) -> Vector:
    """The covariance's diagonal."""
    middle, total = mean(vectors, weights), math.fsum(weights)
    return [
        math.fsum(w * (v[j] - middle[j]) ** 2 for w, v in zip(weights, vectors, strict=True)) / total
        for j in range(len(middle))
    ]


@dataclass
class SlowCluster:
    """The tokens of a cluster."""

    keys: list[Vector] = field(default_factory=list)
    values: list[Vector] = field(default_factory=list)
    weights: Vector = field(default_factory=list)

    def add(self, key: Vector, value: Vector, weight: float = 1.0) -> None:
        """Put one more token in."""
        self.keys.append(key)
        self.values.append(value)
        self.weights.append(weight)

    @property
    def count(self) -> float:
        """Sum of the weights."""
        return math.fsum(self.weights)

    def log_sum_and_value(self, tilt: Vector) -> tuple[float, Vector]:
        """`log(n exp(t.mu + t'St / 2))` and `vbar + C t`."""
        middle, spread = mean(self.keys, self.weights), variances(self.keys, self.weights)
        cross, value = covariance(self.values, self.keys, self.weights), mean(self.values, self.weights)
        exponent = math.fsum(t * m + t * t * s / 2 for t, m, s in zip(tilt, middle, spread, strict=True))
        moved = [
            v + math.fsum(c * t for c, t in zip(row, tilt, strict=True)) for v, row in zip(value, cross, strict=True)
        ]
        return math.log(self.count) + exponent, moved


def closed_form(clusters: list[SlowCluster], query: Vector, scaling: float) -> tuple[Vector, float]:
    """Output and log-sum-exp of one query over clusters that hold something."""
    answers = [cluster.log_sum_and_value([scaling * q for q in query]) for cluster in clusters]
    largest = max(logit for logit, _ in answers)
    lse = largest + math.log(math.fsum(math.exp(logit - largest) for logit, _ in answers))
    shares = [math.exp(logit - lse) for logit, _ in answers]
    width = len(answers[0][1])
    return [math.fsum(s * value[j] for s, (_, value) in zip(shares, answers, strict=True)) for j in range(width)], lse


@dataclass
class SlowReceipt:
    """What one chunk did to a `SlowBank`."""

    birthed: int
    merged: tuple[int, int]
    assignments: list[int]
    residual: Vector


class SlowBank:
    """The rule of one row and kv head."""

    def __init__(self, count: int, birth_threshold: float) -> None:
        self.slots = [SlowCluster() for _ in range(count)]
        self.birth_threshold = birth_threshold

    @property
    def live(self) -> list[int]:
        """Slots that hold something."""
        return [c for c, cluster in enumerate(self.slots) if cluster.weights]

    def everything(self) -> tuple[list[Vector], Vector]:
        """Keys and weights of all tokens."""
        return [k for c in self.slots for k in c.keys], [w for c in self.slots for w in c.weights]

    def scored_variance(self, c: int) -> Vector:
        """Variance of a cluster with one token's worth of all tokens' variance, floored."""
        keys, weights = self.everything()
        total, n = variances(keys, weights), self.slots[c].count
        own = variances(self.slots[c].keys, self.slots[c].weights)
        return [max((n * s + t) / (n + 1), self.floor()) for s, t in zip(own, total, strict=True)]

    def floor(self) -> float:
        """A millionth of the keys' mean square."""
        keys, weights = self.everything()
        squares = [math.fsum(x * x for x in key) / len(key) for key in keys]
        return 1e-6 * math.fsum(w * s for w, s in zip(weights, squares, strict=True)) / math.fsum(weights)

    def log_posteriors(self, key: Vector) -> dict[int, float]:
        """Log of prior times likelihood, up to what all clusters share."""
        found = {}
        for c in self.live:
            middle, spread = mean(self.slots[c].keys, self.slots[c].weights), self.scored_variance(c)
            exponent = math.fsum((x - m) ** 2 / s + math.log(s) for x, m, s in zip(key, middle, spread, strict=True))
            found[c] = math.log(self.slots[c].count) - exponent / 2
        return found

    def residual(self, key: Vector, value: Vector, c: int, value_energy: float) -> float:
        """How badly a token fits cluster `c`."""
        cluster, spread = self.slots[c], self.scored_variance(c)
        middle = mean(cluster.keys, cluster.weights)
        unlike = math.fsum((x - m) ** 2 / s for x, m, s in zip(key, middle, spread, strict=True)) / len(key)
        trust = cluster.count / (cluster.count + len(key))
        error = []
        for v, base, row in zip(
            value,
            mean(cluster.values, cluster.weights),
            covariance(cluster.values, cluster.keys, cluster.weights),
            strict=True,
        ):
            slope = math.fsum(c_vk * (x - m) / s for c_vk, x, m, s in zip(row, key, middle, spread, strict=True))
            error.append((v - base - trust * slope) ** 2)
        return unlike + math.fsum(error) / len(value) / value_energy

    def closest(self) -> tuple[int, int]:
        """The pair of clusters whose merge costs least by Ward, channels in units of all tokens' variance."""
        keys, weights = self.everything()
        unit = [max(s, self.floor()) for s in variances(keys, weights)]
        costs = {}
        for a in self.live:
            for b in self.live:
                if a < b:
                    one, two = (mean(self.slots[c].keys, self.slots[c].weights) for c in (a, b))
                    n, m = self.slots[a].count, self.slots[b].count
                    distance = math.fsum((x - y) ** 2 / u for x, y, u in zip(one, two, unit, strict=True))
                    costs[a, b] = n * m / (n + m) * distance
        return min(costs, key=costs.__getitem__)

    def ingest(self, keys: Tensor, values: Tensor) -> SlowReceipt:
        """One chunk, every token of it real."""
        tokens = list(zip(keys.double().tolist(), values.double().tolist(), strict=True))
        energy = math.fsum(math.fsum(x * x for x in v) / len(v) for _, v in tokens) / len(tokens)
        first = not self.live
        if first:
            for key, value in tokens:
                self.slots[0].add(key, value)
        posteriors = [self.log_posteriors(key) for key, _ in tokens]
        assignments = [max(found, key=found.__getitem__) for found in posteriors]
        residual = [self.residual(k, v, c, energy) for (k, v), c in zip(tokens, assignments, strict=True)]
        if first:
            return SlowReceipt(0, (-1, -1), assignments, residual)
        founders = [i for i, r in enumerate(residual) if r > self.birth_threshold and len(self.slots) > 1]
        birthed, merged = -1, (-1, -1)
        if founders:
            if len(self.live) == len(self.slots):
                keep, free = merged = self.closest()
                for key, value, weight in zip(
                    self.slots[free].keys, self.slots[free].values, self.slots[free].weights, strict=True
                ):
                    self.slots[keep].add(key, value, weight)
                self.slots[free] = SlowCluster()
                assignments = [keep if c == free else c for c in assignments]
            birthed = min(c for c in range(len(self.slots)) if c not in self.live)
            for i in founders:
                assignments[i] = birthed
        for (key, value), c in zip(tokens, assignments, strict=True):
            self.slots[c].add(key, value)
        return SlowReceipt(birthed, merged, assignments, residual)
