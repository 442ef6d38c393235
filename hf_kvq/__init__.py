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
from hf_kvq.states import HookError

__all__ = [
    "ATTENTION",
    "PRESETS",
    "AffineConfig",
    "AffineQuantized",
    "Clusters",
    "EvictedBlock",
    "HeavyHitters",
    "HookError",
    "IdentityConfig",
    "LayerQuant",
    "QuantConfig",
    "QuantizedCache",
    "QuantizedSlidingWindowCache",
    "dequantize_kv_cache",
    "expected_nbytes",
    "quantization_error_per_token",
    "quantize_kv_cache",
    "resolve_scheme",
]

__version__ = "0.1.0"
