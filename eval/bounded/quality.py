"""Perplexity of bounded caches at equal bytes.

Windows of the text one after the other; each begins with an empty cache, goes through it in chunks, every token read as codes, and the positions
from `scored_from` on are scored. All policies see the same tokens, so differences are paired by window.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, PreTrainedModel

from eval.bounded.policies import FULL, Policy
from hf_kvq import QuantizedSlidingWindowCache
from hf_kvq.evaluation.models import forward

__all__ = ["compare", "nll_of"]


def nll_of(model: PreTrainedModel, ids: Tensor, cache: Cache, *, chunk: int) -> Tensor:
    """Negative log-likelihood in nats of tokens 1 and on, `[tokens - 1]`, in chunks through one cache.

    Args:
        model: Set to the attention that the cache needs.
        ids: `[tokens]`.
        cache: Empty, or filled by what came before.
        chunk: Tokens of a forward.
    """
    found = []
    with torch.inference_mode():
        for begin in range(0, len(ids) - 1, chunk):
            end = min(begin + chunk, len(ids) - 1)
            logits = forward(model, ids[None, begin:end], cache)[0].float()
            found.append(cross_entropy(logits, ids[begin + 1 : end + 1], reduction="none"))
    return torch.cat(found)


def compare(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    policies: Sequence[Policy],
    *,
    scored_from: int,
    chunk: int,
    scheme: str = "int8",
    progress: Any = None,
) -> list[dict[str, Any]]:
    """One row a policy: nll by window, and bytes of a kv head at the end."""
    rows = []
    config = model.config
    text = config.get_text_config(decoder=True)
    for policy in policies:
        nlls, started = [], time.perf_counter()
        nbytes = 0.0
        for ids in windows:
            cache = policy.make(config, scheme)
            model.set_attn_implementation("sdpa" if policy.kind == FULL else "hf_kvq")
            nll = nll_of(model, ids, cache, chunk=chunk)
            # Entry i is the nll of token i + 1, whose query stands at position i.
            nlls.append(nll[scored_from:].double().mean().item())
            if isinstance(cache, QuantizedSlidingWindowCache):
                nbytes = cache.nbytes_used / (len(cache.layers) * text.num_key_value_heads)
            if progress is not None:
                progress.update(1)
        rows.append(
            {
                "kind": policy.kind,
                "budget": policy.budget,
                "label": policy.label,
                "scheme": scheme,
                "nll": nlls,
                "perplexity": float(np.exp(np.mean(nlls))),
                "nbytes_per_head": nbytes,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    return rows
