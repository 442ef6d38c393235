"""One query per row over codes on a CPU, compiled by numba: codes are read once and widened in the first-level cache.

Work is split along the tokens (Flash-Decoding) and over heads. Inside a split, a few tokens at a time are widened into a scratch of
float32 that all query heads of the group read. What widens a grid is compiled for it alone. The exponential is a polynomial that the
compiler turns into vectors; numpy's is scalar. Compiled at the first call, and kept on disk beside the module (or in numba's cache directory).

Only `hf_kvq.kernels` imports this module, and only where numba is installed.
"""

from __future__ import annotations

import ast
import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hf_kvq.kernels.base import Bias, Kernel, Logits, Operand, Partial, Query, Scoring
from hf_kvq.kernels.numba_memory import memory, pointer, prefetch
from hf_kvq.kernels.visibility import Visibility
from hf_kvq.packing import HIGH_PATH, LOW_PATH, Grid, scale_of

__all__ = ["NumbaDecodeKernel", "in_threads"]

SPLIT = 256
"""Tokens of one piece of work."""

PARALLEL_FROM = 2**17
"""Codes of the keys below which starting threads costs more than they save."""

_LAYOUTS = {"int8": 0, "e4m3": 1, "int4": 2, "grid": 3}
_LAUNCH = threading.Lock()
_NOTHING = np.empty((0, 0), dtype=np.uint8)


class NumbaDecodeKernel(Kernel):
    """See the module."""

    name = "numba"

    def supports(self, query: Query, keys: Operand, values: Operand, visibility: Visibility) -> bool:
        return (
            query.shape[3] == 1
            and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and keys.layout in _LAYOUTS
            and keys.basis is None
            and values.basis is None
            and values.layout in _LAYOUTS
            and visibility.for_one_query(0, 1)[0]
        )

    def attend(
        self,
        query: Query,
        keys: Operand,
        values: Operand,
        first_column: int,
        visibility: Visibility,
        scoring: Scoring,
        logits: Logits | None = None,
        bias: Bias | None = None,
    ) -> Partial:
        batch, kv_heads, groups, _, dim = query.shape
        rows = query.to(torch.float32).contiguous()
        _, visible = visibility.for_one_query(first_column, keys.tokens)
        hidden = _NOTHING if visible is None else visible.expand(batch, -1).contiguous().view(torch.uint8).numpy()
        output = torch.empty(batch, kv_heads, groups, 1, values.dim)
        lse = torch.empty(batch, kv_heads, groups, 1)
        threads = torch.get_num_threads() if batch * kv_heads * keys.tokens * dim >= PARALLEL_FROM else 1
        arguments = (
            rows.data_ptr(), _place(keys), _place(values), output.data_ptr(), lse.data_ptr(), hidden,
            (batch, kv_heads, groups, keys.tokens, dim, values.dim), scoring.scaling, scoring.softcap or 0.0,
            0 if logits is None else logits.data_ptr(), 0 if bias is None else bias.data_ptr(),
        )  # fmt: skip
        if threads == 1:
            _attend(*arguments)
        else:
            with in_threads(threads):
                _attend_in_parallel(*arguments)
        return Partial(output, lse)


@contextmanager
def in_threads(threads: int) -> Iterator[None]:
    """Let numba use so many threads. One launch at a time: not every threading layer of numba bears two."""
    with _LAUNCH:
        before = numba.get_num_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        try:
            yield
        finally:
            numba.set_num_threads(before)


def _place(operand: Operand) -> tuple[int, ...]:
    """Where codes and scale are, with their strides over rows, heads and tokens; their layout; whether the scale is bfloat16; what widens a grid."""
    codes, scale, grid = operand.parts["codes"], operand.parts["scale"], operand.grid
    steps = scale.stride()
    by_head = steps[1] if scale.shape[1] > 1 else 0
    return (
        codes.data_ptr(), *codes.stride()[:3], scale.data_ptr(), steps[0], by_head, steps[2], _LAYOUTS[operand.layout],
        int(scale.dtype == torch.bfloat16), 0 if grid is None else _widener(grid).address,
    )  # fmt: skip


