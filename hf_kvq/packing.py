"""How codes lie in bytes."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Int8, UInt8
from torch import Tensor

__all__ = ["Layout", "pack_int4", "unpack_int4"]

Layout = Literal["states", "int8", "e4m3", "int4", "other"]
"""What a kernel must know of `codes`, `[batch, kv_heads, tokens, width]`.

`"states"`: the states themselves. `"int8"`: one signed byte an element. `"e4m3"`: one float8 e4m3fn an element. `"int4"`: as `pack_int4` packs. All but
states are multiplied by `scale`, `[batch, kv_heads or 1, tokens, 1]`. `"other"`: only the codec's own decoder knows.
"""


def pack_int4(codes: Int8[Tensor, "*axes channels"]) -> UInt8[Tensor, "*axes bytes"]:
    """Pack codes of -8 to 7, as code + 8: byte j holds channel j in its low and channel j + channels / 2 in its high four bits.

    Halves, not neighbours, share a byte: unpacking then writes two runs of consecutive channels.

    Raises:
        ValueError: If the number of channels is odd.
    """
    channels = codes.shape[-1]
    if channels % 2:
        raise ValueError(f"4-bit codes are packed in pairs: head_dim must be even, got {channels}; try int8")
    low, high = (codes + 8).view(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack_int4(packed: UInt8[Tensor, "*axes bytes"]) -> Int8[Tensor, "*axes channels"]:
    """The codes that `pack_int4` took."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8) - 8
