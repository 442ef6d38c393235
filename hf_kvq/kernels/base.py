"""What a kernel reads and answers.

Attention over a part of the tokens is complete in itself once the log of its softmax denominator is known: outputs of two parts merge
by their log-sum-exp (FlashAttention, arXiv:2205.14135; split along the tokens: Flash-Decoding). So every kernel answers one question,
`attend(query) -> (output, lse)`, for whatever part it is given.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_kvq.basis import PlacedBasis
from hf_kvq.kernels.visibility import Visibility
from hf_kvq.packing import Grid, Layout

__all__ = [
    "HIDDEN",
    "Bias",
    "Kernel",
    "Logits",
    "Operand",
    "Part",
    "Partial",
    "Scoring",
    "compute_dtype",
    "merge",
    "restorer_for",
    "zero_logit",
]

Query = Float[Tensor, "batch kv_heads groups queries key_dim"]
"""Query heads that share a kv head stand together: head `h * groups + g` is `[:, h, g]`."""

Logits = Float[Tensor, "batch kv_heads groups queries tokens"]
"""Contiguous, in `compute_dtype` of the query's dtype."""

Bias = Float[Tensor, "batch kv_heads groups queries tokens"]
"""What is added to the dot products, before they are scaled."""

HIDDEN = -1e30
"""A logit that takes no weight and gives no NaN."""


class Partial(NamedTuple):
    """Attention over a part of the tokens; rows that see none of it have output 0 and lse -inf."""

    output: Float[Tensor, "batch kv_heads groups queries value_dim"]
    lse: Float[Tensor, "batch kv_heads groups queries"]


@dataclass(frozen=True)
class Scoring:
    """How a dot product becomes a logit: `s = scaling * q.k`, then `softcap * tanh(s / softcap)` where there is a softcap."""

    scaling: float
    softcap: float | None = None


@dataclass(frozen=True)
class Operand:
    """Keys, or values, of consecutive tokens as they are stored.

    Attributes:
        layout: What a kernel that reads codes must know.
        parts: Named tensors with the token axis at dimension 2: `codes`, and `scale` where the layout has one.
        dim: Channels of a state.
        decoder: Writes the states that parts stand for into a tensor, in its dtype; where they are coded in a basis, those in the basis.
        grid: How codes lie where the layout is "grid".
        basis: In which the states are coded, if they are.
        block: Tokens that are coded together; the parts hold whole blocks.
        skipped: Tokens at the front of the parts that are not among these.
        count: How many tokens these are; None for all that the parts hold.
    """

    layout: Layout
    parts: Mapping[str, Tensor]
    dim: int
    decoder: Callable[[Mapping[str, Tensor], Tensor], None]
    grid: Grid | None = None
    basis: PlacedBasis | None = None
    block: int = 1
    skipped: int = 0
    count: int | None = None

    @property
    def tokens(self) -> int:
        return self.parts["codes"].shape[2] if self.count is None else self.count

    def slice(self, first: int, end: int) -> Operand:
        """Tokens `first` to `end`, without a copy: the blocks that they are in."""
        basis = None if self.basis is None else self.basis.slice(first, end)
        if self.block == 1:
            return replace(self, parts=self._columns(first, end), basis=basis)
        begin, stop = first + self.skipped, end + self.skipped
        skipped = begin % self.block
        parts = self._columns(begin - skipped, stop + -stop % self.block)
        return replace(self, parts=parts, basis=basis, skipped=skipped, count=end - first)

    def of_rows(self, rows: Int[Tensor, " rows"]) -> Operand:
        """Some rows, as a copy; float8 is indexed as bytes."""
        return replace(
            self,
            parts={
                name: part.view(torch.uint8)[rows].view(part.dtype) if part.dtype.itemsize == 1 else part[rows]
                for name, part in self.parts.items()
            },
            basis=None if self.basis is None else self.basis.of_rows(rows),
        )

    def in_basis(self) -> Operand:
        """The states as they are in their basis."""
        return replace(self, basis=None)

    def decode(self, dtype: torch.dtype) -> Float[Tensor, "batch kv_heads tokens dim"]:
        """The states as a new tensor."""
        codes = self.parts["codes"]
        out = torch.empty(*codes.shape[:2], self.tokens, self.dim, dtype=dtype, device=codes.device)
        self.decode_into(out)
        return out

    def decode_into(self, out: Float[Tensor, "batch kv_heads tokens dim"]) -> None:
        """Write the states into `out`."""
        if self.basis is None:
            self._write(out)
            return
        restore = restorer_for(out.device.type)
        if restore is not None and restore(self, out):
            return
        wide = torch.empty_like(out, dtype=compute_dtype(out.dtype))
        self._write(wide)
        out.copy_(self.basis.restore(wide))

    def _columns(self, first: int, end: int) -> dict[str, Tensor]:
        return {name: part[:, :, first:end] for name, part in self.parts.items()}

    def _write(self, out: Float[Tensor, "batch kv_heads tokens dim"]) -> None:
        """Write the states as they are coded."""
        held = self.parts["codes"].shape[2]
        if held == out.shape[2]:
            self.decoder(self.parts, out)
            return
        blocks = out.new_empty(*out.shape[:2], held, self.dim)
        self.decoder(self.parts, blocks)
        out.copy_(blocks[:, :, self.skipped : self.skipped + out.shape[2]])


