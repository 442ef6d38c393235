"""Sorted profile: a tensor as the order of its elements and the quantile function of a fitted family. An archive and a receipt, no cache codec.

Source: the document of `mixle.experimental.kv_cache_quant`, which names it G4: value = permutation x fitted quantile function, a head of
the largest elements kept exactly, a Kolmogorov-Smirnov receipt of the fit, and float32 elements where the family does not fit.
Departs from it: `rank_bits` codes ranks in bins instead of keeping them all, `gate="lilliefors"` lets the threshold follow the number
of elements, and `detect_anomaly` compares another tensor with a stored profile.

What it costs. Exact ranks take 8, 16 or 32 bits an element (up to 256, 65,536, and more elements: then as much as float32), and what
the family does not say of the values is lost all the same. `rank_bits` comes near the best scalar code of its size where the elements
do follow the family (0.125, 0.036, 0.0099 of the variance at 2, 3, 4 bits on normal elements); no number of bits mends a misfit. On
keys and values of SmolLM2, in groups of 128 tokens and 64 channels, exact ranks of a normal lose 13 % and 2.3 % of the energy, 4-bit
rank codes 15 % and 3.6 %, where plain codes per token lose 3.8 % and 1.7 % at 4.25 bits and 0.012 % and 0.005 % at 8.25
(`python -m eval.profile_rate`). For a cache that is read at every step use a plain code; this is for snapshots whose distribution is
of interest, where the fit itself says what is unusual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt
from numpy import ndarray as Array
from scipy import stats
from torch import Tensor

from hf_kvq.codecs.sorted_profile_encoding import (
    MAX_RANK_BITS,
    SortedProfileEncoding,
    pack_codes,
    smallest_unsigned,
    unpack_codes,
)
from hf_kvq.codecs.sorted_profile_families import Profile, family_name, fit_profile, middles

__all__ = ["ProfileAnomaly", "SortedProfileEncoding", "detect_anomaly", "fit_sorted_profile", "reconstruct"]

GOF_THRESHOLD = 0.05
"""The seed's."""


def fit_sorted_profile(
    tensor: Float[Tensor, "..."] | Float[Array, "..."],
    top_k: int = 0,
    tail_family: str | stats.rv_continuous | None = None,
    gof_threshold: float = GOF_THRESHOLD,
    *,
    rank_bits: int | None = None,
    gate: Literal["seed", "lilliefors"] = "seed",
) -> SortedProfileEncoding:
    """Encode a tensor of any shape. Elements are taken as float32.

    Args:
        tensor: Finite floating-point elements.
        top_k: Elements of largest magnitude that are kept exactly and stay out of the fit (of equals the first); all where there are
            fewer. Each costs 5 to 8 bytes.
        tail_family: `norm` (the default), `laplace`, `t`, or for positive elements `gamma` or `lognorm`, as a name or scipy's
            distribution. What cannot hold the elements is replaced by `norm`, and the encoding says so in `family`.
        gof_threshold: Largest Kolmogorov-Smirnov statistic of a fit; above it the encoding is dense. 1: never. A sample that does
            follow a normal has a median statistic of about 0.6 / sqrt(elements), so that 0.05 refuses most groups of 64 to 128.
        rank_bits: 1 to 16: code ranks in 2^rank_bits bins. None: exact ranks.
        gate: `"lilliefors"`: in place of `gof_threshold` the bound that 95 % of normal samples of this size stay within.

    Raises:
        ValueError: If elements are no finite floating-point numbers, or an argument is out of range.
    """
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    if rank_bits is not None and not 1 <= rank_bits <= MAX_RANK_BITS:
        raise ValueError(f"rank_bits must be 1 to {MAX_RANK_BITS}, or None for exact ranks, got {rank_bits}")
    requested = family_name(tail_family)
    flat, shape = _elements(tensor)
    head = _largest(flat, top_k)
    tail = np.delete(flat, head)
    threshold = _threshold(gate, gof_threshold, len(tail))
    order = np.argsort(tail, kind="stable")
    ascending = tail[order].astype(np.float64)
    profile = fit_profile(ascending, requested)
    statistic = profile.ks_distance(ascending)
    dense = statistic > threshold
    kept = head[:0] if dense else head
    return SortedProfileEncoding(
        shape=shape,
        profile=profile,
        requested_family=requested,
        ks_statistic=statistic,
        ks_threshold=threshold,
        top_k=len(head),
        rank_bits=rank_bits,
        head_indices=kept.astype(smallest_unsigned(len(flat))),
        head_values=flat[kept],
        codes=np.empty(0, np.uint8) if dense else _codes(order, profile, rank_bits),
        dense_values=flat.copy() if dense else None,
    )


