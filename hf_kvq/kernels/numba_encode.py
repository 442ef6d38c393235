"""Codes compiled by numba: int8 of a few tokens, written where they stay, and low bits of any number of tokens.

A low-bit code is the nearest level. Levels are x (1 + b x^2) at half integers x, and so the bound between two of them is a cubic at an integer: a rough inverse of
the cubic names a bound, exact arithmetic says on which side of it a number lies. That costs the same for all bits, and needs no table.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.kernels.numba_threads import launch
from hf_kvq.packing import SCALE_ONE, SCALE_STEPS, Grid, scale_of

__all__ = ["encode_grid", "encode_int8"]

_SMALLEST = np.float32(torch.finfo(torch.bfloat16).tiny)


@numba.njit(cache=True)
@no_type_check
def _encode_int8(states_at, steps, is_bits, codes_at, code_steps, scales_at, scale_steps, sizes):
    batch, kv_heads, tokens, dim = sizes
    codes, scales = memory(codes_at, np.int8), memory(scales_at, np.int16)
    row_of = np.empty(dim, np.float32)
    bits = row_of.view(np.int32)
    one = np.empty(1, np.float32)
    one_bits = one.view(np.int32)
    for row in range(batch):
        for head in range(kv_heads):
            for token in range(tokens):
                start = row * steps[0] + head * steps[1] + token * steps[2]
                if is_bits:
                    halves = memory(states_at, np.int16)
                    for c in range(dim):
                        bits[c] = np.int32(halves[start + c]) << 16
                else:
                    floats = memory(states_at, np.float32)
                    for c in range(dim):
                        row_of[c] = floats[start + c]
                largest = np.float32(0)
                for c in range(dim):
                    largest = max(largest, abs(row_of[c]))
                # To the nearest bfloat16, ties to even, as torch casts.
                one[0] = max(largest / np.float32(127), _SMALLEST)
                rounded = (one_bits[0] + 0x7FFF + ((one_bits[0] >> 16) & 1)) >> 16
                scales[row * scale_steps[0] + head * scale_steps[1] + token * scale_steps[2]] = np.int16(rounded)
                one_bits[0] = np.int32(rounded) << 16
                scale = one[0]
                target = row * code_steps[0] + head * code_steps[1] + token * code_steps[2]
                for c in range(dim):
                    code = np.rint(row_of[c] / scale)
                    codes[target + c] = np.int8(min(max(code, np.float32(-127)), np.float32(127)))


def encode_int8(states: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write the codes and the scale of a few tokens where they stay, bit for bit what the codec's own tensors would hold.

    Args:
        states: `[batch, kv_heads, tokens, head_dim]`, float32 or bfloat16, channels next to each other.
        codes: Likewise, int8; written.
        scale: `[batch, kv_heads, tokens, 1]`, bfloat16; written.
    """
    _encode_int8(
        states.data_ptr(), states.stride(), states.dtype == torch.bfloat16, codes.data_ptr(), codes.stride(),
        scale.data_ptr(), scale.stride(), tuple(states.shape),
    )  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """A grid as compiled code reads it.

    Attributes:
        channels: Of each channel its bend, its largest level, and the code of the level below zero; on a trellis its bend, the middle of its levels, and the scale
            that fits a number of size 1.
        planes: Of each plane its first channel, its bytes, its bits, those that lie below it in a code, and its first byte.
        scales: What the bytes of scales stand for.
    """

    channels: np.ndarray
    planes: np.ndarray
    scales: np.ndarray

    @functools.cached_property
    def places(self) -> tuple[int, int, int]:
        return self.channels.ctypes.data, self.planes.ctypes.data, self.scales.ctypes.data


@functools.cache
def _plan(grid: Grid) -> _Plan:
    channels = []
    for bits in grid.bits:
        channel = (grid.curve(bits), grid.levels(bits)[-1].item(), 2 ** (bits - 1) - 1)
        if grid.trellis:
            channel = (grid.curve(bits), (2 ** (bits + 1) - 1) / 2, grid.best_scale(bits))
        channels += [channel] * grid.tier
    planes = [(plane.first, plane.run, plane.bits, plane.below, plane.start) for plane in grid.planes]
    scales = scale_of(torch.arange(256, dtype=torch.uint8), torch.float64).numpy()
    return _Plan(np.array(channels).T.copy(), np.array(planes, dtype=np.int64), scales)


@numba.njit(fastmath={"contract"}, cache=True)
@no_type_check
def _near(y, bend):
    """Roughly the x of x (1 + bend x^2) = y, for all of `CURVES` and up to their largest level.

    As a multiple of y, a polynomial of bend y^2; it is off by .29 at most, at 8 bits, and half of the way to the next bound would do.
    """
    c = bend * (y * y)
    p = 7.430322e-04
    p = p * c - 1.2305419e-02
    p = p * c + 8.1369886e-02
    p = p * c - 2.7624592e-01
    p = p * c + 5.2422916e-01
    p = p * c - 6.1447221e-01
    p = p * c + 9.7713990e-01
    return y * p


@numba.njit(fastmath={"reassoc"}, cache=True)
@no_type_check
def _sum(numbers):
    total = 0.0
    for number in numbers:
        total += number
    return total


# "nnan" lets the maximum become vectors. A NaN makes it any number, and all errors NaN.
@numba.njit(fastmath={"reassoc", "nnan"}, cache=True)
@no_type_check
def _reach(states, top):
    """The scale at which the largest levels are just enough, and the least of these levels."""
    reach, least = 0.0, math.inf
    for c in range(len(states)):
        reach = max(reach, abs(states[c]) / top[c])
        least = min(least, top[c])
    return reach, least


