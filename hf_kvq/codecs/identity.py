"""The codec that keeps states: it makes every cache operation comparable with `DynamicCache` bit for bit."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.codecs.base import Codec, Codes

__all__ = ["IdentityCodec"]


class IdentityCodec(Codec):
    """States in, the same states out."""

    layout = "states"

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        return {"codes": states}

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        out.copy_(codes["codes"])

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return kv_heads * head_dim * dtype.itemsize * 8
