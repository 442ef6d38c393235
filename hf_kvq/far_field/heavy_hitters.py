"""Tokens that left the window and stay individually: for every kv head those of the largest decayed attention mass.

Source: H2O (Heavy-Hitter Oracle), arXiv:2306.14048, keeps the tokens that got the most attention so far. Departs from it: mass decays with every
block of tokens; a token competes once it leaves the window, with what is kept already; and what is kept are the codes that the window held,
moved as they are and never encoded again. So whatever codec the window has, the kept tokens have it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["MASS_BYTES", "POSITION_BYTES", "Displaced", "KeptTokens"]

MASS_BYTES = 4
"""Of the mass of a token in one head, in the window or kept."""

POSITION_BYTES = 4
"""Of the position of a kept token in one head."""


@dataclass(frozen=True)
class Displaced:
    """Tokens that were weighed and found too light; which ones differs from head to head.

    Attributes:
        codes: Their codes, `[rows, kv_heads, tokens, width]`.
        positions: Their row's own token numbers.
    """

    codes: dict[str, Tensor]
    positions: Int[Tensor, "rows kv_heads tokens"]


class KeptTokens:
    """Up to `count` tokens for each row and kv head, in the order of their positions.

    Every change makes new tensors, so a shallow copy of this object is a snapshot of it.
    """

    def __init__(self, count: int, *, batch: int, kv_heads: int) -> None:
        self.count = count
        self.kv_heads = kv_heads
        self.filled = [0] * batch
        """Slots in use, for each row; the same in all of its heads."""
        self.codes: dict[str, Tensor] = {}
        """Codes of one byte as uint8: not every operation knows float8."""
        self._dtypes: dict[str, torch.dtype] = {}
        self.positions: Tensor | None = None
        self.mass: Tensor | None = None

    @property
    def most(self) -> int:
        """Slots in use in the fullest row."""
        return max(self.filled, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, positions and masses, slots that are free yet included."""
        return sum(t.untyped_storage().nbytes() for t in self._tensors())

    @property
    def nbytes_used(self) -> int:
        """Bytes of the slots in use."""
        whole = sum(t.nbytes for t in self._tensors())
        return whole * sum(self.filled) // max(self.count * len(self.filled), 1)

    def snapshot(self) -> KeptTokens:
        """This, as it is now."""
        copy = KeptTokens(self.count, batch=0, kv_heads=self.kv_heads)
        copy.filled, copy.codes, copy._dtypes = list(self.filled), dict(self.codes), self._dtypes
        copy.positions, copy.mass = self.positions, self.mass
        return copy

    def shown(self) -> Bool[Tensor, "batch slots"] | None:
        """Which of the first `most` slots are in use, row by row; None where all are."""
        if min(self.filled) == self.most:
            return None
        assert self.positions is not None
        filled = torch.tensor(self.filled, device=self.positions.device)
        return torch.arange(self.most, device=self.positions.device) < filled[:, None]

    def held(self) -> dict[str, Tensor]:
        """Codes of the first `most` slots, without a copy."""
        return self._typed({name: part[:, :, : self.most] for name, part in self.codes.items()})

    def add_mass(self, mass: Float[Tensor, "batch kv_heads slots"]) -> None:
        """Add what attention the first `most` slots got."""
        assert self.mass is not None
        self.mass = self.mass + torch.nn.functional.pad(mass, (0, self.count - mass.shape[2]))

    def fade(self, rows: list[int], factor: float) -> None:
        """Multiply the mass of these rows."""
        if self.mass is not None:
            self.mass = scaled_rows(self.mass, rows, factor)

    def absorb(
        self,
        rows: list[int],
        codes: Mapping[str, Tensor],
        positions: Int[Tensor, "rows tokens"],
        mass: Float[Tensor, "rows kv_heads tokens"],
    ) -> Displaced | None:
        """Weigh a block against what is kept, and keep the heaviest.

        Args:
            rows: Rows of the batch, which have the same number of slots in use.
            codes: The block's, `[rows, kv_heads or 1, tokens, width]`.
            positions: The row's own token numbers, above all that are kept.
            mass: Of each token.

        Returns:
            What there is no slot for; None while all tokens have one.
        """
        (filled,) = {self.filled[row] for row in rows}
        tokens = positions.shape[1]
        if self.positions is None:
            self._allocate(codes, positions, mass)
        assert self.positions is not None
        assert self.mass is not None
        index, codes = torch.tensor(rows, device=positions.device), _raw(codes)
        pool = {
            name: torch.cat([self.codes[name][index, :, :filled], self._by_head(part)], dim=2)
            for name, part in codes.items()
        }
        places = torch.cat(
            [self.positions[index, :, :filled], positions[:, None].expand(-1, self.kv_heads, -1).to(torch.int32)],
            dim=2,
        )
        masses = torch.cat([self.mass[index, :, :filled], mass], dim=2)
        kept = min(self.count, filled + tokens)
        chosen = masses.topk(kept, dim=2).indices.sort(dim=2).values
        for name, part in pool.items():
            self.codes[name] = _with_rows(self.codes[name], index, _gather(part, chosen))
        self.positions = _with_rows(self.positions, index, places.gather(2, chosen))
        self.mass = _with_rows(self.mass, index, masses.gather(2, chosen))
        for row in rows:
            self.filled[row] = kept
        if kept == filled + tokens:
            return None
        left = torch.ones_like(masses, dtype=torch.bool).scatter_(2, chosen, False)
        displaced = left.nonzero()[:, 2].view(*masses.shape[:2], -1)
        left_out = self._typed({name: _gather(part, displaced) for name, part in pool.items()})
        return Displaced(left_out, places.gather(2, displaced).long())

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        self.codes = {name: move(part) for name, part in self.codes.items()}
        if self.positions is not None and self.mass is not None:
            self.positions, self.mass = move(self.positions), move(self.mass)

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows, in this order; tensors move by `map`."""
        self.filled = [self.filled[row] for row in rows]

    def _allocate(self, codes: Mapping[str, Tensor], positions: Tensor, mass: Tensor) -> None:
        shape = (len(self.filled), self.kv_heads, self.count)
        self._dtypes = {name: part.dtype for name, part in codes.items()}
        self.codes = {
            name: torch.zeros(*shape, part.shape[3], dtype=part.dtype, device=part.device)
            for name, part in _raw(codes).items()
        }
        self.positions = torch.zeros(shape, dtype=torch.int32, device=positions.device)
        self.mass = torch.zeros(shape, dtype=mass.dtype, device=mass.device)

    def _by_head(self, part: Tensor) -> Tensor:
        return part.expand(-1, self.kv_heads, -1, -1)

    def _typed(self, codes: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: part.view(self._dtypes[name]) for name, part in codes.items()}

    def _tensors(self) -> list[Tensor]:
        return [*self.codes.values(), *(t for t in (self.positions, self.mass) if t is not None)]


def scaled_rows(x: Float[Tensor, "batch kv_heads tokens"], rows: list[int], factor: float) -> Tensor:
    """`x` with these rows multiplied, as a new tensor."""
    if len(rows) == x.shape[0]:
        return x * factor
    factors = torch.ones(x.shape[0], 1, 1, dtype=x.dtype)
    factors[rows] = factor
    return x * factors.to(x.device)


def _raw(codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.view(torch.uint8) if part.dtype.itemsize == 1 else part for name, part in codes.items()}


def _gather(part: Tensor, tokens: Tensor) -> Tensor:
    """Tokens that differ from head to head."""
    return part.gather(2, tokens[..., None].expand(-1, -1, -1, part.shape[3]))


def _with_rows(old: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """`old` with the first slots of these rows replaced, as a new tensor."""
    result = old.clone()
    result[rows, :, : new.shape[2]] = new
    return result