# No fast arithmetic here: these numbers are rounded as the codec's own tensors round them.
@numba.njit(cache=True)
@no_type_check
def _find(states, scale, bends, top, found, squares):
    """Nearest levels, counted from the one below zero, and squared errors."""
    for c in range(len(states)):
        bend = bends[c]
        y = min(max(states[c] / scale, -top[c]), top[c])
        bound = np.rint(_near(y, bend))
        x, above = bound - 0.5, bound + 0.5
        x, above = x * (1 + bend * (x * x)), above * (1 + bend * (above * above))
        beyond = y > (above + x) / 2
        found[c] = bound + 1 if beyond else bound
        error = states[c] - (above if beyond else x) * scale
        squares[c] = error * error


@numba.njit(cache=True)
@no_type_check
def _encode_group(states, bends, top, middle, scales, trials, found, squares, codes):
    """Codes of one group, one in a byte; returns the byte of its scale. Both are 0 where an error is no number at all scales."""
    reach, least = _reach(states, top)
    best, byte, kept, which, largest = math.inf, 0, -1, 0, 0
    if 0 < reach < math.inf:
        largest = int(min(max(math.ceil(math.log2(reach) * SCALE_STEPS) + SCALE_ONE, 1), 255))
    for trial in range(trials):
        here = max(largest - trial, min(largest, 1))
        scale = scales[here] if here else 1.0
        if trial:
            # The largest number alone loses so much, a little more in truth, at this scale and more at all that follow.
            lost = (reach - 1.000001 * scale) * (0.999999 * least)
            if lost > 0 and lost * lost >= best:
                break
        _find(states, scale, bends, top, found[which], squares)
        error = _sum(squares)
        if error < best:
            best, byte, kept, which = error, here, which, 1 - which
        if here <= 1:
            break
    if kept < 0:
        codes[:] = 0
    else:
        for c in range(len(states)):
            codes[c] = np.uint8(np.int32(found[kept, c] + middle[c]))
    return np.uint8(byte)


@numba.njit(cache=True)
@no_type_check
def _pack(codes, planes, packed):
    """As `Grid.pack`."""
    for p in range(len(planes)):
        first, run, bits, below, start = planes[p]
        down, mask = np.uint8(below), np.uint8(2**bits - 1)
        target = packed[start : start + run]
        for i in range(8 // bits):
            source, up = codes[first + i * run : first + i * run + run], np.uint8(i * bits)
            if i == 0:
                for j in range(run):
                    target[j] = (source[j] >> down) & mask
            else:
                for j in range(run):
                    target[j] |= np.uint8(((source[j] >> down) & mask) << up)


@numba.njit(cache=True)
@no_type_check
def _encode_some(places, sizes, first, last, trials):
    """Codes of vectors `first` to `last`. Addresses, and what stands there: states, codes and scales `[vectors, ...]`, and a `_Plan`."""
    states_at, codes_at, scale_at, channels_at, planes_at, scales_at = places
    dim, width, groups, planes_count = sizes
    states, scale = memory(states_at, np.float64), memory(scale_at, np.uint8)
    channels = numba.carray(pointer(channels_at), (3, dim), np.float64)
    planes = numba.carray(pointer(planes_at), (planes_count, 5), np.int64)
    scales = numba.carray(pointer(scales_at), (256,), np.float64)
    size = dim // groups
    found, squares, loose = np.empty((2, size)), np.empty(size), np.empty(dim, np.uint8)
    for vector in range(first, last):
        for group in range(groups):
            start, end = group * size, (group + 1) * size
            scale[vector * groups + group] = _encode_group(
                states[vector * dim + start : vector * dim + end], channels[0, start:end], channels[1, start:end],
                channels[2, start:end], scales, trials, found, squares, loose[start:end],
            )  # fmt: skip
        _pack(loose, planes, memory(codes_at + vector * width, np.uint8))


@numba.njit(cache=True, parallel=True)
@no_type_check
def _encode_in_parallel(places, sizes, first, last, trials):
    for piece in numba.prange((last - first + 63) // 64):
        begin = first + 64 * piece
        _encode_some(places, sizes, begin, min(begin + 64, last), trials)


def encode_grid(
    states: Float[Tensor, "batch kv_heads tokens dim"], grid: Grid, trials: int
) -> tuple[UInt8[Tensor, "batch kv_heads tokens width"], UInt8[Tensor, "batch kv_heads tokens groups"]]:
    """Codes and scales, bit for bit what the codec's own tensors would hold.

    Args:
        states: In float64.
        grid: How codes are to lie.
        trials: Scales that are tried for each group, from the one that reaches its largest element on downwards.
    """
    assert states.dtype == torch.float64
    assert states.shape[3] == grid.dim
    states = states.contiguous()
    codes = torch.empty(*states.shape[:3], grid.width, dtype=torch.uint8)
    scale = torch.empty(*states.shape[:3], grid.groups, dtype=torch.uint8)
    plan = _plan(grid)
    arguments = (
        (states.data_ptr(), codes.data_ptr(), scale.data_ptr(), *plan.places),
        (grid.dim, grid.width, grid.groups, len(plan.planes)), 0, states.numel() // grid.dim, trials,
    )  # fmt: skip
    launch(_encode_some, _encode_in_parallel, arguments, states.numel())
    return codes, scale
