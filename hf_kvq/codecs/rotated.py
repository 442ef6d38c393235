"""Low-bit codes in a basis of each head's own: 8, 6, 5, 4, 3 or 2 bits an element, a byte of scale for 64 channels.

Source: the basis is `hf_kvq.basis`; a Hadamard rotation before rounding is QuaRot's (arXiv:2404.00456), keys before RoPE KVQuant's (arXiv:2401.18079), levels for
a normal distribution Lloyd's and Max's. Departs from them: the basis is learned from the first tokens of each row, and fixed from then on; each token is
coded alone and at once, and attention reads the codes without leaving the basis.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from hf_kvq.basis import Basis, PlacedBasis, fit_basis
from hf_kvq.codecs.base import Codec, Codes
from hf_kvq.config import RotatedConfig
from hf_kvq.packing import PLANES, SCALE_ONE, SCALE_STEPS, Grid, scale_bytes, scale_of
from hf_kvq.rope import Rope

__all__ = ["STATISTICS", "TRIALS", "RotatedCodec", "encode_grid", "grid_for"]

STATISTICS = 128
"""Tokens of a row that a basis is learned from."""

TRIALS = 12
"""Scales that are tried for each group, from the one that reaches its largest element on downwards, an eighth of a power of two apart."""


class RotatedCodec(Codec):
    """Codes in a basis; there are none before it is known.

    Args:
        config: Bits of each tier.
        rope: How the states were turned; None for values, and for models that turn nothing.
        balance: Whether channels get gains of their own; for keys.
    """

    layout = "grid"
    statistics = STATISTICS

    def __init__(self, config: RotatedConfig, *, rope: Rope | None = None, balance: bool = False) -> None:
        self.bits = config.tiers
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
        query_energy: Float[Tensor, "batch kv_heads dim"] | None,
    ) -> RotatedCodec:
        """This codec with the basis of some states; see `fit_basis`."""
        codec = copy.copy(self)
        codec.basis = fit_basis(
            states,
            positions,
            bits=grid_for(self.bits, states.shape[3]).bits,
            rope=self._rope(states.shape[3]),
            query_energy=query_energy if self.balance else None,
            balance=self.balance,
        )
        return codec

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> RotatedCodec:
        codec = copy.copy(self)
        codec.basis = None
        if tensors:
            dim = tensors["mean"].shape[2]
            tiers = len(grid_for(self.bits, dim).bits)
            codec.basis = Basis(**{"order": None, **tensors}, tiers=tiers, rope=self._rope(dim))
        return codec

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        """In the basis, each code is the nearest level at the best of `TRIALS` scales."""
        assert self.basis is not None, "a basis comes before codes"
        coded = self.basis.at(first, states.shape[2]).code(states.double())
        codes, scale = encode_grid(coded, grid_for(self.bits, states.shape[3]))
        return {"codes": codes, "scale": scale}

    def basis_at(self, positions: int | Int[Tensor, "batch kv_heads tokens"], tokens: int) -> PlacedBasis:
        assert self.basis is not None, "a basis comes before codes"
        return self.basis.at(positions, tokens)

    def grid_of(self, head_dim: int) -> Grid:
        return grid_for(self.bits, head_dim)

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        """The states in the basis; `PlacedBasis.restore` takes them out of it."""
        grid_for(self.bits, out.shape[3]).decode_into(codes["codes"], codes["scale"], out)

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        grid = grid_for(self.bits, head_dim)
        return kv_heads * 8 * (grid.width + grid.groups)

    def bits_per_row(self, kv_heads: int, head_dim: int) -> int:
        """Bits of the basis of one row."""
        rope = self._rope(head_dim)
        paired = rope is not None and rope.rotary_dim == head_dim
        units = head_dim // 2 if paired else head_dim
        tiers = len(grid_for(self.bits, head_dim).bits)
        order = 0 if tiers == 1 else units * (8 if units <= 256 else 16)
        return kv_heads * (8 * (head_dim + 1 + (units if self.balance else 1)) + order)

    def _rope(self, head_dim: int) -> Rope | None:
        """The rotation, unless it is of another head_dim: then the mean is that after RoPE, and the round trip as exact."""
        return self.rope if self.rope is not None and self.rope.rotary_dim <= head_dim else None


def grid_for(bits: tuple[int, ...], dim: int) -> Grid:
    """The grid of these tiers, or, where they do not fill whole bytes, of one tier with their mean, or of the next more bits that do."""
    mean = -(-sum(bits) // len(bits))
    for tiers in (bits, *((each,) for each in sorted(PLANES) if each >= mean)):
        try:
            return Grid(dim, tiers)
        except ValueError:
            continue
    raise ValueError(f"head_dim must be at least 1, got {dim}")


def encode_grid(
    states: Float[Tensor, "batch kv_heads tokens dim"], grid: Grid
) -> tuple[UInt8[Tensor, "batch kv_heads tokens width"], UInt8[Tensor, "batch kv_heads tokens groups"]]:
    """Codes and scales: the nearest levels at that one of `TRIALS` scales of each group whose squared error is least.

    Args:
        states: In float64, so that codes do not depend on how many tokens come together.
        grid: How they are to lie.
    """
    tiers = list(zip(states.split(grid.tier, dim=-1), grid.bits, strict=True))
    levels = [grid.levels(bits).to(states.device) for _, bits in tiers]
    reach = torch.cat([tier.abs() / level[-1] for (tier, _), level in zip(tiers, levels, strict=True)], dim=-1)
    largest = scale_bytes(reach.unflatten(-1, (grid.groups, -1)).amax(dim=-1))
    best = torch.full(largest.shape, torch.inf, dtype=states.dtype, device=states.device)
    codes = torch.zeros(states.shape, dtype=torch.uint8, device=states.device)
    scale = torch.zeros_like(largest)
    for trial in range(TRIALS):
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
    return grid.pack(codes), scale
