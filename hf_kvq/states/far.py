"""What a layer still knows of the tokens that left its window: heavy hitters, clusters, and how many are forgotten."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from hf_kvq.far_field import Bank, KeptTokens, make_bank
from hf_kvq.kernels import Operand, Partial, Query, Scoring, Visibility, attend, compute_dtype
from hf_kvq.states.bounds import Bounds
from hf_kvq.states.region import Region
from hf_kvq.states.store import StateShape
from hf_kvq.states.view import copy_states

__all__ = ["FarStore"]


class FarStore:
    """Takes blocks in and answers queries. Every change makes new tensors, so `snapshot` is cheap.

    Args:
        bounds: What is kept.
        shape: Shape and dtype of the states.
        layer: Index of the layer, for errors.
    """

    def __init__(self, bounds: Bounds, shape: StateShape, layer: int) -> None:
        self.bounds = bounds
        self.dtype = shape.dtype
        self.layer = layer
        self.forgotten = torch.zeros(shape.batch, shape.kv_heads, dtype=torch.int64)
        self.kept: KeptTokens | None = None
        if bounds.heavy_hitters is not None:
            self.kept = KeptTokens(bounds.heavy_hitters.tokens, batch=shape.batch, kv_heads=shape.kv_heads)
        self.bank: Bank | None = None
        if bounds.clusters is not None:
            self.bank = make_bank(bounds.clusters, batch=shape.batch, rope=bounds.rope)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, free ones included."""
        return sum(part.nbytes for part in self._parts())

    @property
    def nbytes_used(self) -> int:
        """Bytes of the slots in use."""
        return sum(part.nbytes_used for part in self._parts())

    @property
    def clustered(self) -> Int64[Tensor, "batch kv_heads"]:
        """Tokens that were merged."""
        counts = self.bank.counts.cpu() if self.bank is not None and self.bank.is_allocated else 0
        return torch.zeros_like(self.forgotten) + counts

    def snapshot(self) -> FarStore:
        """This, as it is now."""
        twin = copy.copy(self)
        twin.kept = self.kept.snapshot() if self.kept is not None else None
        twin.bank = copy.copy(self.bank)
        return twin

    def take_in(
        self,
        rows: Int[Tensor, " rows"],
        keys: Operand,
        values: Operand,
        positions: Int64[Tensor, "rows tokens"],
        offset: int,
        mass: Float[Tensor, "rows kv_heads tokens"] | None,
    ) -> Mapping[str, Any] | None:
        """Let a block leave the window; returns the receipt of the clusters.

        Args:
            rows: Rows that it leaves in.
            keys: The block in these rows, as the window held it.
            values: Likewise.
            positions: The rows' own numbers of its tokens.
            offset: Column of these rows' first token.
            mass: Of the tokens; None where nobody counts it.
        """
        places = positions[:, None].expand(-1, self.forgotten.shape[1], -1)
        if self.kept is None:
            return self._let_go(rows, keys, values, places)
        assert mass is not None
        displaced = self.kept.absorb(rows.tolist(), _joined(keys.parts, values.parts), positions, mass)
        if displaced is None:
            return None
        key_codes, value_codes = _parted(displaced.codes)
        columns = displaced.positions + offset
        return self._let_go(
            rows, _moved(keys, key_codes, columns), _moved(values, value_codes, columns), displaced.positions
        )

    def attend(
        self, query: Query, scoring: Scoring, oldest: Tensor | None, coded: Region, first: list[int]
    ) -> tuple[list[Partial], Tensor | None]:
        """The far field's parts of the attention, and the logits of the kept tokens.

        Args:
            query: Queries, unscaled.
            scoring: Scaling and softcap.
            oldest: For each row the position that no key may stand before.
            coded: Where the codes of the kept tokens were made.
            first: Column of each row's first token.

        Raises:
            ValueError: If there are clusters and a softcap.
        """
        parts, logits = [], None
        if self.kept is not None and self.kept.most:
            logits = query.new_empty(*query.shape[:4], self.kept.most, dtype=compute_dtype(query.dtype))
            parts.append(self._attend_kept(query, scoring, oldest, logits, coded, first))
        if self.bank is not None and scoring.softcap is not None:
            raise ValueError(
                f"layer {self.layer}: clusters have no softcap of logits, and this model gives {scoring.softcap}; "
                "use HeavyHitters as the far field"
            )
        if self.bank is not None and self.bank.is_allocated:
            parts.append(self.bank.attend(query, scoring.scaling, oldest))
        return parts, logits

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.forgotten = self.forgotten[rows.cpu()]
        if self.kept is not None:
            self.kept.map(lambda tensor: tensor[rows.to(tensor.device)])
            self.kept.select_rows(rows.tolist())
        if self.bank is not None:
            self.bank.select_rows(rows)

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        for part in self._parts():
            part.map(move)

    def _parts(self) -> list[KeptTokens | Bank]:
        return [part for part in (self.kept, self.bank) if part is not None]

    def _let_go(self, rows: Tensor, keys: Operand, values: Operand, places: Tensor) -> Mapping[str, Any] | None:
        """Merge tokens if there are clusters, and forget them otherwise."""
        if self.bank is None:
            self.forgotten = self.forgotten.index_add(
                0, rows.cpu(), torch.full((len(rows), self.forgotten.shape[1]), places.shape[2])
            )
            return None
        wide = torch.promote_types(self.dtype, torch.float32)
        valid = torch.ones_like(places, dtype=torch.bool)
        return self.bank.absorb(rows, keys.decode(wide), values.decode(wide), places, valid)

    def _attend_kept(
        self, query: Query, scoring: Scoring, oldest: Tensor | None, logits: Tensor, coded: Region, first: list[int]
    ) -> Partial:
        kept, rope = self.kept, self.bounds.rope
        assert kept is not None
        assert kept.positions is not None
        positions = kept.positions[:, :, : kept.most]
        keys, values = coded.operands(kept.held(), positions + _offsets(first, positions))
        if oldest is not None and rope is not None:
            behind = (oldest[:, None, None] - positions).clamp(min=0)
            if bool(behind.any()):
                moved = rope.rotate(keys.decode(compute_dtype(query.dtype)), behind)
                keys = Operand("states", {"codes": moved}, keys.dim, copy_states)
        visibility = Visibility(kept.most, query.shape[3], real=kept.shown())
        return attend(query, keys, values, 0, visibility, scoring, logits)


def _offsets(first: list[int], like: Tensor) -> Tensor | int:
    return first[0] if min(first) == max(first) else torch.tensor(first, device=like.device)[:, None, None]


def _moved(operand: Operand, codes: dict[str, Tensor], columns: Tensor) -> Operand:
    """Codes of the operand's kind that stood at these columns."""
    return replace(operand, parts=codes, basis=None if operand.basis is None else operand.basis.moved(columns))


def _joined(keys: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"key_{name}": part for name, part in keys.items()} | {
        f"value_{name}": part for name, part in values.items()
    }


def _parted(codes: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    keys, values = (
        {name.removeprefix(prefix): part for name, part in codes.items() if name.startswith(prefix)}
        for prefix in ("key_", "value_")
    )
    return keys, values
