"""What a layer learns before it can encode: a row's first tokens after its sinks, kept exactly, and their queries.

The tokens are counted from each row's own first one, so what is learned depends neither on the chunks that they come in nor on padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_kvq.kernels import Query

__all__ = ["Statistics"]


class Statistics:
    """The columns that are learned from, and what their queries look like.

    Args:
        count: Tokens of a row.
        first: Column of each row's first one.
    """

    def __init__(self, count: int, first: list[int]) -> None:
        self.count = count
        self.first = list(first)
        self.start = min(first)
        self.queries: Tensor | None = None
        """Of the columns from `start` on, `[batch, kv_heads, columns, groups * dim]`."""

    @property
    def end(self) -> int:
        """The column at which all rows have their tokens."""
        return max(self.first) + self.count

    @property
    def nbytes(self) -> int:
        return 0 if self.queries is None else self.queries.nbytes

    def ask(self, query: Query, column: int) -> None:
        """Take in the queries at columns `column` and on."""
        start = self.start
        fresh = query[:, :, :, max(start - column, 0) : max(self.end - column, 0)]
        if fresh.shape[3] == 0:
            return
        fresh = fresh.transpose(2, 3).flatten(3)
        held = 0 if self.queries is None else self.queries.shape[2]
        missing = max(column, start) - start - held
        parts = [] if self.queries is None else [self.queries]
        if missing > 0:  # tokens whose queries were not shown: a model's own attention read them
            parts.append(fresh.new_zeros((*fresh.shape[:2], missing, fresh.shape[3])))
        self.queries = torch.cat([*parts, fresh], dim=2)

    def crop(self, column: int) -> None:
        """Forget the columns from `column` on."""
        if self.queries is not None:
            self.queries = self.queries[:, :, : max(column - self.start, 0)]

    def columns(self, device: torch.device) -> Int[Tensor, "batch tokens"]:
        """Of the tokens that are learned from."""
        return torch.tensor(self.first, device=device)[:, None] + torch.arange(self.count, device=device)

    def chosen(
        self, states: Float[Tensor, "batch kv_heads columns dim"], first: int
    ) -> Float[Tensor, "batch kv_heads tokens dim"]:
        """The states of those tokens, of states at columns `first` and on."""
        # Where a row has too few tokens yet, its newest one stands for those that are missing.
        index = (self.columns(states.device) - first).clamp(0, states.shape[2] - 1)[:, None, :, None]
        return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))

    def chosen_queries(self, dim: int) -> Float[Tensor, "batch kv_heads queries dim"] | None:
        """The queries of those tokens, zero where they were not shown; None where none were."""
        if self.queries is None:
            return None
        missing = self.end - self.start - self.queries.shape[2]
        queries = torch.nn.functional.pad(self.queries, (0, 0, 0, max(missing, 0)))
        return self.chosen(queries, self.start).unflatten(3, (-1, dim)).flatten(2, 3)

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; tensors move by `map`."""
        self.first = [self.first[row] for row in rows]

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        if self.queries is not None:
            self.queries = move(self.queries)
