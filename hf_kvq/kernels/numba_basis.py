"""A basis inside compiled code: what its bytes say, queries into it, outputs out of it. What `hf_kvq.basis` does in tensors."""

from __future__ import annotations

import functools
from typing import no_type_check

import numba
import numpy as np
import torch

from hf_kvq.basis import Basis, hadamard
from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.packing import scale_of

__all__ = ["basis_places", "basis_sizes", "enter_basis", "leave_basis", "read_basis", "turn"]


def basis_places(basis: Basis) -> tuple[int, ...]:
    """Addresses of what a basis is made of, of Hadamard's matrix, and of what scale bytes stand for."""
    return (
        basis.mean.data_ptr(), basis.mean_scale.data_ptr(), basis.gain.data_ptr(),
        0 if basis.order is None else basis.order.data_ptr(), basis.aims.data_ptr(), basis.aim_scale.data_ptr(),
        _matrix_at(basis.dim // basis.tiers), _scales_at(),
    )  # fmt: skip


def basis_sizes(basis: Basis) -> tuple[int, ...]:
    """Channels, tiers, units, aims; whether the mean is packed, and pairs are neighbours."""
    interleaved = basis.rope is not None and basis.rope.interleaved
    return (
        basis.dim, basis.tiers, basis.gain.shape[2], basis.aims.shape[2], int(basis.mean.dtype == torch.uint8), int(interleaved)
    )  # fmt: skip


@functools.cache
def _matrix(size: int) -> torch.Tensor:
    return hadamard(size, torch.float64, torch.device("cpu"))


@functools.cache
def _scales() -> torch.Tensor:
    with torch.inference_mode(False):
        return scale_of(torch.arange(256, dtype=torch.uint8), torch.float64)


@functools.cache
def _matrix_at(size: int) -> int:
    return _matrix(size).data_ptr()


@functools.cache
def _scales_at() -> int:
    return _scales().data_ptr()


@numba.njit(cache=True)
@no_type_check
def read_basis(places, sizes, at, means, gains, order):
    """Mean before RoPE, gain, and order of the channels of one head of one row."""
    mean_at, mean_scale_at, gain_at, order_at, scales_at = places[0], places[1], places[2], places[3], places[7]
    dim, units, packed, interleaved = sizes[0], sizes[2], sizes[4], sizes[5]
    scales = numba.carray(pointer(scales_at), (256,), np.float64)
    unit_gains = memory(gain_at + at * units, np.uint8)
    for c in range(dim):
        order[c] = c
    if units == dim or units == 1:
        for c in range(dim):
            gains[c] = scales[unit_gains[c if units == dim else 0]]
        if order_at:
            units_order = memory(order_at + at * dim, np.uint8)
            for c in range(dim):
                order[c] = units_order[c]
    else:
        for p in range(units):
            first = 2 * p if interleaved else p
            second = 2 * p + 1 if interleaved else p + units
            gains[first] = gains[second] = scales[unit_gains[p]]
        if order_at:
            units_order = memory(order_at + at * units, np.uint8)
            for i in range(units):
                p = np.int64(units_order[i])
                order[2 * i] = 2 * p if interleaved else p
                order[2 * i + 1] = 2 * p + 1 if interleaved else p + units
    step = scales[memory(mean_scale_at + at, np.uint8)[0]]
    if packed:
        half = dim // 2
        nibbles = memory(mean_at + at * half, np.uint8)
        for c in range(half):
            means[c] = (np.int64(nibbles[c] & 15) - 8) * (step / gains[c])
            means[c + half] = (np.int64(nibbles[c] >> 4) - 8) * (step / gains[c + half])
    else:
        numbers = memory(mean_at + at * dim, np.int8)
        for c in range(dim):
            means[c] = numbers[c] * (step / gains[c])


@numba.njit(fastmath={"reassoc", "contract"}, cache=True)
@no_type_check
def _spread(numbers, matrix, inverse, scratch):
    """Numbers of a tier times the matrix of `hadamard`, or its transpose, in place: by butterflies where it is Hadamard's own."""
    size = len(numbers)
    if size & (size - 1):
        scratch[:size] = 0.0
        for j in range(size):
            number = numbers[j]
            for i in range(size):
                scratch[i] += (matrix[j, i] if inverse else matrix[i, j]) * number
        numbers[:] = scratch[:size]
        return
    half = 1
    while half < size:
        for start in range(0, size, 2 * half):
            low, high = numbers[start : start + half], numbers[start + half : start + 2 * half]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a + b
                high[i] = a - b
        half *= 2
    for i in range(size):
        numbers[i] *= matrix[0, 0]


@numba.njit(cache=True)
@no_type_check
def turn(source, order, matrix, tiers, scratch, target):
    """H P."""
    size = len(source) // tiers
    for c in range(len(source)):
        target[c] = source[order[c]]
    for tier in range(tiers):
        _spread(target[tier * size : (tier + 1) * size], matrix, False, scratch)


@numba.njit(fastmath={"reassoc", "contract"}, cache=True)
@no_type_check
def enter_basis(places, sizes, pairs, at, query, turned, even, odd, rest):
    """Queries `[queries, dim]` of head number `at` in the basis, and what the scores of the shift are made of.

    For the key at position t these are the sums over pairs of `even cos(w t) + odd sin(w t)`, and `rest`.
    """
    dim, tiers, interleaved = sizes[0], sizes[1], sizes[5]
    matrix = numba.carray(pointer(places[6]), (dim // tiers, dim // tiers), np.float64)
    means, gains, order = np.empty(dim), np.empty(dim), np.empty(dim, np.int64)
    scaled, scratch, out = np.empty(dim), np.empty(dim), np.empty(dim)
    read_basis(places, sizes, at, means, gains, order)
    for i in range(len(query)):
        for c in range(dim):
            scaled[c] = query[i, c] / gains[c]
        turn(scaled, order, matrix, tiers, scratch, out)
        for c in range(dim):
            turned[i, c] = out[c]
        for p in range(pairs):
            a = 2 * p if interleaved else p
            b = 2 * p + 1 if interleaved else p + pairs
            even[i, p] = query[i, a] * means[a] + query[i, b] * means[b]
            odd[i, p] = query[i, b] * means[a] - query[i, a] * means[b]
        total = 0.0
        for c in range(2 * pairs, dim):
            total += query[i, c] * means[c]
        rest[i] = total


@numba.njit(fastmath={"reassoc", "contract"}, cache=True)
@no_type_check
def leave_basis(places, sizes, at, output, lse):
    """Bring outputs `[queries, dim]` of head number `at` out of the basis, in place; those that saw nothing stay zero."""
    dim, tiers = sizes[0], sizes[1]
    size = dim // tiers
    matrix = numba.carray(pointer(places[6]), (size, size), np.float64)
    means, gains, order = np.empty(dim), np.empty(dim), np.empty(dim, np.int64)
    sums, scratch = np.empty(dim), np.empty(dim)
    read_basis(places, sizes, at, means, gains, order)
    for i in range(len(output)):
        if lse[i] == -np.inf:
            continue
        for c in range(dim):
            sums[c] = output[i, c]
        for tier in range(tiers):
            _spread(sums[tier * size : (tier + 1) * size], matrix, True, scratch)
        for c in range(dim):
            output[i, order[c]] = sums[c] / gains[order[c]] + means[order[c]]
