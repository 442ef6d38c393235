"""One query per row over codes on a GPU, in Triton: codes are read once, and widened and scaled on the way.

Source: Flash-Decoding (the tokens are split, so that few rows still fill a device; the splits' outputs merge by their log-sum-exp).
Departs from it: keys and values are codes. Every code is exact in float16, which the tensor cores multiply exactly and add up in
float32. A float32 factor becomes the sum of two float16 numbers (22 bits, and a sign in the second): queries, brought to one power of
two by row, and weights, brought to the largest scale of their block. So the result is what float32 gives, without tf32.

Numbers of a `Grid` are no float16 numbers, as levels are bent; each becomes the sum of two as well, exactly up to 5 bits, and else to 2^-22 of it.
A grid is read piece by piece: channels of one tier and one scale, so that scales stay outside of products here too. Where each channel of a piece has its
bits is index arithmetic, not a walk over runs of channels that share a shift: runs may be two channels long, and a tensor core takes sixteen at least. A byte that
holds several channels of one piece is copied to shared memory once for each, in words of consecutive bytes; one that holds channels of two pieces, as at 4 bits and
128 channels, is copied once.

Only `hf_kvq.kernels` imports this module, and only where triton is installed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool
from torch import Tensor

from hf_kvq.kernels.base import Bias, Kernel, Logits, Operand, Partial, Query, Scoring
from hf_kvq.kernels.visibility import Visibility
from hf_kvq.packing import HIGH_PATH, LOW_PATH, Grid

__all__ = ["TritonDecodeKernel"]

PROGRAMS = 3
"""Programs for each multiprocessor: as many as its registers hold at once, so that all of them run side by side."""

FEWEST, MOST = 128, 4096
"""Tokens of a split: fewer cost more to merge than they save, more lose digits in one long sum of float32."""

WIDEST = 512
"""Channels up to which a program's sums stay in registers."""

_GROUPS = 16
"""Query heads of one program at most; where more share a kv head, several programs read its codes."""

_LAYOUTS = ("int8", "e4m3", "int4")

_GRID_LIMITS = {"num_stages": 2, "maxnreg": 168}
"""So that `PROGRAMS` fit a multiprocessor with grids too: of its 65,536 registers and 227 KiB of shared memory."""

_READS_GRIDS = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 4)
"""Earlier ones carry no tuples of tensors through a loop, or cannot read a constant one."""

_CENTRES = {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25, 5: 180.25}
"""Bits of a code, and the c that makes x (x^2 - c) a float16 number for each of its levels x; of 6 and 8 bits there is none."""

_MOST_PIECES = 16
"""Pieces of a grid at most: they are unrolled."""


