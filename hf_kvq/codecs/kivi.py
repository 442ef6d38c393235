"""KIVI: integers of 4 or 2 bits; keys in groups of 32 tokens of one channel, values in groups of 32 channels of one token.

Source: KIVI, arXiv:2402.02750. Some channels of keys are large in every token, so a group of keys stays within a channel; values have no such channels.
Each group has a scale and a minimum: `x` is about `code * scale + minimum`.

Departs from it:
- The paper keeps up to 128 of the newest tokens exactly. Here a token is exact until the `group_size` tokens of its block are there, keys and values alike, beside
  the residual that a scheme asks for; then the block's codes are written, once. So it depends on when a query comes whether it reads a token's states or its
  codes: one pass over a prompt is not decoding token by token, and drafts need not give the tokens of greedy decoding.
- The minimum is rounded down and the scale up, where the paper rounds both to the nearest: so no element of a group lies beyond its codes, and a large bias with a small spread
  around it stays within half a scale.
- Both are float16, as in the paper, unless the group has an element beyond 65504: then both are bfloat16, and the scale's sign bit, which is free, says so. States of up
  to half of float32's range have finite codes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int16, UInt8
from torch import Tensor
from torch.nn.functional import pad

from hf_kvq.codecs.base import Codec, Codes
from hf_kvq.config import KiviConfig
from hf_kvq.packing import Grid

__all__ = ["KiviKeyCodec", "KiviValueCodec"]

NUMBER_BYTES = 2
"""Of a scale, and of a minimum."""

IS_BFLOAT16 = -(2**15)
"""The sign bit of a scale."""


class KiviKeyCodec(Codec):
    """A scale and a minimum for each channel of a block of tokens.

    Every part of the codes has a row for each token, so a block's numbers lie spread over its tokens: first the scales, then the minima, as bytes. They can be read
    for whole blocks only.
    """

    def __init__(self, config: KiviConfig) -> None:
        self.bits = config.bits
        self.block = config.group_size

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        """`|x - decode(encode(x))| <= scale / 2` for every element, with the scale as it is stored.

        Raises:
            ValueError: If the tokens are no whole blocks, or the codes of a token no whole bytes.
        """
        tokens, dim = states.shape[2:]
        if tokens % self.block:
            raise ValueError(
                f"keys are encoded in blocks of {self.block} tokens, got {tokens} tokens; give a multiple of {self.block}"
            )
        packed, scale, minimum = _encode(states, 2, self.block, self.bits)
        numbers = torch.cat([scale, minimum], dim=3).flatten(3).view(torch.uint8)
        width = self._number_bytes(dim)
        spread = pad(numbers, (0, width * self.block - numbers.shape[3]))
        return {"codes": packed, "scale": spread.reshape(*states.shape[:3], width)}

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        batch, kv_heads, tokens, dim = out.shape
        spread = codes["scale"].reshape(batch, kv_heads, tokens // self.block, -1)
        numbers = spread[..., : 2 * NUMBER_BYTES * dim].contiguous().view(torch.int16)
        scale, minimum = numbers.unflatten(3, (2, dim)).split(1, dim=3)
        _decode(codes["codes"], scale, minimum, 2, self.bits, out)

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Where head_dim is no multiple of `group_size` / 4, a block's last bytes are padding."""
        return kv_heads * 8 * (Grid(head_dim, (self.bits,)).width + self._number_bytes(head_dim))

    def _number_bytes(self, head_dim: int) -> int:
        """Bytes of a block's scales and minima that lie with each of its tokens."""
        return -(-2 * NUMBER_BYTES * head_dim // self.block)


class KiviValueCodec(Codec):
    """A scale and a minimum for each group of channels of a token: `group_size` of them, or the most below that divide head_dim."""

    def __init__(self, config: KiviConfig) -> None:
        self.bits = config.bits
        self.most = config.group_size

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        """`|x - decode(encode(x))| <= scale / 2` for every element, with the scale as it is stored.

        Raises:
            ValueError: If the codes of a token are no whole bytes.
        """
        packed, scale, minimum = _encode(states, 3, self._group_size(states.shape[3]), self.bits)
        return {"codes": packed, "scale": torch.cat([scale, minimum], dim=3)[..., 0]}

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        scale, minimum = codes["scale"][..., None].chunk(2, dim=3)
        _decode(codes["codes"], scale, minimum, 3, self.bits, out)

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        groups = head_dim // self._group_size(head_dim)
        return kv_heads * 8 * (Grid(head_dim, (self.bits,)).width + 2 * NUMBER_BYTES * groups)

    def _group_size(self, head_dim: int) -> int:
        return max(size for size in range(1, min(head_dim, self.most) + 1) if head_dim % size == 0)


def _encode(
    states: Float[Tensor, "batch kv_heads tokens head_dim"], axis: int, group_size: int, bits: int
) -> tuple[UInt8[Tensor, "batch kv_heads tokens width"], Int16[Tensor, "..."], Int16[Tensor, "..."]]:
    """Packed codes, and scales and minima as they are stored: `axis` is split in groups and elements, of which there is one here.

    An element's code depends on its group alone, so that codes are the same to the bit however many groups come together.
    """
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    groups = wide.unflatten(axis, (states.shape[axis] // group_size, group_size))
    low, high = groups.amin(dim=axis + 1, keepdim=True), groups.amax(dim=axis + 1, keepdim=True)
    largest = 2**bits - 1
    stored = _stored(low, high, largest)
    scale, minimum = _numbers(*stored, wide.dtype)
    # A group of one number that its minimum holds has scale 0, and all its codes are 0.
    codes = ((groups - minimum) / scale.clamp(min=torch.finfo(wide.dtype).tiny)).round_().clamp_(0, largest)
    return Grid(states.shape[3], (bits,)).pack(codes.to(torch.uint8).view(states.shape)), *stored


def _decode(
    packed: UInt8[Tensor, "batch kv_heads tokens width"],
    scale: Int16[Tensor, "..."],
    minimum: Int16[Tensor, "..."],
    axis: int,
    bits: int,
    out: Float[Tensor, "batch kv_heads tokens head_dim"],
) -> None:
    """Write what `_encode` gave to `out`, rounded once to its dtype."""
    wide = out if out.dtype in (torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
    wide.copy_(Grid(out.shape[3], (bits,)).unpack(packed))
    number, offset = _numbers(scale, minimum, wide.dtype)
    wide.unflatten(axis, (number.shape[axis], -1)).mul_(number).add_(offset)
    if wide is not out:
        out.copy_(wide)


def _stored(
    low: Float[Tensor, "*groups"], high: Float[Tensor, "*groups"], largest: int
) -> tuple[Int16[Tensor, "*groups"], Int16[Tensor, "*groups"]]:
    """Scale and minimum of groups from `low` to `high` whose codes go up to `largest`, 16 bits each."""
    pairs = []
    for dtype in (torch.float16, torch.bfloat16):
        minimum = _rounded_down(low, dtype)
        step = (high - minimum.view(dtype).to(low.dtype)) / largest
        pairs.append((_rounded_down(-step, dtype) & ~IS_BFLOAT16, minimum))
    (scale, minimum), (wide_scale, wide_minimum) = pairs
    fits = torch.maximum(-low, high) <= torch.finfo(torch.float16).max
    return torch.where(fits, scale, wide_scale | IS_BFLOAT16), torch.where(fits, minimum, wide_minimum)


def _numbers(
    scale: Int16[Tensor, "*groups"], minimum: Int16[Tensor, "*groups"], dtype: torch.dtype
) -> tuple[Float[Tensor, "*groups"], Float[Tensor, "*groups"]]:
    """What `_stored` stands for."""
    is_bfloat16 = scale < 0
    first, second = (
        torch.where(is_bfloat16, bits.view(torch.bfloat16).to(dtype), bits.view(torch.float16).to(dtype))
        for bits in (scale & ~IS_BFLOAT16, minimum)
    )
    return first, second


def _rounded_down(x: Float[Tensor, "*groups"], dtype: torch.dtype) -> Int16[Tensor, "*groups"]:
    """The largest numbers of a 16-bit type that are not above `x`, as their bits."""
    near = x.to(dtype)
    bits = near.view(torch.int16)
    # Neighbours of a float differ by 1 as integers: the one below is nearer to zero if it is positive, and further away if it is negative.
    return torch.where(near.to(x.dtype) > x, torch.where(bits < 0, bits + 1, bits - 1), bits)
