"""Slow and obvious references for sorted profiles: Python numbers one at a time, and integrals on a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, pstdev

import numpy as np

SQUARED_ERROR_AT_BITS = {2: 0.129, 3: 0.0385, 4: 0.0107}
"""Of normal elements of variance 1, measured with a prototype before this package was written."""


def normal_profile(values: Sequence[float], top_k: int = 0) -> list[float]:
    """Permutation x normal quantiles with an exact head, by sorting pairs; equal elements rank in their order."""
    by_magnitude = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))
    head = set(by_magnitude[:top_k])
    tail = [index for index in range(len(values)) if index not in head]
    out = list(values)
    if not tail:
        return out
    mean, deviation = fmean(values[index] for index in tail), pstdev([values[index] for index in tail])
    for rank, index in enumerate(sorted(tail, key=lambda index: values[index])):
        share = (rank + 0.5) / len(tail)
        out[index] = NormalDist(mean, deviation).inv_cdf(share) if deviation else mean
    return out


def normal_rank_codes(values: Sequence[float], bits: int) -> list[float]:
    """Ranks in bins whose edges are quantiles of a normal of sqrt(3) times the deviation; each gives the mean of its ranks' quantiles."""
    exact = normal_profile(values)
    mean, deviation = fmean(values), pstdev(values)
    if not deviation:
        return exact
    edges = [NormalDist(mean, deviation * math.sqrt(3)).inv_cdf(step / 2**bits) for step in range(1, 2**bits)]
    bins = [sum(edge <= value for edge in edges) for value in exact]
    means = {
        code: fmean(value for value, other in zip(exact, bins, strict=True) if other == code) for code in set(bins)
    }
    return [means[code] for code in bins]


def ks_distance(values: Sequence[float], below: Callable[[float], float]) -> float:
    """Largest distance of the share of elements at most, or less than, a number from what `below` says, over all elements."""
    largest = 0.0
    for number in values:
        at_most = sum(value <= number for value in values) / len(values)
        less = sum(value < number for value in values) / len(values)
        largest = max(largest, abs(at_most - below(number)), abs(less - below(number)))
    return largest


def cube_root_edges(density: Callable[[np.ndarray], np.ndarray], grid: np.ndarray, bits: int) -> list[float]:
    """Share of `density` below each inner edge of 2^bits bins that hold equal parts of the integral of its cube root.

    Args:
        density: Of the data; need not be normalized.
        grid: Ascending points that hold all but a negligible part of both integrals.
        bits: Of a code.
    """

    def integral(heights: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2 * np.diff(grid))])

    heights = density(grid)
    share, root = integral(heights), integral(np.cbrt(heights))
    targets = root[-1] * np.arange(1, 2**bits) / 2**bits
    return list(np.interp(targets, root, share / share[-1]))


def packed(codes: Sequence[int], bits: int) -> bytes:
    """Codes as one long binary number, the first in its lowest bits."""
    number = sum(code << (bits * place) for place, code in enumerate(codes))
    return number.to_bytes(math.ceil(len(codes) * bits / 8), "little")