# Reassociation lets sums become vectors. Infinities and NaN keep their meaning: no "ninf", no "nnan".
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_WIDENED = 32  # tokens at a time: a scratch of 8 KiB at 64 channels, 32 KiB at 256
_AHEAD = 4096  # bytes: the processor's own prefetching ends with the page
_HIDDEN = np.float32(-1e30)
_LOG2_E = np.float32(math.log2(math.e))
_LN_2 = np.float32(math.log(2.0))
_TO_E4M3 = np.float32(2.0**120)
_E4M3_BITS = np.int32(-(2**31) + 0x7F00000)
_LANES = 16
_WORD = ir.IntType(64)


@functools.cache
def _widener(grid: Grid) -> Any:
    """What widens tokens of this grid, compiled for it alone, so that where a channel's bits lie is a constant.

    Planes of small tiers run over two or four bytes: a loop over their channels would never fill a vector.
    """
    # As text, since only text and numbers are known when code is generated. Being part of the function's key on disk, a change of it compiles anew.
    tiers = [
        (grid.curve(bits), [(p.start, p.run, p.bits) for p in grid.planes[grid.trellis :] if p.first == tier * grid.tier])
        for tier, bits in enumerate(grid.bits)
    ]  # fmt: skip
    description = repr((grid.dim, grid.group_size, tiers, (LOW_PATH, HIGH_PATH) if grid.trellis else ()))
    table = scale_of(torch.arange(256, dtype=torch.uint8), torch.float32).numpy()

    @numba.cfunc(types.void(*(types.int64,) * 6), cache=True)
    @no_type_check
    def widen(codes, step, scales, scale_step, out, count):
        _widen_tokens(description, codes, step, scales, scale_step, table.ctypes.data, out, count)

    return widen


