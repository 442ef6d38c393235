"""The hazard of a constant in the keys: a large number added to two channels of every head, which a code of few bits must not drown in.

Models with a bias of the keys have such channels (Qwen2's are above 100). Before RoPE they are constant; after it a pair of channels turns, the quicker the higher its frequency,
so that the constant looks different to a code in each place. The biased model's predictions are others too: what is compared is a cache with the exact one on the same biased model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["BIAS", "NONE", "PLACEMENTS", "biased", "channels", "constant"]

BIAS = (100.0, -60.0)
"""What is added to the first channel and to the second."""

NONE = "none"
"""The model as it is."""

PLACEMENTS: Mapping[str, float] = MappingProxyType({"low": 1.0, "mid": 0.5, "high": 0.0})
"""Where among the pairs, from the quickest to the slowest."""


def channels(placement: str, head_dim: int) -> tuple[int, int]:
    """The two channels of a head: of two neighbouring pairs, one of each half (RoPE turns channel i with i + head_dim / 2)."""
    half = head_dim // 2
    first = min(int(PLACEMENTS[placement] * (half - 1)), half - 2)
    return first, first + 1 + half


def constant(placement: str, kv_heads: int, head_dim: int) -> Float[Tensor, " kv_heads*head_dim"]:
    """What is added to the keys of every token."""
    added = torch.zeros(kv_heads, head_dim)
    for channel, number in zip(channels(placement, head_dim), BIAS, strict=True):
        added[:, channel] = number
    return added.flatten()


def biased(model: PreTrainedModel, placement: str) -> PreTrainedModel:
    """A copy whose keys have the constant in every layer; the model itself where the placement is `NONE`.

    Raises:
        ValueError: If the model has no `self_attn.k_proj`, or normalizes what comes out of it.
    """
    if placement == NONE:
        return model
    names = [name for name, _ in model.named_modules()]
    if any(name.endswith("self_attn.k_norm") for name in names):
        raise ValueError("the model normalizes its keys, which a bias of k_proj would not outlast; try another model")
    copied = copy.deepcopy(model)
    projections = [
        module
        for name, module in copied.named_modules()
        if name.endswith("self_attn.k_proj") and isinstance(module, nn.Linear)
    ]
    if not projections:
        raise ValueError(f"{type(model).__name__} has no self_attn.k_proj that could take a bias; try another model")
    head_dim = copied.config.get_text_config(decoder=True).head_dim
    for projection in projections:
        added = constant(placement, projection.out_features // head_dim, head_dim).to(projection.weight)
        before = 0 if projection.bias is None else projection.bias.detach()
        projection.bias = nn.Parameter(before + added, requires_grad=False)
    return copied
