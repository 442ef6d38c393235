"""All tokens of a layer in bounded memory: sinks, a window of codes, and what the far field makes of the rest.

A store takes the tokens of a forward a few at a time, each few with their queries: what left the window goes to the far field first, then the
queries attend to sinks, window, kept tokens and clusters, and what attention says of the tokens' weight is added to their mass. So a prompt of
any length needs no more memory than its own states, and what is kept does not depend on the chunks that a stream came in.

Storage is by columns of the batch, as in `TokenStore`; every boundary is a row's own token number (`Schedule`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor

from hf_kvq.config import Clusters, FarField, HeavyHitters, LayerQuant
from hf_kvq.far_field import Bank, EvictedBlock, KeptTokens, make_bank, scaled_rows
from hf_kvq.kernels import Operand, Partial, Query, Scoring, Visibility, compute_dtype, kernels_for, merge, zero_logit
from hf_kvq.rope import Rope
from hf_kvq.states.schedule import Schedule
from hf_kvq.states.store import ROLLBACK, Keys, StateShape, StoreSnapshot, TokenStore, Values
from hf_kvq.states.view import Segment, copy_states

__all__ = ["BoundedStore", "Bounds", "HookError"]

PIECE = 256
"""Queries that attend together where no far field changes between them."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a layer keeps.

    Attributes:
        window: Tokens that a query sees at least, itself included and sinks not.
        sinks: First real tokens of every row that stay exact.
        block: Tokens that leave together.
        heavy_hitters: Tokens that left and stay individually.
        clusters: Where the others go.
        rope: How keys were turned; None where they were not.
        longest: Distance beyond which no key may stand from a query; None for any.
    """

    window: int
    sinks: int
    block: int
    heavy_hitters: HeavyHitters | None = None
    clusters: Clusters | None = None
    rope: Rope | None = None
    longest: int | None = None

    @staticmethod
    def far(far_field: FarField | None) -> tuple[HeavyHitters | None, Clusters | None]:
        """The two parts of a far field."""
        parts = far_field if isinstance(far_field, tuple) else (far_field,)
        heavy = next((part for part in parts if isinstance(part, HeavyHitters)), None)
        return heavy, next((part for part in parts if isinstance(part, Clusters)), None)

    @property
    def has_far_field(self) -> bool:
        return self.heavy_hitters is not None or self.clusters is not None


class HookError(RuntimeError):
    """A chunk hook raised; the cache is what it was before the forward."""


@dataclass(frozen=True)
class Asked:
    """Queries at columns `column` and on, and how they score.

    Attributes:
        query: Unscaled.
        column: Of the first query.
        scoring: Scaling and softcap.
        sink_logits: One learned logit a query head that takes weight and gives nothing.
    """

    query: Query
    column: int
    scoring: Scoring
    sink_logits: Float[Tensor, "kv_heads groups"] | None = None


@dataclass(frozen=True)
class _Tentative:
    """What weight queries gave that may be cropped again: to columns `first` and on, and to the kept tokens. A bank has not seen them yet."""

    column: int
    query: Query
    first: int
    window: Float[Tensor, "batch kv_heads queries tokens"] | None
    kept: Float[Tensor, "batch kv_heads queries slots"] | None


class BoundedSnapshot(NamedTuple):
    """A store at one time, to go back to."""

    tokens: StoreSnapshot
    steps: list[int]
    mass: Tensor | None
    forgotten: Tensor
    kept: KeptTokens | None
    bank: Bank | None


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
        self.first = list(first_tokens)
        self.schedule = Schedule(bounds.window, bounds.sinks, bounds.block)
        self.tokens = TokenStore(
            quant, shape, device=device, sinks=bounds.sinks, residual=residual, first_tokens=first_tokens, layer=layer
        )
        self.steps = [self.schedule.step(0)] * shape.batch
        self.forgotten = torch.zeros(shape.batch, shape.kv_heads, dtype=torch.int64)
        self.kept: KeptTokens | None = None
        self.mass: Tensor | None = None
        if bounds.heavy_hitters is not None:
            self.kept = KeptTokens(bounds.heavy_hitters.tokens, batch=shape.batch, kv_heads=shape.kv_heads)
            self.mass = torch.zeros(shape.batch, shape.kv_heads, 0, dtype=compute_dtype(shape.dtype), device=device)
        self.bank: Bank | None = None
        if bounds.clusters is not None:
            self.bank = make_bank(bounds.clusters, batch=shape.batch, rope=bounds.rope)
        self._mass_end = 0  # column after the last one that has a mass
        self._tentative: list[_Tentative] = []

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
        return self.tokens.nbytes + self._far_nbytes(lambda part: part.nbytes)

    @property
    def nbytes_used(self) -> int:
        """Bytes of what is kept, with scales, positions and masses."""
        return self.tokens.nbytes_used + self._far_nbytes(lambda part: part.nbytes_used)

    def accounting(self) -> dict[str, Int64[Tensor, "batch kv_heads"]]:
        """Where the tokens of every row and kv head are; `seen` is the sum of the others."""
        everywhere = torch.zeros_like(self.forgotten)
        numbers = [max(self.seen - first, 0) for first in self.first]
        gone = [self.schedule.gone(step) for step in self.steps]
        sinks = [min(number, self.bounds.sinks) for number in numbers]
        window = [max(number - left, 0) for number, left in zip(numbers, gone, strict=True)]

        def by_row(counts: list[int]) -> Tensor:
            return everywhere + torch.tensor(counts)[:, None]

        return {
            "seen": by_row(numbers),
            "sinks": by_row(sinks),
            "window": by_row(window),
            "kept": by_row(self.kept.filled if self.kept else [0] * len(numbers)),
            "clusters": everywhere + (self.bank.counts.cpu() if self.bank and self.bank.is_allocated else 0),
            "forgotten": self.forgotten.clone(),
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
        outputs = []
        for begin, end in self._pieces(start, tokens):
            # Assisted decoding takes back tokens of its last forward: what came before them is there to stay.
            tentative = recording and begin + ROLLBACK > tokens
            if begin == 0 or not tentative:
                self._step_to(start + begin)
            current = keys[:, :, begin:end], values[:, :, begin:end]
            if self.mass is not None:
                self.mass, self._mass_end = torch.nn.functional.pad(self.mass, (0, end - begin)), start + end
            if not exact:
                self.tokens.append(*current, in_place=False)
            elif self.tokens.sinks is not None:
                self.tokens.sinks.write(*current, start + begin)
            if asked is not None:
                first = self._visible_from(start + begin)
                segments = self.tokens.segments(first, start if exact else start + end)
                since = max(first - start, 0)
                if exact and since < end:
                    fresh = keys[:, :, since:end], values[:, :, since:end]
                    operands = (Operand("states", {"codes": x}, x.shape[3], copy_states) for x in fresh)
                    segments.append(Segment(start + since, *operands))
                piece = replace(asked, query=asked.query[:, :, :, begin:end], column=start + begin)
                outputs.append(self._attend(piece, segments, first, tentative=tentative))
            if exact:
                self.tokens.append(*current, in_place=False)
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
            for row, first in enumerate(self.first):
                held = min(max(self.seen - first, 0), sinks)
                place = max(columns - (self.seen - first), 0)
                for states, exact in zip(out, tokens.sinks.tensors, strict=True):
                    states[row, :, place : place + held] = exact[row, :, :held]
        return out[0], out[1]

    def can_crop(self, length: int) -> bool:
        """Whether everything is there that a query at column `length` would have seen."""
        return all(
            self.schedule.gone(step) <= self.schedule.gone(self.schedule.step(length - first))
            for first, step in zip(self.first, self.steps, strict=True)
        )

    def crop(self, length: int) -> None:
        """Forget the columns from `length` on, and the weight that their queries gave to others."""
        self.settle(length)
        removed = self.seen - length
        self.tokens.crop(length)
        if self.mass is not None:
            self.mass, self._mass_end = self.mass[:, :, : self.mass.shape[2] - removed], length

    def settle(self, length: int) -> None:
        """Count what the queries before column `length` saw, and forget the others."""
        for tentative in self._tentative:
            queries = min(max(length - tentative.column, 0), tentative.query.shape[3])
            if queries and self.bank is not None:
                real = self._real_queries(tentative.column, queries)
                self.bank.observe(tentative.query[:, :, :, :queries], real)
            if queries and tentative.window is not None:
                kept = None if tentative.kept is None else tentative.kept[:, :, :queries].sum(2)
                self._add_mass(tentative.first, tentative.window[:, :, :queries].sum(2), kept)
        self._tentative = []

    def snapshot(self) -> BoundedSnapshot:
        """The store as it is, good until the next forward but one."""
        kept = self.kept.snapshot() if self.kept else None
        # Banks, too, make new tensors at every change.
        bank = copy.copy(self.bank)
        return BoundedSnapshot(self.tokens.snapshot(), list(self.steps), self.mass, self.forgotten, kept, bank)

    def go_back_to(self, snapshot: BoundedSnapshot) -> None:
        """Be what the store was when the snapshot was taken."""
        self._tentative = []
        self.tokens.go_back_to(snapshot.tokens)
        self.steps, self.mass, self.forgotten, self.kept, self.bank = list(snapshot.steps), *snapshot[2:]
        self._mass_end = self.seen

    def select_rows(self, rows: Integer[Tensor, " kept"]) -> None:
        """Keep these rows, in this order, with all that is known of them."""
        self.settle(self.seen)
        numbers = rows.tolist()
        self.tokens.select_rows(rows)
        self.first, self.steps = ([x[row] for row in numbers] for x in (self.first, self.steps))
        self.forgotten = self.forgotten[numbers]
        if self.mass is not None:
            self.mass = self.mass[rows.to(self.mass.device)]
        if self.kept is not None:
            self.kept.map(lambda tensor: tensor[rows.to(tensor.device)])
            self.kept.select_rows(numbers)
        if self.bank is not None:
            self.bank.select_rows(rows)

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        self.tokens.map(move)
        if self.mass is not None:
            self.mass = move(self.mass)
        for part in (self.kept, self.bank):
            if part is not None:
                part.map(move)

    def _far_nbytes(self, count: Callable[[Any], int]) -> int:
        parts = sum(count(part) for part in (self.kept, self.bank) if part is not None)
        return parts + (self.mass.nbytes if self.mass is not None else 0)

    def _pieces(self, start: int, tokens: int) -> Iterator[tuple[int, int]]:
        """Stretches of a forward in which no token leaves, and no more than `PIECE` long."""
        if tokens == 1:
            yield 0, 1
            return
        starts = set(range(0, tokens, PIECE))
        if self.bounds.has_far_field:
            block = self.bounds.block
            for first in set(self.first):
                starts.update(range((self.schedule.first_query(0) + first - start) % block, tokens, block))
        starts = sorted(starts)
        yield from zip(starts, [*starts[1:], tokens], strict=True)

    def _visible_from(self, column: int) -> int:
        """The oldest column, sinks aside, that a query at `column` or later sees in some row."""
        if not self.bounds.has_far_field:
            return max(column - self.bounds.window + 1, min(self.first) + self.bounds.sinks)
        return min(first + self.schedule.gone(step) for first, step in zip(self.first, self.steps, strict=True))

    def _step_to(self, column: int) -> None:
        """Let leave what the query at `column` does not see."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, first in enumerate(self.first):
            if self.steps[row] < self.schedule.step(column - first):
                groups.setdefault((first, self.steps[row]), []).append(row)
        for (first, step), rows in groups.items():
            target = self.schedule.step(column - first)
            if self.bounds.has_far_field or self.hooks:
                for next_step in range(step + 1, target + 1):
                    self._fade(rows)
                    if next_step > 0:
                        self._let_leave(rows, first, self.schedule.gone(next_step - 1))
            else:
                self.forgotten = self._with_forgotten(rows, self.schedule.gone(target) - self.schedule.gone(step))
            for row in rows:
                self.steps[row] = target
        if groups:
            before = min(first + self.schedule.gone(step) for first, step in zip(self.first, self.steps, strict=True))
            self.tokens.drop_before(before)
            if self.mass is not None:
                self.mass = self.mass[:, :, max(self.mass.shape[2] - (self._mass_end - before), 0) :]

    def _fade(self, rows: list[int]) -> None:
        if self.mass is None or self.kept is None:
            return
        assert self.bounds.heavy_hitters is not None
        decay = self.bounds.heavy_hitters.decay
        self.mass = scaled_rows(self.mass, rows, decay)
        self.kept.fade(rows, decay)

    def _let_leave(self, rows: list[int], first: int, position: int) -> None:
        """Show the block that begins at `position` to the far field and to the hooks."""
        block = self.bounds.block
        column = first + position
        (segment,) = self.tokens.segments(column, column + block)
        positions = torch.arange(position, position + block).expand(len(rows), -1)
        index = torch.tensor(rows, device=self.tokens.device)
        mass = None
        if self.mass is not None:
            slot = self.mass.shape[2] - (self._mass_end - column)
            mass = self.mass[index, :, slot : slot + block]
        receipt: Mapping[str, Any] | None = None
        if self.kept is not None:
            assert mass is not None
            codes = {f"key_{name}": _rows(part, index) for name, part in segment.keys.parts.items()}
            codes |= {f"value_{name}": _rows(part, index) for name, part in segment.values.parts.items()}
            displaced = self.kept.absorb(rows, codes, positions.to(index.device), mass)
            if displaced is not None and self.bank is not None:
                receipt = self._merge(segment, index, displaced.codes, displaced.positions)
            elif displaced is not None:
                self.forgotten = self._with_forgotten(rows, displaced.positions.shape[2])
        elif self.bank is not None:
            codes = {f"key_{name}": _rows(part, index) for name, part in segment.keys.parts.items()}
            codes |= {f"value_{name}": _rows(part, index) for name, part in segment.values.parts.items()}
            places = positions[:, None].expand(-1, self.shape.kv_heads, -1).to(index.device)
            receipt = self._merge(segment, index, codes, places)
        else:
            self.forgotten = self._with_forgotten(rows, block)
        if self.hooks:
            keys, values = (
                _decoded(operand, {n: _rows(p, index) for n, p in operand.parts.items()}, self.shape.dtype)
                for operand in (segment.keys, segment.values)
            )
            self._call_hooks(EvictedBlock(self.layer, index, keys, values, positions, mass, receipt))

    def _merge(
        self, segment: Segment, rows: Tensor, codes: Mapping[str, Tensor], positions: Tensor
    ) -> Mapping[str, Any]:
        """Put coded tokens into the bank; returns its receipt."""
        assert self.bank is not None
        states = []
        for operand, prefix in ((segment.keys, "key_"), (segment.values, "value_")):
            parts = {n.removeprefix(prefix): part for n, part in codes.items() if n.startswith(prefix)}
            states.append(_decoded(operand, parts, torch.float32))
        valid = torch.ones_like(positions, dtype=torch.bool)
        return self.bank.absorb(rows, states[0], states[1], positions, valid)

    def _with_forgotten(self, rows: list[int], tokens: int) -> Tensor:
        forgotten = self.forgotten.clone()
        forgotten[rows] += tokens
        return forgotten

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
        queries = query.shape[3]
        kernels, dtype = kernels_for(query.device.type), compute_dtype(query.dtype)
        oldest = self._oldest()
        parts, window_logits, kept_logits = [], [], None
        sinks = self.tokens.sinks.states(column + queries) if self.tokens.sinks is not None else None
        if sinks is not None:
            parts.append(sinks.attend(self._nearer(query, oldest), Visibility(column, queries), scoring))
        # Columns count from the oldest visible one on, so that masks do not grow with the stream.
        visibility = Visibility(
            column - first,
            queries,
            None if self.bounds.has_far_field else self.bounds.window,
            self._real(first, column + queries),
        )
        for segment in segments:
            logits = None
            if self.mass is not None:
                logits = torch.empty(*query.shape[:4], segment.keys.tokens, dtype=dtype, device=query.device)
                window_logits.append(logits)
            for kernel in kernels:
                if kernel.supports(query, segment.keys, segment.values, visibility):
                    parts.append(
                        kernel.attend(
                            query, segment.keys, segment.values, segment.first - first, visibility, scoring, logits
                        )
                    )
                    break
        if self.kept is not None and self.kept.most:
            kept_logits = torch.empty(*query.shape[:4], self.kept.most, dtype=dtype, device=query.device)
            parts.append(self._attend_kept(query, scoring, oldest, kept_logits))
        if self.bank is not None:
            if scoring.softcap is not None:
                raise ValueError(
                    f"layer {self.layer}: clusters have no softcap of logits, and this model gives {scoring.softcap}; "
                    "use HeavyHitters as the far field"
                )
            if not tentative:
                self.bank.observe(query, self._real_queries(column, queries))
            if self.bank.is_allocated:
                parts.append(self.bank.attend(query, scoring.scaling, oldest))
        if asked.sink_logits is not None:
            parts.append(zero_logit(parts[0], asked.sink_logits))
        whole = merge(parts)
        window = kept = None
        begin = segments[0].first if segments else column + queries
        if self.mass is not None:
            # With the softmax's denominator over all parts, the logits that attention left behind are weights.
            real = self._real_queries(column, queries)
            lse = whole.lse.masked_fill(whole.lse == -torch.inf, 0.0)[..., None]
            window = _weights(window_logits, lse, real)
            kept = None if kept_logits is None else _weights([kept_logits], lse, real)
        if tentative:
            self._tentative.append(_Tentative(column, query, begin, window, kept))
        elif window is not None:
            self._add_mass(begin, window.sum(2), None if kept is None else kept.sum(2))
        return whole.output

    def _attend_kept(self, query: Query, scoring: Scoring, oldest: Tensor | None, logits: Tensor) -> Partial:
        kept, coded = self.kept, self.tokens.coded
        assert kept is not None
        assert kept.positions is not None
        codes, shown = kept.held(), kept.shown()
        keys, values = (
            Operand(
                codec.layout,
                {n.removeprefix(prefix): part for n, part in codes.items() if n.startswith(prefix)},
                dim,
                codec.decode_into,
            )
            for codec, prefix, dim in zip(
                (coded.key_codec, coded.value_codec), ("key_", "value_"), coded.dims, strict=True
            )
        )
        if oldest is not None and self.bounds.rope is not None:
            behind = (oldest[:, None, None] - kept.positions[:, :, : kept.most]).clamp(min=0)
            if bool(behind.any()):
                moved = self.bounds.rope.rotate(_decoded(keys, keys.parts, compute_dtype(query.dtype)), behind)
                keys = Operand("states", {"codes": moved}, keys.dim, copy_states)
        visibility = Visibility(kept.most, query.shape[3], real=shown)
        for kernel in kernels_for(query.device.type):
            if kernel.supports(query, keys, values, visibility):
                return kernel.attend(query, keys, values, 0, visibility, scoring, logits)
        raise AssertionError("the last kernel takes everything")

    def _oldest(self) -> Tensor | None:
        """For each row the position that no key may stand before, seen from the last query of this step; None while no key does."""
        if self.bounds.longest is None or self.bounds.rope is None:
            return None
        oldest = [self.schedule.last_query(step) - self.bounds.longest for step in self.steps]
        return torch.tensor(oldest, device=self.tokens.device) if max(oldest) > 0 else None

    def _nearer(self, query: Query, oldest: Tensor | None) -> Query:
        """Queries for the sinks: to turn the query back is to move all sinks ahead by as much, and costs no code."""
        if oldest is None or self.bounds.rope is None:
            return query
        return self.bounds.rope.rotate(query, -oldest.clamp(min=0)[:, None, None, None])

    def _real(self, first: int, end: int) -> Tensor | None:
        """Which of the columns `first` to `end` stand for a token of the window, row by row; None if all do."""
        if self.bounds.has_far_field:
            since = [row + self.schedule.gone(step) for row, step in zip(self.first, self.steps, strict=True)]
        else:
            since = [row + self.bounds.sinks for row in self.first]
        if max(since) <= first or end <= first:
            return None
        columns = torch.arange(first, min(max(since), end), device=self.tokens.device)
        return columns >= torch.tensor(since, device=columns.device)[:, None]

    def _real_queries(self, column: int, queries: int) -> Tensor | None:
        """Which queries are tokens of their row; None if all are."""
        if column >= max(self.first):
            return None
        columns = torch.arange(column, column + queries, device=self.tokens.device)
        return columns >= torch.tensor(self.first, device=columns.device)[:, None]

    def _add_mass(self, first: int, window: Tensor, kept: Tensor | None) -> None:
        """Add weights of columns `first` and on, and of the kept tokens."""
        assert self.mass is not None
        slot = self.mass.shape[2] - (self._mass_end - first)
        after = self.mass.shape[2] - slot - window.shape[2]
        self.mass = self.mass + torch.nn.functional.pad(window, (slot, after))
        if kept is not None and self.kept is not None:
            self.kept.add_mass(kept)


def _weights(logits: list[Tensor], lse: Tensor, real: Tensor | None) -> Float[Tensor, "batch kv_heads queries tokens"]:
    """Weights that the query heads of a kv head give together; none where a query is padding."""
    if not logits:
        return lse.new_zeros(*lse.shape[:2], lse.shape[3], 0)
    together = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
    weights = together.sub_(lse).exp_().sum(dim=2)
    return weights if real is None else weights.masked_fill_(~real[:, None, :, None], 0.0)


def _rows(part: Tensor, rows: Tensor) -> Tensor:
    """Rows of a part; float8 is indexed as bytes."""
    if part.dtype.itemsize == 1:
        return part.view(torch.uint8)[rows].view(part.dtype)
    return part[rows]


def _decoded(operand: Operand, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    codes = parts["codes"]
    out = torch.empty(*codes.shape[:3], operand.dim, dtype=dtype, device=codes.device)
    operand.decoder(parts, out)
    return out
