"""What one forward reads of a layer: segments of consecutive columns and the sinks, as they are stored.

`dense` decodes them all, for a model's own attention; `attend` asks each for its part of the attention and merges the parts. Both read the
same codes. A view is good until its layer is updated again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hf_kvq.kernels import (
    Operand,
    Part,
    Partial,
    Scoring,
    Visibility,
    attend_exact,
    attend_few,
    attend_parts,
    merge,
    zero_logit,
)

__all__ = ["Segment", "SinkStates", "StoreView", "copy_states"]


@dataclass(frozen=True)
class Segment:
    """Tokens at columns `first` to `end`, keys and values coded in one way."""

    first: int
    keys: Operand
    values: Operand

    @property
    def end(self) -> int:
        return self.first + self.keys.tokens

    @property
    def is_exact(self) -> bool:
        """Whether the states are there as they are."""
        return self.keys.layout == self.values.layout == "states"


@dataclass(frozen=True)
class SinkStates:
    """Exact tokens that stand at columns of their row's own: row r's sink s at column `first[r] + s`.

    Attributes:
        keys: `[batch, kv_heads, sinks, head_dim]`.
        values: Likewise.
        first: Column of each row's first real token.
        end: Columns from here on are not held yet.
    """

    keys: Float[Tensor, "batch kv_heads sinks key_dim"]
    values: Float[Tensor, "batch kv_heads sinks value_dim"]
    first: list[int]
    end: int

    def hidden(self, column: int) -> Shaped[Tensor, "batch columns"] | None:
        """Columns of the batch that are a sink of their row and stand at `column` or later, where codes are; None if none do."""
        count = self.keys.shape[2]
        if max(self.first) + count <= column:
            return None
        first = torch.tensor(self.first)[:, None]
        columns = torch.arange(max(self.first) + count)
        return ((columns >= first) & (columns < first + count)).to(self.keys.device)

    def are_seen_by(self, visibility: Visibility) -> bool:
        """Whether every query sees all of them."""
        last = max(self.first) + self.keys.shape[2] - 1
        plain = visibility.mask is None and visibility.window is None
        return plain and last < self.end and last <= visibility.first_query

    def part(self) -> Part:
        """The sinks as a part of what a query sees, which sees them all."""
        keys, values = (Operand("states", {"codes": x}, x.shape[3], copy_states) for x in (self.keys, self.values))
        return Part(keys, values, 0, Visibility(self.keys.shape[2], 1))

    def attend(self, query: Tensor, visibility: Visibility, scoring: Scoring) -> Partial:
        """The part of the attention that the sinks take."""
        if self.are_seen_by(visibility):
            return attend_few(query, self.keys, self.values, None, scoring)
        count = self.keys.shape[2]
        columns = torch.tensor(self.first, device=query.device)[:, None] + torch.arange(count, device=query.device)
        seen = visibility.at(columns)
        held = (columns < self.end)[:, None, None]
        mask = seen & held if seen.dtype == torch.bool else seen.masked_fill(~held, -torch.inf)
        return attend_few(query, self.keys, self.values, mask, scoring)


@dataclass(frozen=True)
class StoreView:
    """Columns `first` to `end` of a layer as one forward reads them.

    Attributes:
        segments: In the order of their columns.
        sinks: Where the layer has any.
        first: The oldest column.
        end: The column after the newest.
        window: Columns that a query sees, itself included; None for all.
        layer: Index of the layer, for errors.
    """

    segments: tuple[Segment, ...]
    sinks: SinkStates | None
    first: int
    end: int
    window: int | None
    layer: int
    dtype: torch.dtype

    def dense(
        self,
    ) -> tuple[Float[Tensor, "batch kv_heads columns key_dim"], Float[Tensor, "batch kv_heads columns value_dim"]]:
        """The states of all columns in the model's dtype; without a copy where they are stored as they are, in one piece."""
        if self.sinks is None and len(self.segments) == 1 and self.segments[0].is_exact:
            return self.segments[0].keys.parts["codes"], self.segments[0].values.parts["codes"]
        like = self.segments[0].keys.parts["codes"] if self.segments else self._sinks.keys
        shape = (*like.shape[:2], self.end - self.first)
        key_dim, value_dim = self._dims
        keys, values = (torch.empty(*shape, dim, dtype=self.dtype, device=like.device) for dim in (key_dim, value_dim))
        if self.sinks is not None:
            before = self.segments[0].first - self.first if self.segments else self.end - self.first
            keys[:, :, :before], values[:, :, :before] = 0, 0
        for segment in self.segments:
            columns = slice(segment.first - self.first, segment.end - self.first)
            segment.keys.decode_into(keys[:, :, columns])
            segment.values.decode_into(values[:, :, columns])
        if self.sinks is not None:
            for row, first in enumerate(self.sinks.first):
                held = max(min(first + self.sinks.keys.shape[2], self.sinks.end) - first, 0)
                columns = slice(first - self.first, first - self.first + held)
                keys[row, :, columns] = self.sinks.keys[row, :, :held]
                values[row, :, columns] = self.sinks.values[row, :, :held]
        return keys, values

    def attend(
        self,
        query: Float[Tensor, "batch heads queries key_dim"],
        visibility: Visibility,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Attention of the queries over all columns, in the query's dtype.

        Args:
            query: The newest columns' queries, unscaled; query head h reads kv head `h // (heads / kv_heads)`.
            visibility: Which columns each query sees.
            scaling: Factor of the dot products.
            softcap: Bound of the logits, `softcap * tanh(logit / softcap)`.
            sink_logits: One learned logit a head that takes weight and gives nothing.
        """
        batch, heads, queries, _ = query.shape
        kv_heads = (self.segments[0].keys.parts["codes"] if self.segments else self._sinks.keys).shape[1]
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, -1)
        plain = softcap is None and sink_logits is None
        if plain and self.sinks is None and len(self.segments) == 1 and self.segments[0].is_exact:
            (only,) = self.segments
            keys, values = only.keys.parts["codes"], only.values.parts["codes"]
            output = attend_exact(grouped, keys, values, only.first, visibility, scaling)
            return output.reshape(batch, heads, queries, -1)
        scoring = Scoring(scaling, softcap)
        parts: list[Part] = []
        done: list[Partial] = []
        if self.sinks is not None:
            if queries == 1 and self.sinks.are_seen_by(visibility):
                parts.append(self.sinks.part())
            else:
                done.append(self.sinks.attend(grouped, visibility, scoring))
            hidden = self.sinks.hidden(self.segments[0].first) if self.segments else None
            visibility = visibility if hidden is None else visibility.hiding(hidden)
        parts += [Part(segment.keys, segment.values, segment.first, visibility) for segment in self.segments]
        if parts:
            done.append(attend_parts(grouped, parts, scoring))
        if sink_logits is not None:
            done.append(zero_logit(done[0], sink_logits.view(kv_heads, -1)))
        return merge(done).output.reshape(batch, heads, queries, -1).to(query.dtype)

    @property
    def _sinks(self) -> SinkStates:
        assert self.sinks is not None
        return self.sinks

    @property
    def _dims(self) -> tuple[int, int]:
        if self.segments:
            return self.segments[0].keys.dim, self.segments[0].values.dim
        return self._sinks.keys.shape[3], self._sinks.values.shape[3]


def copy_states(parts: Mapping[str, Tensor], out: Tensor) -> None:
    """The decoder of states that are kept as they are."""
    out.copy_(parts["codes"])
