"""One kv head's queries over a few hundred tokens, compiled by numba: what `numba_decode` splits the tokens into.

A few tokens at a time are widened into a scratch of float32 that all query heads of the group read. The exponential is a polynomial that the compiler turns
into vectors; numpy's is scalar.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hf_kvq.kernels.numba_memory import memory, prefetch
from hf_kvq.kernels.numba_widen import widen_grid

__all__ = ["FAST", "add_weighted", "attend_split", "join_parts", "merge_splits"]

# Reassociation lets sums become vectors. Infinities and NaN keep their meaning: no "ninf", no "nnan".
FAST = {"reassoc", "contract", "arcp", "nsz"}
_WIDENED = 32  # tokens at a time: a scratch of 8 KiB at 64 channels, 32 KiB at 256
_AHEAD = 4096  # bytes: the processor's own prefetching ends with the page
_HIDDEN = np.float32(-1e30)
_LOG2_E = np.float32(math.log2(math.e))
_LN_2 = np.float32(math.log(2.0))
_TO_E4M3 = np.float32(2.0**120)
_E4M3_BITS = np.int32(-(2**31) + 0x7F00000)


@numba.njit(cache=True)
@no_type_check
def _ask_for(codes, start, length):
    """Prefetch what comes a little later than these bytes."""
    for byte in range(0, length, 64):
        prefetch(codes, start + byte + _AHEAD)


@numba.njit(cache=True)
@no_type_check
def _copy(place, start, count, dim, floats):
    """States as they are, float32 or bfloat16."""
    if place[8] == 4:
        states = memory(place[0], np.float32)
        for token in range(count):
            for c in range(dim):
                floats[token * dim + c] = states[start + token * place[3] + c]
    else:
        halves, bits = memory(place[0], np.int16), floats.view(np.int32)
        for token in range(count):
            for c in range(dim):
                bits[token * dim + c] = np.int32(halves[start + token * place[3] + c]) << 16


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def _widen(place, row, head, first, count, dim, floats):
    """Codes of tokens `first` and on as float32, one token after the other, in `floats`.

    Those of e4m3 come out as 2^-120 times theirs, those of a grid with their scales.
    """
    codes = memory(place[0], np.int8)
    start = row * place[1] + head * place[2] + first * place[3]
    if place[8] >= 4:
        _copy(place, start, count, dim, floats)
        return
    if place[8] == 3:
        _ask_for(codes, start, count * place[3])
        scale = place[4] + row * place[5] + head * place[6] + first * place[7]
        widen_grid(place[10], place[0] + start, place[3], scale, place[7], floats.ctypes.data, count)
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


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def _read_scales(place, row, head, first, count, factor, out):
    """Scales of tokens `first` and on times `factor`, and what mends the widened e4m3 codes; `factor` alone where there are none."""
    if place[8] >= 3:
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


@numba.njit(fastmath=FAST, cache=True)
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


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def add_weighted(weights, floats, count, dim, out):
    """Add `count` widened tokens to `out`, each times its weight, eight at a time."""
    in_eights, whole = count - count % 8, dim - dim % 8
    for token in range(0, in_eights, 8):
        at = floats.ctypes.data + 4 * token * dim
        _add_eight(weights.ctypes.data + 4 * token, at, whole, dim, out.ctypes.data)
    for token in range(count):
        first = whole if token < in_eights else 0
        for i in range(first, dim):
            out[i] += weights[token] * floats[token * dim + i]


@numba.njit(fastmath=FAST, cache=True)
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
@numba.njit(fastmath=FAST | {"nnan"}, cache=True)
@no_type_check
def _largest(logits):
    top = _HIDDEN
    for i in range(len(logits)):
        top = max(top, logits[i])
    return top


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def attend_split(
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
                if not visible[i]:
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
                if not visible[i]:
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
            add_weighted(scores[g, begin : begin + some], floats, some, value_dim, output[g])


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def merge_splits(outputs, largest, total, output, lse):
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
def join_parts(outputs, lses, output, lse):
    """One kv head: complete attention over each part, `[parts, queries, dim]`, into that over all; see `kernels.merge`."""
    parts, queries, dim = outputs.shape
    for i in range(queries):
        top = lses[0, i]
        for p in range(1, parts):
            top = max(top, lses[p, i])
        output[i] = np.float32(0)
        lse[i] = top
        if top == -np.inf:
            continue
        total = np.float32(0)
        for p in range(parts):
            total += np.float32(math.exp(lses[p, i] - top))
        for p in range(parts):
            weight = np.float32(math.exp(lses[p, i] - top)) / total
            for c in range(dim):
                output[i, c] += weight * outputs[p, i, c]
        lse[i] = top + np.float32(math.log(total))
