"""Codes of keys moved to neighbouring levels where that spares an error along the directions that queries look along, compiled by numba.

What `hf_kvq.codecs.rotated` does in tensors, one vector after the other and in place.
"""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from hf_kvq.kernels.numba_encode import _pack, _plan, encode_grid
from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.kernels.numba_threads import launch
from hf_kvq.kernels.numba_trellis import encode_trellis
from hf_kvq.packing import Grid

__all__ = ["aim_grid", "encode_aimed"]


@numba.njit(cache=True)
@no_type_check
def _unpack(packed, planes, codes):
    """As `Grid.unpack`."""
    codes[:] = np.uint8(0)
    for p in range(len(planes)):
        first, run, bits, below, start = planes[p]
        up, mask = np.uint8(below), np.uint8(2**bits - 1)
        for i in range(8 // bits):
            target, down = codes[first + i * run : first + i * run + run], np.uint8(i * bits)
            for j in range(run):
                target[j] |= np.uint8(((packed[start + j] >> down) & mask) << up)


@numba.njit(cache=True)
@no_type_check
def _level(x, bend):
    return x * (1 + bend * (x * x))


@numba.njit(cache=True)
@no_type_check
def _aim(codes, states, steps, bends, middle, aims, weight, flips, errors, along):
    """Move codes of one vector, the one that gains most first; returns whether any moved."""
    dim, count = len(codes), len(aims)
    along[:] = 0.0
    for c in range(dim):
        errors[c] = _level(codes[c] - (middle[c] + 0.5), bends[c]) * steps[c] - states[c]
        for a in range(count):
            along[a] += errors[c] * aims[a, c]
    moved = False
    for _ in range(flips):
        best, channel, direction, by = 0.0, -1, 0, 0.0
        for c in range(dim):
            x = codes[c] - (middle[c] + 0.5)
            here = _level(x, bends[c])
            pull = errors[c]
            for a in range(count):
                pull += aims[a, c] * along[a]
            # Only a step against the pull can gain.
            d = -1 if pull > 0 else 1
            if abs(x + d) > middle[c] + 0.5:
                continue
            move = (_level(x + d, bends[c]) - here) * steps[c]
            gain = -(2 * move * pull + move * move * weight[c])
            if gain > best:
                best, channel, direction, by = gain, c, d, move
        if channel < 0:
            break
        codes[channel] = np.uint8(np.int32(codes[channel]) + direction)
        errors[channel] += by
        for a in range(count):
            along[a] += by * aims[a, channel]
        moved = True
    return moved


@numba.njit(cache=True)
@no_type_check
def _aim_some(places, sizes, first, last, flips):
    """Vectors `first` to `last`; addresses, and what stands there: states, codes, scales, aims, and a `_Plan`."""
    states_at, codes_at, scale_at, aims_at, channels_at, planes_at, scales_at = places
    dim, width, groups, planes_count, tokens, count = sizes
    states, scale = memory(states_at, np.float64), memory(scale_at, np.uint8)
    channels = numba.carray(pointer(channels_at), (3, dim), np.float64)
    planes = numba.carray(pointer(planes_at), (planes_count, 5), np.int64)
    scales = numba.carray(pointer(scales_at), (256,), np.float64)
    loose, steps, errors = np.empty(dim, np.uint8), np.empty(dim), np.empty(dim)
    along, weight, size = np.empty(count), np.empty(dim), dim // groups
    for vector in range(first, last):
        head = vector // tokens
        aims = numba.carray(pointer(aims_at + 8 * head * count * dim), (count, dim), np.float64)
        for c in range(dim):
            weight[c] = 1.0
            for a in range(count):
                weight[c] += aims[a, c] * aims[a, c]
            byte = scale[vector * groups + c // size]
            steps[c] = scales[byte]
        packed = memory(codes_at + vector * width, np.uint8)
        _unpack(packed, planes, loose)
        own = states[vector * dim : vector * dim + dim]
        if _aim(loose, own, steps, channels[0], channels[2], aims, weight, flips, errors, along):
            _pack(loose, planes, packed)


@numba.njit(cache=True, parallel=True)
@no_type_check
def _aim_in_parallel(places, sizes, first, last, flips):
    for piece in numba.prange((last - first + 63) // 64):
        begin = first + 64 * piece
        _aim_some(places, sizes, begin, min(begin + 64, last), flips)


def aim_grid(
    states: Float[Tensor, "batch kv_heads tokens dim"],
    codes: UInt8[Tensor, "batch kv_heads tokens width"],
    scale: UInt8[Tensor, "batch kv_heads tokens groups"],
    grid: Grid,
    aims: Float[Tensor, "batch kv_heads aims dim"],
    flips: int,
) -> None:
    """Move codes in place.

    Args:
        states: In float64.
        codes: Of the states, contiguous; written.
        scale: Theirs, contiguous.
        grid: How codes lie.
        aims: Directions u along which an error e costs `(u . e)^2` beside its `|e|^2`, in float64.
        flips: Codes of a vector that move, at most.
    """
    assert states.dtype == aims.dtype == torch.float64
    states, aims, plan = states.contiguous(), aims.contiguous(), _plan(grid)
    arguments = (
        (states.data_ptr(), codes.data_ptr(), scale.data_ptr(), aims.data_ptr(), *plan.places),
        (grid.dim, grid.width, grid.groups, len(plan.planes), states.shape[2], aims.shape[2]),
        0, states.numel() // grid.dim, flips,
    )  # fmt: skip
    launch(_aim_some, _aim_in_parallel, arguments, states.numel())


def encode_aimed(
    states: Float[Tensor, "batch kv_heads tokens dim"],
    grid: Grid,
    aims: Float[Tensor, "batch kv_heads aims dim"],
    trials: int,
    flips: int,
) -> tuple[UInt8[Tensor, "batch kv_heads tokens width"], UInt8[Tensor, "batch kv_heads tokens groups"]]:
    """Codes and scales, bit for bit what the codec's own tensors would hold; see `encode_trellis`, or `numba_encode.encode_grid` and `aim_grid`."""
    if grid.trellis:
        return encode_trellis(states, grid, aims)
    codes, scale = encode_grid(states, grid, trials)
    if bool(aims.any()):
        aim_grid(states, codes, scale, grid, aims, flips)
    return codes, scale
