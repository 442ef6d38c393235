"""What becomes of tokens that leave the window: kept individually, merged into clusters, or shown to a hook."""

from __future__ import annotations

from hf_kvq.config import Clusters
from hf_kvq.far_field.bank import ClusterBank
from hf_kvq.far_field.block import EvictedBlock
from hf_kvq.far_field.bounded import BoundedBank
from hf_kvq.far_field.heavy_hitters import MASS_BYTES, POSITION_BYTES, Displaced, KeptTokens, scaled_rows
from hf_kvq.far_field.protocol import Bank
from hf_kvq.rope import Rope

__all__ = [
    "MASS_BYTES",
    "POSITION_BYTES",
    "Bank",
    "Displaced",
    "EvictedBlock",
    "KeptTokens",
    "cluster_bytes",
    "make_bank",
    "scaled_rows",
]


def make_bank(clusters: Clusters, *, batch: int, rope: Rope | None) -> Bank:
    """An empty bank.

    Args:
        clusters: How many, and how they answer.
        batch: Rows.
        rope: How keys were turned; None where they were not.
    """
    if clusters.closure == "mgf":
        return ClusterBank(clusters.count, batch=batch)
    return BoundedBank(clusters.count, batch=batch, rope=rope)


def cluster_bytes(clusters: Clusters, key_dim: int, value_dim: int) -> int:
    """Bytes of one cluster of one row and kv head."""
    if clusters.closure == "mgf":
        return ClusterBank.bytes_per_cluster(key_dim, value_dim)
    return BoundedBank.bytes_per_cluster(key_dim, value_dim)
