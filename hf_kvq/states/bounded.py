"""All tokens of a layer in bounded memory: sinks, a window of codes, and what the far field makes of the rest.

A store takes the tokens of a forward a few at a time, each few with their queries: what left the window goes to the far field first, then the
queries attend to sinks, window, kept tokens and clusters, and what attention says of the tokens' weight is added to their mass. So a prompt of
any length needs no more memory than its own states, and what is kept does not depend on the chunks that a stream came in.

Storage is by columns of the batch, as in `TokenStore`; every boundary is a row's own token number (`Schedule`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from hf_kvq.config import LayerQuant
from hf_kvq.far_field import EvictedBlock
from hf_kvq.kernels import Operand, Part, Partial, Query, Visibility, attend_parts, compute_dtype, merge, zero_logit
from hf_kvq.states.bounds import Asked, Bounds, HookError
from hf_kvq.states.far import FarStore
from hf_kvq.states.mass import Tentative, WindowMass, weights_of
from hf_kvq.states.places import RowPlaces
from hf_kvq.states.store import ROLLBACK, Keys, StateShape, StoreSnapshot, TokenStore, Values
from hf_kvq.states.view import Segment, copy_states

__all__ = ["BoundedSnapshot", "BoundedStore"]

PIECE = 128
"""Queries that attend together where no far field changes between them."""

SPARE = 32
"""Room for codes beyond a window and a piece, in tokens."""


class BoundedSnapshot(NamedTuple):
    """A store at one time, to go back to."""

    tokens: StoreSnapshot
    steps: list[int]
    mass: WindowMass | None
    far: FarStore


class BoundedStore:
    """Keys and values of one layer.

    Args:
        quant: Codecs of keys and values.
        shape: Shape and dtype of the states.
        bounds: What is kept.
        device: Where the states come from.
        residual: Newest tokens that stay exact.
        first_tokens: Column of each row's first real token.
        layer: Index of the layer, for errors and hooks.
        hooks: What is shown each block that leaves.
    """

    def __init__(
        self,
        quant: LayerQuant,
        shape: StateShape,
        bounds: Bounds,
        *,
        device: torch.device,
        residual: int,
        first_tokens: list[int],
        layer: int,
        hooks: Mapping[int, Callable[[EvictedBlock], object]],
    ) -> None:
        self.bounds = bounds
        self.layer = layer
        self.hooks = hooks
        self.rows = RowPlaces(bounds, first_tokens, device)
        self.tokens = TokenStore(
            quant,
            shape,
            device=device,
            sinks=bounds.sinks,
            residual=residual,
            first_tokens=first_tokens,
            layer=layer,
            spare=SPARE,
            rope=bounds.rope,
            # What leaves the window leaves as codes.
            most_statistics=bounds.window,
        )
        self.far = FarStore(bounds, shape, layer)
        self.mass: WindowMass | None = None
        if bounds.heavy_hitters is not None:
            self.mass = WindowMass(shape.batch, shape.kv_heads, compute_dtype(shape.dtype), device)
        self._tentative: list[Tentative] = []

    @property
    def shape(self) -> StateShape:
        return self.tokens.shape

    @property
    def seen(self) -> int:
        """Columns that ever came, less those that were cropped."""
        return self.tokens.seen

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, room for later tokens included."""
        return self.tokens.nbytes + self.far.nbytes + self._mass_nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of what is kept, with scales, positions and masses."""
        return self.tokens.nbytes_used + self.far.nbytes_used + self._mass_nbytes

    def accounting(self) -> dict[str, Int64[Tensor, "batch kv_heads"]]:
        """Where the tokens of every row and kv head are; `seen` is the sum of the others."""
        kept = self.far.kept
        numbers, gone = [max(self.seen - first, 0) for first in self.rows.first], self.rows.gone
        sinks = [min(number, self.bounds.sinks) for number in numbers]
        window = [max(number - left, 0) for number, left in zip(numbers, gone, strict=True)]

        def by_row(counts: list[int]) -> Tensor:
            return torch.zeros_like(self.far.forgotten) + torch.tensor(counts)[:, None]

        return {
            "seen": by_row(numbers),
            "sinks": by_row(sinks),
            "window": by_row(window),
            "kept": by_row(kept.filled if kept else [0] * len(numbers)),
            "clusters": self.far.clustered,
            # Without a far field nobody needs to count: all that left is gone.
            "forgotten": self.far.forgotten.clone()
            if self.bounds.has_far_field
            else by_row([left - self.bounds.sinks for left in gone]),
        }

    def take(
        self,
        keys: Keys,
        values: Values,
        *,
        exact: bool,
        recording: bool = False,
        asked: Asked | None = None,
    ) -> Tensor | None:
        """Store the tokens of a forward, and answer their queries.

        Args:
            keys: Finite, without gradient, zero where padding is.
            values: Likewise.
            exact: Whether queries see the tokens of this forward as they are, or as they are stored.
            recording: Whether the newest of these tokens may be cropped again: the last `ROLLBACK` of them then move nothing out of the window.
            asked: The queries; without them the tokens are stored and no attention is counted.

        Returns:
            The attention output, `[batch, kv_heads, groups, tokens, value_dim]`; None without queries.

        Raises:
            HookError: If a hook raises.
        """
        self.settle(self.seen)
        start, tokens = self.seen, keys.shape[2]
        # Assisted decoding takes back tokens of its last forward: what came before them is there to stay.
        settled = start + max(tokens - ROLLBACK, 0) if recording else start + tokens
        outputs = []
        for begin, end in self._pieces(start, tokens):
            tentative = recording and begin + ROLLBACK > tokens
            if begin == 0 or not tentative:
                self._step_to(start + begin)
            current = keys[:, :, begin:end], values[:, :, begin:end]
            if self.mass is not None:
                self.mass.extend_to(start + end)
            query = None if asked is None else asked.query[:, :, :, begin:end]
            if not exact:
                self.tokens.append(*current, query=query, settled=settled, in_place=False)
            elif self.tokens.sinks is not None:
                self.tokens.sinks.write(*current, start + begin)
            if asked is not None:
                first = self.rows.visible_from(start + begin)
                segments = self.tokens.segments(first, start if exact else start + end)
                since = max(first - start, 0)
                if exact and since < end:
                    fresh = keys[:, :, since:end], values[:, :, since:end]
                    operands = (Operand("states", {"codes": x}, x.shape[3], copy_states) for x in fresh)
                    segments.append(Segment(start + since, *operands))
                piece = replace(asked, query=asked.query[:, :, :, begin:end], column=start + begin)
                outputs.append(self._attend(piece, segments, first, tentative=tentative))
            if exact:
                self.tokens.append(*current, query=query, settled=settled, in_place=False)
        if not recording:
            # Where the store stands then depends on how many tokens came, and not on how.
            self._step_to(start + tokens - 1)
        if asked is None:
            return None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)

    def dense(self, columns: int) -> tuple[Keys, Values]:
        """Sinks and the newest tokens as tensors of `columns` columns, the newest at the end, a row's sinks before its window."""
        shape, tokens = self.shape, self.tokens
        sinks = self.bounds.sinks
        out = tuple(
            torch.zeros(shape.batch, shape.kv_heads, columns, dim, dtype=shape.dtype, device=tokens.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        begin = self.seen - max(columns - sinks, 0)
        for segment in tokens.segments(begin, self.seen):
            place = slice(segment.first - self.seen + columns, segment.end - self.seen + columns)
            segment.keys.decode_into(out[0][:, :, place])
            segment.values.decode_into(out[1][:, :, place])
        if tokens.sinks is not None and tokens.sinks.tensors is not None:
            for row, first in enumerate(self.rows.first):
                held = min(max(self.seen - first, 0), sinks)
                place = max(columns - (self.seen - first), 0)
                for states, exact in zip(out, tokens.sinks.tensors, strict=True):
                    states[row, :, place : place + held] = exact[row, :, :held]
        return out[0], out[1]

    def crop(self, length: int) -> None:
        """Forget the columns from `length` on, and the weight that their queries gave to others."""
        self.settle(length)
        self.tokens.crop(length)
        if self.mass is not None:
            self.mass.crop(length)

    def settle(self, length: int) -> None:
        """Count what the queries before column `length` saw, and forget the others."""
        for tentative in self._tentative:
            queries = min(max(length - tentative.column, 0), tentative.query.shape[3])
            if queries:
                self._observe(tentative.column, tentative.query[:, :, :, :queries])
            if queries and tentative.window is not None:
                kept = None if tentative.kept is None else tentative.kept[:, :, :queries].sum(2)
                self._add_mass(tentative.first, tentative.window[:, :, :queries].sum(2), kept)
        self._tentative = []

    def snapshot(self) -> BoundedSnapshot:
        """The store as it is, good until the next forward but one."""
        return BoundedSnapshot(
            self.tokens.snapshot(), list(self.rows.steps), copy.copy(self.mass), self.far.snapshot()
        )

    def go_back_to(self, snapshot: BoundedSnapshot) -> None:
        """Be what the store was when the snapshot was taken."""
        self._tentative = []
        self.tokens.go_back_to(snapshot.tokens)
        self.rows.steps, self.mass, self.far = list(snapshot.steps), snapshot.mass, snapshot.far

    def select_rows(self, rows: Integer[Tensor, " kept"]) -> None:
        """Keep these rows, in this order, with all that is known of them."""
        self.settle(self.seen)
        self.tokens.select_rows(rows)
        self.rows.select_rows(rows.tolist())
        self.far.select_rows(rows)
        if self.mass is not None:
            self.mass.map(lambda tensor: tensor[rows.to(tensor.device)])

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        self.tokens.map(move)
        self.far.map(move)
        if self.mass is not None:
            self.mass.map(move)

    @property
    def _mass_nbytes(self) -> int:
        return self.mass.tensor.nbytes if self.mass is not None else 0

    def _pieces(self, start: int, tokens: int) -> Iterator[tuple[int, int]]:
        """Stretches of a forward in which no token leaves, and no more than `PIECE` long."""
        if tokens == 1:
            yield 0, 1
            return
        starts = set(range(0, tokens, PIECE))
        if self.bounds.has_far_field:
            block = self.bounds.block
            for first in set(self.rows.first):
                starts.update(range((self.rows.schedule.first_query(0) + first - start) % block, tokens, block))
        starts = sorted(starts)
        yield from zip(starts, [*starts[1:], tokens], strict=True)

    def _step_to(self, column: int) -> None:
        """Let leave what the query at `column` does not see."""
        schedule, groups = self.rows.schedule, self.rows.due(column)
        for (first, step), rows in groups.items():
            target = schedule.step(column - first)
            if self.bounds.has_far_field or self.hooks:
                for next_step in range(step + 1, target + 1):
                    self._fade(rows)
                    if next_step > 0:
                        self._let_leave(rows, first, schedule.gone(next_step - 1))
            for row in rows:
                self.rows.steps[row] = target
        if groups:
            before = min(self.rows.held_from)
            self.tokens.drop_before(before)
            if self.mass is not None:
                self.mass.drop_before(before)

    def _fade(self, rows: list[int]) -> None:
        heavy = self.bounds.heavy_hitters
        if heavy is not None and self.mass is not None and self.far.kept is not None:
            self.mass.fade(rows, heavy.decay)
            self.far.kept.fade(rows, heavy.decay)

    def _let_leave(self, rows: list[int], first: int, position: int) -> None:
        """Show the block that begins at `position` to the far field and to the hooks."""
        column, block = first + position, self.bounds.block
        self.tokens.encode_now()
        (segment,) = self.tokens.segments(column, column + block)
        index = torch.tensor(rows, device=self.tokens.device)
        keys, values = segment.keys.of_rows(index), segment.values.of_rows(index)
        positions = torch.arange(position, position + block, device=index.device).expand(len(rows), -1)
        mass = None if self.mass is None else self.mass.of(index, column, block)
        receipt = self.far.take_in(index, keys, values, positions, first, mass)
        if self.hooks:
            dtype = self.shape.dtype
            states = keys.decode(dtype), values.decode(dtype)
            self._call_hooks(EvictedBlock(self.layer, index, *states, positions.cpu(), mass, receipt))

    def _call_hooks(self, block: EvictedBlock) -> None:
        for hook in list(self.hooks.values()):
            try:
                hook(block)
            except Exception as error:
                name = getattr(hook, "__qualname__", type(hook).__name__)
                tokens = f"{int(block.positions[0, 0])} to {int(block.positions[0, -1])}"
                raise HookError(
                    f"chunk hook {name} raised {type(error).__name__} ({error}) at layer {self.layer}, tokens {tokens} of rows {block.rows.tolist()}; "
                    "the cache is as it was before this forward: mend the hook, or take it out by handle.remove(), and run the forward again"
                ) from error

    def _attend(self, asked: Asked, segments: list[Segment], first: int, *, tentative: bool) -> Tensor:
        query, scoring, column = asked.query, asked.scoring, asked.column
        queries, oldest = query.shape[3], self.rows.oldest()
        done: list[Partial] = []
        parts: list[Part] = []
        window_logits = []
        if self.tokens.sinks is not None and (sinks := self.tokens.sinks.states(column + queries)) is not None:
            nearer, by_order = self._nearer(query, oldest), Visibility(column, queries)
            if nearer is query and queries == 1 and sinks.are_seen_by(by_order):
                parts.append(sinks.part())
            else:
                done.append(sinks.attend(nearer, by_order, scoring))
        # Columns count from the oldest visible one on, so that masks do not grow with the stream.
        window = None if self.bounds.has_far_field else self.bounds.window
        visibility = Visibility(column - first, queries, window, self.rows.real(first, column + queries))
        for segment in segments:
            logits = None
            if self.mass is not None:
                logits = query.new_empty(*query.shape[:4], segment.keys.tokens, dtype=compute_dtype(query.dtype))
                window_logits.append(logits)
            parts.append(Part(segment.keys, segment.values, segment.first - first, visibility, logits))
        if parts:
            done.append(attend_parts(query, parts, scoring))
        if not tentative:
            self._observe(column, query)
        far_parts, kept_logits = self.far.attend(query, scoring, oldest, self.tokens.coded, self.rows.first)
        done += far_parts
        if asked.sink_logits is not None:
            done.append(zero_logit(done[0], asked.sink_logits))
        whole = merge(done)
        weights = kept = None
        if self.mass is not None:
            real = self.rows.real_queries(column, queries)
            weights = weights_of(window_logits, whole.lse, real)
            kept = None if kept_logits is None else weights_of([kept_logits], whole.lse, real)
        begin = segments[0].first if segments else column + queries
        if tentative:
            self._tentative.append(Tentative(column, query, begin, weights, kept))
        elif weights is not None:
            self._add_mass(begin, weights.sum(2), None if kept is None else kept.sum(2))
        return whole.output

    def _observe(self, column: int, query: Query) -> None:
        if self.far.bank is not None:
            self.far.bank.observe(query, self.rows.real_queries(column, query.shape[3]))

    def _nearer(self, query: Query, oldest: Tensor | None) -> Query:
        """Queries for the sinks: to turn the query back is to move all sinks ahead by as much, and costs no code."""
        if oldest is None or self.bounds.rope is None:
            return query
        return self.bounds.rope.rotate(query, -oldest.clamp(min=0)[:, None, None, None])

    def _add_mass(self, first: int, window: Tensor, kept: Tensor | None) -> None:
        """Add weights of columns `first` and on, and of the kept tokens."""
        assert self.mass is not None
        self.mass.add(first, window)
        if kept is not None and self.far.kept is not None:
            self.far.kept.add_mass(kept)
