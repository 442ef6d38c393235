"""How codes lie in bytes.

A `Grid` is what a kernel must know of low-bit codes: how many bits each channel has, how levels become numbers, and which channels share
a scale. Bits lie in planes, so that unpacking writes runs of consecutive channels: a plane of w bits over n channels takes n w / 8 bytes, and byte j
holds channel j + i n w / 8 in its bits i w to (i + 1) w. A code of 3, 5 or 6 bits lies in two planes, 2 + 1, 4 + 1 or 4 + 2, its lower bits first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

__all__ = [
    "BEST_SCALES",
    "CURVES",
    "FLIPS",
    "PLANES",
    "SCALE_ONE",
    "SCALE_STEPS",
    "TRIALS",
    "Grid",
    "Layout",
    "pack_int4",
    "scale_bytes",
    "scale_of",
    "unpack_int4",
]

Layout = Literal["states", "int8", "e4m3", "int4", "grid", "other"]
"""What a kernel must know of `codes`, `[batch, kv_heads, tokens, width]`.

`"states"`: the states themselves. `"int8"`: one signed byte an element. `"e4m3"`: one float8 e4m3fn an element. `"int4"`: as `pack_int4` packs. These three are
multiplied by `scale`, `[batch, kv_heads or 1, tokens, 1]`. `"grid"`: as a `Grid` says. `"other"`: only the codec's own decoder knows.
"""

PLANES: dict[int, tuple[int, ...]] = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}
"""Bits of a code, and the bits of the planes that it lies in, lower bits first."""

CURVES: dict[int, float] = {
    8: 6.6337728e-05, 6: 0.00082425, 5: 0.00276424, 4: 0.00872128, 3: 0.02457252, 2: 0.0567737, 1: 0.0
}  # fmt: skip
"""Bits of a code, and the bend b of its levels: x (1 + b x^2), x = level - (2^bits - 1) / 2.

