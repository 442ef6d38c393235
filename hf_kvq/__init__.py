"""hf_kvq: quantized key/value caches for transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_kvq.attention import ATTENTION
from hf_kvq.caches import QuantizedCache, QuantizedSlidingWindowCache, expected_nbytes
from hf_kvq.codecs.affine import (
    AffineQuantized,
    dequantize_kv_cache,
    quantization_error_per_token,
    quantize_kv_cache,
)
from hf_kvq.codecs.sorted_profile import SortedProfileEncoding, detect_anomaly, fit_sorted_profile, reconstruct
from hf_kvq.config import (
    PRESETS,
    AffineConfig,
    Band,
    Clusters,
    HeavyHitters,
    IdentityConfig,
    KiviConfig,
    LayerQuant,
    QuantConfig,
    RotatedConfig,
    resolve_scheme,
)
from hf_kvq.far_field import EvictedBlock
from hf_kvq.far_field.bank import ClusterBank, birth_and_merge, cluster_responsibilities, ingest
from hf_kvq.far_field.outliers import (
    QuantizedClusterOutliers,
    dequantize_cluster_outliers,
    quantize_cluster_outliers,
)
from hf_kvq.far_field.snapshots import OutlierSnapshots
from hf_kvq.layers import CodesUnfitWarning
from hf_kvq.states import HookError

if TYPE_CHECKING:
    from hf_kvq.evaluation import allocate

__all__ = [
    "ATTENTION",
    "PRESETS",
    "AffineConfig",
    "AffineQuantized",
    "Band",
    "ClusterBank",
    "Clusters",
    "CodesUnfitWarning",
    "EvictedBlock",
    "HeavyHitters",
    "HookError",
    "IdentityConfig",
    "KiviConfig",
    "LayerQuant",
    "OutlierSnapshots",
    "QuantConfig",
    "QuantizedCache",
    "QuantizedClusterOutliers",
    "QuantizedSlidingWindowCache",
    "RotatedConfig",
    "SortedProfileEncoding",
    "allocate",
    "birth_and_merge",
    "cluster_responsibilities",
    "dequantize_cluster_outliers",
    "dequantize_kv_cache",
    "detect_anomaly",
    "expected_nbytes",
    "fit_sorted_profile",
    "ingest",
    "quantization_error_per_token",
    "quantize_cluster_outliers",
    "quantize_kv_cache",
    "reconstruct",
    "resolve_scheme",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`allocate`, whose module is imported when it is first asked for: caches do without evaluations."""
    if name != "allocate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_kvq.evaluation import allocate

    return allocate