@intrinsic
@no_type_check
def _call(typing_context, address, codes, step, scales, scale_step, out, count):
    """Call what `_widener` compiled."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), generate


@intrinsic(prefer_literal=True)
@no_type_check
def _widen_tokens(typing_context, description, codes, step, scales, scale_step, table, out, count):
    """Write the numbers of `count` tokens to `out`; it, the codes, their scales and the table of scales are addresses."""

    def generate(context, builder, signature, arguments):
        _, codes, step, scales, scale_step, table, out, count = arguments
        dim, group_size, tiers, path = ast.literal_eval(description.literal_value)
        with cgutils.for_range(builder, count, intp=_WORD) as loop:
            token = _Token(
                builder,
                codes=builder.add(codes, builder.mul(loop.index, step)),
                scales=builder.add(scales, builder.mul(loop.index, scale_step)),
                table=table,
                out=builder.add(out, builder.mul(loop.index, _WORD(4 * dim))),
            )
            quarters = token.quarters(dim, path)
            channels = dim // len(tiers)
            for tier, (bend, planes) in enumerate(tiers):
                token.widen(
                    range(tier * channels, (tier + 1) * channels), planes, quarters, bend, group_size
                )  # fmt: skip
        return context.get_dummy_value()

    return types.void(description, *(types.int64,) * 7), generate


@no_type_check
class _Token:
    """Generates the code that widens one token, vector by vector."""

    def __init__(self, builder, codes, scales, table, out):
        self.builder, self.codes, self.scales, self.table, self.out = builder, codes, scales, table, out
        # Stores keep the compiler from seeing that two loads are the same.
        self.bytes_of, self.scale_of = functools.cache(self.bytes_of), functools.cache(self.scale_of)

    def quarters(self, dim, path):
        """The bits of all channels' quarters as vectors of bytes, the lower ones first; none without a path."""
        if not path:
            return ()
        run = dim // 8
        builder, whole, kind = self.builder, ir.IntType(dim), ir.VectorType(ir.IntType(8), run)
        bits = builder.load(self.at(self.codes, 0, whole), align=1)

        words = [bits]
        for _ in range(max(max(taps) for taps in path)):
            # A channel back is a byte back, and from the first byte to the last one's next lower bit.
            around = builder.shl(builder.lshr(words[-1], whole(dim - 8)), whole(1))
            around = builder.and_(around, whole(0xFE))
            before = builder.shl(words[-1], whole(8)) if run > 1 else whole(0)
            words.append(builder.or_(before, around))
        parities = [functools.reduce(builder.xor, [words[back] for back in taps]) for taps in path]
        return tuple(builder.bitcast(parity, kind) for parity in parities)

    def widen(self, channels, planes, quarters, bend, group_size):
        """A tier: where its planes start, their bytes, and their bits."""
        builder = self.builder
        least, middle = min([run for _, run, _ in planes], default=_LANES), self.middle(planes, quarters)
        # Vectors that share bytes follow each other: few bytes are held at a time.
        for first in sorted(range(0, len(channels), _LANES), key=lambda first: first % least):
            places = range(first, min(first + _LANES, len(channels)))
            real = ir.VectorType(ir.FloatType(), len(places))
            code = self.code_of(places, [channels[c] for c in places], planes, quarters)
            code = builder.sitofp(code, real)
            x = builder.fsub(code, ir.Constant(real, [middle] * len(places)))
            scale = self.scale_of(tuple(channels[c] // group_size for c in places))
            bent = builder.fmul(scale, ir.Constant(real, [bend] * len(places)))
            slope = builder.fmul(builder.fmul(x, x), bent, flags=["contract"])
            slope = builder.fadd(slope, scale, flags=["contract"])
            builder.store(builder.fmul(x, slope), self.at(self.out, 4 * channels[first], real), align=4)

    def middle(self, planes, quarters):
        """The middle of the levels."""
        return (2 ** (sum(bits for _, _, bits in planes) + len(quarters)) - 1) / 2

    def code_of(self, places, channels, planes, quarters):
        """The levels of some places of a tier, which are these channels of all."""
        builder, code, up = self.builder, None, 0
        parts = [(self.shuffled(bits, channels), channels, bits.type.count, 1) for bits in quarters]
        parts += [(self.bytes_of(start, run, places), places, run, bits) for start, run, bits in planes]
        for part, at, run, bits in parts:
            part = builder.lshr(part, _integers(bits * (c // run) for c in at))
            part = builder.and_(part, _integers([2**bits - 1] * len(at)))
            part = builder.shl(part, _integers([up] * len(at)))
            code = part if code is None else builder.or_(code, part)
            up += bits
        return code

    def shuffled(self, part, places):
        """Bytes `c % run` of a plane that is held as a whole, as integers."""
        part = self.builder.shuffle_vector(part, part, _integers(c % part.type.count for c in places))
        return self.builder.zext(part, ir.VectorType(ir.IntType(32), len(places)))

    def bytes_of(self, start, run, places):
        """Bytes `c % run` of a plane as integers."""
        builder, lanes, first = self.builder, len(places), places[0] % run
        if first + lanes <= run:
            part = self.load(start + first, lanes)
        elif run <= lanes:
            part = self.load(start, run)
            part = builder.shuffle_vector(part, part, _integers(c % run for c in places))
        else:
            # Around the end of the run; nothing beyond it is read.
            parts = self.load(start + run - lanes, lanes), self.load(start, lanes)
            split = places[0] + run - first
            part = builder.shuffle_vector(*parts, _integers(c - split + lanes for c in places))
        return builder.zext(part, ir.VectorType(ir.IntType(32), lanes))

    def load(self, byte, count):
        return self.builder.load(self.at(self.codes, byte, ir.VectorType(ir.IntType(8), count)), align=1)

    def scale_of(self, groups):
        """The scales of these groups."""
        builder, lanes, scales = self.builder, len(groups), None
        undefined = ir.Constant(ir.VectorType(ir.FloatType(), lanes), ir.Undefined)
        for group in sorted(set(groups)):
            code = builder.zext(builder.load(self.at(self.scales, group, ir.IntType(8))), _WORD)
            scale = builder.load(self.at(builder.add(self.table, builder.mul(code, _WORD(4))), 0, ir.FloatType()))
            scale = builder.insert_element(undefined, scale, _WORD(0))
            scale = builder.shuffle_vector(scale, scale, _integers([0] * lanes))
            both = _integers(lanes * (groups[i] == group) + i for i in range(lanes))
            scales = scale if scales is None else builder.shuffle_vector(scales, scale, both)
        return scales

    def at(self, address, offset, kind):
        return self.builder.inttoptr(self.builder.add(address, _WORD(offset)), kind.as_pointer())


@no_type_check
def _integers(values):
    values = list(values)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), values)


@numba.njit(cache=True)
@no_type_check
def _ask_for(codes, start, length):
    """Prefetch what comes a little later than these bytes."""
    for byte in range(0, length, 64):
        prefetch(codes, start + byte + _AHEAD)


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _widen(place, row, head, first, count, dim, floats):
    """Codes of tokens `first` and on as float32, one token after the other, in `floats`.

    Those of e4m3 come out as 2^-120 times theirs, those of a grid with their scales.
    """
    codes = memory(place[0], np.int8)
    start = row * place[1] + head * place[2] + first * place[3]
    if place[8] == 3:
        _ask_for(codes, start, count * place[3])
        scale = place[4] + row * place[5] + head * place[6] + first * place[7]
        _call(place[10], place[0] + start, place[3], scale, place[7], floats.ctypes.data, count)
        return
    width = dim // 2 if place[8] == 2 else dim
    if place[8] == 2:
        for token in range(count):
            code = codes[start + token * place[3] : start + token * place[3] + width]
            lower = floats[token * dim : token * dim + width]
            upper = floats[token * dim + width : token * dim + dim]
            for c in range(width):
                packed = np.int32(code[c])
                lower[c] = np.float32((packed & 15) - 8)
                upper[c] = np.float32(((packed >> 4) & 15) - 8)
        return
    _ask_for(codes, start, count * place[3])
    # Tokens that follow each other without a gap, as a store holds them, are one long run.
    runs = 1 if place[3] == dim else count
    length = count * dim // runs
    bits = floats.view(np.int32)
    for run in range(runs):
        code = codes[start + run * place[3] : start + run * place[3] + length]
        if place[8] == 0:
            wide = floats[run * length : run * length + length]
            for c in range(length):
                wide[c] = np.float32(code[c])
        else:
            # The bits move to where float32 has them; subnormal codes come out right as well.
            wide_bits = bits[run * length : run * length + length]
            for c in range(length):
                wide_bits[c] = (np.int32(code[c]) << 20) & _E4M3_BITS


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _read_scales(place, row, head, first, count, factor, out):
    """Scales of tokens `first` and on times `factor`, and what mends the widened e4m3 codes; `factor` alone for a grid."""
    if place[8] == 3:
        out[:] = factor
        return
    start = row * place[5] + head * place[6] + first * place[7]
    if place[9]:
        scales = memory(place[4], np.int16)
        bits = out.view(np.int32)
        for token in range(count):
            bits[token] = np.int32(scales[start + token * place[7]]) << 16
    else:
        floats = memory(place[4], np.float32)
        for token in range(count):
            out[token] = floats[start + token * place[7]]
    if place[8] == 1:
        # In two steps: the scale times both at once could go beyond float32.
        for token in range(count):
            out[token] = out[token] * _TO_E4M3
    for token in range(count):
        out[token] = out[token] * factor


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _dots(query, floats, count, dim, out):
    """Dot products of one query with `count` widened tokens, four at a time."""
    for token in range(0, count - 3, 4):
        a = floats[token * dim : token * dim + dim]
        b = floats[token * dim + dim : token * dim + 2 * dim]
        c = floats[token * dim + 2 * dim : token * dim + 3 * dim]
        d = floats[token * dim + 3 * dim : token * dim + 4 * dim]
        sum_a = np.float32(0)
        sum_b = np.float32(0)
        sum_c = np.float32(0)
        sum_d = np.float32(0)
        for i in range(dim):
            sum_a += query[i] * a[i]
            sum_b += query[i] * b[i]
            sum_c += query[i] * c[i]
            sum_d += query[i] * d[i]
        out[token] = sum_a
        out[token + 1] = sum_b
        out[token + 2] = sum_c
        out[token + 3] = sum_d
    for token in range(count - count % 4, count):
        a = floats[token * dim : token * dim + dim]
        sum_a = np.float32(0)
        for i in range(dim):
            sum_a += query[i] * a[i]
        out[token] = sum_a


@intrinsic
@no_type_check
def _add_eight(typing_context, weights, states, stop, dim, out):
    """`out[c] += sum over k < 8 of weights[k] * states[k * dim + c]` for c < stop, a multiple of eight; all but `stop` and `dim` are addresses.

    Spelled out in vectors: the compiler would first ask, every eight tokens, whether `out` overlaps one of the states.
    """

    def generate(context, builder, signature, arguments):
        real, vector = ir.FloatType(), ir.VectorType(ir.FloatType(), 8)
        weights, states, stop, dim, out = arguments
        weights, states, out = (builder.inttoptr(x, real.as_pointer()) for x in (weights, states, out))
        index = ir.IntType(64)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
        factors, rows = [], []
        for k in range(8):
            factor = builder.load(builder.gep(weights, [index(k)]))
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, ir.IntType(32)(0))
            factors.append(builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), everywhere))
            rows.append(builder.gep(states, [builder.mul(index(k), dim)]))

        def at(row, place):
            return builder.bitcast(builder.gep(row, [place]), vector.as_pointer())

        with cgutils.for_range_slice(builder, index(0), stop, index(8), index) as (place, _):
            # Two chains: a sum of eight waits for each addition.
            sums = [builder.load(at(out, place), align=4), ir.Constant(vector, [0.0] * 8)]
            for k, (factor, row) in enumerate(zip(factors, rows, strict=True)):
                product = builder.fmul(factor, builder.load(at(row, place), align=4), flags=["contract"])
                sums[k % 2] = builder.fadd(sums[k % 2], product, flags=["contract"])
            builder.store(builder.fadd(*sums), at(out, place), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), generate


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _add_weighted(weights, floats, count, dim, out):
    """Add `count` widened tokens to `out`, each times its weight, eight at a time."""
    in_eights, whole = count - count % 8, dim - dim % 8
    for token in range(0, in_eights, 8):
        at = floats.ctypes.data + 4 * token * dim
        _add_eight(weights.ctypes.data + 4 * token, at, whole, dim, out.ctypes.data)
    for token in range(count):
        first = whole if token < in_eights else 0
        for i in range(first, dim):
            out[i] += weights[token] * floats[token * dim + i]


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _exp2(x, powers):
    """`x = 2 ** x` in place for x <= 0; `powers` is scratch.

    x = n + f with f in [-1/2, 1/2]: 2^f is its Taylor polynomial of degree 7, 2^n goes into the exponent's bits.
    """
    bits = powers.view(np.int32)
    for i in range(len(x)):
        clamped = max(x[i], np.float32(-126))
        whole = np.floor(clamped + np.float32(0.5))
        f = clamped - whole
        p = np.float32(1.5252734e-05)
        p = p * f + np.float32(1.5403530e-04)
        p = p * f + np.float32(1.3333558e-03)
        p = p * f + np.float32(9.6181291e-03)
        p = p * f + np.float32(5.5504109e-02)
        p = p * f + np.float32(2.4022651e-01)
        p = p * f + np.float32(6.9314718e-01)
        x[i] = p * f + np.float32(1)
        bits[i] = (np.int32(whole) + np.int32(127)) << 23
    for i in range(len(x)):
        x[i] = x[i] * powers[i]


