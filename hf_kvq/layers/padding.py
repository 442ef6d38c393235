"""Which columns of a batch are padding, as far as the caller said."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

__all__ = ["RowPadding"]


@dataclass(frozen=True)
class RowPadding:
    """Padding by row and column.

    Attributes:
        real: True where a column of a row is a token of the row. Columns past its end are real.
        first: Column of each row's first real token.
        end: Column after the last padding of any row.
    """

    real: Bool[Tensor, "batch columns"]
    first: list[int]
    end: int

    @staticmethod
    def from_mask(attention_mask: Bool[Tensor, "batch columns"] | Integer[Tensor, "batch columns"]) -> RowPadding:
        """Read a mask as tokenizers give it: nonzero for a token, 0 for padding.

        Raises:
            ValueError: If it is not `[batch, columns]`, or a row has no token at all.
        """
        if attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [batch, columns], got shape {tuple(attention_mask.shape)}")
        real = attention_mask.bool()
        if empty := (~real.any(dim=1)).nonzero().flatten().tolist():
            raise ValueError(f"attention_mask has no token at all in rows {empty}; leave these rows out of the batch")
        padded = (~real).any(dim=0).nonzero().flatten()
        return RowPadding(
            real=real, first=real.int().argmax(dim=1).tolist(), end=int(padded[-1]) + 1 if len(padded) else 0
        )

    def for_batch(self, batch: int) -> RowPadding:
        """The same for a batch in which every row stands `batch / rows` times in a row, as beams and returned sequences do.

        Raises:
            ValueError: If `batch` is no multiple of the rows.
        """
        rows = len(self.first)
        if batch % rows:
            raise ValueError(
                f"set_padding was given {rows} rows, and the first forward has {batch}; give the mask of this batch"
            )
        return self.select_rows(torch.arange(rows).repeat_interleave(batch // rows))

    def select_rows(self, rows: Integer[Tensor, " kept"]) -> RowPadding:
        """Keep these rows, in this order."""
        return RowPadding(
            real=self.real[rows.to(self.real.device)], first=[self.first[row] for row in rows.tolist()], end=self.end
        )

    def zeroed(
        self, states: Float[Tensor, "batch kv_heads tokens head_dim"], column: int
    ) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """The states of columns `column` and on with zeros for padding, so that it enters no scale."""
        if column >= self.end:
            return states
        real = self.real[:, column : column + states.shape[2]].to(states.device)
        real = torch.nn.functional.pad(real, (0, states.shape[2] - real.shape[1]), value=True)
        return states.masked_fill(~real[:, None, :, None], 0)
