"""Where each row of a bounded layer stands: what has left its window, and which columns of the batch its queries see.

Storage is by columns of the batch, boundaries are a row's own token numbers; here one becomes the other.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hf_kvq.states.bounds import Bounds
from hf_kvq.states.schedule import Schedule

__all__ = ["RowPlaces"]


class RowPlaces:
    """The step that each row is in.

    Args:
        bounds: What is kept.
        first: Column of each row's first real token.
        device: Where masks are wanted.
    """

    def __init__(self, bounds: Bounds, first: list[int], device: torch.device) -> None:
        self.bounds = bounds
        self.schedule = Schedule(bounds.window, bounds.sinks, bounds.block)
        self.first = list(first)
        self.steps = [self.schedule.step(0)] * len(first)
        self.device = device

    @property
    def gone(self) -> list[int]:
        """Position of each row's first token that is neither a sink nor gone."""
        return [self.schedule.gone(step) for step in self.steps]

    @property
    def held_from(self) -> list[int]:
        """Its column."""
        return [first + position for first, position in zip(self.first, self.gone, strict=True)]

    def due(self, column: int) -> dict[tuple[int, int], list[int]]:
        """Rows that take a step for the query at `column`, by their first column and the step that they are in."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (first, step) in enumerate(zip(self.first, self.steps, strict=True)):
            if step < self.schedule.step(column - first):
                groups.setdefault((first, step), []).append(row)
        return groups

    def can_go_back_to(self, column: int) -> bool:
        """Whether nothing is gone that a query at `column` would have seen."""
        return all(
            gone <= self.schedule.gone(self.schedule.step(column - first))
            for first, gone in zip(self.first, self.gone, strict=True)
        )

    def visible_from(self, column: int) -> int:
        """The oldest column, sinks aside, that a query at `column` or later sees in some row."""
        if not self.bounds.has_far_field:
            return max(column - self.bounds.window + 1, min(self.first) + self.bounds.sinks)
        return min(self.held_from)

    def real(self, begin: int, end: int) -> Bool[Tensor, "batch columns"] | None:
        """Which of the columns `begin` to `end` stand for a token of the window, row by row, as far as it differs; None if all do."""
        since = self.held_from if self.bounds.has_far_field else [first + self.bounds.sinks for first in self.first]
        if max(since) <= begin or end <= begin:
            return None
        return self._at_least(since, begin, min(max(since), end))

    def real_queries(self, column: int, queries: int) -> Bool[Tensor, "batch queries"] | None:
        """Which queries at columns `column` and on are tokens of their row; None if all are."""
        return None if column >= max(self.first) else self._at_least(self.first, column, column + queries)

    def oldest(self) -> Int[Tensor, " batch"] | None:
        """For each row the position that no key may stand before, seen from the last query of its step; None while no key does."""
        if self.bounds.longest is None or self.bounds.rope is None:
            return None
        oldest = [self.schedule.last_query(step) - self.bounds.longest for step in self.steps]
        return torch.tensor(oldest, device=self.device) if max(oldest) > 0 else None

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self.first, self.steps = ([x[row] for row in rows] for x in (self.first, self.steps))

    def _at_least(self, since: list[int], begin: int, end: int) -> Tensor:
        columns = torch.arange(begin, end, device=self.device)
        return columns >= torch.tensor(since, device=self.device)[:, None]
