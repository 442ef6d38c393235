"""All tokens of a layer: sinks (exact), codes, and the residual (newest tokens, exact).

Tokens are counted in columns of the batch, padding included, so every row has the same columns and what is read lines up with the
model's mask. Codes begin at the first column that is neither padding nor a sink in some row; where a row's padding makes it start
later than another, its sinks lie over its codes.

Codecs that encode several tokens together get whole blocks, counted from the column where the codes begin; tokens of the newest block wait in the residual until
it is full, and are exact until then. Rows of a batch share the blocks, with whatever padding is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from hf_kvq.codecs import Codec, make_codec, make_codecs
from hf_kvq.config import IdentityConfig, LayerQuant
from hf_kvq.kernels import Operand, Query, grid_encoder_for
from hf_kvq.rope import Rope
from hf_kvq.states.buffer import BufferMark, BufferSnapshot
from hf_kvq.states.region import Region
from hf_kvq.states.sinks import SinkStore
from hf_kvq.states.statistics import Statistics
from hf_kvq.states.view import Segment, StoreView, copy_states

__all__ = ["ROLLBACK", "StateShape", "StoreMark", "StoreSnapshot", "TokenStore"]

ROLLBACK = 128
"""Exact tokens that are kept behind the residual on request, so that a crop by as many brings back what was exact."""

FIRST = 128
"""Tokens that `first_encoded` holds at most."""

Keys = Float[Tensor, "batch kv_heads tokens key_dim"]
Values = Float[Tensor, "batch kv_heads tokens value_dim"]


@dataclass(frozen=True)
class StateShape:
    """What stays the same from update to update."""

    batch: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(key_states: Tensor, value_states: Tensor) -> StateShape:
        """The shape of a layer whose states these are."""
        batch, kv_heads, _, key_dim = key_states.shape
        return StateShape(batch, kv_heads, key_dim, value_states.shape[3], key_states.dtype)


class Learned(NamedTuple):
    """What a store knew at one time."""

    codecs: tuple[Codec, Codec]
    queries: Tensor | None


class StoreMark(NamedTuple):
    """The boundaries of a store at one time, to go back to; of exact tokens that wait to be encoded, the storage."""

    seen: int
    coded: BufferMark
    residual: BufferMark | BufferSnapshot
    learned: Learned


class StoreSnapshot(NamedTuple):
    """A store at one time with its storage, to go back to."""

    seen: int
    coded: BufferSnapshot
    residual: BufferSnapshot
    learned: Learned


class TokenStore:
    """Keys and values of one layer.

    Args:
        quant: Codecs of keys and values.
        shape: Shape and dtype of the states.
        device: Where they come from and go back to.
        sinks: First real tokens of every row that stay exact.
        residual: Newest tokens that stay exact.
        first_tokens: Column of each row's first real token.
        window: Columns that a query sees, itself included; None for all.
        layer: Index of the layer, for errors.
        spare: Room for codes beyond those that are there, in tokens, for a store whose tokens leave one by one; None: a quarter of them.
        rope: How the model turned the keys.
        most_statistics: Tokens after which codecs that learn must begin to encode; None for as many as they want.

    Raises:
        ValueError: If tokens are to leave one by one, and are encoded in blocks.
    """

    def __init__(
        self,
        quant: LayerQuant,
        shape: StateShape,
        *,
        device: torch.device,
        sinks: int,
        residual: int,
        first_tokens: list[int],
        window: int | None = None,
        layer: int = 0,
        spare: int | None = None,
        rope: Rope | None = None,
        most_statistics: int | None = None,
    ) -> None:
        self.shape = shape
        self.window = window
        self.layer = layer
        self.device = device
        self.residual_size = residual
        self.seen = 0
        dims = shape.key_dim, shape.value_dim
        self.coded = Region(make_codecs(quant, rope, grid_encoder_for), dims, spare=spare)
        if spare is not None and self.coded.block > 1:
            raise ValueError(
                f"layer {layer}: this scheme encodes tokens in blocks of {self.coded.block}, and the tokens of a bounded cache leave one by one; "
                "use a scheme that encodes each token alone, such as 'int8', or QuantizedCache"
            )
        self.residual = Region((make_codec(IdentityConfig()), make_codec(IdentityConfig())), dims)
        self.sinks = SinkStore(sinks, list(first_tokens)) if sinks else None
        if self.sinks is not None:
            self.coded.restart_at(self.sinks.start)
            self.residual.restart_at(self.sinks.start)
        wanted = max(self.coded.key_codec.statistics, self.coded.value_codec.statistics)
        count = wanted if most_statistics is None else min(wanted, most_statistics)
        self.keeps_first = False
        """Whether the first tokens that are encoded are handed to `first_encoded`, as they came."""
        self.first_encoded: tuple[int, Keys, Values] | None = None
        """The column of the first, their keys and their values; whoever takes them sets None."""
        self.statistics = Statistics(count, [first + sinks for first in first_tokens])
        self._sinks = sinks

    @property
    def depends_on_padding(self) -> bool:
        """Whether what is stored would differ if it were known which columns are padding."""
        codecs = self.coded.key_codec, self.coded.value_codec
        shared = self.coded.block > 1 or any(codec.depends_on_chunks for codec in codecs)
        return self.sinks is not None or not self.is_fitted or shared

    @property
    def is_fitted(self) -> bool:
        """Whether the codecs have learned what they need; until then all tokens are exact."""
        return self.coded.is_fitted

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, room for later tokens included."""
        sinks = self.sinks.nbytes if self.sinks else 0
        return self.coded.nbytes + self.residual.nbytes + sinks + self.statistics.nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of the tokens that are kept, scales included."""
        used = self.coded.nbytes_used + self.residual.nbytes_used + self.statistics.nbytes
        return used + (self.sinks.nbytes if self.sinks else 0)

    def append(
        self,
        keys: Keys,
        values: Values,
        *,
        query: Query | None = None,
        recording: bool = False,
        settled: int | None = None,
        in_place: bool = True,
    ) -> None:
        """Store new tokens: the first ones as sinks, the newest in the residual, the rest as codes once the codecs can encode.

        Args:
            keys: Finite, without gradient.
            values: Likewise.
            query: Their queries, where attention shows them; codecs may learn from them.
            recording: Keep the last `ROLLBACK` tokens that left the residual exactly, beside their codes.
            settled: See `learn`; these columns are not settled where `recording` says that they may be cropped again.
            in_place: Whether a view that was taken before may be overwritten.
        """
        if self.sinks is not None and self.seen < self.sinks.end:
            self.sinks.write(keys, values, self.seen)
            only_sinks = min(max(self.sinks.start - self.seen, 0), keys.shape[2])
            self.seen += only_sinks
            keys, values = (self.sinks.zeroed(x[:, :, only_sinks:], self.seen) for x in (keys, values))
        if keys.shape[2] == 0:
            return
        start, self.seen = self.seen, self.seen + keys.shape[2]
        self.learn(keys, values, start, query, settled=start if recording else settled)
        if not self.is_fitted:
            self.residual.append(keys, values, in_place=in_place)
            return
        leaving = self._reach(self.seen) - self.coded.end
        if leaving > 0:
            self._encode(keys, values, leaving, start, in_place)
        waits = self.residual_size > 0 or self.coded.block > 1
        kept_from = max(self.coded.end - (ROLLBACK if recording and waits else 0), self.residual.first)
        if kept_from == self.seen:
            self.residual.restart_at(self.seen)
        elif kept_from > start:
            # All of the residual left, and tokens that came now went past it: an exact copy of them is never made.
            self.residual.restart_at(kept_from)
            self.residual.append(keys[:, :, kept_from - start :], values[:, :, kept_from - start :])
        else:
            self.residual.append(keys, values, in_place=in_place and self.coded.block == 1)
        self.residual.buffer.drop_before(kept_from)

    def learn(
        self, keys: Keys, values: Values, start: int, query: Query | None, *, settled: int | None = None
    ) -> None:
        """Let codecs learn from tokens that `append` is to take, or is not: a short window drops most of a long prompt.

        Args:
            keys: Of columns `start` and on.
            values: Likewise.
            start: Column of the first one.
            query: Of the newest of these columns.
            settled: The column from which on columns may be cropped again, and nothing is learned; None: none may.
        """
        if self.is_fitted:
            return
        end = start + keys.shape[2]
        if query is not None:
            self.statistics.ask(query, end - query.shape[3])
        if min(end if settled is None else settled, end) >= self.statistics.end:
            self._fit(keys, values, start)

    def encode_now(self) -> None:
        """Learn from what is there, and encode what is not residual: tokens must leave, and a row that began later has too few yet."""
        if self.is_fitted:
            return
        keys, values = self.residual.states(self.residual.first, self.residual.end)
        self._fit(keys[:, :, :0], values[:, :, :0], self.seen)
        leaving = self._reach(self.seen) - self.coded.end
        if leaving > 0:
            self.coded.append(keys[:, :, :leaving], values[:, :, :leaving], in_place=False)
            self.residual.buffer.drop_before(self.coded.end)

    def view(self, first: int, current: tuple[Keys, Values] | None = None) -> StoreView:
        """Columns `first` and on as attention reads them, with `current`, as it is, behind them."""
        segments = self.segments(first, self.seen)
        end = self.seen
        if current is not None:
            segments.append(Segment(end, *(Operand("states", {"codes": x}, x.shape[3], copy_states) for x in current)))
            end += current[0].shape[2]
        sinks = self.sinks.states(self.seen) if self.sinks is not None else None
        return StoreView(tuple(segments), sinks, first, end, self.window, self.layer, self.shape.dtype)

    def segments(self, first: int, end: int) -> list[Segment]:
        """Columns `first` to `end` as they are stored, without those that are sinks in every row."""
        spans = (
            (self.coded, max(first, self.coded.first), min(self.coded.end, end)),
            (self.residual, max(first, self.coded.end, self.residual.first), min(self.residual.end, end)),
        )
        return [region.segment(begin, stop) for region, begin, stop in spans if begin < stop]

    def snapshot(self) -> StoreSnapshot:
        """The store as it is; good for as long as every `append` since has `in_place=False`."""
        return StoreSnapshot(self.seen, self.coded.buffer.snapshot(), self.residual.buffer.snapshot(), self._learned)

    def go_back_to(self, snapshot: StoreSnapshot) -> None:
        """Be what the store was when the snapshot was taken; sinks that came since are written again when they come again."""
        self.seen = snapshot.seen
        self.coded.buffer.go_back_to(snapshot.coded)
        self.residual.buffer.go_back_to(snapshot.residual)
        self._learned = snapshot.learned

    def round_trip(self, keys: Keys, values: Values) -> tuple[Keys, Values]:
        """States as attention would read them after they were stored: codes, with sinks and the newest exact. Nothing is stored.

        Where tokens wait for their block to fill, they are encoded with those that come.
        """
        if not self.is_fitted:
            if self.seen + keys.shape[2] < self.statistics.end:
                return keys, values
            self._fit(keys, values, self.seen)
        start, begin, end = self.seen, self.coded.block_start(self.seen), self._reach(self.seen + keys.shape[2])
        if end <= start:
            return keys, values
        parts = keys[:, :, : end - start], values[:, :, : end - start]
        if begin < start:
            held = self.residual.states(begin, start)
            parts = tuple(torch.cat(pair, dim=2) for pair in zip(held, parts, strict=True))
        region = Region((self.coded.key_codec, self.coded.value_codec), self.coded.dims)
        region.restart_at(begin)
        region.append(*parts)
        decoded = keys.clone(), values.clone()
        segment = region.segment(start, end)
        segment.keys.decode_into(decoded[0][:, :, : end - start])
        segment.values.decode_into(decoded[1][:, :, : end - start])
        if self.sinks is not None:
            self.sinks.restore(decoded, (keys, values), start)
        return decoded

    def drop_before(self, column: int) -> None:
        """Forget the columns before `column`, of a store without sinks; a block goes when all of it does."""
        self.coded.drop_before(column)

    def restart_at(self, column: int) -> None:
        """Forget everything, of a store without sinks; the next token is column `column`."""
        self.coded.restart_at(column)
        self.residual.restart_at(column)
        self.seen = column

    def crop(self, length: int) -> None:
        """Forget the columns from `length` on. Codes stay as they are; what was kept exactly for it becomes residual again.

        The codes of a block that is cut go: its tokens that stay are from then on what was read of them before, and are encoded anew when their block is full again.
        """
        coded_end = min(self.coded.end, max(length - self.residual_size, self.residual.first, self.coded.first))
        whole = self.coded.block_start(min(coded_end, length))
        if whole < min(length, self.residual.first):
            self._decode_from(whole, length)
        self.coded.buffer.drop_from(whole)
        if length < self.residual.first:
            self.residual.restart_at(max(length, self.coded.end))
        else:
            self.residual.buffer.drop_from(length)
            self.residual.buffer.drop_before(self.coded.end)
        self.seen = length
        self.statistics.crop(length)
        if self.is_fitted and length < self.statistics.end and not len(self.coded):
            # Nothing is left that was coded: what comes now is learned from anew.
            self._learned = Learned(
                (self.coded.key_codec.with_tensors({}), self.coded.value_codec.with_tensors({})), None
            )

    def mark(self) -> StoreMark:
        """Where the store stands; valid for `restore` until the second append after it."""
        waiting = not self.is_fitted or self.coded.block > 1
        residual = self.residual.buffer.snapshot() if waiting else self.residual.mark()
        return StoreMark(self.seen, self.coded.mark(), residual, self._learned)

    def restore(self, mark: StoreMark) -> bool:
        """Go back to `mark`; False, and nothing changed, if what it needs was overwritten."""
        if not self.coded.can_restore(mark.coded):
            return False
        if isinstance(mark.residual, BufferSnapshot):
            self.residual.buffer.go_back_to(mark.residual)
        elif self.residual.can_restore(mark.residual):
            self.residual.restore(mark.residual)
        else:
            return False
        self.coded.restore(mark.coded)
        self.seen = mark.seen
        self._learned = mark.learned
        return True

    def select_rows(self, rows: Integer[Tensor, " kept"]) -> None:
        """Keep these rows, in this order: codes, scales, sinks and residual together, without a round trip."""
        self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))
        self.shape = replace(self.shape, batch=len(rows))
        self.statistics.select_rows(rows.tolist())
        if self.sinks is not None:
            self.sinks.select_rows(rows.tolist())

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        self.coded.map(move)
        self.residual.map(move)
        self.statistics.map(move)
        if self.sinks is not None:
            self.sinks.map(move)

    @property
    def _first_tokens(self) -> list[int]:
        return [first - self._sinks for first in self.statistics.first]

    @property
    def _learned(self) -> Learned:
        return Learned((self.coded.key_codec, self.coded.value_codec), self.statistics.queries)

    @_learned.setter
    def _learned(self, learned: Learned) -> None:
        (self.coded.key_codec, self.coded.value_codec), self.statistics.queries = learned

    def _fit(self, keys: Keys, values: Values, start: int) -> None:
        """Let the codecs learn from what is held exactly and from what comes now, from column `start` on."""
        first, end, coded = self.residual.first, self.statistics.end, self.coded
        fresh = keys[:, :, : end - start], values[:, :, : end - start]
        held = (x[:, :, : end - first] for x in self.residual.states(first, start)) if len(self.residual) else ()
        parts = [torch.cat(pair, dim=2) for pair in zip(held, fresh, strict=True)] if len(self.residual) else fresh
        begin = first if len(self.residual) else start
        columns = self.statistics.columns(keys.device).clamp(begin, begin + parts[0].shape[2] - 1)
        queries = self.statistics.chosen_queries(keys.shape[3])
        # A row's own numbers, so that it learns what it would learn alone.
        origin = torch.tensor(self._first_tokens, dtype=torch.int32, device=keys.device)
        coded.key_codec, coded.value_codec = (
            codec.fitted(
                self.statistics.chosen(states, begin), columns - origin[:, None], queries if of_keys else None, origin
            )
            for codec, states, of_keys in ((coded.key_codec, parts[0], True), (coded.value_codec, parts[1], False))
        )
        self.statistics.queries = None

    def _reach(self, seen: int) -> int:
        """The column that codes reach when `seen` are there: they leave the residual out, and hold whole blocks."""
        return self.coded.block_start(seen - self.residual_size)

    def _decode_from(self, column: int, end: int) -> None:
        """Let the residual be columns `column` to `end`, with states that the codes stand for where it had none."""
        first = self.residual.first
        segment = self.coded.segment(column, min(first, end))
        parts = segment.keys.decode(self.shape.dtype), segment.values.decode(self.shape.dtype)
        if first < end:
            parts = tuple(torch.cat(pair, dim=2) for pair in zip(parts, self.residual.states(first, end), strict=True))
        self.residual.restart_at(column)
        self.residual.append(*parts)

    def _encode(self, keys: Keys, values: Values, leaving: int, start: int, in_place: bool) -> None:
        """Encode the `leaving` tokens behind the codes: first what was in the residual, then of `keys` from column `start` on."""
        direct = max(leaving - (start - self.coded.end), 0)
        parts = keys[:, :, :direct], values[:, :, :direct]
        if start > self.coded.end:
            held = self.residual.states(self.coded.end, min(self.coded.end + leaving, start))
            parts = tuple(torch.cat(pair, dim=2) for pair in zip(held, parts, strict=True)) if direct else held
        if self.keeps_first and not self.coded.tokens_encoded:
            self.first_encoded = self.coded.end, parts[0][:, :, :FIRST], parts[1][:, :, :FIRST]
        self.coded.append(*parts, in_place=in_place)
