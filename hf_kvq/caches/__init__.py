"""Caches that `generate` takes, and how many bytes they come to."""

from __future__ import annotations

from hf_kvq.caches.memory import LayerMemory, expected_nbytes, layer_memory
from hf_kvq.caches.quantized import QuantizedCache
from hf_kvq.caches.sliding import QuantizedSlidingWindowCache

__all__ = ["LayerMemory", "QuantizedCache", "QuantizedSlidingWindowCache", "expected_nbytes", "layer_memory"]