class TritonDecodeKernel(Kernel):
    """See the module.

    Attributes:
        device_type: Of the tensors that it takes; `"cpu"` works where Triton interprets its kernels.
    """

    name = "triton"

    def __init__(self, device_type: str = "cuda") -> None:
        self.device_type = device_type

    def supports(self, query: Query, keys: Operand, values: Operand, visibility: Visibility) -> bool:
        return (
            query.device.type == self.device_type
            and query.shape[3] == 1
            and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and _is_read(keys)
            and _is_read(values)
            and max(keys.dim, values.dim) <= WIDEST
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
        batch, kv_heads, groups, _, _ = query.shape
        _, visible = visibility.for_one_query(first_column, keys.tokens)
        wide = max(keys.dim, values.dim)
        block = 64 if wide <= 128 else 32 if wide <= 256 else 16
        split, splits = _split(keys.tokens, batch * kv_heads, block, query.device)
        scratch = query.new_empty(batch * kv_heads, splits, groups, values.dim, dtype=torch.float32)
        lses = query.new_empty(batch * kv_heads, splits, groups, dtype=torch.float32)
        with torch.cuda.device_of(query):  # Triton launches on the current device
            _launch(query, keys, values, visible, scoring, scratch, lses, logits, bias, split, block)
            output, lse = (scratch, lses) if splits == 1 else _merge(scratch, lses)
        return Partial(output.view(batch, kv_heads, groups, 1, -1), lse.view(batch, kv_heads, groups, 1))


def _is_read(operand: Operand) -> bool:
    if operand.basis is not None:
        return False
    if operand.grid is None:
        return operand.layout in _LAYOUTS
    return _READS_GRIDS and operand.dim // _piece(operand.grid) <= _MOST_PIECES


def _piece(grid: Grid) -> int:
    """Channels of a piece: as many as divide both a tier and the channels of a scale."""
    return math.gcd(grid.tier, grid.group_size)


@functools.cache
def _pieces(grid: Grid) -> tuple[tuple[Any, ...], ...]:
    """What the kernel must know of each piece.

    The bits of its levels, those of the lower plane of its tier, the first byte of that plane, its first channel within the tier, its scale; then of its levels
    bend and centre, and the weights of the two numbers that stand for one; see `_levels`. At last the bits of a second plane, and, on a trellis, its first channel
    of all (else -1), the bytes of the path, and how far back it is read.
    """
    pieces, width = [], _piece(grid)
    for channel in range(0, grid.dim, width):
        tier, first = divmod(channel, grid.tier)
        planes = [plane for plane in grid.planes[grid.trellis :] if plane.first == tier * grid.tier]
        low, high, *_ = [*(plane.bits for plane in planes), 0, 0]
        bits = grid.bits[tier] + grid.trellis
        bend, centre = grid.curve(grid.bits[tier]), _CENTRES.get(bits)
        weights = (1.0, 1.0) if centre is None else (1.0 + bend * centre, bend)
        group, start = channel // grid.group_size, planes[0].start if planes else 0
        path = (channel, grid.dim // 8, LOW_PATH, HIGH_PATH) if grid.trellis else (-1, 1, (), ())
        pieces.append((bits, low, start, first, group, bend, centre or 0.0, *weights, high, *path))
    return tuple(pieces)


def _constants(name: str, operand: Operand) -> dict[str, Any]:
    """What is compiled into the kernel of the layout of keys (`name` is KEY) or values (VALUE): `WIDTH` is the bytes of a token, or the channels of a piece."""
    grid = operand.grid
    width = operand.parts["codes"].shape[3] if grid is None else _piece(grid)
    return {
        f"{name}S": operand.layout,
        f"{name}_WIDTH": width,
        f"{name}_PADDED": max(triton.next_power_of_2(width), 16),
        f"{name}_TIER": 0 if grid is None else grid.tier,
        f"{name}_PIECES": () if grid is None else _pieces(grid),
    }


def _split(tokens: int, heads: int, block: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a split, whole blocks, and how many splits that makes."""
    wanted = max(PROGRAMS * _multiprocessors(device) // heads, 1)
    split = min(max(-(-tokens // wanted), FEWEST), MOST)
    split = -(-split // block) * block
    return split, max(-(-tokens // split), 1)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of the device; interpreted, as many as a large one has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _launch(
    query: Query, keys: Operand, values: Operand, visible: Bool[Tensor, "rows columns"] | None, scoring: Scoring,
    output: Tensor, lse: Tensor, logits: Tensor | None, bias: Tensor | None, split: int, block: int,
) -> None:  # fmt: skip
    batch, kv_heads, groups, _, _ = query.shape
    query = query if query.stride(4) == 1 else query.contiguous()
    log2_e = math.log2(math.e)
    # The exponentials are powers of 2; where there is a softcap, log2(e) comes after it.
    before, after = (scoring.scaling * log2_e, 1.0) if scoring.softcap is None else (
        scoring.scaling / scoring.softcap, scoring.softcap * log2_e
    )  # fmt: skip
    mask = query if visible is None else visible.expand(batch, -1).view(torch.uint8)
    padded = max(triton.next_power_of_2(min(groups, _GROUPS)), 8)  # twice 8 rows: what a tensor core takes at least
    kernel: Any = _attend_split  # its options, such as the number of warps, are no parameters of it
    kernel[(batch * kv_heads, output.shape[1], triton.cdiv(groups, padded))](
        query, *query.stride()[:3], *_place(keys), *_place(values), mask, mask.stride(0), mask.stride(1), output, lse,
        lse if logits is None else logits, lse if bias is None else bias,
        kv_heads, groups, keys.tokens, split, before, after,
        **_constants("KEY", keys), **_constants("VALUE", values),
        DIM=values.dim, GROUPS=padded, BLOCK=block, EXACT_QUERY=query.dtype != torch.float32, HIDES=visible is not None,
        CAPPED=scoring.softcap is not None, SHOWS=logits is not None, BIASED=bias is not None, num_warps=4,
        **_GRID_LIMITS if keys.grid or values.grid else {"num_stages": 3},
    )  # fmt: skip


def _place(operand: Operand) -> tuple[Tensor | int, ...]:
    """Codes and scale, each with its strides over rows, heads and tokens."""
    codes, scale = operand.parts["codes"], operand.parts["scale"]
    # The bits of e4m3 as integers: widening them needs no hardware that knows the format.
    codes = codes.view(torch.int8) if operand.layout == "e4m3" else codes
    by_head = scale.stride(1) if scale.shape[1] > 1 else 0
    return (codes, *codes.stride()[:3], scale, scale.stride(0), by_head, scale.stride(2))


def _merge(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The splits of each head into one: one small kernel, where torch would launch eight."""
    heads, splits, groups, dim = outputs.shape
    output, lse = outputs.new_empty(heads, groups, dim), lses.new_empty(heads, groups)
    kernel: Any = _merge_splits
    kernel[(heads, groups)](
        outputs, lses, output, lse, groups, splits, DIM=dim, PADDED=triton.next_power_of_2(dim),
        SPLITS=triton.next_power_of_2(splits), TILE=16, num_warps=4,
    )  # fmt: skip
    return output, lse


@triton.jit
@no_type_check
def _widen(codes, LAYOUT: tl.constexpr):
    """Codes of one byte as float16, exactly."""
    if LAYOUT == "e4m3":
        # The bits move to where float16 has them; what its larger bias makes too small, 2^8 mends. Subnormal codes come out right as well.
        bits = (
            codes.to(tl.int16) << 7
        ) & -16512  # negative codes bring their sign up to the highest bit, 0xBF80 keeps it
        widened = bits.to(tl.float16, bitcast=True) * 256.0
    else:
        widened = codes.to(tl.float16)
    return widened


@triton.jit
@no_type_check
def _nibble(codes, SHIFT: tl.constexpr):
    """The 4-bit codes in the low (`SHIFT` 0) or the high (`SHIFT` 4) halves of bytes as float16, exactly."""
    return (((codes >> SHIFT) & 15).to(tl.int8) - 8).to(tl.float16)


@triton.jit
@no_type_check
def _plane(
    codes, channel, held,
    WIDTH: tl.constexpr, START: tl.constexpr, RUN: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The bits of a piece's channels in the plane that starts at byte `START`: `RUN` consecutive channels share a shift."""
    place = FIRST % RUN + channel
    if RUN % WIDTH == 0:  # all of them share one; pieces whose bytes are the same then read by the same expression
        codes = tl.load(codes + START + place, mask=held, other=0)
        shift = FIRST // RUN * BITS
    else:
        codes = tl.load(codes + START + place % RUN, mask=held, other=0)
        shift = (FIRST // RUN + place // RUN) * BITS
    return (codes >> shift) & (2**BITS - 1)


@triton.jit
@no_type_check
def _parity(codes, channel, held, PIECES: tl.constexpr, PIECE: tl.constexpr, WHICH: tl.constexpr):
    """The parity of the path's bits so many channels back as entry `WHICH` of the piece says."""
    RUN: tl.constexpr = PIECES[PIECE][11]
    parity = tl.zeros(held.shape, dtype=tl.uint8)
    for i in tl.static_range(len(PIECES[PIECE][WHICH])):
        place = PIECES[PIECE][10] - PIECES[PIECE][WHICH][i] + channel
        there = place >= 0
        place = tl.where(there, place, 0)
        bits = tl.load(codes + place % RUN, mask=held & there, other=0)
        parity ^= (bits >> (place // RUN).to(tl.uint8)) & 1
    return parity


@triton.jit
@no_type_check
def _levels(codes, channel, held, WIDTH: tl.constexpr, TIER: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Two float16 numbers for each code of a piece; weighted as the piece says, their sum is what the code stands for at scale 1.

    Up to 5 bits they are x and x (x^2 - c), both exact, and 1 + b c times the one plus b times the other is x (1 + b x^2). With more bits they are that number
    rounded, and what is missing to float32. `codes` points at the first byte of each token.
    """
    BITS: tl.constexpr = PIECES[PIECE][0]
    LOW: tl.constexpr = PIECES[PIECE][1]
    START: tl.constexpr = PIECES[PIECE][2]
    FIRST: tl.constexpr = PIECES[PIECE][3]
    HIGH: tl.constexpr = PIECES[PIECE][9]
    BELOW: tl.constexpr = BITS - LOW - HIGH
    if BELOW == 0:
        level = _plane(codes, channel, held, WIDTH, START, TIER * LOW // 8, FIRST, LOW)
    else:
        level = _parity(codes, channel, held, PIECES, PIECE, 12) | (
            _parity(codes, channel, held, PIECES, PIECE, 13) << 1
        )
        if LOW > 0:
            level |= _plane(codes, channel, held, WIDTH, START, TIER * LOW // 8, FIRST, LOW) << BELOW
    if HIGH > 0:
        START_HIGH: tl.constexpr = START + TIER * LOW // 8
        level |= _plane(codes, channel, held, WIDTH, START_HIGH, TIER * HIGH // 8, FIRST, HIGH) << (BELOW + LOW)
    if BITS <= 5:
        # The bits of 512 + level, whose last is worth a half: an or and a sum, for two numbers at a time, in place of conversions.
        x = ((level << 1).to(tl.int16) | 0x6000).to(tl.float16, bitcast=True) - (512.0 + (2**BITS - 1) / 2)
        first, second = x, x * (x * x - PIECES[PIECE][6])
    else:
        x = level.to(tl.float32) - (2**BITS - 1) / 2
        number = x * (1.0 + PIECES[PIECE][5] * (x * x))
        first = number.to(tl.float16)
        second = _rest(number, first)
    return first, second


@triton.jit
@no_type_check
def _scale_of(scale, held, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """The scales of a piece. `scale` points at the first of each token."""
    byte = tl.load(scale + PIECES[PIECE][4], mask=held, other=0)
    return tl.where(byte > 0, tl.exp2((byte.to(tl.float32) - 128.0) * 0.125), 0.0)


@triton.jit
@no_type_check
def _rest(x, rounded):
    """What is missing from a float16 number to the float32 number that it was."""
    return (x - rounded.to(tl.float32)).to(tl.float16)


@triton.jit
@no_type_check
def _dots(query, codes, EXACT_QUERY: tl.constexpr):
    """Dot products of all queries with a block of widened keys."""
    rounded = query.to(tl.float16)
    dots = tl.dot(rounded, codes)
    if not EXACT_QUERY:
        dots += tl.dot(_rest(query, rounded), codes)
    return dots


@triton.jit
@no_type_check
def _piece_dots(
    rows, codes, channel, held,
    WIDTH: tl.constexpr, TIER: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, EXACT_ROWS: tl.constexpr,
):  # fmt: skip
    """Products of rows with the numbers that a piece stands for at scale 1."""
    first, second = _levels(codes, channel, held, WIDTH, TIER, PIECES, PIECE)
    dots = _dots(rows, first, EXACT_ROWS) * PIECES[PIECE][7]
    if PIECES[PIECE][8] != 0.0:
        dots += _dots(rows, second, EXACT_ROWS) * PIECES[PIECE][8]
    return dots


@triton.jit
@no_type_check
def _scaled(weights, scale, first_row):
    """Weights times scales in two float16 rows, and what brings their products back to size."""
    largest = tl.max(scale, axis=0)
    largest = tl.where(largest > 0.0, largest, 1.0)
    weights = weights * (scale / largest * 32768.0)[None, :]
    rounded = weights.to(tl.float16)
    return tl.where(first_row[:, None], rounded, _rest(weights, rounded)), largest * (1.0 / 32768.0)


@triton.jit
@no_type_check
def _tanh(x):
    """Within float32's rounding: a polynomial (Cephes) near 0, where the formula with an exponential loses digits."""
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, p * z * x + x, tl.where(x < 0.0, -far, far))


@triton.jit
@no_type_check
def _closed(out, divisor):
    """Weighted means from weighted sums: of both rows of each query together."""
    return tl.sum(tl.reshape(out / divisor[:, None], (2, out.shape[0] // 2, out.shape[1])), axis=0)


# What changes from step to step must not compile the kernel again.
@triton.jit(
    do_not_specialize=["tokens", "split", "key_scale_row", "key_scale_head", "value_scale_row", "value_scale_head"]
)
@no_type_check
def _attend_split(
    query, query_row, query_head, query_group,
    keys, key_row, key_head, key_token, key_scale, key_scale_row, key_scale_head, key_scale_token,
    values, value_row, value_head, value_token, value_scale, value_scale_row, value_scale_head, value_scale_token,
    visible, visible_row, visible_column, output, lse, shown, bias,
    kv_heads, groups, tokens, split, before, after,
    KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr, KEY_PADDED: tl.constexpr,
    KEY_TIER: tl.constexpr, KEY_PIECES: tl.constexpr,
    VALUES: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr,
    VALUE_TIER: tl.constexpr, VALUE_PIECES: tl.constexpr,
    DIM: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, EXACT_QUERY: tl.constexpr, HIDES: tl.constexpr,
    CAPPED: tl.constexpr, SHOWS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Attention of up to `GROUPS` query heads of one kv head over the tokens of one split.

    Every query stands in two rows. Both have its logits and weights; the first multiplies the values with the weights as float16 has
    them, the second with what is missing to float32.
    """
    place = tl.program_id(0).to(tl.int64)  # rows x heads x tokens x channels may go beyond 2^31
    row, head = place // kv_heads, place % kv_heads
    rows = tl.arange(0, 2 * GROUPS)
    first_row = rows < GROUPS
    group = tl.program_id(2) * GROUPS + rows % GROUPS
    key_channel = tl.arange(0, KEY_PADDED)
    value_channel = tl.arange(0, VALUE_PADDED)
    column = tl.arange(0, BLOCK)

    query += row * query_row + head * query_head
    query_at = group[:, None] * query_group + key_channel[None, :]
    query_held = (group < groups)[:, None] & (key_channel < KEY_WIDTH)[None, :]
    q = tl.load(query + query_at, mask=query_held, other=0.0).to(tl.float32)
    largest_q = tl.max(tl.abs(q), axis=1)
    if KEYS == "int4":
        upper_q = tl.load(query + query_at + KEY_WIDTH, mask=query_held, other=0.0).to(tl.float32)
        largest_q = tl.maximum(largest_q, tl.max(tl.abs(upper_q), axis=1))
    if KEYS == "grid":
        pieces_q = (q,)
        for piece in tl.static_range(1, len(KEY_PIECES)):
            piece_q = tl.load(query + query_at + piece * KEY_WIDTH, mask=query_held, other=0.0).to(tl.float32)
            largest_q = tl.maximum(largest_q, tl.max(tl.abs(piece_q), axis=1))
            pieces_q += (piece_q,)
    # The power of two at or below the largest element; then all of them are below 2^15 in float16.
    power = (largest_q.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > 0.0, power, 1.0)
    if KEYS == "grid":
        scaled_q = ()
        for piece in tl.static_range(len(KEY_PIECES)):
            scaled_q += (pieces_q[piece] / power[:, None] * 16384.0,)
    else:
        q = q / power[:, None] * 16384.0
    if KEYS == "int4":
        upper_q = upper_q / power[:, None] * 16384.0
    factor = power * (before / 16384.0)

    keys += row * key_row + head * key_head
    values += row * value_row + head * value_head
    key_scale += row * key_scale_row + head * key_scale_head
    value_scale += row * value_scale_row + head * value_scale_head
    first = tl.program_id(1) * split
    end = tl.minimum(first + split, tokens)
    largest = tl.full([2 * GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([2 * GROUPS], tl.float32)
    if VALUES == "grid":
        outs = ()
        for _ in tl.static_range(len(VALUE_PIECES)):
            outs += (tl.zeros([2 * GROUPS, VALUE_PADDED], tl.float32),)
    else:
        out = tl.zeros([2 * GROUPS, VALUE_PADDED], tl.float32)
        upper_out = tl.zeros([2 * GROUPS, VALUE_PADDED], tl.float32)
    for start in range(first, end, BLOCK):
        token = (start + column).to(tl.int64)
        held = token < end
        seen = held
        if HIDES:
            hidden_at = visible + row * visible_row + token * visible_column
            seen = seen & (tl.load(hidden_at, mask=seen, other=0) != 0)

        key_line = keys + token[None, :] * key_token
        key_held = held[None, :] & (key_channel < KEY_WIDTH)[:, None]
        if KEYS == "grid":
            logits = tl.zeros([2 * GROUPS, BLOCK], tl.float32)
            for piece in tl.static_range(len(KEY_PIECES)):
                dots = _piece_dots(
                    scaled_q[piece], key_line, key_channel[:, None], key_held,
                    KEY_WIDTH, KEY_TIER, KEY_PIECES, piece, EXACT_QUERY,
                )  # fmt: skip
                scale = _scale_of(key_scale + token * key_scale_token, held, KEY_PIECES, piece)
                logits += dots * scale[None, :]
            logits = logits * factor[:, None]
        else:
            codes = tl.load(key_line + key_channel[:, None], mask=key_held, other=0)
            if KEYS == "int4":
                logits = _dots(q, _nibble(codes, 0), EXACT_QUERY) + _dots(upper_q, _nibble(codes, 4), EXACT_QUERY)
            else:
                logits = _dots(q, _widen(codes, KEYS), EXACT_QUERY)
            scale = tl.load(key_scale + token * key_scale_token, mask=held, other=0.0).to(tl.float32)
            logits = logits * factor[:, None] * scale[None, :]
        if BIASED or SHOWS:
            by_token = (place * groups + group)[:, None] * tokens + token[None, :]
        if BIASED:
            added = tl.load(bias + by_token, mask=(group < groups)[:, None] & held[None, :], other=0.0)
            logits += added * before
        if CAPPED:
            logits = after * _tanh(logits)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        if SHOWS:
            natural = tl.maximum(logits * 0.6931471805599453, -1e30)
            tl.store(shown + by_token, natural, mask=(first_row & (group < groups))[:, None] & held[None, :])

        top = tl.maximum(largest, tl.max(logits, axis=1))
        reference = tl.where(top == float("-inf"), 0.0, top)  # rows that see nothing: -inf - -inf would be NaN
        weights = tl.exp2(logits - reference[:, None])
        kept = tl.exp2(largest - reference)
        total = total * kept + tl.sum(weights, axis=1)
        largest = top

        value_line = values + token[:, None] * value_token
        value_held = held[:, None] & (value_channel < VALUE_WIDTH)[None, :]
        if VALUES == "grid":
            continued = ()
            for piece in tl.static_range(len(VALUE_PIECES)):
                scale = _scale_of(value_scale + token * value_scale_token, seen, VALUE_PIECES, piece)
                parts, back = _scaled(weights, scale, first_row)
                sums = _piece_dots(
                    parts, value_line, value_channel[None, :], value_held,
                    VALUE_WIDTH, VALUE_TIER, VALUE_PIECES, piece, True,
                )  # fmt: skip
                continued += (outs[piece] * kept[:, None] + sums * back,)
            outs = continued
        else:
            scale = tl.load(value_scale + token * value_scale_token, mask=seen, other=0.0).to(tl.float32)
            parts, back = _scaled(weights, scale, first_row)
            codes = tl.load(value_line + value_channel[None, :], mask=value_held, other=0)
            if VALUES == "int4":
                out = out * kept[:, None] + tl.dot(parts, _nibble(codes, 0)) * back
                upper_out = upper_out * kept[:, None] + tl.dot(parts, _nibble(codes, 4)) * back
            else:
                out = out * kept[:, None] + tl.dot(parts, _widen(codes, VALUES)) * back

    divisor = tl.where(total > 0.0, total, 1.0)
    line = (place * tl.num_programs(1) + tl.program_id(1)) * groups
    log_sum = tl.where(total > 0.0, (largest + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + line + group, log_sum, mask=first_row & (group < groups))
    one_row = tl.arange(0, GROUPS)
    group = tl.program_id(2) * GROUPS + one_row
    output_at = output + (line + group)[:, None] * DIM + value_channel[None, :]
    stored = (group < groups)[:, None] & (value_channel < VALUE_WIDTH)[None, :]
    if VALUES == "grid":
        for piece in tl.static_range(len(VALUE_PIECES)):
            tl.store(output_at + piece * VALUE_WIDTH, _closed(outs[piece], divisor), mask=stored)
    else:
        tl.store(output_at, _closed(out, divisor), mask=stored)
    if VALUES == "int4":
        tl.store(output_at + VALUE_WIDTH, _closed(upper_out, divisor), mask=stored)


@triton.jit(do_not_specialize=["splits"])
@no_type_check
def _merge_splits(
    outputs, lses, output, lse, groups, splits,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One query head's splits into one. Rows that see nothing have output 0 and lse -inf."""
    place, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, PADDED)
    every = tl.arange(0, SPLITS)
    parts = tl.load(lses + (place * splits + every) * groups + group, mask=every < splits, other=float("-inf"))
    top = tl.max(parts, axis=0)
    reference = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(parts - reference), axis=0)
    divisor = tl.where(total > 0.0, total, 1.0)
    merged = tl.zeros([PADDED], tl.float32)
    for first in range(0, splits, TILE):
        some = first + tl.arange(0, TILE)
        line = (place * splits + some) * groups + group
        weights = tl.exp(tl.load(lses + line, mask=some < splits, other=float("-inf")) - reference) / divisor
        held = (some < splits)[:, None] & (channel < DIM)[None, :]
        part = tl.load(outputs + line[:, None] * DIM + channel[None, :], mask=held, other=0.0)
        merged += tl.sum(weights[:, None] * part, axis=0)
    tl.store(output + (place * groups + group) * DIM + channel, merged, mask=channel < DIM)
    tl.store(lse + place * groups + group, tl.where(total > 0.0, reference + tl.log(divisor), float("-inf")))
