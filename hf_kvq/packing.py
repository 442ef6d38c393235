"""How codes lie in bytes.

A `Grid` is what a kernel must know of low-bit codes: how many bits each channel has, how levels become numbers, and which channels share
a scale. Bits lie in planes, so that unpacking writes runs of consecutive channels: a plane of w bits over n channels takes n w / 8 bytes, and byte j
holds channel j + i n w / 8 in its bits i w to (i + 1) w. A code of 3, 5 or 6 bits lies in two planes, 2 + 1, 4 + 1 or 4 + 2, its lower bits first.

With a trellis the lowest bits of all channels are a path through 16 states, and lie in a plane of their own before the tiers. They choose, with those of up to four channels
before, one of four interleaved quarters of twice as many levels; the other bits choose in it. So the code costs as many bits as without, and its levels lie twice as
dense: a third of the squared error goes. Source: trellis-coded quantization (Marcellin and Fischer, 1990) with Ungerboeck's code of 16 states. Departs from it: the code is fed forward, so
every channel is decoded alone, from bits that lie in order; and the levels lie on a cubic.
"""

from __future__ import annotations

import functools
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
    "HIGH_PATH",
    "LOW_PATH",
    "MEMORY",
    "OFFSETS",
    "PLANES",
    "SCALE_ONE",
    "SCALE_STEPS",
    "TRELLIS_CURVES",
    "TRELLIS_SCALES",
    "TRIALS",
    "Grid",
    "Layout",
    "Plane",
    "pack_int4",
    "quarter_of",
    "quarters",
    "scale_bytes",
    "scale_of",
    "unpack_int4",
]

Layout = Literal["states", "int8", "e4m3", "int4", "grid", "other"]
"""What a kernel must know of `codes`, `[batch, kv_heads, tokens, width]`.

`"states"`: the states themselves. `"int8"`: one signed byte an element. `"e4m3"`: one float8 e4m3fn an element. `"int4"`: as `pack_int4` packs. These three are
multiplied by `scale`, `[batch, kv_heads or 1, tokens, 1]`. `"grid"`: as a `Grid` says. `"other"`: only the codec's own decoder knows.
"""

PLANES: dict[int, tuple[int, ...]] = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,), 0: ()}
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

TRELLIS_CURVES: dict[int, float] = {
    6: 0.00037975, 5: 0.00124111, 4: 0.00463756, 3: 0.01426975, 2: 0.0453364, 1: 0.0567742
}  # fmt: skip
"""The same for codes on a trellis, whose levels are those of one bit more.

Chosen so that the squared error of long sequences of normally distributed numbers is least, at `TRELLIS_SCALES`. What vectors of 64 lose at the best of the scales that
are tried is `hf_kvq.evaluation.allocation.LADDER`; `tests/test_codecs_trellis.py` prints it as a share of what they lose without a trellis.
"""

TRELLIS_SCALES: dict[int, float] = {6: 0.0230528, 5: 0.0484168, 4: 0.0912281, 3: 0.181216, 2: 0.342638, 1: 0.70873}
"""The best scale of codes on a trellis, likewise."""

LOW_PATH, HIGH_PATH = (2,), (0, 1, 4)
"""How many channels back the bits are whose parity is the lowest, and the second, bit of a level on a trellis (Ungerboeck's 04 and 23)."""

MEMORY = max(HIGH_PATH)
"""Channels back that a path remembers: it is in one of 2^MEMORY states."""

OFFSETS = (-3, -2, -1, 0, 1, 2, 3, 4)
"""Bytes beyond the one that fits a token's size that are tried as its scale on a trellis."""

SCALE_STEPS = 8
"""Scales are powers of two in steps of an eighth: byte k stands for 2^((k - SCALE_ONE) / SCALE_STEPS), byte 0 for a token that is zero."""

SCALE_ONE = 128
"""The byte that stands for 1."""


TRIALS = 12
"""Scales that are tried for each group, from the one that reaches its largest element on downwards, a byte apart."""

FLIPS = 4
"""Codes of a token that are moved to a neighbouring level to spare an error where it costs most, at most."""


@dataclass(frozen=True)
class Plane:
    """Bits of consecutive channels.

    Attributes:
        first: The first channel.
        channels: How many.
        bits: Of each channel.
        below: Bits of a code that are below these.
        start: Byte at which they begin.
    """

    first: int
    channels: int
    bits: int
    below: int
    start: int

    @property
    def run(self) -> int:
        """Bytes."""
        return self.channels * self.bits // 8


