"""What a sorted profile keeps, and its bytes: little-endian, versioned, with a checksum, read without pickle.

Layout of version 1: magic `HKSP`, version, then `_HEADER`, sizes of the axes (uint32), parameters of the family (float64), indices of
the head (the smallest unsigned type for the last index), its values (float32), then all elements (float32) where the encoding is
dense, else ranks (the smallest unsigned type for the last rank) or codes packed in `rank_bits` bits; CRC-32 of all that.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt, UInt8
from numpy import ndarray as Array

from hf_kvq.codecs.sorted_profile_families import FAMILIES, Profile, parameters_of

__all__ = ["SortedProfileEncoding", "pack_codes", "smallest_unsigned", "unpack_codes"]

MAGIC = b"HKSP"
VERSION = 1
MAX_RANK_BITS = 16
MAX_ELEMENTS = 2**32 - 1
MAX_AXES = 32
"""Of numpy 1; later versions and torch have more."""

# Dense (0 or 1), family, family asked for, rank_bits (0: exact ranks), axes, top_k, KS statistic, threshold.
_HEADER = struct.Struct("<BBBBBIdd")
_START = len(MAGIC) + 1
_CHECKSUM = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedProfileEncoding:
    """A tensor as a permutation and a fitted family; `hf_kvq.codecs.sorted_profile` makes and reads it.

    Attributes:
        shape: Of the tensor.
        profile: The family that was fitted to all elements but the head, and its parameters.
        requested_family: What was asked for; the fit is of another family where this one could not hold the elements.
        ks_statistic: Kolmogorov-Smirnov distance of these elements from the fitted family.
        ks_threshold: Largest that it was allowed to be.
        top_k: Elements of largest magnitude that stayed out of the fit.
        rank_bits: Bits of a code; None: exact ranks.
        head_indices: Flat indices of the elements kept exactly, ascending; empty where the encoding is dense.
        head_values: Those elements.
        codes: Of the other elements in their order: ranks, or the bytes of packed codes; empty where the encoding is dense.
        dense_values: All elements where the family did not fit; None where it did.
    """

    shape: tuple[int, ...]
    profile: Profile
    requested_family: str
    ks_statistic: float
    ks_threshold: float
    top_k: int
    rank_bits: int | None
    head_indices: UInt[Array, " head"]
    head_values: Float32[Array, " head"]
    codes: UInt[Array, " codes"]
    dense_values: Float32[Array, " elements"] | None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def tail_elements(self) -> int:
        """Elements that are coded: all but the head, none where the encoding is dense."""
        return 0 if self.is_dense else self.elements - self.top_k

    @property
    def family(self) -> str:
        """Name of the family that was fitted."""
        return self.profile.family

    @property
    def is_dense(self) -> bool:
        """Whether the elements are kept as they are, since the family did not fit."""
        return self.dense_values is not None

    @property
    def nbytes(self) -> int:
        """Bytes of `to_bytes()`."""
        return (
            _fixed_bytes(len(self.shape), len(self.profile.parameters))
            + self.head_indices.nbytes
            + self.head_values.nbytes
            + self.codes.nbytes
            + (0 if self.dense_values is None else self.dense_values.nbytes)
        )

    @property
    def bits_per_element(self) -> float:
        """All bytes, header, parameters and checksum included, x 8 / elements; 0 for a tensor without elements."""
        return self.nbytes * 8 / self.elements if self.elements else 0.0

    def to_bytes(self) -> bytes:
        """The encoding as bytes, the same for the same encoding."""
        header = _HEADER.pack(
            self.is_dense,
            FAMILIES.index(self.family),
            FAMILIES.index(self.requested_family),
            self.rank_bits or 0,
            len(self.shape),
            self.top_k,
            self.ks_statistic,
            self.ks_threshold,
        )
        parts = [
            np.array(self.shape, np.uint32),
            np.array(self.profile.parameters, np.float64),
            self.head_indices,
            self.head_values,
            self.codes if self.dense_values is None else self.dense_values,
        ]
        body = MAGIC + bytes([VERSION]) + header + b"".join(_little_endian(part).tobytes() for part in parts)
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> SortedProfileEncoding:
        """Read what `to_bytes` wrote. Nothing is allocated beyond the size of `data`.

        Raises:
            ValueError: If `data` is anything else: foreign, of another version, cut, longer, changed, or inconsistent.
        """
        if data[: len(MAGIC)] != MAGIC or len(data) < _START + _HEADER.size + _CHECKSUM:
            raise ValueError(
                f"no sorted profile: expected {MAGIC!r} and a header, got {len(data)} bytes that start {data[:5]!r}"
            )
        if data[len(MAGIC)] != VERSION:
            raise ValueError(f"a sorted profile of version {data[len(MAGIC)]}; this package reads version {VERSION}")
        if zlib.crc32(data[:-_CHECKSUM]) != int.from_bytes(data[-_CHECKSUM:], "little"):
            raise ValueError(
                f"damaged sorted profile: its {len(data)} bytes do not match their checksum; read it again"
            )
        return _parse(data)


def _parse(data: bytes) -> SortedProfileEncoding:
    dense, family, requested, bits, axes, top_k, statistic, threshold = _HEADER.unpack_from(data, _START)
    if max(family, requested) >= len(FAMILIES) or dense > 1:
        raise ValueError(f"damaged sorted profile: no family {family} or {requested}, or no flag {dense}")
    read = _Reader(data, _START + _HEADER.size)
    shape = tuple(read.take(axes, np.uint32).tolist())
    count = math.prod(shape)
    # Before any of them is computed with: a size that lies may be larger than every integer type.
    if top_k > count or count > MAX_ELEMENTS:
        raise ValueError(f"damaged sorted profile: a head of {top_k} elements in a tensor of shape {shape}")
    name, head = FAMILIES[family], 0 if dense else top_k
    parameters = read.take(parameters_of(name), np.float64)
    head_indices = read.take(head, smallest_unsigned(count))
    head_values = read.take(head, np.float32)
    tail = 0 if dense else count - top_k
    codes = read.take(-(-tail * bits // 8), np.uint8) if bits else read.take(tail, smallest_unsigned(tail))
    dense_values = read.take(count, np.float32) if dense else None
    read.finish()
    return SortedProfileEncoding(
        shape=shape,
        profile=Profile(name, tuple(parameters.tolist())),
        requested_family=FAMILIES[requested],
        ks_statistic=statistic,
        ks_threshold=threshold,
        top_k=top_k,
        rank_bits=bits or None,
        head_indices=head_indices,
        head_values=head_values,
        codes=codes,
        dense_values=dense_values,
    )


class _Reader:
    """Arrays from bytes, one after another, up to the checksum."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position, self._end = data, position, len(data) - _CHECKSUM

    def take(self, count: int, dtype: np.dtype | type) -> Array:
        stored = np.dtype(dtype).newbyteorder("<")
        stop = self._position + count * stored.itemsize
        if stop > self._end:
            raise ValueError(f"damaged sorted profile: {stop} bytes are needed up to here, there are {self._end}")
        taken = np.frombuffer(self._data[self._position : stop], stored)
        self._position = stop
        return taken.astype(dtype, copy=False)

    def finish(self) -> None:
        if self._position != self._end:
            raise ValueError(f"damaged sorted profile: {self._end - self._position} bytes too many")


