"""What a layer learns before it can encode: a row's first tokens after its sinks, kept exactly, and the energy of their queries.

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
        self.energy: Tensor | None = None
        """Mean square over the query heads of a kv head, `[batch, kv_heads, columns, dim]`, from column `min(first)` on."""

    @property
    def end(self) -> int:
        """The column at which all rows have their tokens."""
        return max(self.first) + self.count

    @property
    def nbytes(self) -> int:
        return 0 if self.energy is None else self.energy.nbytes

    def ask(self, query: Query, column: int) -> None:
        """Take in the queries at columns `column` and on; the first ones decide from where on they are counted."""
        start = min(self.first)
        fresh = query[:, :, :, max(start - column, 0) : max(self.end - column, 0)]
        if fresh.shape[3] == 0:
            return
        energy = fresh.float().square().mean(dim=2)
        held = 0 if self.energy is None else self.energy.shape[2]
        missing = max(column, start) - start - held
        parts = [] if self.energy is None else [self.energy]
        if missing > 0:  # tokens whose queries were not shown: a model's own attention read them
            parts.append(energy.new_full((*energy.shape[:2], missing, energy.shape[3]), torch.nan))
        self.energy = torch.cat([*parts, energy], dim=2)

    def crop(self, column: int) -> None:
        """Forget the columns from `column` on."""
        if self.energy is not None:
            self.energy = self.energy[:, :, : max(column - min(self.first), 0)]

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

    def query_energy(self) -> Float[Tensor, "batch kv_heads dim"] | None:
        """Mean over the tokens whose queries were shown; None where none were, or not in every row."""
        if self.energy is None:
            return None
        missing = self.end - min(self.first) - self.energy.shape[2]
        energy = torch.nn.functional.pad(self.energy, (0, 0, 0, max(missing, 0)), value=torch.nan)
        mean = self.chosen(energy, min(self.first)).double().nanmean(dim=2)
        return None if bool(mean.isnan().any()) else mean

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; tensors move by `map`."""
        self.first = [self.first[row] for row in rows]

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        if self.energy is not None:
            self.energy = move(self.energy)
