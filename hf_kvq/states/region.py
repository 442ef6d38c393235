"""A region: consecutive tokens of a layer, keys and values together, coded in one way.

Every region answers the same questions, so a layer never asks what codec it holds: how many tokens, how many bytes, and
`segment`, what attention reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.codecs import Codec
from hf_kvq.kernels import FEW, Operand, encoder_for
from hf_kvq.states.buffer import BufferMark, TokenBuffer
from hf_kvq.states.view import Segment

__all__ = ["Region"]


class Region:
    """Tokens `first` to `end` of a layer, held as the codes of two codecs."""

    def __init__(self, key_codec: Codec, value_codec: Codec, *, spare: int | None = None) -> None:
        self.key_codec = key_codec
        self.value_codec = value_codec
        self.buffer = TokenBuffer(spare)
        alone = key_codec.layout == value_codec.layout and not (
            key_codec.depends_on_chunks or value_codec.depends_on_chunks
        )
        self._encoder = encoder_for(key_codec.layout, "cpu") if alone else None
        self.dims = (0, 0)
        """Channels of a key and of a value, known from the first tokens on."""
        self.tokens_encoded = 0
        """Tokens ever encoded here: a decode step adds the new ones and no more."""

    def __len__(self) -> int:
        return len(self.buffer)

    @property
    def first(self) -> int:
        """Number of the oldest token that is kept."""
        return self.buffer.first

    @property
    def end(self) -> int:
        """Number after the newest token."""
        return self.buffer.end

    def restart_at(self, first: int) -> None:
        """Forget all tokens and count from `first` on."""
        self.buffer.clear()
        self.buffer.first = self.buffer.end = first

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads tokens key_dim"],
        values: Float[Tensor, "batch kv_heads tokens value_dim"],
        *,
        in_place: bool = True,
    ) -> None:
        """Encode tokens and keep their codes.

        Args:
            keys: Finite states.
            values: Likewise.
            in_place: Whether older tokens may move within their storage to make room; what `segment` gave then reads other tokens.
        """
        self.dims = keys.shape[3], values.shape[3]
        self.tokens_encoded += keys.shape[2]
        if self._encoder is not None and self._encodes_in_place(keys) and self._encodes_in_place(values):
            codes = self.buffer.extend(keys.shape[2], in_place=in_place)
            self._encoder(keys, codes["key_codes"], codes["key_scale"])
            self._encoder(values, codes["value_codes"], codes["value_scale"])
            return
        self.buffer.append(
            {f"key_{name}": part for name, part in self.key_codec.encode(keys).items()}
            | {f"value_{name}": part for name, part in self.value_codec.encode(values).items()},
            in_place=in_place,
        )

    def _encodes_in_place(self, states: Tensor) -> bool:
        """Whether a compiled encoder takes these states; the buffer must be there to write to."""
        return (
            0 < states.shape[2] <= FEW
            and bool(self.buffer.tensors)
            and states.dtype in (torch.float32, torch.bfloat16)
            and states.device.type == "cpu"
            and states.stride(3) == 1
        )

    def segment(self, first: int, end: int) -> Segment:
        """Tokens `first` to `end` as they are stored, without a copy."""
        codes = self.buffer.view(first, end)
        return Segment(
            first,
            Operand(self.key_codec.layout, _part(codes, "key_"), self.dims[0], self.key_codec.decode_into),
            Operand(self.value_codec.layout, _part(codes, "value_"), self.dims[1], self.value_codec.decode_into),
        )

    def states(
        self, first: int, end: int
    ) -> tuple[Float[Tensor, "batch kv_heads tokens key_dim"], Float[Tensor, "batch kv_heads tokens value_dim"]]:
        """Tokens `first` to `end` as they were given, without a copy; for a region of identity codecs."""
        codes = self.buffer.view(first, end)
        return codes["key_codes"], codes["value_codes"]

    def mark(self) -> BufferMark:
        """See `TokenBuffer.mark`."""
        return self.buffer.mark()

    def can_restore(self, mark: BufferMark) -> bool:
        """Whether nothing that `mark` needs was overwritten."""
        return self.buffer.can_restore(mark)

    def restore(self, mark: BufferMark) -> None:
        """See `TokenBuffer.restore`."""
        self.buffer.restore(mark)

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move codes and scales together, without a round trip."""
        self.buffer.map(move)


def _part(codes: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in codes.items() if name.startswith(prefix)}