def _check(encoding: SortedProfileEncoding) -> None:
    """An encoding that `reconstruct` cannot read does not come to be."""
    count, bits, head = encoding.elements, encoding.rank_bits, encoding.head_indices
    # Sizes other than 0 count here: numpy refuses an empty array with axes that are too long.
    if math.prod(max(size, 1) for size in encoding.shape) > MAX_ELEMENTS or len(encoding.shape) > MAX_AXES:
        raise ValueError(
            f"a sorted profile holds at most {MAX_ELEMENTS} elements on {MAX_AXES} axes, got {encoding.shape}; encode it in parts"
        )
    if bits is not None and not 1 <= bits <= MAX_RANK_BITS:
        raise ValueError(f"rank_bits must be 1 to {MAX_RANK_BITS}, or None for exact ranks, got {bits}")
    if not (0 <= encoding.ks_statistic <= 1 and 0 <= encoding.ks_threshold <= 1):
        raise ValueError(
            f"KS statistic and threshold must be within 0 and 1, got {encoding.ks_statistic} and {encoding.ks_threshold}"
        )
    expected = 0 if encoding.is_dense else encoding.top_k
    if not 0 <= encoding.top_k <= count or not len(encoding.head_values) == len(head) == expected:
        raise ValueError(
            f"a head of {encoding.top_k} in {count} elements needs {expected} indices and values, got {len(head)} and {len(encoding.head_values)}"
        )
    ascending = head.astype(np.int64)
    if len(head) and (ascending[-1] >= count or (np.diff(ascending) <= 0).any()):
        raise ValueError(f"indices of the head must ascend and stay below {count}, got {head[:5]} ... {head[-1:]}")
    if encoding.dense_values is not None:
        if len(encoding.dense_values) != count or len(encoding.codes):
            raise ValueError(
                f"a dense encoding holds {count} elements and no codes, got {len(encoding.dense_values)} and {len(encoding.codes)}"
            )
        kept = encoding.dense_values
    else:
        kept = encoding.head_values
        _check_codes(encoding.codes, encoding.tail_elements, bits)
    if not np.isfinite(kept).all():
        raise ValueError("elements that are kept must be finite, got NaN or infinity")


