"""A step's few tokens into their basis and into codes, compiled by numba.

What `hf_kvq.basis` and `hf_kvq.codecs.rotated` do in tensors: some fifty small operations a layer, which take longer than the attention of a short context.
"""

from __future__ import annotations

import functools
from typing import no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from hf_kvq.basis import Basis, PlacedBasis
from hf_kvq.kernels.numba_aim import _aim_some
from hf_kvq.kernels.numba_basis import basis_places, basis_sizes, read_basis, turn
from hf_kvq.kernels.numba_encode import _encode_some, _plan
from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.kernels.numba_trellis import _trellis_some
from hf_kvq.packing import FLIPS, TRIALS, Grid

__all__ = ["encode_few"]


def encode_few(states: Tensor, codes: Tensor, scale: Tensor, placed: PlacedBasis | None, grid: Grid | None) -> None:
    """Write the codes and scales of a few tokens where they stay, as `encode_grid` gives them.

    Args:
        states: `[batch, kv_heads, tokens, head_dim]`, float32 or bfloat16 as the model gave them, channels next to each other.
        codes: `[batch, kv_heads, tokens, width]`, bytes next to each other; written.
        scale: `[batch, kv_heads, tokens, groups]`, likewise; written.
        placed: Their basis, at consecutive positions.
        grid: How codes lie.
    """
    assert placed is not None
    assert grid is not None
    basis, plan = placed.basis, _plan(grid)
    batch, kv_heads, tokens, _ = states.shape
    _encode_few(
        (states.data_ptr(), codes.data_ptr(), scale.data_ptr(), *basis_places(basis), *plan.places),
        (codes.stride()[:3], scale.stride()[:3], states.stride()[:3]), states.dtype == torch.bfloat16,
        (batch, kv_heads, tokens, grid.width, grid.groups, len(plan.planes), grid.trellis),
        basis_sizes(basis), _frequencies(basis), placed.positions, TRIALS, FLIPS,
    )  # fmt: skip


def _frequencies(basis: Basis) -> np.ndarray:
    return _as_array(() if basis.rope is None else basis.rope.inv_freq)


@functools.lru_cache(maxsize=64)
def _as_array(numbers: tuple[float, ...]) -> np.ndarray:
    return np.array(numbers, dtype=np.float64)


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


@numba.njit(cache=True)
@no_type_check
def _encode_few(places, strides, is_bits, counts, sizes, frequencies, first, trials, flips):
    states_at, codes_at, scale_at = places[:3]
    basis, channels_at, planes_at, scales_at = places[3:11], places[11], places[12], places[13]
    batch, kv_heads, tokens, width, groups, planes, trellis = counts
    dim, tiers, _, count, _, interleaved = sizes
    matrix = numba.carray(pointer(basis[6]), (dim // tiers, dim // tiers), np.float64)
    floats, halves = memory(states_at, np.float32), memory(states_at, np.int16)
    state = np.empty(dim, np.float32)
    bits = state.view(np.int32)
    all_codes, all_scales = memory(codes_at, np.uint8), memory(scale_at, np.uint8)
    means, gains, order = np.empty(dim), np.empty(dim), np.empty(dim, np.int64)
    aims, shifted = np.empty((count, dim)), np.empty(dim)
    scratch, coded = np.empty(dim), np.empty((tokens, dim))
    codes, scale = np.empty((tokens, width), np.uint8), np.empty((tokens, groups), np.uint8)
    pairs = len(frequencies)
    for row in range(batch):
        for head in range(kv_heads):
            at = row * kv_heads + head
            read_basis(basis, sizes, at, means, gains, order)
            for t in range(tokens):
                shifted[:] = means
                for p in range(pairs):
                    angle = (first + t) * frequencies[p]
                    cos, sin = np.cos(angle), np.sin(angle)
                    a = 2 * p if interleaved else p
                    b = 2 * p + 1 if interleaved else p + pairs
                    shifted[a] = means[a] * cos - means[b] * sin
                    shifted[b] = means[b] * cos + means[a] * sin
                start = row * strides[2][0] + head * strides[2][1] + t * strides[2][2]
                for c in range(dim):
                    if is_bits:
                        bits[c] = np.int32(halves[start + c]) << 16
                    else:
                        state[c] = floats[start + c]
                for c in range(dim):
                    shifted[c] = (np.float64(state[c]) - shifted[c]) * gains[c]
                turn(shifted, order, matrix, tiers, scratch, coded[t])
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
