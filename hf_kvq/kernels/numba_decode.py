"""One query per row over tokens as they are stored on a CPU, compiled by numba: codes are read once and widened in the first-level cache.

Work is split along the tokens (Flash-Decoding) and over heads. All parts of a step go in one call: its sinks, codes in their basis and exact tokens; a step of a
short context would otherwise spend more time between calls than in them. What widens a grid is compiled for it alone. Compiled at the first call, and kept on
disk beside the module (or in numba's cache directory).

Only `hf_kvq.kernels` imports this module, and only where numba is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from hf_kvq.basis import BLOCK, PlacedBasis, block_table, block_waves
from hf_kvq.kernels.base import Bias, Kernel, Logits, Operand, Part, Partial, Query, Scoring
from hf_kvq.kernels.numba_basis import basis_places, basis_sizes, enter_basis, leave_basis
from hf_kvq.kernels.numba_memory import memory, pointer
from hf_kvq.kernels.numba_split import FAST, add_weighted, attend_split, join_parts, merge_splits
from hf_kvq.kernels.numba_threads import in_threads
from hf_kvq.kernels.numba_widen import widener
from hf_kvq.kernels.visibility import Visibility

__all__ = ["NumbaDecodeKernel"]

SPLIT = 256
"""Tokens of one piece of work; a multiple of `BLOCK`."""

PARALLEL_FROM = 2**17
"""Codes of the keys below which starting threads costs more than they save."""

_LAYOUTS = {"int8": 0, "e4m3": 1, "int4": 2, "grid": 3}
_STATES = {torch.float32: 4, torch.bfloat16: 5}

# Where things stand in the description of a part: places of keys and values, then numbers and addresses, then a basis of each.
_KEYS, _VALUES = slice(0, 11), slice(11, 22)
_TOKENS, _POSITION, _PAIRS, _WAVES, _TABLE, _LOGITS, _BIAS, _SEEN = range(22, 30)
_KEY_BASIS, _KEY_SIZES = slice(30, 38), slice(38, 44)
_VALUE_BASIS, _VALUE_SIZES = slice(44, 52), slice(52, 58)
_IN_BASIS, _OUT_OF_BASIS = 58, 59
_NO_BASIS = (0,) * 14


class NumbaDecodeKernel(Kernel):
    """See the module."""

    name = "numba"
    takes_parts = True

    def supports(self, query: Query, keys: Operand, values: Operand, visibility: Visibility) -> bool:
        return (
            query.shape[3] == 1
            and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and _is_read(keys)
            and _is_read(values)
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
        return self.attend_parts(query, (Part(keys, values, first_column, visibility, logits),), scoring, bias)

    def attend_parts(self, query: Query, parts: Sequence[Part], scoring: Scoring, bias: Bias | None = None) -> Partial:
        batch, kv_heads, groups, _, dim = query.shape
        rows = query.to(torch.float32).contiguous()
        value_dim = parts[0].values.dim
        output = torch.empty(batch, kv_heads, groups, 1, value_dim)
        lse = torch.empty(batch, kv_heads, groups, 1)
        seen = [_seen(part, batch) for part in parts]
        described = [_described(part, mask, bias) for part, mask in zip(parts, seen, strict=True)]
        arguments = (
            np.array(described, dtype=np.int64), rows.data_ptr(), output.data_ptr(), lse.data_ptr(),
            (batch, kv_heads, groups, dim, value_dim), scoring.scaling, scoring.softcap or 0.0,
        )  # fmt: skip
        tokens = sum(part.keys.tokens for part in parts)
        threads = torch.get_num_threads() if batch * kv_heads * tokens * dim >= PARALLEL_FROM else 1
        if threads == 1:
            _attend(*arguments)
        else:
            with in_threads(threads):
                _attend_in_parallel(*arguments)
        return Partial(output, lse)


def _is_read(operand: Operand) -> bool:
    basis, codes = operand.basis, operand.parts["codes"]
    if basis is not None and not (isinstance(basis.positions, int) and basis.basis.is_plain):
        return False
    if operand.layout == "states":
        return codes.dtype in _STATES and codes.stride(3) == 1
    return operand.layout in _LAYOUTS


def _seen(part: Part, batch: int) -> Tensor | None:
    """Which tokens each row sees, as bytes; None where it sees all."""
    _, visible = part.visibility.for_one_query(part.first_column, part.keys.tokens)
    return None if visible is None else visible.expand(batch, -1).contiguous()


def _described(part: Part, seen: Tensor | None, bias: Bias | None) -> tuple[int, ...]:
    """All that compiled code must know of a part, and where it is; see the names above."""
    keys, values = part.keys.basis, part.values.basis
    assert bias is None or keys is None, "a bias stands for the shift of a basis"
    return (
        *_place(part.keys), *_place(part.values), part.keys.tokens, *_waves(keys),
        0 if part.logits is None else part.logits.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if seen is None else seen.data_ptr(), *_basis(keys), *_basis(values), keys is not None, values is not None,
    )  # fmt: skip


def _place(operand: Operand) -> tuple[int, ...]:
    """Where codes and scale are, with their strides over rows, heads and tokens; their layout; whether the scale is bfloat16; what widens a grid."""
    codes = operand.parts["codes"]
    at = (codes.data_ptr(), *codes.stride()[:3])
    if operand.layout == "states":
        return (*at, 0, 0, 0, 0, _STATES[codes.dtype], 0, 0)
    scale, grid = operand.parts["scale"], operand.grid
    steps = scale.stride()
    by_head = steps[1] if scale.shape[1] > 1 else 0
    return (
        *at, scale.data_ptr(), steps[0], by_head, steps[2], _LAYOUTS[operand.layout], scale.dtype == torch.bfloat16,
        0 if grid is None else widener(grid).address,
    )  # fmt: skip


def _basis(placed: PlacedBasis | None) -> tuple[int, ...]:
    return _NO_BASIS if placed is None else (*basis_places(placed.basis), *basis_sizes(placed.basis))


def _waves(placed: PlacedBasis | None) -> tuple[int, int, int, int]:
    """Position of the first token, pairs, and where the waves of blocks and the table of a block are; see `basis.block_waves`."""
    if placed is None or placed.basis.rope is None:
        return 0, 0, 0, 0
    rope, first = placed.basis.rope, placed.positions
    assert isinstance(first, int), "consecutive tokens"
    blocks = (first + placed.tokens - 1) // BLOCK + 1
    return first, len(rope.inv_freq), block_waves(rope, blocks).data_ptr(), block_table(rope).data_ptr()


@numba.njit(cache=True)
@no_type_check
def _split(parts):
    """Pieces of work: part, first token, tokens. A block of positions is in one piece."""
    count = 0
    for part in parts:
        count += (part[_POSITION] % SPLIT + part[_TOKENS] + SPLIT - 1) // SPLIT
    pieces = np.empty((count, 3), np.int64)
    at = 0
    for p in range(len(parts)):
        tokens, before = parts[p, _TOKENS], parts[p, _POSITION] % SPLIT
        for start in range(-before, tokens, SPLIT):
            first = max(start, 0)
            pieces[at, 0], pieces[at, 1], pieces[at, 2] = p, first, min(start + SPLIT, tokens) - first
            at += 1
    return pieces


@numba.njit(cache=True)
@no_type_check
def _shift_scores(part, even, odd, rest, first, count, out):
    """Scores of the shift of tokens `first` and on, `[queries, count]`: a turn for each block of positions, then one product with a constant table."""
    pairs = part[_PAIRS]
    for i in range(len(out)):
        out[i] = rest[i]
    if pairs == 0:
        return
    position = part[_POSITION] + first
    table = numba.carray(pointer(part[_TABLE]), (2 * pairs * BLOCK,), np.float32)
    turned, scores = np.empty(2 * pairs, np.float32), np.empty(BLOCK, np.float32)
    for block in range(position // BLOCK, (position + count - 1) // BLOCK + 1):
        waves = memory(part[_WAVES] + 4 * block * 2 * pairs, np.float32)
        begin, end = max(block * BLOCK, position), min((block + 1) * BLOCK, position + count)
        for i in range(len(out)):
            for p in range(pairs):
                cos, sin = waves[p], waves[pairs + p]
                turned[p] = even[i, p] * cos + odd[i, p] * sin
                turned[pairs + p] = odd[i, p] * cos - even[i, p] * sin
            scores[:] = np.float32(0)
            add_weighted(turned, table, 2 * pairs, BLOCK, scores)
            for t in range(begin, end):
                out[i, t - position] += scores[t - block * BLOCK]


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def _enter(parts, query, at, turned, even, odd, rest):
    """Queries of head number `at` as each part reads them, `[parts, queries, ...]`."""
    for p in range(len(parts)):
        part = parts[p]
        if part[_IN_BASIS]:
            enter_basis(
                part[_KEY_BASIS], part[_KEY_SIZES], part[_PAIRS], at, query, turned[p], even[p], odd[p], rest[p]
            )
        else:
            turned[p] = query


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def _attend_piece(parts, piece, sizes, at, turned, even, odd, rest, scaling, softcap, output, largest, total):
    batch, kv_heads, groups, _, _ = sizes
    p, first, count = piece
    part, end = parts[p], first + count
    tokens = part[_TOKENS]
    bias = np.empty((groups, count if part[_IN_BASIS] or part[_BIAS] else 0), np.float32)
    if part[_IN_BASIS]:
        _shift_scores(part, even[p], odd[p], rest[p], first, count, bias)
    elif part[_BIAS]:
        bias[:] = numba.carray(pointer(part[_BIAS]), (batch * kv_heads, groups, tokens), np.float32)[at, :, first:end]
    held = batch * kv_heads if part[_LOGITS] else 0
    shown = np.empty((groups, 0), np.float32)
    if held:
        shown = numba.carray(pointer(part[_LOGITS]), (held, groups, tokens), np.float32)[at, :, first:end]
    seen = np.empty(0, np.uint8)
    if part[_SEEN]:
        seen = numba.carray(pointer(part[_SEEN]), (batch, tokens), np.uint8)[at // kv_heads, first:end]
    attend_split(
        turned[p], part[_KEYS], part[_VALUES], at // kv_heads, at % kv_heads, first, count, seen, np.float32(scaling), np.float32(softcap),
        output, largest, total, shown, bias,
    )  # fmt: skip


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def _finish(parts, pieces, at, outputs, largest, total, output, lse):
    """One kv head: the pieces of each part into one and out of the basis, then the parts into one."""
    groups, dim = output.shape
    found, weights = np.empty((len(parts), groups, dim), np.float32), np.empty((len(parts), groups), np.float32)
    begin = 0
    for p in range(len(parts)):
        part, end = parts[p], begin
        while end < len(pieces) and pieces[end, 0] == p:
            end += 1
        merge_splits(outputs[begin:end], largest[begin:end], total[begin:end], found[p], weights[p])
        if part[_OUT_OF_BASIS]:
            leave_basis(part[_VALUE_BASIS], part[_VALUE_SIZES], at, found[p], weights[p])
        begin = end
    join_parts(found, weights, output, lse)


@numba.njit(cache=True)
@no_type_check
def _room(parts, pieces, sizes):
    """Where heads keep their queries in each part's basis, and what each piece finds."""
    batch, kv_heads, groups, dim, value_dim = sizes
    heads, queries = batch * kv_heads, (batch * kv_heads, len(parts), groups)
    return (
        np.empty((*queries, dim), np.float32),
        np.empty((*queries, dim // 2), np.float32),
        np.empty((*queries, dim // 2), np.float32),
        np.empty(queries, np.float32),
        np.empty((heads, len(pieces), groups, value_dim), np.float32),
        np.empty((heads, len(pieces), groups), np.float32),
        np.empty((heads, len(pieces), groups), np.float32),
    )


@numba.njit(cache=True)
@no_type_check
def _open(query_at, output_at, lse_at, sizes):
    batch, kv_heads, groups, dim, value_dim = sizes
    heads = batch * kv_heads
    return (
        numba.carray(pointer(query_at), (heads, groups, dim), np.float32),
        numba.carray(pointer(output_at), (heads, groups, value_dim), np.float32),
        numba.carray(pointer(lse_at), (heads, groups), np.float32),
    )


@numba.njit(fastmath=FAST, cache=True)
@no_type_check
def _attend(parts, query_at, output_at, lse_at, sizes, scaling, softcap):
    query, output, lse = _open(query_at, output_at, lse_at, sizes)
    pieces = _split(parts)
    turned, even, odd, rest, outputs, largest, total = _room(parts, pieces, sizes)
    for at in range(len(query)):
        _enter(parts, query[at], at, turned[at], even[at], odd[at], rest[at])
        for i in range(len(pieces)):
            piece = (pieces[i, 0], pieces[i, 1], pieces[i, 2])
            _attend_piece(
                parts, piece, sizes, at, turned[at], even[at], odd[at], rest[at], scaling, softcap, outputs[at, i],
                largest[at, i], total[at, i],
            )  # fmt: skip
        _finish(parts, pieces, at, outputs[at], largest[at], total[at], output[at], lse[at])


@numba.njit(fastmath=FAST, cache=True, parallel=True)
@no_type_check
def _attend_in_parallel(parts, query_at, output_at, lse_at, sizes, scaling, softcap):
    query, output, lse = _open(query_at, output_at, lse_at, sizes)
    pieces = _split(parts)
    turned, even, odd, rest, outputs, largest, total = _room(parts, pieces, sizes)
    count = len(pieces)
    for at in range(len(query)):
        _enter(parts, query[at], at, turned[at], even[at], odd[at], rest[at])
    for work in numba.prange(len(query) * count):
        at, i = work // count, work % count
        piece = (pieces[i, 0], pieces[i, 1], pieces[i, 2])
        _attend_piece(
            parts, piece, sizes, at, turned[at], even[at], odd[at], rest[at], scaling, softcap, outputs[at, i],
            largest[at, i], total[at, i],
        )  # fmt: skip
    for at in range(len(query)):
        _finish(parts, pieces, at, outputs[at], largest[at], total[at], output[at], lse[at])
