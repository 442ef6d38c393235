"""What widens low-bit codes of tokens to float32, generated for each grid alone, so that where a channel's bits lie is a constant.

Planes of small tiers run over two or four bytes: a loop over their channels would never fill a vector. Here each vector says which bytes it takes.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, no_type_check

import numba
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hf_kvq.packing import HIGH_PATH, LOW_PATH, Grid, scale_of

__all__ = ["widen_grid", "widener"]

_LANES = 16
_WORD = ir.IntType(64)


@functools.cache
def widener(grid: Grid) -> Any:
    """What widens tokens of this grid; its `address` goes to `widen_grid`."""
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
def widen_grid(typing_context, address, codes, step, scales, scale_step, out, count):
    """Call what `widener` compiled."""

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