class Part(NamedTuple):
    """Tokens at consecutive columns, and which of them each query sees; see `Kernel.attend`."""

    keys: Operand
    values: Operand
    first_column: int
    visibility: Visibility
    logits: Logits | None = None


@functools.cache
def restorer_for(device_type: str) -> Callable[[Operand, Tensor], bool] | None:
    """What takes codes out of their basis in one walk, or says that it does not; None where tensors are all there is."""
    if device_type != "cpu":
        return None
    try:
        from hf_kvq.kernels.numba_restore import restore_into
    except ImportError:
        return None
    return restore_into


class Kernel(ABC):
    """One way to compute attention over codes."""

    name: str
    takes_parts = False
    """Whether `attend_parts` is one call."""

    @abstractmethod
    def supports(self, query: Query, keys: Operand, values: Operand, visibility: Visibility) -> bool:
        """Whether `attend` takes these arguments."""

    @abstractmethod
    def attend(
        self,
        query: Query,
        keys: Operand,
        values: Operand,
        first_column: int,
        visibility: Visibility,
        scoring: Scoring,
        logits: Logits | None = None,
        bias: Bias | None = None,
    ) -> Partial:
        """Attention of the queries over these tokens alone, accumulated over tokens in `compute_dtype` of the query's dtype.

        A kernel that takes no basis reads states as they are in it; `kernels.attend` sees to that.

        Args:
            query: Queries, unscaled.
            keys: Tokens at columns `first_column` and on.
            values: Their values.
            first_column: Column of the first token.
            visibility: Which columns each query sees.
            scoring: Scaling and softcap.
            logits: Filled with the logits where given, below `HIDDEN` / 2 where a query does not see: with the `lse` of all parts they say what
                weight each token has, without reading a code again.
            bias: Contiguous, in `compute_dtype` of the query's dtype; added to the dot products before they are scaled.
        """

    def attend_parts(self, query: Query, parts: Sequence[Part], scoring: Scoring) -> Partial:
        """Attention over all parts together, each of which it supports; of kernels that take parts."""
        raise NotImplementedError(f"kernel {self.name} takes no parts; see kernels.attend_parts")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is accumulated over tokens: at least float32. fp8 with weaker sums found 13 % of the needles at 128k instead of 91 % (vllm#23813)."""
    return torch.promote_types(dtype, torch.float32)


def merge(partials: Sequence[Partial]) -> Partial:
    """Attention over all parts together."""
    if len(partials) == 1:
        return partials[0]
    outputs, lses = zip(*partials, strict=True)
    stacked = torch.stack(lses)
    largest = stacked.amax(dim=0)
    # Rows that see nothing at all: any finite number in place of -inf keeps NaN away.
    weights = (stacked - largest.masked_fill(largest == -torch.inf, 0.0)).exp_()
    total = weights.sum(dim=0)
    divisor = total.clamp(min=torch.finfo(total.dtype).tiny)
    merged = torch.zeros_like(outputs[0])
    for output, weight in zip(outputs, weights, strict=True):
        merged.addcmul_(output, (weight / divisor)[..., None])
    return Partial(merged, total.log() + largest)


def zero_logit(like: Partial, logits: Float[Tensor, "kv_heads groups"]) -> Partial:
    """A part that takes weight and gives nothing: a learned sink logit per query head (GPT-OSS calls it `s_aux`)."""
    lse = logits.to(like.lse.dtype)[None, :, :, None].expand_as(like.lse)
    return Partial(torch.zeros_like(like.output), lse)