def reconstruct(encoding: SortedProfileEncoding) -> Float32[Array, "..."]:
    """The tensor that `encoding` stands for: exact where it is dense and in its head, else what the family expects.

    Of a rank that is its quantile at (rank + 1/2) / elements, of a code the mean of that over the ranks that share it.
    """
    if encoding.dense_values is not None:
        return encoding.dense_values.reshape(encoding.shape).copy()
    expected = encoding.profile.expected(encoding.tail_elements)
    if encoding.rank_bits is None:
        tail = expected.astype(np.float32)[encoding.codes]
    else:
        codes = unpack_codes(encoding.codes, encoding.rank_bits, encoding.tail_elements)
        tail = _bin_means(expected, codes, 2**encoding.rank_bits)[codes]
    out = np.empty(encoding.elements, np.float32)
    in_tail = np.ones(encoding.elements, bool)
    in_tail[encoding.head_indices] = False
    out[in_tail] = tail
    out[encoding.head_indices] = encoding.head_values
    return out.reshape(encoding.shape)


@dataclass(frozen=True, eq=False)
class ProfileAnomaly:
    """How far a tensor is from a stored profile.

    Attributes:
        statistic: Kolmogorov-Smirnov distance of its elements from the fitted family.
        threshold: What elements of the encoded tensor's own distribution stay below.
        outside: Flat indices of elements so far out that the family expects fewer than `significance` of them in the whole tensor.
            They do not decide: a profile that passed its gate may still have tails that are too light.
    """

    statistic: float
    threshold: float
    outside: Int[Array, " outside"]

    @property
    def is_anomaly(self) -> bool:
        """Whether the elements follow another distribution than the encoded tensor's."""
        return self.statistic > self.threshold


def detect_anomaly(
    tensor: Float[Tensor, "..."] | Float[Array, "..."], encoding: SortedProfileEncoding, *, significance: float = 0.01
) -> ProfileAnomaly:
    """Compare a tensor with the distribution that another one was fitted with, location and scale included.

    The threshold is the encoding's own distance from its family plus what two samples of one distribution differ by (Smirnov's
    two-sample bound), so that by the triangle inequality independent elements of the encoded tensor's distribution exceed it in at most
    the share `significance` of all tensors, whether or not the family fitted. The share of the encoded tensor that was its head is taken
    off the compared one too.

    Args:
        tensor: Finite floating-point elements, of any shape.
        encoding: Of the tensor to compare with.
        significance: Share of false alarms, above 0 and below 1.

    Raises:
        ValueError: If a tensor has no elements, or as `fit_sorted_profile` does.
    """
    if not 0 < significance < 1:
        raise ValueError(f"significance must be above 0 and below 1, got {significance}")
    flat, _ = _elements(tensor)
    if not (len(flat) and encoding.elements):
        raise ValueError(f"nothing to compare: the tensors have {len(flat)} and {encoding.elements} elements")
    head = _largest(flat, round(encoding.top_k * len(flat) / encoding.elements))
    ascending = np.sort(np.delete(flat, head)).astype(np.float64)
    fitted = encoding.elements - encoding.top_k
    noise = math.sqrt(-math.log(significance / 2) / 2 * (1 / max(len(ascending), 1) + 1 / max(fitted, 1)))
    smaller, larger = encoding.profile.tails(flat.astype(np.float64))
    return ProfileAnomaly(
        statistic=encoding.profile.ks_distance(ascending),
        threshold=encoding.ks_statistic + noise,
        outside=np.flatnonzero(np.minimum(smaller, larger) < significance / (2 * len(flat))),
    )