def _check_codes(codes: UInt[Array, " codes"], tail: int, bits: int | None) -> None:
    if bits is not None:
        if codes.dtype != np.uint8 or len(codes) != -(-tail * bits // 8):
            raise ValueError(f"{tail} codes of {bits} bits take {-(-tail * bits // 8)} bytes, got {len(codes)}")
        unused = len(codes) * 8 - tail * bits
        if unused and codes[-1] >> (8 - unused):
            raise ValueError("the bits after the last code must be 0")
        return
    if codes.dtype != smallest_unsigned(tail) or len(codes) != tail:
        raise ValueError(f"{tail} ranks are {smallest_unsigned(tail)}, got {len(codes)} of {codes.dtype}")
    if tail and (codes.max() >= tail or (np.bincount(codes, minlength=tail) != 1).any()):
        raise ValueError(f"ranks must be a permutation of 0 to {tail - 1}: some are missing or out of range")


def smallest_unsigned(count: int) -> np.dtype:
    """The smallest unsigned type that numbers `count` things from 0 on."""
    return np.dtype(np.min_scalar_type(max(count - 1, 0)))


def pack_codes(codes: UInt[Array, " codes"], bits: int) -> UInt8[Array, " bytes"]:
    """Codes below 2^bits without gaps, lowest bit first; the last byte is filled with zeros."""
    spread = (codes[:, None] >> np.arange(bits, dtype=codes.dtype)) & 1
    return np.packbits(spread.astype(np.uint8), bitorder="little")


def unpack_codes(packed: UInt8[Array, " bytes"], bits: int, count: int) -> UInt[Array, " codes"]:
    """The codes that `pack_codes` took, as uint16."""
    spread = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    return spread @ (1 << np.arange(bits)).astype(np.uint16)


def _fixed_bytes(axes: int, parameters: int) -> int:
    return _START + _HEADER.size + 4 * axes + 8 * parameters + _CHECKSUM


def _little_endian(part: Array) -> Array:
    return part.astype(part.dtype.newbyteorder("<"), copy=False)
