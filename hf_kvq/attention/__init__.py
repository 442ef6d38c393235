"""Attention over codes under the name "hf_kvq": `model.set_attn_implementation("hf_kvq")`.

Registered when this module is imported, under that name alone; nothing that was there before is touched.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from hf_kvq.attention.function import attention_over_codes
from hf_kvq.attention.mask import CompactMask, compact_mask
from hf_kvq.states import ATTENTION

__all__ = ["ATTENTION", "CompactMask", "attention_over_codes", "compact_mask"]

AttentionInterface.register(ATTENTION, attention_over_codes)
AttentionMaskInterface.register(ATTENTION, compact_mask)
