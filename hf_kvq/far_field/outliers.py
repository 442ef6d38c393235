"""The tokens that a bank's clusters explain worst, kept in 8 bits, and the others as a fitted distribution.

Source: I2 of the seed, the document of `mixle.experimental.kv_cache_quant`: `QuantizedClusterOutliers`, `quantize_cluster_outliers`
and `dequantize_cluster_outliers`. Outliers go through `quantize_kv_cache` ("quantized exact outliers": their places are exact), the
others through `fit_sorted_profile` ("G4 parametric tails"), both as they are.
Departs from it: where the receipt names the members of every cluster, a cluster's tail is its own members that are no outliers, and it
is checked that every token of the chunk is in exactly one tier of exactly one cluster. The seed's receipt names none; then a cluster's tail is the
whole chunk but its outliers, as the seed has it, and tokens are stored once for each cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.codecs.affine import AffineQuantized, Mode, dequantize_kv_cache, quantize_kv_cache
from hf_kvq.codecs.sorted_profile import SortedProfileEncoding, fit_sorted_profile, reconstruct

__all__ = ["QuantizedClusterOutliers", "dequantize_cluster_outliers", "quantize_cluster_outliers"]

SHOWN = 8
"""Tokens that an error names before it says how many more there are."""


@dataclass(frozen=True, eq=False)
class QuantizedClusterOutliers:
    """One cluster's tokens of one chunk in two tiers; a tier without tokens is None.

    Attributes:
        cluster_id: Slot of the cluster.
        outlier_k: Keys of the outliers, `[n_out, n_head, d_head]`.
        outlier_v: Their values.
        outlier_indices: Their places in the chunk.
        tail_k: Keys of the tail, `[n_tail, n_head, d_head]`.
        tail_v: Their values.
        member_indices: Places of all the cluster's tokens; None where the receipt does not say.
        tail_indices: Places of the tail's tokens, in its order.
    """

    cluster_id: int
    outlier_k: AffineQuantized | None
    outlier_v: AffineQuantized | None
    outlier_indices: np.ndarray | None
    tail_k: SortedProfileEncoding | None
    tail_v: SortedProfileEncoding | None
    member_indices: np.ndarray | None = None
    tail_indices: np.ndarray | None = None


def quantize_cluster_outliers(
    per_cluster_outlier_tokens: Mapping[int, Mapping[str, Any]],
    flat_k: Float[Tensor, "tokens n_head d_head"],
    flat_v: Float[Tensor, "tokens n_head d_value"],
    *,
    mode: Mode = "int8",
    tail_family: Any = None,
    tail_top_k: int = 0,
    tail_gof_threshold: float = 0.05,
    tail_rank_bits: int | None = None,
) -> dict[int, QuantizedClusterOutliers]:
    """Quantize one chunk as its receipt splits it.

    Args:
        per_cluster_outlier_tokens: Of the receipt: `{cluster_id: {"k": [n_out, n_head, d_head], "v": ..., "indices": [n_out]}}`, each
            entry or none of them with `"members": [n]`.
        flat_k: Keys of the whole chunk.
        flat_v: Values of the whole chunk.
        mode: Of the outliers, as in `quantize_kv_cache`.
        tail_family: As in `fit_sorted_profile`; None is the normal distribution.
        tail_top_k: Elements of a tail that are kept exactly. 0, since outliers are out of it already.
        tail_gof_threshold: Kolmogorov-Smirnov distance above which a tail is kept as it is; 1.0 never does.
        tail_rank_bits: Bits of a rank; None keeps ranks exactly, as the seed does.

    Raises:
        ValueError: If indices are out of range or repeated, shapes disagree, or, where members are named, a token of the chunk is in no
            cluster, or in several.
    """
    if flat_k.shape[:2] != flat_v.shape[:2]:
        raise ValueError(
            f"flat_k and flat_v must hold the same tokens and heads, got {tuple(flat_k.shape)} and {tuple(flat_v.shape)}"
        )
    tokens = len(flat_k)
    found = {}
    for cluster, entry in per_cluster_outlier_tokens.items():
        outliers = _indices(entry["indices"], tokens, f"cluster {cluster}: indices")
        members = _indices(entry["members"], tokens, f"cluster {cluster}: members") if "members" in entry else None
        if members is not None and not np.isin(outliers, members).all():
            raise ValueError(
                f"cluster {cluster}: outliers {_shown(np.setdiff1d(outliers, members))} are no members of it; its indices must be among its members"
            )
        tail = np.setdiff1d(np.arange(tokens) if members is None else members, outliers)
        outlier_k, outlier_v = (
            _quantize_outliers(entry[name], flat, len(outliers), f"cluster {cluster}: {name}", mode)
            for name, flat in (("k", flat_k), ("v", flat_v))
        )
        fit = partial(
            fit_sorted_profile,
            top_k=tail_top_k,
            tail_family=tail_family,
            gof_threshold=tail_gof_threshold,
            rank_bits=tail_rank_bits,
        )
        tail_k, tail_v = (_fit_tail(flat, tail, fit) for flat in (flat_k, flat_v))
        found[cluster] = QuantizedClusterOutliers(
            cluster_id=cluster,
            outlier_k=outlier_k,
            outlier_v=outlier_v,
            outlier_indices=outliers if len(outliers) else None,
            tail_k=tail_k,
            tail_v=tail_v,
            member_indices=members,
            tail_indices=tail if len(tail) else None,
        )
    _check_conservation(found, tokens)
    return found


def dequantize_cluster_outliers(q: QuantizedClusterOutliers) -> dict[str, Any]:
    """What a cluster's encodings stand for: `outlier_k`, `outlier_v` as float32 tensors, `tail_k`, `tail_v` as arrays; None for an empty tier.

    Places are exact; a tail's values are those of its fitted distribution in their own order.
    """
    return {
        "outlier_k": None if q.outlier_k is None else dequantize_kv_cache(q.outlier_k),
        "outlier_v": None if q.outlier_v is None else dequantize_kv_cache(q.outlier_v),
        "tail_k": None if q.tail_k is None else reconstruct(q.tail_k),
        "tail_v": None if q.tail_v is None else reconstruct(q.tail_v),
    }


def _indices(given: Any, tokens: int, what: str) -> np.ndarray:
    indices = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if indices.ndim != 1 or (indices.size and not np.issubdtype(indices.dtype, np.integer)):
        raise ValueError(f"{what} must be whole numbers on one axis, got {indices.dtype} of shape {indices.shape}")
    indices = indices.astype(np.int64)
    beyond = indices[(indices < 0) | (indices >= tokens)]
    if beyond.size:
        raise ValueError(f"{what} must be 0 to {tokens - 1}, the chunk's {tokens} tokens, got {_shown(beyond)}")
    places, times = np.unique(indices, return_counts=True)
    if (times > 1).any():
        raise ValueError(f"{what} must name a token once, got {_shown(places[times > 1])} more than once")
    return indices


def _quantize_outliers(states: Any, flat: Tensor, count: int, what: str, mode: Mode) -> AffineQuantized | None:
    states = torch.as_tensor(states)
    if states.shape != (count, *flat.shape[1:]):
        raise ValueError(
            f"{what} must hold the {count} tokens of its indices as the chunk has them, {(count, *flat.shape[1:])}, got {tuple(states.shape)}"
        )
    return quantize_kv_cache(states, mode=mode) if count else None


def _fit_tail(
    flat: Tensor, tail: np.ndarray, fit: Callable[[Tensor], SortedProfileEncoding]
) -> SortedProfileEncoding | None:
    if not len(tail):
        return None
    states = flat.detach()[torch.from_numpy(tail).to(flat.device)].float()
    return fit(states)


def _check_conservation(found: Mapping[int, QuantizedClusterOutliers], tokens: int) -> None:
    """Every token in exactly one cluster; within a cluster the tail is what its outliers are not."""
    named = [cluster for cluster in found.values() if cluster.member_indices is not None]
    if not named:
        return
    if len(named) < len(found):
        silent = sorted(set(found) - {cluster.cluster_id for cluster in named})
        raise ValueError(f'every cluster or none must name its "members", got none for clusters {silent}')
    places = [
        part for cluster in named for part in (cluster.outlier_indices, cluster.tail_indices) if part is not None
    ]
    times = np.bincount(np.concatenate([*places, np.empty(0, np.int64)]), minlength=tokens)
    if (times == 0).any():
        raise ValueError(f"tokens {_shown(np.flatnonzero(times == 0))} are in no cluster; each belongs to exactly one")
    if (times > 1).any():
        raise ValueError(f"tokens {_shown(np.flatnonzero(times > 1))} are in several clusters; each belongs to one")


def _shown(tokens: np.ndarray) -> str:
    more = f" and {len(tokens) - SHOWN} more" if len(tokens) > SHOWN else ""
    return f"{tokens[:SHOWN].tolist()}{more}"