@dataclass(frozen=True)
class Grid:
    """Low-bit codes of states of `dim` channels.

    `codes` is `[batch, kv_heads, tokens, width]` in uint8: the tiers one after the other, each packed in planes. `scale` is `[batch, kv_heads, tokens,
    groups]` in uint8, one byte for each `group_size` consecutive channels.

    Attributes:
        dim: Channels of a state.
        bits: Bits of a code in each tier; tiers are equally many consecutive channels.
        trellis: Whether the lowest bits of the codes are a path.

    Raises:
        ValueError: If a tier cannot be packed in whole bytes, or has bits that no plane holds.
    """

    dim: int
    bits: tuple[int, ...]
    trellis: bool = False

    def __post_init__(self) -> None:
        known = TRELLIS_CURVES if self.trellis else CURVES
        if unknown := set(self.bits) - set(known):
            raise ValueError(f"bits must be of {', '.join(map(str, sorted(known)))}, got {sorted(unknown)}")
        if self.dim % len(self.bits) or any(plane.channels * plane.bits % 8 for plane in self.planes):
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
    def planes(self) -> tuple[Plane, ...]:
        """Where the bits of all codes are, in the order of the bytes."""
        planes = [Plane(0, self.dim, 1, 0, 0)] if self.trellis else []
        path = len(planes)
        start = path * self.dim // 8
        for tier, bits in enumerate(self.bits):
            below = path
            for plane in PLANES[bits - path]:
                planes.append(Plane(tier * self.tier, self.tier, plane, below, start))
                start, below = start + planes[-1].run, below + plane
        return tuple(planes)

    @cached_property
    def width(self) -> int:
        """Bytes of the codes of a token."""
        return sum(self.tier * bits // 8 for bits in self.bits)

    def curve(self, bits: int) -> float:
        """The bend of the levels of codes of so many bits."""
        return (TRELLIS_CURVES if self.trellis else CURVES)[bits]

    def best_scale(self, bits: int) -> float:
        """The scale at which normally distributed numbers of variance 1 have the least squared error."""
        return (TRELLIS_SCALES if self.trellis else BEST_SCALES)[bits]

    def levels(self, bits: int) -> Float[Tensor, " levels"]:
        """The numbers that codes of so many bits stand for at scale 1, ascending, in float64."""
        count = 2 ** (bits + self.trellis)
        x = torch.arange(count, dtype=torch.float64) - (count - 1) / 2
        return x * (1 + self.curve(bits) * x.square())

    def level_of(self, codes: UInt8[Tensor, "*axes dim"]) -> UInt8[Tensor, "*axes dim"]:
        """Which level each code of a token stands for."""
        return quarter_of(codes & 1) | ((codes >> 1) << 2) if self.trellis else codes

    def pack(self, codes: UInt8[Tensor, "*axes dim"]) -> UInt8[Tensor, "*axes width"]:
        """Codes, one in a byte, to bytes."""
        parts = []
        for plane in self.planes:
            run = codes[..., plane.first : plane.first + plane.channels]
            parts.append(_pack_plane((run >> plane.below) & (2**plane.bits - 1), plane.bits))
        return torch.cat(parts, dim=-1)

    def unpack(self, packed: UInt8[Tensor, "*axes width"]) -> UInt8[Tensor, "*axes dim"]:
        """What `pack` took."""
        tiers: list[Tensor | None] = [None] * len(self.bits)
        path = None
        for plane in self.planes:
            part = _unpack_plane(packed[..., plane.start : plane.start + plane.run], plane.bits)
            if self.trellis and path is None:
                path = part
                continue
            tier, part = plane.first // self.tier, part << plane.below
            held = tiers[tier]
            tiers[tier] = part if held is None else held | part
        if path is None:
            return torch.cat([tier for tier in tiers if tier is not None], dim=-1)
        lowest = path.split(self.tier, dim=-1)
        return torch.cat([x if y is None else x | y for x, y in zip(lowest, tiers, strict=True)], dim=-1)

    def decode_into(
        self,
        packed: UInt8[Tensor, "batch kv_heads tokens width"],
        scale: UInt8[Tensor, "batch kv_heads tokens groups"],
        out: Float[Tensor, "batch kv_heads tokens dim"],
    ) -> None:
        """Write the numbers that packed codes stand for to `out`, rounded to its dtype."""
        wide = out if out.dtype in (torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
        wide.copy_(self.level_of(self.unpack(packed)))
        for tier, bits in zip(wide.split(self.tier, dim=-1), self.bits, strict=True):
            tier.sub_((2 ** (bits + self.trellis) - 1) / 2)
            if bend := self.curve(bits):
                tier.mul_(tier.square().mul_(bend).add_(1))
        by_group = wide.unflatten(-1, (self.groups, self.group_size))
        by_group.mul_(scale_of(scale, wide.dtype)[..., None])
        if wide is not out:
            out.copy_(wide)


def quarter_of(path: UInt8[Tensor, "*axes dim"]) -> UInt8[Tensor, "*axes dim"]:
    """In which of the four quarters of the levels each channel is, for a path of bits; before the first channel they were 0."""
    before = torch.nn.functional.pad(path, (MEMORY, 0))

    def parity(back: tuple[int, ...]) -> Tensor:
        bits = [before[..., MEMORY - b : MEMORY - b + path.shape[-1]] for b in back]
        return functools.reduce(torch.bitwise_xor, bits)

    return parity(LOW_PATH) | (parity(HIGH_PATH) << 1)


def quarters() -> list[int]:
    """The quarter for each of the 2^(MEMORY + 1) windows of a path, whose bit b is the path's bit b channels back."""
    return [
        sum(window >> b & 1 for b in LOW_PATH) % 2 + 2 * (sum(window >> b & 1 for b in HIGH_PATH) % 2)
        for window in range(2 ** (MEMORY + 1))
    ]


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
