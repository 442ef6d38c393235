"""hf_kvq: quantized key/value caches for transformers."""

from __future__ import annotations

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
    Clusters,
    HeavyHitters,
    IdentityConfig,
    LayerQuant,
    QuantConfig,
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
from hf_kvq.states import HookError

__all__ = [
    "ATTENTION",
    "PRESETS",
    "AffineConfig",
    "AffineQuantized",
    "ClusterBank",
    "Clusters",
    "EvictedBlock",
    "HeavyHitters",
    "HookError",
    "IdentityConfig",
    "LayerQuant",
    "OutlierSnapshots",
    "QuantConfig",
    "QuantizedCache",
    "QuantizedClusterOutliers",
    "QuantizedSlidingWindowCache",
    "SortedProfileEncoding",
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
