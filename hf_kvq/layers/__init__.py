"""Cache layers that hold codes, after transformers' layer contract."""

from __future__ import annotations

from hf_kvq.layers.bounded import BoundedLayer
from hf_kvq.layers.canary import CodesUnfitWarning
from hf_kvq.layers.coded import CodedLayer
from hf_kvq.layers.live import LiveConfig
from hf_kvq.layers.padding import RowPadding
from hf_kvq.layers.quantized import QuantizedLayer

__all__ = ["BoundedLayer", "CodedLayer", "CodesUnfitWarning", "LiveConfig", "QuantizedLayer", "RowPadding"]