# "nnan" lets the maximum become vectors too. A NaN logit makes it any number, and the weights that follow NaN all the same.
@numba.njit(fastmath=_FAST | {"nnan"}, cache=True)
@no_type_check
def _largest(logits):
    top = _HIDDEN
    for i in range(len(logits)):
        top = max(top, logits[i])
    return top


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _attend_split(
    query, keys, values, row, head, first, count, visible, scaling, softcap, output, largest, total, shown, bias
):  # fmt: skip
    """Attention of one kv head's queries over `count` tokens: weighted sum of values, largest logit (base 2), sum of weights.

    The logits themselves, with base e, go to `shown` if it is as long as the tokens; `bias` is added to the dot products if it is.
    """
    groups, dim = query.shape
    value_dim = output.shape[1]
    floats = np.empty(_WIDENED * max(dim, value_dim), np.float32)
    powers = np.empty(count, np.float32)
    scales = np.empty(count, np.float32)
    scores = np.empty((groups, count), np.float32)
    for begin in range(0, count, _WIDENED):
        some = min(_WIDENED, count - begin)
        _widen(keys, row, head, first + begin, some, dim, floats)
        for g in range(groups):
            _dots(query[g], floats, some, dim, scores[g, begin : begin + some])
    factor = scaling if softcap > 0 else scaling * _LOG2_E
    _read_scales(keys, row, head, first, count, factor, scales)
    for g in range(groups):
        logits = scores[g]
        for i in range(count):
            logits[i] *= scales[i]
        if bias.shape[1]:
            for i in range(count):
                logits[i] += bias[g, i] * factor
        if softcap > 0:
            for i in range(count):
                logits[i] = softcap * np.float32(math.tanh(logits[i] / softcap)) * _LOG2_E
        if len(visible):
            for i in range(count):
                if not visible[row, first + i]:
                    logits[i] = _HIDDEN
        if shown.shape[1]:
            for i in range(count):
                shown[g, i] = logits[i] * _LN_2
        top = _largest(logits)
        for i in range(count):
            logits[i] -= top
        _exp2(logits, powers)
        if len(visible):
            for i in range(count):
                if not visible[row, first + i]:
                    logits[i] = np.float32(0)
        denominator = np.float32(0)
        for i in range(count):
            denominator += logits[i]
        largest[g] = top
        total[g] = denominator
    _read_scales(values, row, head, first, count, np.float32(1), scales)
    for g in range(groups):
        for i in range(count):
            scores[g, i] *= scales[i]
    output[:] = np.float32(0)
    for begin in range(0, count, _WIDENED):
        some = min(_WIDENED, count - begin)
        _widen(values, row, head, first + begin, some, value_dim, floats)
        for g in range(groups):
            _add_weighted(scores[g, begin : begin + some], floats, some, value_dim, output[g])


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _merge_splits(outputs, largest, total, output, lse):
    """One kv head: its splits into one, divided by the sum of weights. Rows that see nothing have output 0 and lse -inf."""
    splits, groups, dim = outputs.shape
    for g in range(groups):
        top = _HIDDEN
        for split in range(splits):
            top = max(top, largest[split, g])
        sum_of_weights = np.float32(0)
        target = output[g]
        target[:] = np.float32(0)
        for split in range(splits):
            factor = np.float32(2.0 ** (largest[split, g] - top))
            sum_of_weights += factor * total[split, g]
            source = outputs[split, g]
            for i in range(dim):
                target[i] += factor * source[i]
        if sum_of_weights > 0:
            for i in range(dim):
                target[i] /= sum_of_weights
            lse[g] = (top + np.float32(math.log2(sum_of_weights))) * _LN_2
        else:
            lse[g] = -np.inf


