"""Codes on a trellis, compiled by numba: the Viterbi algorithm for one vector at eight scales at once, which fill the lanes of a vector register.

What `hf_kvq.codecs.trellis` does in tensors, bit for bit: costs are float32, added in the same order, and nothing is contracted. A step is spelled out in vectors: its
sixteen states follow each other without a loop, and no load waits for the question whether a store was to the same place.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float, UInt8
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from hf_kvq.kernels.numba_encode import _pack, _plan
from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.kernels.numba_threads import launch
from hf_kvq.packing import MEMORY, OFFSETS, SCALE_ONE, SCALE_STEPS, Grid, quarters

__all__ = ["encode_trellis"]

_STATES, _LANES = 2**MEMORY, len(OFFSETS)
_QUARTERS = quarters()
_QUARTER_OF = np.array(_QUARTERS, dtype=np.int64)
_OFFSETS = np.array(OFFSETS, dtype=np.int64)
_NEVER = np.float32(1e30)
_FLOAT, _INT, _BYTE, _WORD = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT, _LANES)
_SIGN = 0x7FFFFFFF

_INVERSE = (-2.9094815, 6.3332896, -5.5238113, 2.4287965, -1.0856712, 1.0026416)
"""Roughly the x of y = x (1 + b x^2), as y times a polynomial of c / (1 + c) with c = b y^2: off by .19 at most for all of `TRELLIS_CURVES`, where one would do."""


@intrinsic
@no_type_check
def _step(typing_context, number, inverse, scale, bend, middle, aim, cost, sums, forgotten, levels):
    """One channel.

    `number`, its `bend`, the `middle` of its levels and the `aim` are float32; the others are addresses: `inverse` and `scale` `[lanes]`, `cost` and `sums`
    `[states, lanes]`, changed in place; `forgotten` `[states]` bytes, a bit for each lane, and `levels` `[4, lanes]` bytes, written.
    """

    def generate(context, builder, signature, arguments):
        number, inverse, scale, bend, middle, aim, cost, sums, forgotten, levels = arguments

        def at(address, offset, kind):
            return builder.inttoptr(builder.add(address, _WORD(offset)), kind.as_pointer())

        def load(address, row):
            return builder.load(at(address, 4 * _LANES * row, _FLOATS), align=4)

        def store(value, address, row):
            builder.store(value, at(address, 4 * _LANES * row, _FLOATS), align=4)

        def spread(value):
            kind = ir.VectorType(value.type, _LANES)
            one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT(0))
            return builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * _LANES))

        def floats(value):
            return ir.Constant(_FLOATS, [float(np.float32(value))] * _LANES)

        def integers(value):
            return ir.Constant(_INTS, [value] * _LANES)

        def smaller(a, b, compare="<"):
            is_less = builder.icmp_signed if a.type == _INTS else builder.fcmp_ordered
            return builder.select(is_less(compare, a, b), a, b)

        def magnitude(x):
            return builder.bitcast(builder.and_(builder.bitcast(x, _INTS), integers(_SIGN)), _FLOATS)

        bend, middle, scale = spread(bend), spread(middle), load(scale, 0)
        wanted = builder.fmul(spread(number), load(inverse, 0))

        def number_of(level):
            x = builder.fsub(builder.sitofp(level, _FLOATS), middle)
            return builder.fmul(x, builder.fadd(floats(1), builder.fmul(bend, builder.fmul(x, x))))

        # The level below: a guess is enough, since two candidates of each quarter are compared.
        top = builder.fptosi(builder.fadd(middle, middle), _INTS)
        highest = number_of(top)
        y = smaller(smaller(highest, wanted), builder.fneg(highest), ">")
        c = builder.fmul(bend, builder.fmul(y, y))
        share = builder.fdiv(c, builder.fadd(floats(1), c))
        guess = floats(_INVERSE[0])
        for coefficient in _INVERSE[1:]:
            guess = builder.fadd(builder.fmul(guess, share), floats(coefficient))
        guess = builder.fadd(builder.fmul(guess, y), middle)
        below = smaller(builder.fptosi(smaller(guess, floats(0), ">"), _INTS), top)
        squares, parts = [], []
        for quarter in range(4):
            away = builder.and_(builder.sub(below, integers(quarter)), integers(3))
            lower = smaller(builder.sub(below, away), integers(quarter), ">")
            last = builder.add(builder.sub(top, integers(3)), integers(quarter))
            upper = smaller(builder.add(lower, integers(4)), last)
            errors = [builder.fmul(builder.fsub(number_of(level), wanted), scale) for level in (lower, upper)]
            first = builder.fcmp_ordered("<=", magnitude(errors[0]), magnitude(errors[1]))
            error = builder.select(first, *errors)
            level = builder.trunc(builder.select(first, lower, upper), ir.VectorType(_BYTE, _LANES))
            builder.store(level, at(levels, _LANES * quarter, level.type), align=1)
            squares.append(builder.fmul(error, error))
            parts.append(builder.fmul(error, spread(aim)))
        costs, so_far = ([load(address, state) for state in range(_STATES)] for address in (cost, sums))
        for state in range(_STATES):
            windows = state, state + _STATES
            cost_of = [builder.fadd(costs[w >> 1], squares[_QUARTERS[w]]) for w in windows]
            sum_of = [builder.fadd(so_far[w >> 1], parts[_QUARTERS[w]]) for w in windows]
            take = builder.fcmp_ordered("<", cost_of[1], cost_of[0])
            store(builder.select(take, cost_of[1], cost_of[0]), cost, state)
            store(builder.select(take, sum_of[1], sum_of[0]), sums, state)
            builder.store(builder.bitcast(take, ir.IntType(_LANES)), at(forgotten, state, ir.IntType(_LANES)))
        return context.get_dummy_value()

    kinds = (types.float32, types.int64, types.int64, *(types.float32,) * 3, *(types.int64,) * 4)
    return types.void(*kinds), generate


# No fast arithmetic here: these numbers are rounded as the codec's own tensors round them.
@numba.njit(cache=True)
@no_type_check
def _scales(states, channels, groups, table, bytes_, scale, inverse):
    """What is tried for each group, `[groups, lanes]`."""
    size = len(states) // groups
    for group in range(groups):
        total = 0.0
        for c in range(group * size, (group + 1) * size):
            fitted = states[c] * channels[2, c]
            total += fitted * fitted
        fit = math.sqrt(total / size)
        middle = 0
        if fit > 0:
            step = math.ceil(math.log2(fit * 2.0 ** (-1 / 16)) * SCALE_STEPS) + SCALE_ONE
            middle = int(min(max(step, 1.0), 255.0))
        for lane in range(_LANES):
            byte = min(max(middle + _OFFSETS[lane], 1), 255) if fit > 0 else 0
            bytes_[group, lane] = byte
            scale[group, lane] = np.float32(table[byte]) if byte else np.float32(1)
            inverse[group, lane] = np.float32(1) / scale[group, lane]


@numba.njit(cache=True)
@no_type_check
def _trellis_some(places, sizes, first, last):
    """Codes of vectors `first` to `last`. Addresses, and what stands there: states, codes and scales `[vectors, ...]`, aims `[heads, count, dim]`, and a `_Plan`."""
    states_at, codes_at, scale_at, aims_at, channels_at, planes_at, scales_at = places
    dim, width, groups, planes_count, tokens, count = sizes
    states, scale = memory(states_at, np.float64), memory(scale_at, np.uint8)
    channels = numba.carray(pointer(channels_at), (3, dim), np.float64)
    planes = numba.carray(pointer(planes_at), (planes_count, 5), np.int64)
    table = numba.carray(pointer(scales_at), (256,), np.float64)
    cost, sums = np.empty((_STATES, _LANES), np.float32), np.empty((_STATES, _LANES), np.float32)
    forgotten, levels = np.empty((dim, _STATES), np.uint8), np.empty((dim, 4, _LANES), np.uint8)
    bytes_ = np.empty((groups, _LANES), np.int64)
    steps, inverse = np.empty((groups, _LANES), np.float32), np.empty((groups, _LANES), np.float32)
    loose, path, aim = np.empty(dim, np.uint8), np.empty(dim, np.uint8), np.zeros(dim, np.float32)
    size = dim // groups
    for vector in range(first, last):
        own = states[vector * dim : vector * dim + dim]
        _scales(own, channels, groups, table, bytes_, steps, inverse)
        if count:
            aims = numba.carray(pointer(aims_at + 8 * (vector // tokens) * count * dim), (count, dim), np.float64)
            for c in range(dim):
                aim[c] = np.float32(aims[0, c])
        cost[:] = _NEVER
        cost[0] = np.float32(0)
        sums[:] = np.float32(0)
        for c in range(dim):
            group = c // size
            _step(
                np.float32(own[c]), inverse.ctypes.data + 4 * _LANES * group, steps.ctypes.data + 4 * _LANES * group,
                np.float32(channels[0, c]), np.float32(channels[1, c]), aim[c], cost.ctypes.data, sums.ctypes.data,
                forgotten.ctypes.data + _STATES * c, levels.ctypes.data + 4 * _LANES * c,
            )  # fmt: skip
        best, trial, state = np.float32(math.inf), 0, 0
        for lane in range(_LANES):
            for end in range(_STATES):
                total = cost[end, lane] + sums[end, lane] * sums[end, lane]
                if total < best:
                    best, trial, state = total, lane, end
        for c in range(dim - 1, -1, -1):
            path[c] = state & 1
            state = (state + _STATES * ((forgotten[c, state] >> trial) & 1)) >> 1
        window = 0
        for c in range(dim):
            window = ((window << 1) | path[c]) & (2 * _STATES - 1)
            level = levels[c, _QUARTER_OF[window], trial]
            loose[c] = ((level >> 2) << 1) | path[c]
        for group in range(groups):
            scale[vector * groups + group] = bytes_[group, trial]
        _pack(loose, planes, memory(codes_at + vector * width, np.uint8))


@numba.njit(cache=True, parallel=True)
@no_type_check
def _trellis_in_parallel(places, sizes, first, last):
    for piece in numba.prange((last - first + 15) // 16):
        begin = first + 16 * piece
        _trellis_some(places, sizes, begin, min(begin + 16, last))


def encode_trellis(
    states: Float[Tensor, "batch kv_heads tokens dim"],
    grid: Grid,
    aims: Float[Tensor, "batch kv_heads aims dim"],
) -> tuple[UInt8[Tensor, "batch kv_heads tokens width"], UInt8[Tensor, "batch kv_heads tokens groups"]]:
    """Codes and scales, bit for bit what the codec's own tensors would hold.

    Args:
        states: In float64.
        grid: How codes are to lie; on a trellis.
        aims: At most one direction u along which an error e costs `(u . e)^2` beside its `|e|^2`, in float64.
    """
    assert states.dtype == aims.dtype == torch.float64
    assert aims.shape[2] <= 1
    states, aims, plan = states.contiguous(), aims.contiguous(), _plan(grid)
    codes = torch.empty(*states.shape[:3], grid.width, dtype=torch.uint8)
    scale = torch.empty(*states.shape[:3], grid.groups, dtype=torch.uint8)
    arguments = (
        (states.data_ptr(), codes.data_ptr(), scale.data_ptr(), aims.data_ptr(), *plan.places),
        (grid.dim, grid.width, grid.groups, len(plan.planes), max(states.shape[2], 1), aims.shape[2]),
        0, states.numel() // grid.dim,
    )  # fmt: skip
    launch(_trellis_some, _trellis_in_parallel, arguments, states.numel())
    return codes, scale
