"""What a bank says of a chunk that it took in: where each token went, and which ones fit worst.

Source: the receipt of `birth_and_merge` in E2 of the seed, with its keys "birthed", "merged", "misfit", "assignments" and
"per_cluster_outlier_tokens".
Departs from it: everything is per row and kv head, so "per_cluster_outlier_tokens" is a list of rows of lists of kv heads of the
seed's mapping, with one head in its tensors; an entry also names all "members" of the cluster, by which the token count can be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, final

from jaxtyping import Float, Int64
from torch import Tensor

__all__ = ["BankReceipt", "OutlierTokens"]

OutlierTokens = Mapping[int, Mapping[str, Tensor]]
"""`{cluster_id: {"k": [n_out, n_head, d_head], "v": [n_out, n_head, d_head], "indices": [n_out], "members": [n]}}`."""

OUTLIERS = "per_cluster_outlier_tokens"


@final
@dataclass(frozen=True, eq=False)
class BankReceipt(Mapping[str, Any]):
    """A mapping of the attributes by name, and of "per_cluster_outlier_tokens", which is put together when it is asked for.

    Attributes:
        birthed: Slot of the cluster that was founded, -1 where none was.
        merged: The slot that took another one in, and the one that this freed; -1 where nothing merged.
        misfit: Mean residual of the tokens that a cluster got; NaN where it got none.
        residual: How badly a token fitted the cluster that was nearest when the chunk came.
        assignments: Cluster of each token, -1 where there was none.
        chunk_keys: The tokens that all this is about, 0 where there was none.
        chunk_values: Likewise.
        positions: Their positions; places in the chunk where nobody gave any.
        outlier_top_k: Tokens listed for each cluster.
    """

    birthed: Int64[Tensor, "rows kv_heads"]
    merged: Int64[Tensor, "rows kv_heads 2"]
    misfit: Float[Tensor, "rows kv_heads clusters"]
    residual: Float[Tensor, "rows kv_heads tokens"]
    assignments: Int64[Tensor, "rows kv_heads tokens"]
    chunk_keys: Float[Tensor, "rows kv_heads tokens key_dim"]
    chunk_values: Float[Tensor, "rows kv_heads tokens value_dim"]
    positions: Int64[Tensor, "rows kv_heads tokens"]
    outlier_top_k: int

    @cached_property
    def per_cluster_outlier_tokens(self) -> list[list[OutlierTokens]]:
        """For each row and kv head, and each cluster that got tokens: the `outlier_top_k` tokens with the largest residual."""
        rows, kv_heads = self.birthed.shape
        return [[self._outliers(row, head) for head in range(kv_heads)] for row in range(rows)]

    def __getitem__(self, key: str) -> Any:
        if key == OUTLIERS or key in (field.name for field in fields(self)):
            return getattr(self, key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        yield from (field.name for field in fields(self))
        yield OUTLIERS

    def __len__(self) -> int:
        return len(fields(self)) + 1

    def _outliers(self, row: int, head: int) -> OutlierTokens:
        assignments, residual = self.assignments[row, head], self.residual[row, head]
        found = {}
        for cluster in assignments.unique().tolist():
            if cluster < 0:
                continue
            members = (assignments == cluster).nonzero()[:, 0]
            largest = residual[members].topk(min(self.outlier_top_k, len(members))).indices
            indices = members[largest].sort().values
            found[cluster] = {
                "k": self.chunk_keys[row, head, indices][:, None],
                "v": self.chunk_values[row, head, indices][:, None],
                "indices": indices,
                "members": members,
            }
        return found