@numba.njit(cache=True)
@no_type_check
def _open(query, keys, values, output, lse, logits, bias, sizes):
    """Addresses and tuples as arrays; logits and bias without tokens where there is no place for them."""
    batch, kv_heads, groups, tokens, dim, value_dim = sizes
    key_place, value_place = np.empty(len(keys), np.int64), np.empty(len(values), np.int64)
    for i in range(len(keys)):
        key_place[i], value_place[i] = keys[i], values[i]
    return (
        numba.carray(pointer(query), (batch, kv_heads, groups, dim), np.float32),
        key_place,
        value_place,
        numba.carray(pointer(output), (batch, kv_heads, groups, value_dim), np.float32),
        numba.carray(pointer(lse), (batch, kv_heads, groups), np.float32),
        numba.carray(
            pointer(logits if logits else lse), (batch, kv_heads, groups, tokens if logits else 0), np.float32
        ),
        numba.carray(pointer(bias if bias else lse), (batch, kv_heads, groups, tokens if bias else 0), np.float32),
    )


@numba.njit(fastmath=_FAST, cache=True)
@no_type_check
def _attend(
    query_at, keys_at, values_at, output_at, lse_at, visible, sizes, scaling, softcap, logits_at, bias_at
):  # fmt: skip
    query, keys, values, output, lse, logits, bias = _open(
        query_at, keys_at, values_at, output_at, lse_at, logits_at, bias_at, sizes
    )
    batch, kv_heads, groups, dim = output.shape
    tokens = sizes[3]
    splits = (tokens + SPLIT - 1) // SPLIT
    outputs = np.empty((splits, groups, dim), np.float32)
    largest = np.empty((splits, groups), np.float32)
    total = np.empty((splits, groups), np.float32)
    for row in range(batch):
        for head in range(kv_heads):
            for split in range(splits):
                first = split * SPLIT
                _attend_split(
                    query[row, head], keys, values, row, head, first, min(SPLIT, tokens - first), visible,
                    np.float32(scaling), np.float32(softcap), outputs[split], largest[split], total[split],
                    logits[row, head, :, first : first + SPLIT], bias[row, head, :, first : first + SPLIT],
                )  # fmt: skip
            _merge_splits(outputs, largest, total, output[row, head], lse[row, head])


