"""What a bank of clusters is to the cache: tokens in, one part of the attention out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from hf_kvq.kernels import Partial, Query

__all__ = ["Bank"]


@runtime_checkable
class Bank(Protocol):
    """Clusters of every row and kv head. Rows share nothing."""

    @property
    def is_allocated(self) -> bool:
        """Whether a token ever came."""
        ...

    @property
    def counts(self) -> Int64[Tensor, "batch kv_heads"]:
        """Tokens that were merged."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all clusters, free ones included."""
        ...

    @property
    def nbytes_used(self) -> int:
        """Bytes of the clusters in use."""
        ...

    def observe(self, query: Query, real: Bool[Tensor, "batch queries"] | None) -> None:
        """Learn what queries look like; those that are not `real` are padding."""
        ...

    def absorb(
        self,
        rows: Int[Tensor, " rows"],
        keys: Float[Tensor, "rows kv_heads tokens key_dim"],
        values: Float[Tensor, "rows kv_heads tokens value_dim"],
        positions: Int[Tensor, "rows kv_heads tokens"],
        valid: Bool[Tensor, "rows kv_heads tokens"],
    ) -> Mapping[str, Any]:
        """Merge tokens (keys after RoPE) into the clusters of these rows; returns a receipt."""
        ...

    def attend(self, query: Query, scaling: float, oldest: Int[Tensor, " batch"] | None = None) -> Partial:
        """The clusters' part of the attention; none of them stands before position `oldest` of its row."""
        ...

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        ...

    def select_rows(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep these rows, in this order."""
        ...
