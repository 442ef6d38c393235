"""Attention over states that are there as they are: PyTorch's own kernel, in blocks of queries where it would want a mask of queries x columns."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvq.kernels.base import Query
from hf_kvq.kernels.visibility import Visibility

__all__ = ["QUERIES", "attend_exact"]

QUERIES = 256
"""Queries of a block: its mask holds as many booleans for each column."""


def attend_exact(
    query: Query,
    keys: Float[Tensor, "batch kv_heads tokens key_dim"],
    values: Float[Tensor, "batch kv_heads tokens value_dim"],
    first_column: int,
    visibility: Visibility,
    scaling: float,
) -> Float[Tensor, "batch kv_heads groups queries value_dim"]:
    """Attention over these states, which are all that the queries see.

    Args:
        query: Queries, unscaled.
        keys: States at columns `first_column` and on.
        values: Their values.
        first_column: Column of the first state.
        visibility: Which columns each query sees.
        scaling: Factor of the dot products.
    """
    batch, kv_heads, groups, queries, dim = query.shape
    if queries == 1:
        mask = _mask(visibility, 0, 1, first_column, keys.shape[2], query)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.view(mask.shape[0], kv_heads, groups, -1)
        output = scaled_dot_product_attention(query[:, :, :, 0], keys, values, attn_mask=mask, scale=scaling)
        return output[:, :, :, None]
    # Rows and kv heads as one axis: the groups then share their head's keys by a stride of 0, and nothing is repeated in memory.
    rows = query.reshape(batch * kv_heads, groups, queries, dim)
    keys, values = (x.reshape(batch * kv_heads, 1, *x.shape[2:]).expand(-1, groups, -1, -1) for x in (keys, values))
    tokens = keys.shape[2]
    plain = visibility.mask is None and visibility.real is None
    within = visibility.window is None or visibility.window >= tokens
    if plain and within and visibility.first_query == first_column and queries == tokens:
        output = scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scaling)
        return output.view(batch, kv_heads, groups, queries, -1)
    output = query.new_empty(batch, kv_heads, groups, queries, values.shape[-1])
    for begin in range(0, queries, QUERIES):
        end = min(begin + QUERIES, queries)
        first, last = visibility.columns_of(begin, end)
        start, stop = max(first - first_column, 0), min(last - first_column, tokens)
        mask = _mask(visibility, begin, end, first_column + start, stop - start, query)
        if mask is not None:
            by_head = mask.view(mask.shape[0], -1, groups if mask.shape[1] > 1 else 1, end - begin, stop - start)
            mask = by_head.expand(batch, kv_heads, -1, -1, -1).flatten(0, 1)
        block = scaled_dot_product_attention(
            rows[:, :, begin:end], keys[:, :, start:stop], values[:, :, start:stop], attn_mask=mask, scale=scaling
        )
        output[:, :, :, begin:end] = block.view(batch, kv_heads, groups, end - begin, -1)
    return output


def _mask(visibility: Visibility, begin: int, end: int, column: int, columns: int, query: Query) -> Tensor | None:
    mask = visibility.tile(begin, end, column, columns, query.device)
    return mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
