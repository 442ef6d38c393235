"""What a codec is: states in, codes out, and back.

Codes are a mapping of named tensors that all carry the token axis at dimension 2, so that a store can append, cut and
reorder them without knowing what they mean. A codec writes the codes of a token once; nothing is ever encoded again. A codec does not change: where it
learns something from the first tokens, `fitted` makes another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_kvq.basis import PlacedBasis
from hf_kvq.packing import Grid, Layout

__all__ = ["Codec", "Codes"]

Codes = Mapping[str, Tensor]
"""Named tensors, each `[batch, kv_heads or 1, tokens, width]`."""


class Codec(ABC):
    """Turns states of whole tokens into codes and back."""

    layout: Layout = "other"
    """How the codes are laid out, for kernels that read them."""

    block: int = 1
    """Tokens that are encoded together; `encode` takes a multiple of it."""

    depends_on_chunks: bool = False
    """Whether the codes of a token depend on what else came in its update (a scale shared over tokens)."""

    statistics: int = 0
    """Tokens that are kept exactly until `fitted` has seen them; 0 for a codec that learns nothing."""

    @property
    def is_fitted(self) -> bool:
        """Whether it can encode."""
        return True

    def fitted(
        self,
        states: Float[Tensor, "batch kv_heads tokens head_dim"],
        positions: Int[Tensor, "batch tokens"],
        queries: Float[Tensor, "batch kv_heads queries head_dim"] | None,
        origin: Int[Tensor, " batch"] | None = None,
    ) -> Codec:
        """The codec that has learned from a row's first tokens.

        Args:
            states: Exact ones.
            positions: Their rows' own numbers of them.
            queries: Of these tokens, of all query heads of a kv head; zero where a token's is not known, None where none is.
            origin: Column of each row's number 0; None for column 0.
        """
        return self

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it has learned, by name; the rows of the batch come first."""
        return {}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Codec:
        """The codec that has learned this; what no tensors name, nothing."""
        return self

    def map(self, move: Callable[[Tensor], Tensor]) -> Codec:
        """The codec with `move(tensor)` for each tensor that it has learned."""
        return self.with_tensors({name: move(tensor) for name, tensor in self.tensors.items()})

    def basis_at(self, positions: int | Int[Tensor, "batch kv_heads tokens"], tokens: int) -> PlacedBasis | None:
        """In what basis the codes of tokens at these columns are; None if in none."""
        return None

    def grid_of(self, head_dim: int) -> Grid | None:
        """How codes lie, where the layout is "grid"."""
        return None

    def bits_per_row(self, kv_heads: int, head_dim: int) -> int:
        """Bits of what is learned of one row."""
        return 0

    @abstractmethod
    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        """Encode states whose elements are all finite.

        Args:
            states: Of consecutive tokens.
            first: Column of the first one.
        """

    @abstractmethod
    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        """Write the decoded states to `out`, in its dtype, without a second tensor of that size where possible."""

    @abstractmethod
    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bits that one token of one row takes, scales included; exact states are in `dtype`."""

    def decode(
        self, codes: Codes, *, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "batch kv_heads tokens head_dim"]:
        """The decoded states as a new tensor."""
        batch, kv_heads, tokens, _ = codes["codes"].shape
        out = torch.empty(batch, kv_heads, tokens, head_dim, dtype=dtype, device=codes["codes"].device)
        self.decode_into(codes, out)
        return out
