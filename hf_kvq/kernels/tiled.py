"""Attention over codes in plain PyTorch, tile by tile: any device, any codec, queries of any number. The reference of the other kernels.

A tile of tokens is decoded into one buffer, which keys and values take in turn, and the softmax runs online (FlashAttention,
arXiv:2205.14135). The buffers do not depend on how many tokens there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_kvq.kernels.base import HIDDEN, Bias, Kernel, Logits, Operand, Partial, Query, Scoring, compute_dtype
from hf_kvq.kernels.visibility import Visibility

__all__ = ["SCORES", "TILE", "TiledKernel"]

TILE = 2**20
"""Elements of the decoded tile at most (but at least `_FEWEST` and at most `_MOST` tokens)."""

SCORES = 2**21
"""Scores of a tile at most (but at least one query)."""

_FEWEST, _MOST = 64, 1024


class TiledKernel(Kernel):
    """See the module."""

    name = "torch"

    def supports(self, query: Query, keys: Operand, values: Operand, visibility: Visibility) -> bool:
        return True

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
        batch, kv_heads, groups, queries, dim = query.shape
        dtype = compute_dtype(query.dtype)
        tokens = min(max(TILE // (batch * kv_heads * max(keys.dim, values.dim)), _FEWEST), _MOST, keys.tokens)
        block = min(max(SCORES // (batch * kv_heads * groups * tokens), 1), queries)
        scratch = _Scratch(batch * kv_heads, tokens, max(keys.dim, values.dim), groups * block, dtype, query.device)
        output = torch.zeros(batch, kv_heads, groups, queries, values.dim, dtype=dtype, device=query.device)
        lse = torch.full((batch, kv_heads, groups, queries), -torch.inf, dtype=dtype, device=query.device)
        if logits is not None:
            logits.fill_(HIDDEN)
        for begin in range(0, queries, block):
            end = min(begin + block, queries)
            rows = query[:, :, :, begin:end].to(dtype).reshape(batch * kv_heads, groups * (end - begin), dim)
            first, last = visibility.columns_of(begin, end)
            running = _Running(rows.shape[:2], values.dim, dtype, query.device)
            for column in range(max(first, first_column), min(last, first_column + keys.tokens), tokens):
                stop = min(column + tokens, last, first_column + keys.tokens)
                scores = _scores(
                    rows, keys.slice(column - first_column, stop - first_column), scratch, visibility, scoring, batch,
                    (begin, end, column, stop),
                    None if bias is None else bias[:, :, :, begin:end, column - first_column : stop - first_column],
                )  # fmt: skip
                if logits is not None:
                    shown = logits[:, :, :, begin:end, column - first_column : stop - first_column]
                    shown.copy_(scores.view(shown.shape)).clamp_(min=HIDDEN)
                running.add(scores, scratch.states(values.slice(column - first_column, stop - first_column)))
            shape = (batch, kv_heads, groups, end - begin)
            output[:, :, :, begin:end], lse[:, :, :, begin:end] = (
                x.view(*shape, *x.shape[2:]) for x in running.close()
            )
        return Partial(output, lse)


class _Scratch:
    """The buffers of one call: fresh tensors for each tile would cost a page fault for each page."""

    def __init__(self, heads: int, tokens: int, dim: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.heads = heads
        self._tile = torch.empty(heads * tokens * dim, dtype=dtype, device=device)
        self._scores = torch.empty(heads * rows * tokens, dtype=dtype, device=device)

    def states(self, operand: Operand) -> Tensor:
        """The states of a tile, `[batch * kv_heads, tokens, dim]`; overwritten by the next call."""
        codes = operand.parts["codes"]
        if operand.layout == "states" and codes.dtype == self._tile.dtype:
            return codes.reshape(self.heads, operand.tokens, operand.dim)
        tile = self._tile[: self.heads * operand.tokens * operand.dim]
        operand.decode_into(tile.view(codes.shape[0], codes.shape[1], operand.tokens, operand.dim))
        return tile.view(self.heads, operand.tokens, operand.dim)

    def scores(self, rows: int, tokens: int) -> Tensor:
        return self._scores[: self.heads * rows * tokens].view(self.heads, rows, tokens)


class _Running:
    """Softmax and weighted sum over the tiles so far."""

    def __init__(self, shape: torch.Size, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.largest = torch.full((*shape, 1), -torch.inf, dtype=dtype, device=device)
        self.total = torch.zeros(*shape, 1, dtype=dtype, device=device)
        self.output = torch.zeros(*shape, dim, dtype=dtype, device=device)

    def add(self, scores: Tensor, values: Tensor) -> None:
        largest = torch.maximum(self.largest, scores.amax(dim=-1, keepdim=True))
        reference = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = scores.sub_(reference).exp_()
        kept = (self.largest - reference).exp_()
        self.total.mul_(kept).add_(weights.sum(dim=-1, keepdim=True))
        self.output.mul_(kept).baddbmm_(weights, values)
        self.largest = largest

    def close(self) -> tuple[Tensor, Tensor]:
        output = self.output / self.total.clamp(min=torch.finfo(self.total.dtype).tiny)
        return output, (self.total.log() + self.largest)[..., 0]


def _scores(
    rows: Tensor, keys: Operand, scratch: _Scratch, visibility: Visibility, scoring: Scoring, batch: int,
    place: tuple[int, int, int, int], bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Logits of one tile, -inf where a query does not see."""
    begin, end, column, stop = place
    scores = scratch.scores(rows.shape[1], keys.tokens)
    torch.bmm(rows, scratch.states(keys).transpose(1, 2), out=scores)
    if bias is not None:
        scores.view(bias.shape).add_(bias)
    scores.mul_(scoring.scaling)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    mask = visibility.tile(begin, end, column, stop - column, rows.device)
    if mask is not None:
        heads, queries = scores.shape[0] // batch, end - begin
        by_head = scores.view(batch, heads, -1, queries, stop - column)
        # A mask of its own for each query head, or one for all.
        mask = mask.view(mask.shape[0], heads, -1, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
        if mask.dtype == torch.bool:
            by_head.masked_fill_(~mask, -torch.inf)
        else:
            by_head.add_(mask)
    return scores