Chosen so that the squared error of normally distributed numbers is least over all cubics, at the best scale: .1175, .0346, .00969, .00265, .00072 and .000051 of
their variance at 2, 3, 4, 5, 6 and 8 bits. The best free levels (Lloyd, Max) have .1175, .0345, .0095 at 2, 3, 4 bits, evenly spaced ones .1188, .0374, .0115, .0035,
.00104, .000088. A cubic costs a kernel two multiplications, free levels a table.
"""

BEST_SCALES: dict[int, float] = {
    8: 0.0158595,
    6: 0.0617059,
    5: 0.1218273,
    4: 0.2405073,
    3: 0.4714552,
    2: 0.892887,
    1: 1.595526,
}
"""Bits of a code, and the scale at which normally distributed numbers of variance 1 have the least squared error."""

SCALE_STEPS = 8
"""Scales are powers of two in steps of an eighth: byte k stands for 2^((k - SCALE_ONE) / SCALE_STEPS), byte 0 for a token that is zero."""

SCALE_ONE = 128
"""The byte that stands for 1."""


TRIALS = 12
"""Scales that are tried for each group, from the one that reaches its largest element on downwards, a byte apart."""

FLIPS = 4
"""Codes of a token that are moved to a neighbouring level to spare an error where it costs most, at most."""


@dataclass(frozen=True)
class Grid:
    """Low-bit codes of states of `dim` channels.

    `codes` is `[batch, kv_heads, tokens, width]` in uint8: the tiers one after the other, each packed in planes. `scale` is `[batch, kv_heads, tokens,
    groups]` in uint8, one byte for each `group_size` consecutive channels.

    Attributes:
        dim: Channels of a state.
        bits: Bits of a code in each tier; tiers are equally many consecutive channels.

    Raises:
        ValueError: If a tier cannot be packed in whole bytes, or has bits that no plane holds.
    """

    dim: int
    bits: tuple[int, ...]

    def __post_init__(self) -> None:
        if unknown := set(self.bits) - set(PLANES):
            raise ValueError(f"bits must be of {', '.join(map(str, sorted(PLANES)))}, got {sorted(unknown)}")
        if self.dim % len(self.bits) or any(self.tier * bits % 8 for each in self.bits for bits in PLANES[each]):
            raise ValueError(
                f"head_dim {self.dim} in {len(self.bits)} tier(s) of {', '.join(map(str, self.bits))} bits does not fill whole bytes; "
                "try one tier, or 8, 4 or 2 bits"
            )

    @property
    def tier(self) -> int:
        """Channels of a tier."""
        return self.dim // len(self.bits)

    @cached_property
    def group_size(self) -> int:
        """Channels that share a scale: 64, or the most below that divide the channels."""
        return max(size for size in range(1, min(self.dim, 64) + 1) if self.dim % size == 0)

    @property
    def groups(self) -> int:
        return self.dim // self.group_size

    @cached_property
    def width(self) -> int:
        """Bytes of the codes of a token."""
        return sum(self.tier * bits // 8 for bits in self.bits)

    @staticmethod
    def levels(bits: int) -> Float[Tensor, " levels"]:
        """The numbers that the codes of a tier stand for at scale 1, ascending, in float64."""
        x = torch.arange(2**bits, dtype=torch.float64) - (2**bits - 1) / 2
        return x * (1 + CURVES[bits] * x.square())

    def pack(self, codes: UInt8[Tensor, "*axes dim"]) -> UInt8[Tensor, "*axes width"]:
        """Codes, one in a byte, to bytes."""
        parts = []
        for tier, bits in zip(codes.split(self.tier, dim=-1), self.bits, strict=True):
            shift = 0
            for plane in PLANES[bits]:
                parts.append(_pack_plane((tier >> shift) & (2**plane - 1), plane))
                shift += plane
        return torch.cat(parts, dim=-1)

    def unpack(self, packed: UInt8[Tensor, "*axes width"]) -> UInt8[Tensor, "*axes dim"]:
        """What `pack` took."""
        tiers, start = [], 0
        for bits in self.bits:
            tier, shift = None, 0
            for plane in PLANES[bits]:
                width = self.tier * plane // 8
                part = _unpack_plane(packed[..., start : start + width], plane)
                tier = part if tier is None else tier | (part << shift)
                start, shift = start + width, shift + plane
            assert tier is not None
            tiers.append(tier)
        return tiers[0] if len(tiers) == 1 else torch.cat(tiers, dim=-1)

    def decode_into(
        self,
        packed: UInt8[Tensor, "batch kv_heads tokens width"],
        scale: UInt8[Tensor, "batch kv_heads tokens groups"],
        out: Float[Tensor, "batch kv_heads tokens dim"],
    ) -> None:
        """Write the numbers that packed codes stand for to `out`, rounded to its dtype."""
        wide = out if out.dtype in (torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
        wide.copy_(self.unpack(packed))
        for tier, bits in zip(wide.split(self.tier, dim=-1), self.bits, strict=True):
            tier.sub_((2**bits - 1) / 2)
            if bend := CURVES[bits]:
                tier.mul_(tier.square().mul_(bend).add_(1))
        by_group = wide.unflatten(-1, (self.groups, self.group_size))
        by_group.mul_(scale_of(scale, wide.dtype)[..., None])
        if wide is not out:
            out.copy_(wide)


def scale_of(scale: UInt8[Tensor, "*axes"], dtype: torch.dtype) -> Float[Tensor, "*axes"]:
    """What the bytes of scales stand for."""
    return _scale_table(dtype, scale.device)[scale.int()]


def scale_bytes(scale: Float[Tensor, "*axes"]) -> UInt8[Tensor, "*axes"]:
    """The bytes of the smallest scales that are not below these; 0 for 0. Scales beyond a range of 2^-15.9 to 2^15.9 are cut to it."""
    steps = (scale.double().log2() * SCALE_STEPS).ceil() + SCALE_ONE
    return torch.where(scale > 0, steps.clamp(1, 255), 0.0).to(torch.uint8)


@lru_cache(maxsize=16)
def _scale_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept, since a copy from the host at every decode step would make an accelerator wait."""
    with torch.inference_mode(False):
        table = torch.exp2((torch.arange(256, dtype=torch.float64) - SCALE_ONE) / SCALE_STEPS)
        table[0] = 0.0
        return table.to(dtype).to(device)


def _pack_plane(values: UInt8[Tensor, "*axes channels"], bits: int) -> UInt8[Tensor, "*axes bytes"]:
    parts = values.chunk(8 // bits, dim=-1)
    packed = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (i * bits))
    return packed


def _unpack_plane(packed: UInt8[Tensor, "*axes bytes"], bits: int) -> UInt8[Tensor, "*axes channels"]:
    if bits == 8:
        return packed
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-1)


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
