"""Low-bit codes back to states on a CPU, compiled by numba: out of their levels, out of their basis, into the model's dtype, in one walk over the codes.

What `Grid.decode_into` and `PlacedBasis.restore` do in tensors, in a dozen walks over numbers that no longer fit the caches. The mean of the keys is turned to each
block of positions once, and from there on by what all blocks share.
"""

from __future__ import annotations

import functools
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from hf_kvq.basis import BLOCK, block_table, block_waves, hadamard
from hf_kvq.kernels.base import Operand
from hf_kvq.kernels.numba_basis import basis_places, basis_sizes, read_basis
from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.kernels.numba_split import add_weighted
from hf_kvq.kernels.numba_threads import launch
from hf_kvq.kernels.numba_widen import widen_grid, widener
from hf_kvq.rope import Rope

__all__ = ["restore_into"]

_SPLIT = 256
"""Tokens of one piece of work; a multiple of `BLOCK`."""

_SOME = 32
"""Tokens that are widened together."""

_LANES = 16
_WORD = ir.IntType(64)


def restore_into(operand: Operand, out: Tensor) -> bool:
    """Write the states of codes in a basis to `out`, `[batch, kv_heads, tokens, dim]`; False, and nothing written, where this is left to tensors."""
    placed, grid, codes, scale = operand.basis, operand.grid, operand.parts["codes"], operand.parts.get("scale")
    if (
        placed is None
        or grid is None
        or scale is None
        or not isinstance(placed.positions, int)
        or not placed.basis.is_plain
    ):
        return False
    if out.dtype not in (torch.float32, torch.bfloat16) or out.stride(3) != 1:
        return False
    basis, rope = placed.basis, placed.basis.rope
    batch, kv_heads, tokens, dim = out.shape
    size = dim // basis.tiers
    first = placed.positions if rope is not None else 0
    pairs, waves, table = 0, 0, 0
    if rope is not None:
        pairs, waves = len(rope.inv_freq), block_waves(rope, (first + tokens - 1) // BLOCK + 1).data_ptr()
        table = _offsets(rope).data_ptr()
    arguments = (
        (codes.data_ptr(), *codes.stride()[:3]), (scale.data_ptr(), *scale.stride()[:3]), (out.data_ptr(), *out.stride()[:3]),
        basis_places(basis), basis_sizes(basis), (pairs, waves, table, first), widener(grid).address,
        _butterflies(size).address if size & (size - 1) == 0 else 0, _matrix(size).data_ptr(), out.dtype == torch.bfloat16,
        (batch, kv_heads, tokens),
    )  # fmt: skip
    launch(_restore, _restore_in_parallel, arguments, out.numel())
    return True


@functools.lru_cache(maxsize=64)
def _offsets(rope: Rope) -> Tensor:
    """Cosines, then sines, of each position of a block."""
    with torch.inference_mode(False):
        return block_table(rope).T.contiguous()


@functools.cache
def _matrix(size: int) -> Tensor:
    return hadamard(size, torch.float32, torch.device("cpu"))


@functools.cache
def _butterflies(size: int) -> Any:
    """What multiplies runs of so many numbers by Hadamard's matrix, times the root of `size`, in place; compiled for this size alone."""

    @numba.cfunc(types.void(types.int64, types.int64), cache=True)
    @no_type_check
    def mix(numbers, runs):
        _mix(size, numbers, runs)

    return mix


@intrinsic(prefer_literal=True)
@no_type_check
def _mix(typing_context, size, numbers, runs):
    """Sums and differences of numbers 1, 2, 4 and more apart: within a vector by a shuffle of it, and between vectors."""

    def generate(context, builder, signature, arguments):
        count = signature.args[0].literal_value
        lanes = min(_LANES, count)
        kind = ir.VectorType(ir.FloatType(), lanes)
        with cgutils.for_range(builder, arguments[2], intp=_WORD) as loop:
            start = builder.add(arguments[1], builder.mul(loop.index, _WORD(4 * count)))
            places = [
                builder.inttoptr(builder.add(start, _WORD(4 * lanes * i)), kind.as_pointer())
                for i in range(count // lanes)
            ]
            vectors = [builder.load(place, align=4) for place in places]
            apart = 1
            while apart < lanes:
                partner = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [i ^ apart for i in range(lanes)])
                sign = ir.Constant(kind, [-1.0 if i & apart else 1.0 for i in range(lanes)])
                vectors = [
                    builder.fadd(
                        builder.fmul(x, sign, flags=["contract"]), builder.shuffle_vector(x, x, partner), flags=["contract"]
                    )
                    for x in vectors
                ]  # fmt: skip
                apart *= 2
            apart = 1
            while apart < len(vectors):
                mixed = list(vectors)
                for i in range(len(vectors)):
                    if not i & apart:
                        low, high = vectors[i], vectors[i + apart]
                        mixed[i], mixed[i + apart] = builder.fadd(low, high), builder.fsub(low, high)
                vectors = mixed
                apart *= 2
            for place, vector in zip(places, vectors, strict=True):
                builder.store(vector, place, align=4)
        return context.get_dummy_value()

    return types.void(size, types.int64, types.int64), generate


@intrinsic
@no_type_check
def _call_mix(typing_context, address, numbers, runs):
    """Call what `_butterflies` compiled."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 2)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), generate


@numba.njit(cache=True)
@no_type_check
def _turn_back(mix, matrix_at, size, floats, runs, mixed):
    """Runs of `size` numbers times the transposed matrix of `hadamard`, in place."""
    if mix:
        _call_mix(mix, floats.ctypes.data, runs)
        return
    matrix = numba.carray(pointer(matrix_at), (size * size,), np.float32)
    for run in range(runs):
        numbers = floats[run * size : (run + 1) * size]
        mixed[:size] = np.float32(0)
        add_weighted(numbers, matrix, size, size, mixed[:size])
        numbers[:] = mixed[:size]


@numba.njit(fastmath={"contract"}, cache=True)
@no_type_check
def _mean_at(pairs, interleaved, even, odd, waves, line):
    """Add a mean of pairs, turned by the angles that `waves` has cosines and sines of."""
    cos, sin = waves[:pairs], waves[pairs : 2 * pairs]
    if interleaved:
        for p in range(pairs):
            line[2 * p] += even[p] * cos[p] - odd[p] * sin[p]
            line[2 * p + 1] += odd[p] * cos[p] + even[p] * sin[p]
    else:
        low, high = line[:pairs], line[pairs : 2 * pairs]
        for p in range(pairs):
            low[p] += even[p] * cos[p] - odd[p] * sin[p]
        for p in range(pairs):
            high[p] += odd[p] * cos[p] + even[p] * sin[p]


@numba.njit(cache=True)
@no_type_check
def _store(line, is_bits, at, start):
    if is_bits:
        # To the nearest bfloat16, ties to even, as torch casts.
        halves, bits = memory(at, np.int16), line.view(np.int32)
        for c in range(len(line)):
            halves[start + c] = np.int16((bits[c] + 0x7FFF + ((bits[c] >> 16) & 1)) >> 16)
    else:
        floats = memory(at, np.float32)
        for c in range(len(line)):
            floats[start + c] = line[c]


@numba.njit(fastmath={"contract"}, cache=True)
@no_type_check
def _restore_some(
    codes, scale, out, places, sizes, rotary, widens, mix, matrix_at, is_bits, row, head, at, first, count
):
    """States of tokens `first` and on of head number `at`."""
    pairs, waves_at, table_at, position = rotary
    dim, tiers, interleaved = sizes[0], sizes[1], sizes[5]
    size = dim // tiers
    means, gains, order = np.empty(dim), np.empty(dim), np.empty(dim, np.int64)
    read_basis(places, sizes, at, means, gains, order)
    # Butterflies leave the root of the size out.
    factor = 1 / np.sqrt(size) if mix else 1.0
    gain, rest, place_of = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.int64)
    for c in range(dim):
        gain[c] = factor / gains[c]
        rest[c] = means[c] if c >= 2 * pairs else 0.0
        place_of[order[c]] = c
    even, odd = np.empty(pairs, np.float32), np.empty(pairs, np.float32)
    floats, line, mixed = np.empty(_SOME * dim, np.float32), np.empty(dim, np.float32), np.empty(size, np.float32)
    table = numba.carray(pointer(table_at if pairs else matrix_at), (BLOCK if pairs else 0, 2 * pairs), np.float32)
    block = np.int64(-1)
    for begin in range(first, first + count, _SOME):
        some = min(_SOME, first + count - begin)
        widen_grid(
            widens, codes[0] + row * codes[1] + head * codes[2] + begin * codes[3], codes[3],
            scale[0] + row * scale[1] + head * scale[2] + begin * scale[3], scale[3], floats.ctypes.data, some,
        )  # fmt: skip
        _turn_back(mix, matrix_at, size, floats, some * tiers, mixed)
        for t in range(some):
            numbers = floats[t * dim : (t + 1) * dim]
            if tiers == 1:
                for c in range(dim):
                    line[c] = numbers[c] * gain[c] + rest[c]
            else:
                for c in range(dim):
                    line[c] = numbers[place_of[c]] * gain[c] + rest[c]
            if pairs:
                place = position + begin + t
                if place // BLOCK != block:
                    block = place // BLOCK
                    waves = memory(waves_at + 4 * block * 2 * pairs, np.float32)
                    for p in range(pairs):
                        a = means[2 * p if interleaved else p]
                        b = means[2 * p + 1 if interleaved else p + pairs]
                        even[p] = a * waves[p] - b * waves[pairs + p]
                        odd[p] = b * waves[p] + a * waves[pairs + p]
                _mean_at(pairs, interleaved, even, odd, table[place - block * BLOCK], line)
            _store(line, is_bits, out[0], row * out[1] + head * out[2] + (begin + t) * out[3])


@numba.njit(cache=True)
@no_type_check
def _restore(codes, scale, out, places, sizes, rotary, widens, mix, matrix_at, is_bits, counts):
    batch, kv_heads, tokens = counts
    for at in range(batch * kv_heads):
        _restore_some(
            codes, scale, out, places, sizes, rotary, widens, mix, matrix_at, is_bits, at // kv_heads, at % kv_heads, at, 0, tokens
        )  # fmt: skip


@numba.njit(cache=True, parallel=True)
@no_type_check
def _restore_in_parallel(codes, scale, out, places, sizes, rotary, widens, mix, matrix_at, is_bits, counts):
    batch, kv_heads, tokens = counts
    splits = (tokens + _SPLIT - 1) // _SPLIT
    for work in numba.prange(batch * kv_heads * splits):
        at, first = work // splits, work % splits * _SPLIT
        _restore_some(
            codes, scale, out, places, sizes, rotary, widens, mix, matrix_at, is_bits, at // kv_heads, at % kv_heads, at, first,
            min(_SPLIT, tokens - first),
        )  # fmt: skip