@numba.njit(fastmath=_FAST, cache=True, parallel=True)
@no_type_check
def _attend_in_parallel(
    query_at, keys_at, values_at, output_at, lse_at, visible, sizes, scaling, softcap, logits_at, bias_at
):  # fmt: skip
    query, keys, values, output, lse, logits, bias = _open(
        query_at, keys_at, values_at, output_at, lse_at, logits_at, bias_at, sizes
    )
    batch, kv_heads, groups, dim = output.shape
    tokens = sizes[3]
    splits = (tokens + SPLIT - 1) // SPLIT
    outputs = np.empty((batch * kv_heads, splits, groups, dim), np.float32)
    largest = np.empty((batch * kv_heads, splits, groups), np.float32)
    total = np.empty((batch * kv_heads, splits, groups), np.float32)
    for piece in numba.prange(batch * kv_heads * splits):
        place, split = piece // splits, piece % splits
        row, head, first = place // kv_heads, place % kv_heads, split * SPLIT
        _attend_split(
            query[row, head], keys, values, row, head, first, min(SPLIT, tokens - first), visible,
            np.float32(scaling), np.float32(softcap), outputs[place, split], largest[place, split], total[place, split],
            logits[row, head, :, first : first + SPLIT], bias[row, head, :, first : first + SPLIT],
        )  # fmt: skip
    for place in range(batch * kv_heads):
        row, head = place // kv_heads, place % kv_heads
        _merge_splits(outputs[place], largest[place], total[place], output[row, head], lse[row, head])
