"""A step's few tokens into their basis and into codes, its queries into the basis, its output out of it, compiled by numba.

What `hf_kvq.basis` and `hf_kvq.codecs.rotated` do in tensors: some fifty small operations a layer, which take longer than the attention of a short context.
"""

from __future__ import annotations

import functools
from typing import no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from hf_kvq.basis import BLOCK, Basis, PlacedBasis, block_table, block_waves, hadamard
from hf_kvq.kernels.base import Partial
from hf_kvq.kernels.numba_aim import _aim_some
from hf_kvq.kernels.numba_encode import _encode_some, _plan
from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.kernels.numba_trellis import _trellis_some
from hf_kvq.packing import FLIPS, TRIALS, Grid, scale_of

__all__ = ["encode_few", "enter_basis", "leave_basis"]


def encode_few(states: Tensor, codes: Tensor, scale: Tensor, placed: PlacedBasis | None, grid: Grid | None) -> None:
    """Write the codes and scales of a few tokens where they stay, as `encode_grid` gives them.

    Args:
        states: `[batch, kv_heads, tokens, head_dim]`, as the model gave them.
        codes: `[batch, kv_heads, tokens, width]`, bytes next to each other; written.
        scale: `[batch, kv_heads, tokens, groups]`, likewise; written.
        placed: Their basis, at consecutive positions.
        grid: How codes lie.
    """
    assert placed is not None
    assert grid is not None
    basis, plan = placed.basis, _plan(grid)
    states = states.double().contiguous()
    batch, kv_heads, tokens, _ = states.shape
    _encode_few(
        (states.data_ptr(), codes.data_ptr(), scale.data_ptr(), *_places(basis), *plan.places),
        (codes.stride()[:3], scale.stride()[:3]), (batch, kv_heads, tokens, grid.width, grid.groups, len(plan.planes), grid.trellis),
        _sizes(basis), _frequencies(basis), placed.positions, TRIALS, FLIPS,
    )  # fmt: skip


def enter_basis(query: Tensor, placed: PlacedBasis) -> tuple[Tensor, Tensor]:
    """A query of each head in the basis of consecutive keys, and the scores of their shift; see `PlacedBasis.query` and `bias`."""
    basis, rope = placed.basis, placed.basis.rope
    query = query.float().contiguous()
    turned = torch.empty_like(query)
    first = placed.positions if rope is not None else 0
    assert isinstance(first, int), "consecutive tokens"
    begin = first // BLOCK
    blocks = (first + placed.tokens - 1) // BLOCK - begin + 1 if rope is not None else 0
    pairs = 0 if rope is None else len(rope.inv_freq)
    waves = block_waves(rope, begin + blocks) if rope is not None else query
    parts = torch.empty(*query.shape[:4], blocks, 2 * pairs)
    rest = torch.empty(query.shape[:4])
    _enter(
        (query.data_ptr(), turned.data_ptr(), parts.data_ptr(), rest.data_ptr(), waves.data_ptr(), *_places(basis)),
        (query.shape[0] * query.shape[1], query.shape[2] * query.shape[3], begin, blocks, pairs), _sizes(basis),
    )  # fmt: skip
    if rope is None:
        return turned, rest[..., None].expand(*rest.shape, placed.tokens).contiguous()
    offset = first - begin * BLOCK
    bias = (parts @ block_table(rope)).flatten(-2)[..., offset : offset + placed.tokens]
    if 2 * pairs < basis.dim:
        bias = bias + rest[..., None]
    return turned, bias.contiguous()


