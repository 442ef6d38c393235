"""A region: consecutive tokens of a layer, keys and values together, coded in one way.

Every region answers the same questions, so a layer never asks what codec it holds: how many tokens, how many bytes, and
`segment`, what attention reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_kvq.codecs import Codec
from hf_kvq.kernels import FEW, Operand, encoder_for
from hf_kvq.states.buffer import BufferMark, TokenBuffer
from hf_kvq.states.view import Segment

__all__ = ["Region"]


class Region:
    """Tokens `first` to `end` of a layer, held as the codes of two codecs."""

    def __init__(self, codecs: tuple[Codec, Codec], dims: tuple[int, int], *, spare: int | None = None) -> None:
        key_codec, value_codec = codecs
        self.key_codec = key_codec
        self.value_codec = value_codec
        self.block = math.lcm(key_codec.block, value_codec.block)
        """Tokens that are encoded together; whole blocks are held, counted from the oldest token."""
        self.buffer = TokenBuffer(spare)
        alone = key_codec.layout == value_codec.layout and not (
            key_codec.depends_on_chunks or value_codec.depends_on_chunks
        )
        self._encoder = encoder_for(key_codec.layout, "cpu") if alone else None
        self.dims = dims
        """Channels of a key and of a value."""
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
            keys: Finite states of whole blocks of tokens.
            values: Likewise.
            in_place: Whether older tokens may move within their storage to make room; what `segment` gave then reads other tokens.
        """
        self.tokens_encoded += keys.shape[2]
        first = self.end
        if self._encoder is not None and all(
            self._encodes_in_place(states, codec)
            for states, codec in ((keys, self.key_codec), (values, self.value_codec))
        ):
            codes = self.buffer.extend(keys.shape[2], in_place=in_place)
            for codec, states, part in ((self.key_codec, keys, "key"), (self.value_codec, values, "value")):
                self._encoder(
                    states, codes[f"{part}_codes"], codes[f"{part}_scale"], codec.basis_at(first, states.shape[2]),
                    codec.grid_of(states.shape[3]),
                )  # fmt: skip
            return
        self.buffer.append(
            {f"key_{name}": part for name, part in self.key_codec.encode(keys, first).items()}
            | {f"value_{name}": part for name, part in self.value_codec.encode(values, first).items()},
            in_place=in_place,
        )

    def _encodes_in_place(self, states: Tensor, codec: Codec) -> bool:
        """Whether a compiled encoder takes these states; the buffer must be there to write to."""
        return (
            0 < states.shape[2] <= FEW
            and bool(self.buffer.tensors)
            and states.dtype in (torch.float32, torch.bfloat16)
            and states.device.type == "cpu"
            and states.stride(3) == 1
            and ((placed := codec.basis_at(0, 1)) is None or placed.basis.is_plain)
        )

    def segment(self, first: int, end: int) -> Segment:
        """Tokens `first` to `end` as they are stored, without a copy."""
        begin, stop = self.block_start(first), self.block_start(end + self.block - 1)
        keys, values = self.operands(self.buffer.view(begin, stop), begin)
        if (begin, stop) != (first, end):
            keys, values = (operand.slice(first - begin, end - begin) for operand in (keys, values))
        return Segment(first, keys, values)

    def block_start(self, token: int) -> int:
        """Where the block begins that token number `token` is in, or would be; a token older than all here is in none."""
        return token - max(token - self.first, 0) % self.block

    def drop_before(self, token: int) -> None:
        """Forget the blocks whose tokens all have numbers below `token`."""
        self.buffer.drop_before(self.block_start(token))

    def operands(
        self, codes: Mapping[str, Tensor], columns: int | Int[Tensor, "batch kv_heads tokens"]
    ) -> tuple[Operand, Operand]:
        """Keys and values as codes that this region made, wherever they are now.

        Args:
            codes: Named as in the buffer.
            columns: Of the first token, the others following; or of every token in every head.
        """
        tokens = next(iter(codes.values())).shape[2]
        keys, values = (
            Operand(
                codec.layout, _part(codes, prefix), dim, codec.decode_into, codec.grid_of(dim), codec.basis_at(columns, tokens),
                codec.block,
            )
            for codec, prefix, dim in zip((self.key_codec, self.value_codec), ("key_", "value_"), self.dims, strict=True)
        )  # fmt: skip
        return keys, values

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

    @property
    def nbytes(self) -> int:
        """Bytes of the storages, room for later tokens and what the codecs have learned included."""
        return self.buffer.nbytes + self._learned

    @property
    def nbytes_used(self) -> int:
        """Bytes of the tokens that are kept, and of what the codecs have learned."""
        return self.buffer.nbytes_used + self._learned

    @property
    def is_fitted(self) -> bool:
        """Whether both codecs can encode."""
        return self.key_codec.is_fitted and self.value_codec.is_fitted

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move codes and scales, and what the codecs have learned, without a round trip."""
        self.buffer.map(move)
        self.key_codec, self.value_codec = self.key_codec.map(move), self.value_codec.map(move)

    @property
    def _learned(self) -> int:
        return sum(t.nbytes for codec in (self.key_codec, self.value_codec) for t in codec.tensors.values())


def _part(codes: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in codes.items() if name.startswith(prefix)}
