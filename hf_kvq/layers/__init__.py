"""Cache layers that hold codes, after transformers' layer contract."""

from __future__ import annotations

from hf_kvq.layers.live import LiveConfig
from hf_kvq.layers.padding import RowPadding
from hf_kvq.layers.quantized import QuantizedLayer

__all__ = ["LiveConfig", "QuantizedLayer", "RowPadding"]