def leave_basis(part: Partial, placed: PlacedBasis) -> Tensor:
    """See `PlacedBasis.output`; zero where nothing was seen."""
    output, lse = part.output.float().contiguous(), part.lse.float().contiguous()
    result = torch.empty_like(output)
    rows = output.shape[0] * output.shape[1]
    _leave(
        (output.data_ptr(), result.data_ptr(), lse.data_ptr(), *_places(placed.basis)),
        (rows, output.numel() // output.shape[-1] // rows),
        _sizes(placed.basis),
    )
    return result


def _places(basis: Basis) -> tuple[int, ...]:
    """Addresses of what a basis is made of, of Hadamard's matrix, and of what scale bytes stand for."""
    return (
        basis.mean.data_ptr(), basis.mean_scale.data_ptr(), basis.gain.data_ptr(),
        0 if basis.order is None else basis.order.data_ptr(), basis.aims.data_ptr(), basis.aim_scale.data_ptr(),
        hadamard(basis.dim // basis.tiers, torch.float64, _CPU).data_ptr(), _scales().ctypes.data,
    )  # fmt: skip


def _sizes(basis: Basis) -> tuple[int, ...]:
    """Channels, tiers, units, aims; whether the mean is packed, and pairs are neighbours."""
    interleaved = basis.rope is not None and basis.rope.interleaved
    return (
        basis.dim, basis.tiers, basis.gain.shape[2], basis.aims.shape[2], int(basis.mean.dtype == torch.uint8), int(interleaved)
    )  # fmt: skip


def _frequencies(basis: Basis) -> np.ndarray:
    return _as_array(() if basis.rope is None else basis.rope.inv_freq)


@functools.lru_cache(maxsize=64)
def _as_array(numbers: tuple[float, ...]) -> np.ndarray:
    return np.array(numbers, dtype=np.float64)


@functools.cache
def _scales() -> np.ndarray:
    return scale_of(torch.arange(256, dtype=torch.uint8), torch.float64).numpy()


_CPU = torch.device("cpu")


@numba.njit(cache=True)
@no_type_check
def _read(places, sizes, at, means, gains, order):
    """Mean before RoPE, gain, and order of the channels of one head of one row."""
    mean_at, mean_scale_at, gain_at, order_at, _, _, _, scales_at = places
    dim, _, units, _, packed, interleaved = sizes
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


@numba.njit(cache=True)
@no_type_check
def _read_aims(places, sizes, at, aims):
    """The directions of one head, `[aims, dim]`."""
    _, _, _, _, aims_at, aim_scale_at, _, scales_at = places
    dim, _, _, count, _, _ = sizes
    scales = numba.carray(pointer(scales_at), (256,), np.float64)
    half = dim // 2
    any_aim = False
    for a in range(count):
        nibbles = memory(aims_at + (at * count + a) * half, np.uint8)
        step = scales[memory(aim_scale_at + at * count, np.uint8)[a]]
        any_aim = any_aim or step > 0
        for c in range(half):
            aims[a, c] = (np.int64(nibbles[c] & 15) - 8) * step
            aims[a, c + half] = (np.int64(nibbles[c] >> 4) - 8) * step
    return any_aim


@numba.njit(fastmath={"reassoc", "contract"}, cache=True)
@no_type_check
def _turn(source, order, matrix, tiers, target):
    """H P."""
    size = len(source) // tiers
    for tier in range(tiers):
        for i in range(size):
            total = 0.0
            for j in range(size):
                total += matrix[i, j] * source[order[tier * size + j]]
            target[tier * size + i] = total


@numba.njit(cache=True)
@no_type_check
def _encode_few(places, strides, counts, sizes, frequencies, first, trials, flips):
    states_at, codes_at, scale_at = places[:3]
    basis, channels_at, planes_at, scales_at = places[3:11], places[11], places[12], places[13]
    batch, kv_heads, tokens, width, groups, planes, trellis = counts
    dim, tiers, _, count, _, interleaved = sizes
    matrix = numba.carray(pointer(basis[6]), (dim // tiers, dim // tiers), np.float64)
    states = numba.carray(pointer(states_at), (batch, kv_heads, tokens, dim), np.float64)
    all_codes, all_scales = memory(codes_at, np.uint8), memory(scale_at, np.uint8)
    means, gains, order = np.empty(dim), np.empty(dim), np.empty(dim, np.int64)
    aims, shifted = np.empty((count, dim)), np.empty(dim)
    coded = np.empty((tokens, dim))
    codes, scale = np.empty((tokens, width), np.uint8), np.empty((tokens, groups), np.uint8)
    pairs = len(frequencies)
    for row in range(batch):
        for head in range(kv_heads):
            at = row * kv_heads + head
            _read(basis, sizes, at, means, gains, order)
            for t in range(tokens):
                shifted[:] = means
                for p in range(pairs):
                    angle = (first + t) * frequencies[p]
                    cos, sin = np.cos(angle), np.sin(angle)
                    a = 2 * p if interleaved else p
                    b = 2 * p + 1 if interleaved else p + pairs
                    shifted[a] = means[a] * cos - means[b] * sin
                    shifted[b] = means[b] * cos + means[a] * sin
                for c in range(dim):
                    shifted[c] = (states[row, head, t, c] - shifted[c]) * gains[c]
                _turn(shifted, order, matrix, tiers, coded[t])
            arguments = (coded.ctypes.data, codes.ctypes.data, scale.ctypes.data)
            any_aim = _read_aims(basis, sizes, at, aims)
            aimed = (*arguments, aims.ctypes.data, channels_at, planes_at, scales_at)
            if trellis:
                _trellis_some(aimed, (dim, width, groups, planes, tokens, count), 0, tokens)
            else:
                _encode_some(
                    (*arguments, channels_at, planes_at, scales_at), (dim, width, groups, planes), 0, tokens, trials
                )
                if any_aim:
                    _aim_some(aimed, (dim, width, groups, planes, tokens, count), 0, tokens, flips)
            for t in range(tokens):
                start = row * strides[0][0] + head * strides[0][1] + t * strides[0][2]
                for j in range(width):
                    all_codes[start + j] = codes[t, j]
                start = row * strides[1][0] + head * strides[1][1] + t * strides[1][2]
                for g in range(groups):
                    all_scales[start + g] = scale[t, g]


@numba.njit(cache=True)
@no_type_check
def _enter(places, counts, sizes):
    query_at, turned_at, parts_at, rest_at, waves_at = places[:5]
    basis = places[5:]
    heads, queries, begin, blocks, pairs = counts
    dim, tiers, _, _, _, interleaved = sizes
    matrix = numba.carray(pointer(basis[6]), (dim // tiers, dim // tiers), np.float64)
    query = numba.carray(pointer(query_at), (heads, queries, dim), np.float32)
    turned = numba.carray(pointer(turned_at), (heads, queries, dim), np.float32)
    parts = numba.carray(pointer(parts_at), (heads, queries, blocks, 2 * pairs), np.float32)
    rest = numba.carray(pointer(rest_at), (heads, queries), np.float32)
    waves = numba.carray(pointer(waves_at), (begin + blocks, 2 * pairs), np.float32)
    means, gains, order = np.empty(dim), np.empty(dim), np.empty(dim, np.int64)
    scaled, out = np.empty(dim), np.empty(dim)
    even, odd = np.empty(pairs, np.float32), np.empty(pairs, np.float32)
    for head in range(heads):
        _read(basis, sizes, head, means, gains, order)
        for i in range(queries):
            for c in range(dim):
                scaled[c] = query[head, i, c] / gains[c]
            _turn(scaled, order, matrix, tiers, out)
            for c in range(dim):
                turned[head, i, c] = out[c]
            for p in range(pairs):
                a = 2 * p if interleaved else p
                b = 2 * p + 1 if interleaved else p + pairs
                even[p] = query[head, i, a] * means[a] + query[head, i, b] * means[b]
                odd[p] = query[head, i, b] * means[a] - query[head, i, a] * means[b]
            total = 0.0
            for c in range(2 * pairs, dim):
                total += query[head, i, c] * means[c]
            rest[head, i] = total
            for block in range(blocks):
                cos, sin = waves[begin + block, :pairs], waves[begin + block, pairs:]
                into = parts[head, i, block]
                for p in range(pairs):
                    into[p] = even[p] * cos[p] + odd[p] * sin[p]
                for p in range(pairs):
                    into[pairs + p] = odd[p] * cos[p] - even[p] * sin[p]


@numba.njit(fastmath={"reassoc", "contract"}, cache=True)
@no_type_check
def _leave(places, counts, sizes):
    heads, queries = counts
    basis = places[3:]
    dim, tiers, _, _, _, _ = sizes
    size = dim // tiers
    lse = numba.carray(pointer(places[2]), (heads, queries), np.float32)
    matrix = numba.carray(pointer(basis[6]), (size, size), np.float64)
    output = numba.carray(pointer(places[0]), (heads, queries, dim), np.float32)
    result = numba.carray(pointer(places[1]), (heads, queries, dim), np.float32)
    means, gains, order = np.empty(dim), np.empty(dim), np.empty(dim, np.int64)
    sums = np.empty(size)
    for head in range(heads):
        _read(basis, sizes, head, means, gains, order)
        for i in range(queries):
            if lse[head, i] == -np.inf:
                result[head, i, :] = 0.0
                continue
            for tier in range(tiers):
                sums[:] = 0.0
                for k in range(size):
                    weight = output[head, i, tier * size + k]
                    for j in range(size):
                        sums[j] += matrix[k, j] * weight
                for j in range(size):
                    c = order[tier * size + j]
                    result[head, i, c] = sums[j] / gains[c] + means[c]
