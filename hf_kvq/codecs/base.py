"""What a codec is: states in, codes out, and back.

Codes are a mapping of named tensors that all carry the token axis at dimension 2, so that a store can append, cut and
reorder them without knowing what they mean. A codec writes the codes of a token once; nothing is ever encoded again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.packing import Layout

__all__ = ["Codec", "Codes"]

Codes = Mapping[str, Tensor]
"""Named tensors, each `[batch, kv_heads or 1, tokens, width]`."""


class Codec(ABC):
    """Turns states of whole tokens into codes and back."""

    layout: Layout = "other"
    """How the codes are laid out, for kernels that read them."""

    block: int = 1
    """Tokens that are encoded together; `encode` takes a multiple of it."""

    depends_on_chunks: bool = False
    """Whether the codes of a token depend on what else came in its update (a scale shared over tokens)."""

    @abstractmethod
    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"]) -> Codes:
        """Encode states whose elements are all finite."""

    @abstractmethod
    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        """Write the decoded states to `out`, in its dtype, without a second tensor of that size where possible."""

    @abstractmethod
    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bits that one token of one row takes, scales included; exact states are in `dtype`."""

    def decode(
        self, codes: Codes, *, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """The decoded states as a new tensor."""
        batch, kv_heads, tokens, _ = codes["codes"].shape
        out = torch.empty(batch, kv_heads, tokens, head_dim, dtype=dtype, device=codes["codes"].device)
        self.decode_into(codes, out)
        return out
