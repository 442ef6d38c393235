"""How much attention the tokens of a window got: one number a token and kv head, which fades as tokens come.

Attention leaves its logits behind; with the denominator of the whole softmax they are weights, so no code is read a second time. Every change makes a
new tensor, so a shallow copy of a `WindowMass` is a snapshot of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hf_kvq.far_field import scaled_rows
from hf_kvq.kernels import Query

__all__ = ["Tentative", "WindowMass", "weights_of"]


@dataclass(frozen=True)
class Tentative:
    """What weight queries gave that may be cropped again, and the queries, which a bank has not seen yet.

    Attributes:
        column: Of the first query.
        query: The queries.
        first: Column of the first token of the window.
        window: Weights of the window's tokens by query; None where nobody counts them.
        kept: Of the kept tokens, likewise.
    """

    column: int
    query: Query
    first: int
    window: Float[Tensor, "batch kv_heads queries tokens"] | None
    kept: Float[Tensor, "batch kv_heads queries slots"] | None


class WindowMass:
    """Mass of the columns up to `end`, `[batch, kv_heads, columns]`."""

    def __init__(self, batch: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(batch, kv_heads, 0, dtype=dtype, device=device)
        self.end = 0

    def extend_to(self, end: int) -> None:
        """Give columns up to `end` a mass of nothing."""
        self.tensor, self.end = torch.nn.functional.pad(self.tensor, (0, end - self.end)), end

    def add(self, first: int, weights: Float[Tensor, "batch kv_heads tokens"]) -> None:
        """Add weights of columns `first` and on."""
        slot = self._slot(first)
        after = self.tensor.shape[2] - slot - weights.shape[2]
        self.tensor = self.tensor + torch.nn.functional.pad(weights, (slot, after))

    def of(self, rows: Tensor, first: int, tokens: int) -> Float[Tensor, "rows kv_heads tokens"]:
        """The mass of `tokens` columns from `first` on, in these rows."""
        slot = self._slot(first)
        return self.tensor[rows, :, slot : slot + tokens]

    def fade(self, rows: list[int], factor: float) -> None:
        """Multiply the mass of these rows."""
        self.tensor = scaled_rows(self.tensor, rows, factor)

    def drop_before(self, first: int) -> None:
        """Forget the columns before `first`."""
        self.tensor = self.tensor[:, :, max(self._slot(first), 0) :]

    def crop(self, end: int) -> None:
        """Forget the columns from `end` on."""
        self.tensor, self.end = self.tensor[:, :, : self.tensor.shape[2] - (self.end - end)], end

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor by `move(tensor)`."""
        self.tensor = move(self.tensor)

    def _slot(self, column: int) -> int:
        return self.tensor.shape[2] - (self.end - column)


def weights_of(
    logits: list[Tensor],
    lse: Float[Tensor, "batch kv_heads groups queries"],
    real: Bool[Tensor, "batch queries"] | None,
) -> Float[Tensor, "batch kv_heads queries tokens"]:
    """Weights that the query heads of a kv head give together.

    Args:
        logits: `[batch, kv_heads, groups, queries, tokens]` each, of parts that follow each other; overwritten.
        lse: Of the softmax over all parts.
        real: False where a query is padding and gives no weight; None where none is.
    """
    if not logits:
        return lse.new_zeros(*lse.shape[:2], lse.shape[3], 0)
    together = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
    # Queries that see nothing at all: any finite number in place of -inf keeps NaN away.
    denominator = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    weights = together.sub_(denominator).exp_().sum(dim=2)
    return weights if real is None else weights.masked_fill_(~real[:, None, :, None], 0.0)
