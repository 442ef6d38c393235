"""A region: consecutive tokens of a layer, keys and values together, coded in one way.

Every region answers the same questions, so a layer never asks what codec it holds: how many tokens, how many bytes, and
`write_dense`, the states that a model's own attention reads.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from hf_kvq.codecs import Codec
from hf_kvq.states.buffer import BufferMark, TokenBuffer

__all__ = ["Region"]


class Region:
    """Tokens `first` to `end` of a layer, held as the codes of two codecs."""

    def __init__(self, key_codec: Codec, value_codec: Codec) -> None:
        self.key_codec = key_codec
        self.value_codec = value_codec
        self.buffer = TokenBuffer()
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
    ) -> None:
        """Encode tokens and keep their codes."""
        self.buffer.append(
            {f"key_{name}": part for name, part in self.key_codec.encode(keys).items()}
            | {f"value_{name}": part for name, part in self.value_codec.encode(values).items()}
        )
        self.tokens_encoded += keys.shape[2]

    def write_dense(
        self,
        keys: Float[Tensor, "batch kv_heads tokens key_dim"],
        values: Float[Tensor, "batch kv_heads tokens value_dim"],
        first: int,
        end: int,
    ) -> None:
        """Decode tokens `first` to `end` into the two tensors, in their dtype."""
        codes = self.buffer.view(first, end)
        self.key_codec.decode_into(_part(codes, "key_"), keys)
        self.value_codec.decode_into(_part(codes, "value_"), values)

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