def lilliefors_threshold(elements: int) -> float:
    """KS statistic that 95 % of normal samples stay within when mean and variance are estimated from the sample: about 0.89 / sqrt(n).

    Source: Lilliefors, JASA 62 (1967), 399-402, gives 0.886 / sqrt(n) for n > 30; this is the form of Stephens, JASA 69 (1974), 730-737,
    which holds for every n. Other families have bounds of their own, near this one.
    """
    if elements == 0:
        return 1.0
    root = math.sqrt(elements)
    return 0.895 / (root - 0.01 + 0.85 / root)


def _threshold(gate: str, gof_threshold: float, elements: int) -> float:
    if gate not in ("seed", "lilliefors"):
        raise ValueError(f"gate must be 'seed' or 'lilliefors', got {gate!r}")
    if not 0 <= gof_threshold <= 1:
        raise ValueError(f"gof_threshold must be within 0 and 1, as a KS statistic is, got {gof_threshold}")
    if gate == "seed":
        return gof_threshold
    if gof_threshold != GOF_THRESHOLD:
        raise ValueError(
            f"gate='lilliefors' sets the threshold itself, got gof_threshold={gof_threshold} too; leave one out"
        )
    return lilliefors_threshold(elements)


def _codes(order: Int[Array, " tail"], profile: Profile, rank_bits: int | None) -> UInt[Array, " codes"]:
    """Codes of the elements in their own order; `order` lists them from the smallest to the largest."""
    count = len(order)
    if rank_bits is None:
        ranks = np.empty(count, smallest_unsigned(count))
        ranks[order] = np.arange(count)
        return ranks
    bins = np.empty(count, np.uint16)
    bins[order] = np.searchsorted(profile.coded_below(rank_bits), middles(count), side="right")
    return pack_codes(bins, rank_bits)


def _bin_means(expected: Float[Array, " tail"], codes: UInt[Array, " tail"], bins: int) -> Float32[Array, " bins"]:
    """Mean of what is expected over the ranks of each bin; 0 for bins without any.

    Bins hold consecutive ranks, so that their sizes say which: the decoder need not know how the encoder chose them.
    """
    sizes = np.bincount(codes, minlength=bins)
    used = np.flatnonzero(sizes)
    means = np.zeros(bins, np.float32)
    if len(used):
        first = np.cumsum(sizes)[used] - sizes[used]
        means[used] = np.add.reduceat(expected, first) / sizes[used]
    return means


def _largest(flat: Float32[Array, " elements"], count: int) -> Int[Array, " head"]:
    """Ascending indices of the `count` elements of largest magnitude, of equals the first."""
    count = min(count, len(flat))
    if count == 0:
        return np.empty(0, np.intp)
    magnitudes = np.abs(flat)
    least = np.partition(magnitudes, len(flat) - count)[len(flat) - count]
    above = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _elements(
    tensor: Float[Tensor, "..."] | Float[Array, "..."],
) -> tuple[Float32[Array, " elements"], tuple[int, ...]]:
    """The elements as float32 in one row, and the shape; they may be the tensor's own memory."""
    if isinstance(tensor, Tensor):
        if not tensor.is_floating_point():
            raise ValueError(f"tensor must be of a floating-point dtype, got {tensor.dtype}; try tensor.float()")
        array = tensor.detach().to("cpu", torch.float32).numpy()
    else:
        if not np.issubdtype(tensor.dtype, np.floating):
            raise ValueError(
                f"tensor must be of a floating-point dtype, got {tensor.dtype}; try tensor.astype('float32')"
            )
        with np.errstate(over="ignore"):  # refused below
            array = tensor.astype(np.float32, copy=False)
    flat = array.reshape(-1)
    bad = np.flatnonzero(~np.isfinite(flat))
    if len(bad):
        where = tuple(int(index) for index in np.unravel_index(bad[0], array.shape))
        raise ValueError(
            f"tensor must be finite in float32: {len(bad)} of {flat.size} elements are not, the first at {where} is {flat[bad[0]]}; "
            "look for an overflow upstream"
        )
    return flat, array.shape
