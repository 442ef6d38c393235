"""Sinks: the first real tokens of every row, kept exactly.

Source: StreamingLLM, arXiv:2309.17453: attention leans on the first tokens whatever they say, so an error there costs most.
A left-padded row has its sinks behind its padding. Columns are the columns of the batch; row r's sink s is column
`first[r] + s`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.states.view import SinkStates

__all__ = ["SinkStore"]


class SinkStore:
    """`count` exact tokens a row, indexed by the row's own token number.

    Args:
        count: Sinks of a row.
        first: Column of each row's first real token.
    """

    def __init__(self, count: int, first: list[int]) -> None:
        self.count = count
        self.first = first
        self.tensors: tuple[Tensor, Tensor] | None = None

    @property
    def start(self) -> int:
        """First column that is neither padding nor a sink in some row: what follows is held as codes."""
        return min(self.first) + self.count

    @property
    def end(self) -> int:
        """First column behind the sinks of all rows."""
        return max(self.first) + self.count

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors or ())

    def write(
        self,
        keys: Float[Tensor, "batch kv_heads tokens key_dim"],
        values: Float[Tensor, "batch kv_heads tokens value_dim"],
        column: int,
    ) -> None:
        """Take the sinks that are among columns `column` and on."""
        tokens = keys.shape[2]
        if column >= self.end:
            return
        if self.tensors is None:
            with torch.inference_mode(False):
                self.tensors = (self._new(keys), self._new(values))
        for row in range(len(self.first)):
            begin, end = self._columns(row, column, column + tokens)
            if begin < end:
                sink = begin - self.first[row]
                for store, states in zip(self.tensors, (keys, values), strict=True):
                    store[row, :, sink : sink + end - begin] = states[row, :, begin - column : end - column]

    def zeroed(
        self, states: Float[Tensor, "batch kv_heads tokens head_dim"], column: int
    ) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """States of columns `column` and on, zero where a row has a sink: another row's padding may put it among the codes."""
        rows = [row for row in range(len(self.first)) if column < self.first[row] + self.count]
        if rows:
            states = states.clone()
        for row in rows:
            begin, end = self._columns(row, column, column + states.shape[2])
            states[row, :, begin - column : max(end, begin) - column] = 0
        return states

    def restore(
        self,
        states: tuple[
            Float[Tensor, "batch kv_heads tokens key_dim"], Float[Tensor, "batch kv_heads tokens value_dim"]
        ],
        exact: tuple[Float[Tensor, "batch kv_heads tokens key_dim"], Float[Tensor, "batch kv_heads tokens value_dim"]],
        column: int,
    ) -> None:
        """Put those of columns `column` and on that are sinks where their codes' states are."""
        for row in range(len(self.first)):
            begin, end = self._columns(row, column, column + states[0].shape[2])
            place = slice(begin - column, max(end, begin) - column)
            for target, source in zip(states, exact, strict=True):
                target[row, :, place] = source[row, :, place]

    def states(self, end: int) -> SinkStates | None:
        """The sinks at columns before `end` as attention reads them; None while there are none."""
        return None if self.tensors is None else SinkStates(*self.tensors, list(self.first), end)

    def _new(self, states: Tensor) -> Tensor:
        return states.new_zeros(*states.shape[:2], self.count, states.shape[3])

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self.first = [self.first[row] for row in rows]

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        if self.tensors is not None:
            self.tensors = (move(self.tensors[0]), move(self.tensors[1]))

    def _columns(self, row: int, begin: int, end: int) -> tuple[int, int]:
        """The columns of row `row`'s sinks within `begin` to `end`."""
        return max(self.first[row], begin), min(self.first[row] + self.count, end)
