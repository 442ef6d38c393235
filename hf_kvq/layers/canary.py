"""Whether codes are fit for a model: attention over the first tokens that were coded, beside attention over the same tokens exactly.

Some models have keys that a scheme cannot hold (a large bias in a few channels: Qwen2.5 under 4 bits per token answers nothing right any more,
transformers#35185). It shows at once, on the first tokens, in the output of their attention.
"""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["LIMIT", "CodesUnfitWarning", "attention_error", "warn_if_unfit"]

LIMIT = 0.9
"""Relative error of the attention output above which a scheme is called unfit.

The worst head of SmolLM2-135M after a prompt of 240 tokens of prose, keys standing in for queries / by its own queries: q8 .02 / .02, int8 .05 / .04, kivi4 .21 / .24, q4
.18 / .35, q3 .29 / .65, q2 .67 / .65, one scale a token at 4 bits .62 / .71, kivi2 .82 / .82. With a constant of +100 and -60 on two channels of the keys one scale a token at 4
bits is at 1.0 to 1.2: what it gives has nothing to do with what it should.
"""

QUERIES = 64
"""Newest queries that are asked."""


class CodesUnfitWarning(UserWarning):
    """Attention over codes is far from exact attention."""


def attention_error(
    query: Float[Tensor, "batch kv_heads groups queries key_dim"],
    exact: tuple[Float[Tensor, "batch kv_heads tokens key_dim"], Float[Tensor, "batch kv_heads tokens value_dim"]],
    read: tuple[Float[Tensor, "batch kv_heads tokens key_dim"], Float[Tensor, "batch kv_heads tokens value_dim"]],
    *,
    ahead: int,
    scaling: float,
) -> Float[Tensor, " kv_heads"]:
    """Error of the attention output over tokens as they are read, relative to that over the exact ones, root mean square over rows and queries.

    Args:
        query: Queries, unscaled.
        exact: Keys and values as they came.
        read: As codes stand for them.
        ahead: Tokens by which the first query is behind the first token.
        scaling: Factor of the dot products.
    """
    outputs = []
    tokens, queries = exact[0].shape[2], query.shape[3]
    places = torch.arange(queries, device=query.device)[:, None] + ahead
    hidden = torch.arange(tokens, device=query.device) > places
    for keys, values in (exact, read):
        logits = (query.float() @ keys.float().mT[:, :, None] * scaling).masked_fill(hidden, -torch.inf)
        outputs.append(logits.softmax(dim=-1) @ values.float()[:, :, None])
    error, size = ((x).square().sum(dim=(0, 2, 3, 4)) for x in (outputs[1] - outputs[0], outputs[0]))
    return (error / size.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()


def warn_if_unfit(error: Float[Tensor, " kv_heads"], layer: int) -> None:
    """Warn of the worst head where it is beyond `LIMIT`, or no number at all."""
    worst = int(error.nan_to_num(torch.inf).argmax())
    found = float(error[worst])
    if not found <= LIMIT:
        warnings.warn(
            f"layer {layer}, kv head {worst}: attention over codes is off by {found:.0%} of its output on the first tokens, where {LIMIT:.0%} is the limit; this scheme "
            f"does not fit the model: take more bits (q8), or skip_layers=({layer},)",
            CodesUnfitWarning,
            stacklevel=2,
        )
