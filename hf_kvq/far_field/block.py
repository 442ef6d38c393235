"""The tokens that leave a window together, as every part of the far field and every hook gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["EvictedBlock"]


@dataclass(frozen=True)
class EvictedBlock:
    """A block of consecutive tokens that left the window of one layer, in the rows that it left in.

    Attributes:
        layer: Index of the layer.
        rows: Rows of the batch that the block left in.
        keys: As attention read them last: decoded, after RoPE.
        values: Likewise.
        positions: The row's own token numbers, padding not counted.
        mass: Decayed attention mass of the tokens, summed over the query heads of a kv head; None where nobody asked for it.
        receipt: What the bank of clusters said of the block; None without one.
    """

    layer: int
    rows: Int[Tensor, " rows"]
    keys: Float[Tensor, "rows kv_heads tokens key_dim"]
    values: Float[Tensor, "rows kv_heads tokens value_dim"]
    positions: Int[Tensor, "rows tokens"]
    mass: Float[Tensor, "rows kv_heads tokens"] | None = None
    receipt: Mapping[str, Any] | None = None
