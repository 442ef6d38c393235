"""Which columns of the cache a query sees, without a tensor of queries x columns until a tile of it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Integer, Shaped
from torch import Tensor

__all__ = ["Visibility"]


@dataclass(frozen=True)
class Visibility:
    """Query i stands at column `first_query + i`; it sees itself, what is before it, and no further back than its window.

    Attributes:
        first_query: Column of the first query.
        queries: How many there are.
        window: Columns that a query sees, itself included; None for all.
        real: False where a column holds nothing for a row (padding); columns past its end are real. Its first column is column 0.
        mask: A mask `[batch or 1, heads or 1, queries, columns]`, True or 0.0 where a query sees; it then says all, `window` and order included. Its first
            column is column `mask_from`.
        mask_from: Column of the mask's first one.
    """

    first_query: int
    queries: int
    window: int | None = None
    real: Bool[Tensor, "batch columns"] | None = None
    mask: Shaped[Tensor, "rows heads queries columns"] | None = None
    mask_from: int = 0

    def hiding(self, hidden: Bool[Tensor, "batch columns"]) -> Visibility:
        """The same, with more columns that hold nothing."""
        if self.real is None:
            return replace(self, real=~hidden)
        columns = max(self.real.shape[1], hidden.shape[1])
        real = torch.nn.functional.pad(self.real, (0, columns - self.real.shape[1]), value=True)
        return replace(self, real=real & ~torch.nn.functional.pad(hidden, (0, columns - hidden.shape[1])))

    def columns_of(self, begin: int, end: int) -> tuple[int, int]:
        """The first and the last column (exclusive) that queries `begin` to `end` can see at all."""
        if self.mask is not None:
            return self.mask_from, self.mask_from + self.mask.shape[3]
        first = 0 if self.window is None else max(self.first_query + begin - self.window + 1, 0)
        return first, self.first_query + end

    def tile(
        self, begin: int, end: int, column: int, columns: int, device: torch.device
    ) -> Bool[Tensor, "rows heads queries columns"] | Float[Tensor, "rows heads queries columns"] | None:
        """What queries `begin` to `end` see of `columns` columns from `column` on; None where they see all of it."""
        real = self._real(column, columns)
        if self.mask is not None:
            start = column - self.mask_from
            tile = self.mask[:, :, begin:end, start : start + columns]
            if real is None:
                return tile
            return (
                tile & real[:, None, None]
                if tile.dtype == torch.bool
                else tile.masked_fill(~real[:, None, None], -torch.inf)
            )
        tile = self._by_order(begin, end, column, columns, device)
        if real is None or tile is None:
            return tile if real is None else real[:, None, None]
        return tile & real[:, None, None]

    def at(
        self, columns: Integer[Tensor, "batch tokens"]
    ) -> Bool[Tensor, "batch heads queries tokens"] | Float[Tensor, "batch heads queries tokens"]:
        """What the queries see of columns that differ from row to row; all of them real."""
        if self.mask is not None:
            index = (columns - self.mask_from).clamp(0, self.mask.shape[3] - 1)[:, None, None]
            mask = self.mask.expand(len(columns), *self.mask.shape[1:])
            return mask.gather(3, index.expand(-1, *mask.shape[1:3], -1))
        places = self.first_query + torch.arange(self.queries, device=columns.device)[:, None]
        seen = columns[:, None, :] <= places
        return (seen if self.window is None else seen & (columns[:, None, :] > places - self.window))[:, None]

    def for_one_query(self, column: int, columns: int) -> tuple[bool, Bool[Tensor, "rows columns"] | None]:
        """Whether a bool for each row and column says what a single query sees, and that (None where it sees all of it)."""
        tile = self.tile(0, 1, column, columns, torch.device("cpu")) if self.mask is not None else None
        if tile is not None:
            simple = tile.dtype == torch.bool and tile.shape[1] == 1
            return simple, tile[:, 0, 0] if simple else None
        return True, self._real(column, columns)

    def _real(self, column: int, columns: int) -> Bool[Tensor, "batch columns"] | None:
        if self.real is None or column >= self.real.shape[1]:
            return None
        real = self.real[:, column : column + columns]
        return torch.nn.functional.pad(real, (0, columns - real.shape[1]), value=True)

    def _by_order(
        self, begin: int, end: int, column: int, columns: int, device: torch.device
    ) -> Bool[Tensor, "1 1 queries columns"] | None:
        first, last = self.first_query + begin, self.first_query + end - 1
        all_before = column + columns - 1 <= first
        all_near = self.window is None or column > last - self.window
        if all_before and all_near:
            return None
        places = torch.arange(first, last + 1, device=device)[:, None]
        held = torch.arange(column, column + columns, device=device)
        seen = held <= places
        return (seen if self.window is None else seen & (held > places - self.window))[None, None]
