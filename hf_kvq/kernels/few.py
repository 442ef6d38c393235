"""Attention over a handful of states that are there as they are, sinks above all: one product, without tiles."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hf_kvq.kernels.base import Partial, Query, Scoring, compute_dtype

__all__ = ["attend_few"]


def attend_few(
    query: Query,
    keys: Float[Tensor, "batch kv_heads tokens key_dim"],
    values: Float[Tensor, "batch kv_heads tokens value_dim"],
    mask: Shaped[Tensor, "rows heads queries tokens"] | None,
    scoring: Scoring,
) -> Partial:
    """Attention of the queries over these tokens alone.

    Args:
        query: Queries, unscaled.
        keys: A few states.
        values: Theirs.
        mask: True, or 0.0, where a query sees a token; None where all are seen.
        scoring: Scaling and softcap.
    """
    batch, kv_heads, groups, queries, dim = query.shape
    dtype = compute_dtype(query.dtype)
    rows = query.to(dtype).reshape(batch, kv_heads, groups * queries, dim)
    logits = torch.matmul(rows, keys.to(dtype).transpose(2, 3)).mul_(scoring.scaling)
    if scoring.softcap is not None:
        logits.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if mask is not None:
        by_query = logits.view(batch, kv_heads, groups, queries, -1)
        mask = mask.view(mask.shape[0], kv_heads, -1, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
        if mask.dtype == torch.bool:
            by_query.masked_fill_(~mask, -torch.inf)
        else:
            by_query.add_(mask)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    # A query that sees nothing: any finite number in place of -inf keeps NaN away.
    reference = lse if mask is None else lse.masked_fill(lse == -torch.inf, 0.0)
    output = torch.matmul(logits.sub_(reference).exp_(), values.to(dtype))
    shape = (batch, kv_heads, groups, queries)
    return Partial(output.view(*shape, -1), lse.view(shape))
