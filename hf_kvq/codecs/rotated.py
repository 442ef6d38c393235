"""Low-bit codes in a basis of each head's own: 8, 6, 5, 4, 3 or 2 bits an element, a byte of scale for 64 channels.

Source: the basis is `hf_kvq.basis`; a Hadamard rotation before rounding is QuaRot's (arXiv:2404.00456), keys before RoPE KVQuant's (arXiv:2401.18079), levels for
a normal distribution Lloyd's and Max's. Departs from them: the basis is learned from the first tokens of each row, and fixed from then on; each token is
coded alone and at once, and attention reads the codes without leaving the basis.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from hf_kvq.basis import Basis, PlacedBasis, fit_basis
from hf_kvq.codecs.base import Codec, Codes
from hf_kvq.codecs.trellis import encode_trellis
from hf_kvq.config import RotatedConfig
from hf_kvq.packing import CURVES, FLIPS, SCALE_ONE, SCALE_STEPS, TRIALS, Grid, scale_bytes, scale_of
from hf_kvq.rope import Rope

__all__ = ["STATISTICS", "TRIALS", "GridEncoder", "RotatedCodec", "encode_grid", "grid_for"]

STATISTICS = 128
"""Tokens of a row that a basis is learned from."""

AIMS = 1
"""Directions of the queries along which the errors of a key are made small."""

GridEncoder = Callable[[Tensor, Grid, Tensor, int, int], tuple[Tensor, Tensor]]
"""`encode_grid`, or what does the same."""


class RotatedCodec(Codec):
    """Codes in a basis; there are none before it is known.

    Args:
        config: Bits of each tier.
        rope: How the states were turned; None for values, and for models that turn nothing.
        balance: Whether channels get gains of their own; for keys.
        compiled: A compiled `encode_grid` for a type of device, or None.
    """

    layout = "grid"
    statistics = STATISTICS

    def __init__(
        self,
        config: RotatedConfig,
        *,
        rope: Rope | None = None,
        balance: bool = False,
        compiled: Callable[[str], GridEncoder | None] = lambda device_type: None,
    ) -> None:
        self.compiled = compiled
        self.bits = config.tiers
        self.trellis = config.trellis
        self.rope = rope
        self.balance = balance
        self.basis: Basis | None = None

    @property
    def is_fitted(self) -> bool:
        return self.basis is not None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {} if self.basis is None else self.basis.tensors

    def fitted(
        self,
        states: Float[Tensor, "batch kv_heads tokens dim"],
        positions: Int[Tensor, "batch tokens"],
        queries: Float[Tensor, "batch kv_heads queries dim"] | None,
        origin: Int[Tensor, " batch"] | None = None,
    ) -> RotatedCodec:
        """This codec with the basis of some states; see `fit_basis`."""
        codec = copy.copy(self)
        codec.basis = fit_basis(
            states,
            positions,
            grid=self.grid_of(states.shape[3]),
            rope=self._rope(states.shape[3]),
            queries=queries if self.balance else None,
            balance=self.balance,
            aims=AIMS,
            origin=origin,
        )
        return codec

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> RotatedCodec:
        codec = copy.copy(self)
        codec.basis = None
        if tensors:
            basis = Basis(**{"order": None, **tensors}, tiers=1, rope=None)
            tiers = len(self.grid_of(basis.dim).bits)
            offset = self.basis.offset if self.basis is not None else bool(basis.origin.any())
            codec.basis = replace(basis, tiers=tiers, rope=self._rope(basis.dim), offset=offset)
        return codec

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        """In the basis, each code is the nearest level at the best of `TRIALS` scales; see `encode_trellis` for a trellis."""
        assert self.basis is not None, "a basis comes before codes"
        coded = self.basis.at(first, states.shape[2]).code(states.double())
        encode = self.compiled(states.device.type) or encode_grid
        codes, scale = encode(coded, self.grid_of(states.shape[3]), self.basis.aimed(coded.dtype), TRIALS, FLIPS)
        return {"codes": codes, "scale": scale}

    def basis_at(self, positions: int | Int[Tensor, "batch kv_heads tokens"], tokens: int) -> PlacedBasis:
        assert self.basis is not None, "a basis comes before codes"
        return self.basis.at(positions, tokens)

    def grid_of(self, head_dim: int) -> Grid:
        return grid_for(self.bits, head_dim, trellis=self.trellis)

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        """The states in the basis; `PlacedBasis.restore` takes them out of it."""
        self.grid_of(out.shape[3]).decode_into(codes["codes"], codes["scale"], out)

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        grid = self.grid_of(head_dim)
        return kv_heads * 8 * (grid.width + grid.groups)

    def bits_per_row(self, kv_heads: int, head_dim: int) -> int:
        """Bits of the basis of one row."""
        rope = self._rope(head_dim)
        paired = rope is not None and rope.rotary_dim == head_dim
        units = head_dim // 2 if paired else head_dim
        tiers = len(self.grid_of(head_dim).bits)
        order = 0 if tiers == 1 else units * (8 if units <= 256 else 16)
        aims = AIMS * (head_dim // 2 + 1) if self.balance and head_dim % 2 == 0 else 0
        mean = head_dim if self.balance or head_dim % 2 else head_dim // 2
        return kv_heads * (8 * (mean + 1 + (units if self.balance else 1) + aims) + order) + 32

    def _rope(self, head_dim: int) -> Rope | None:
        """The rotation, unless it is of another head_dim: then the mean is that after RoPE, and the round trip as exact."""
        return self.rope if self.rope is not None and self.rope.rotary_dim <= head_dim else None


@functools.cache
def grid_for(bits: tuple[int, ...], dim: int, *, trellis: bool = False) -> Grid:
    """The grid of these tiers, or, where they do not fill whole bytes, of one tier with their mean, or of the next more bits that do."""
    mean = -(-sum(bits) // len(bits))
    for tiers in (bits, *((each,) for each in sorted(CURVES) if each >= mean)):
        for on_trellis in (True, False) if trellis else (False,):
            try:
                return Grid(dim, tiers, on_trellis)
            except ValueError:
                continue
    raise ValueError(f"head_dim must be at least 1, got {dim}")


def encode_grid(
    states: Float[Tensor, "batch kv_heads tokens dim"],
    grid: Grid,
    aims: Float[Tensor, "batch kv_heads aims dim"] | None = None,
    trials: int = TRIALS,
    flips: int = FLIPS,
) -> tuple[UInt8[Tensor, "batch kv_heads tokens width"], UInt8[Tensor, "batch kv_heads tokens groups"]]:
    """Codes and scales: the nearest levels at that one of `TRIALS` scales of each group whose squared error is least. On a trellis see `encode_trellis`.

    Args:
        states: In float64, so that codes do not depend on how many tokens come together.
        grid: How they are to lie.
        aims: Directions u along which an error e costs `(u . e)^2` beside its `|e|^2`: codes then move to neighbouring levels while that lowers the cost.
        trials: Scales that are tried.
        flips: Codes of a token that move, at most; none does on a trellis.
    """
    if grid.trellis:
        return encode_trellis(states, grid, aims)
    tiers = list(zip(states.split(grid.tier, dim=-1), grid.bits, strict=True))
    levels = [grid.levels(bits).to(states.device) for _, bits in tiers]
    reach = torch.cat([tier.abs() / level[-1] for (tier, _), level in zip(tiers, levels, strict=True)], dim=-1)
    largest = scale_bytes(reach.unflatten(-1, (grid.groups, -1)).amax(dim=-1))
    best = torch.full(largest.shape, torch.inf, dtype=states.dtype, device=states.device)
    codes = torch.zeros(states.shape, dtype=torch.uint8, device=states.device)
    scale = torch.zeros_like(largest)
    for trial in range(trials):
        byte = torch.where(largest > 0, (largest.int() - trial).clamp(min=1), 0).to(torch.uint8)
        step = scale_of(byte, states.dtype).clamp(min=2.0 ** (-SCALE_ONE / SCALE_STEPS))
        by_channel = step.repeat_interleave(grid.group_size, dim=-1)
        found = [
            torch.bucketize((tier / s).contiguous(), (level[1:] + level[:-1]) / 2)
            for (tier, _), s, level in zip(tiers, by_channel.split(grid.tier, dim=-1), levels, strict=True)
        ]
        decoded = torch.cat([level[index] for index, level in zip(found, levels, strict=True)], dim=-1) * by_channel
        error = (states - decoded).square().unflatten(-1, (grid.groups, -1)).sum(dim=-1)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, byte, scale)
        index = torch.cat(found, dim=-1).to(torch.uint8)
        codes = torch.where(better.repeat_interleave(grid.group_size, dim=-1), index, codes)
    if aims is not None and bool(aims.any()):
        codes = _aimed(states, codes, scale, grid, aims, flips)
    return grid.pack(codes), scale


def _aimed(states: Tensor, codes: Tensor, scale: Tensor, grid: Grid, aims: Tensor, flips: int) -> Tensor:
    """Codes of which one after the other, the one that gains most first, is moved by a level."""
    tiers = list(zip(range(0, grid.dim, grid.tier), grid.bits, strict=True))
    top = torch.cat([torch.full((grid.tier,), 2**bits - 1, device=codes.device) for _, bits in tiers])
    step = scale_of(scale, states.dtype).repeat_interleave(grid.group_size, dim=-1)
    table = torch.nn.utils.rnn.pad_sequence([grid.levels(bits) for _, bits in tiers], batch_first=True).to(
        states.device
    )
    tier = torch.arange(grid.dim, device=codes.device) // grid.tier
    codes = codes.long()
    error = table[tier, codes] * step - states
    along = error @ aims.mT  # [batch, kv_heads, tokens, aims]
    for _ in range(flips):
        gain, move = _best_move(codes, error, along, step, table, tier, top, aims)
        best, channel = gain.max(dim=-1, keepdim=True)
        if not bool((best > 0).any()):
            break
        moved = torch.where(best > 0, move.gather(-1, channel), 0.0)
        codes = codes.scatter_add(-1, channel, moved.sign().long())
        error = error.scatter_add(-1, channel, moved)
        aim = aims.mT.unsqueeze(2).expand(*codes.shape, -1)
        along = along + moved * aim.gather(3, channel[..., None].expand(*channel.shape, aims.shape[2])).squeeze(3)
    return codes.to(torch.uint8)


def _best_move(
    codes: Tensor, error: Tensor, along: Tensor, step: Tensor, table: Tensor, tier: Tensor, top: Tensor, aims: Tensor
) -> tuple[Tensor, Tensor]:
    """For each channel what the better of its two neighbouring levels gains, and how far away it is."""
    here, pull = table[tier, codes], along @ aims
    weight = 1 + aims.square().sum(dim=2)[:, :, None]
    found = []
    for direction in (-1, 1):
        index = codes + direction
        inside = (index >= 0) & (index <= top)
        move = (table[tier, torch.minimum(index.clamp(min=0), top)] - here) * step
        gain = -(2 * move * (error + pull) + move.square() * weight)
        found.append((torch.where(inside & (move != 0), gain, -torch.inf), move))
    (down, down_move), (up, up_move) = found
    return torch.maximum(down, up), torch.where(up > down, up_move, down_move)
