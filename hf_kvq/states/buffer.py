"""Named tensors that grow along the token axis.

Storage is allocated ahead and written in place, so that a decode step touches the new tokens alone, where growth by
`torch.cat` copies everything at every step. Tokens keep a number that counts from the first one ever appended: dropping old
tokens moves a boundary, and moves data only when the room runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GRANULE", "BufferMark", "BufferSnapshot", "TokenBuffer", "round_up"]

GRANULE = 64
"""Capacities are multiples of this many tokens."""


class BufferMark(NamedTuple):
    """The boundaries of a buffer at one time, to go back to."""

    first: int
    end: int


class BufferSnapshot(NamedTuple):
    """A buffer at one time with its storage, to go back to."""

    tensors: dict[str, Tensor]
    first: int
    end: int
    base: int


def round_up(tokens: int) -> int:
    """The capacity that a first append of `tokens` tokens allocates."""
    return -(-tokens // GRANULE) * GRANULE


class TokenBuffer:
    """Tensors `[batch, any, tokens, any]` that share one token axis, tokens `first` to `end` of all that were appended.

    Growth: a quarter more than is needed, so a token is copied about four times however long the stream. Where tokens are dropped
    at the front as others come, the kept ones move down once for every quarter of them that comes, in place.

    Args:
        spare: Room beyond the tokens that are needed, where a quarter of them is too much: kept tokens then move once for every `spare` that come.
    """

    def __init__(self, spare: int | None = None) -> None:
        self.spare = spare
        self.tensors: dict[str, Tensor] = {}
        self.first = 0
        self.end = 0
        self._base = 0  # number of the token in slot 0

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def capacity(self) -> int:
        """Tokens that there is storage for."""
        return next(iter(self.tensors.values())).shape[2] if self.tensors else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the storages, room for later tokens included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    @property
    def nbytes_used(self) -> int:
        """Bytes of the tokens that are kept."""
        return sum(tensor.nbytes // max(self.capacity, 1) * len(self) for tensor in self.tensors.values())

    def append(self, parts: Mapping[str, Tensor], *, in_place: bool = True) -> None:
        """Add tokens at the end; every part holds the same number of them.

        Args:
            parts: The tokens.
            in_place: Whether kept tokens may move within their storage; if not, and they must move, views of them stay as they are.
        """
        tokens = next(iter(parts.values())).shape[2]
        self._make_room(parts, tokens, in_place)
        start = self.end - self._base
        for name, part in parts.items():
            self.tensors[name][:, :, start : start + tokens].copy_(part)
        self.end += tokens

    def extend(self, tokens: int, *, in_place: bool = True) -> dict[str, Tensor]:
        """Add tokens at the end of a buffer that holds some, and return their slots to write to; `in_place` as in `append`."""
        self._make_room(self.tensors, tokens, in_place)
        start = self.end - self._base
        self.end += tokens
        return {name: tensor.narrow(2, start, tokens) for name, tensor in self.tensors.items()}

    def view(self, first: int | None = None, end: int | None = None) -> dict[str, Tensor]:
        """Tokens `first` to `end` (all that are kept, where not given) without a copy."""
        first = self.first if first is None else first
        end = self.end if end is None else end
        return {name: tensor.narrow(2, first - self._base, end - first) for name, tensor in self.tensors.items()}

    def drop_before(self, first: int) -> None:
        """Forget the tokens before number `first`."""
        self.first = min(max(first, self.first), self.end)

    def drop_from(self, end: int) -> None:
        """Forget the tokens from number `end` on, and give storage back where less than half of it stays in use."""
        self.end = max(min(end, self.end), self.first)
        if self.tensors and self.capacity > 2 * round_up(max(len(self), 1)):
            self._move_to(
                {name: self._new(tensor, round_up(max(len(self), 1))) for name, tensor in self.tensors.items()}
            )

    def mark(self) -> BufferMark:
        """Where the buffer stands; valid for `restore` until the second append after it."""
        return BufferMark(self.first, self.end)

    def can_restore(self, mark: BufferMark) -> bool:
        """Whether the tokens of `mark` are still in their slots."""
        return mark.first == mark.end or (bool(self.tensors) and mark.first >= self._base)

    def restore(self, mark: BufferMark) -> None:
        """Go back to `mark`: tokens appended since are forgotten, tokens dropped since are back."""
        assert self.can_restore(mark), "the tokens of the mark were overwritten"
        if mark.first == mark.end:
            self.clear()
        self.first, self.end = mark

    def snapshot(self) -> BufferSnapshot:
        """The buffer as it is; good for as long as every `append` since has `in_place=False`. It holds on to the storage."""
        return BufferSnapshot(dict(self.tensors), self.first, self.end, self._base)

    def go_back_to(self, snapshot: BufferSnapshot) -> None:
        """Be what the buffer was when the snapshot was taken."""
        self.tensors, self.first, self.end, self._base = dict(snapshot.tensors), *snapshot[1:]

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`: another row order, another device."""
        self.tensors = {name: move(tensor) for name, tensor in self.tensors.items()}

    def clear(self) -> None:
        """Forget all tokens and give the storage back."""
        self.tensors = {}
        self.first = self.end = self._base = 0

    def _make_room(self, parts: Mapping[str, Tensor], tokens: int, in_place: bool) -> None:
        if not self.tensors:
            self.tensors = {name: self._new(part, round_up(tokens)) for name, part in parts.items()}
            self._base = self.first
            return
        needed = len(self) + tokens
        if self.end - self._base + tokens <= self.capacity:
            return
        roomy = round_up(needed + (needed // 4 if self.spare is None else self.spare))
        if self.spare is not None and needed + self.spare // 2 <= self.capacity <= roomy + 4 * self.spare:
            roomy = self.capacity  # a bounded store keeps its size, whatever the sizes of the chunks that come
        if in_place and needed <= self.capacity <= roomy:
            self._move_down()
        else:
            self._move_to({name: self._new(tensor, roomy) for name, tensor in self.tensors.items()})

    def _move_to(self, targets: dict[str, Tensor]) -> None:
        for name, part in self.view().items():
            targets[name][:, :, : len(self)].copy_(part)
        self.tensors = targets
        self._base = self.first

    def _move_down(self) -> None:
        """Move the kept tokens to the front of their own storage, in steps so small that source and target never overlap."""
        gap = self.first - self._base
        for tensor in self.tensors.values():
            for slot in range(0, len(self), gap):
                step = min(gap, len(self) - slot)
                tensor[:, :, slot : slot + step].copy_(tensor[:, :, slot + gap : slot + gap + step])
        self._base = self.first

    @staticmethod
    def _new(like: Tensor, tokens: int) -> Tensor:
        # A tensor made under inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.empty(*like.shape[:2], tokens, *like.shape[3:], dtype=like.dtype, device=like.device)
