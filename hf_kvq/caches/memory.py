"""How many bytes a cache comes to, from a model's config alone.

A closed formula beside `QuantizedCache.nbytes`, which counts storages; each checks the other. It holds after one prefill of
`context` tokens; a cache that grew token by token may hold up to a quarter of spare room beyond it, and a layer that still learns keeps a number for each channel of the queries
that attention over codes showed it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from hf_kvq.caches.coded import CODED_LAYER_TYPES, layer_types_and_kwargs
from hf_kvq.codecs import make_codecs
from hf_kvq.config import QuantConfig, resolve_scheme
from hf_kvq.layers.rotary import rope_of_layer
from hf_kvq.states import round_up

__all__ = ["LayerMemory", "expected_nbytes", "layer_memory"]


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """What one layer keeps of one row.

    Attributes:
        layer_type: As the config has it.
        kv_heads: Heads of keys and values.
        key_dim: Channels of a key.
        value_dim: Channels of a value.
        tokens: Tokens that are kept at the context length asked for.
        coded: Whether a scheme would code the layer.
        window: The model's own sliding window; None for full attention.
    """

    layer_type: str
    kv_heads: int
    key_dim: int
    value_dim: int
    tokens: int
    coded: bool
    window: int | None = None

    @property
    def elements(self) -> int:
        """Elements of keys and values of one row."""
        return self.tokens * self.kv_heads * (self.key_dim + self.value_dim)


def layer_memory(config: PreTrainedConfig, context: int) -> list[LayerMemory]:
    """What each layer of a model keeps of `context` tokens; layers without keys and values keep none.

    Raises:
        ValueError: If `context` is not positive, or the config does not say how many heads there are.
    """
    if context < 1:
        raise ValueError(f"context must be at least 1 token, got {context}")
    text = config.get_text_config(decoder=True)
    layer_types, kwargs = layer_types_and_kwargs(config)
    layers = []
    for layer_type, layer_kwargs, layer_config in zip(layer_types, kwargs, text.per_layer_config, strict=True):
        window = layer_kwargs.get("sliding_window")
        has_keys = ("attention" in layer_type and layer_type != "linear_attention") or layer_type.startswith("hybrid")
        kv_heads, key_dim, value_dim = _dimensions(layer_config) if has_keys else (0, 0, 0)
        layers.append(
            LayerMemory(
                layer_type=layer_type,
                kv_heads=kv_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                tokens=0 if not has_keys else context if window is None else min(context, window - 1),
                coded=layer_type in CODED_LAYER_TYPES,
                window=window,
            )
        )
    return layers


def expected_nbytes(
    config: PreTrainedConfig,
    scheme: str | QuantConfig,
    context: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that a cache holds after a prefill of `context` tokens a row.

    States of fixed size (linear attention) are not counted: they do not grow with the context.

    Args:
        config: The model's config.
        scheme: A preset's name, a `QuantConfig`, or `"exact"` for transformers' DynamicCache.
        context: Tokens of a row.
        batch: Rows.
        dtype: The model's dtype, in which exact states are kept.

    Raises:
        ValueError: If the scheme is unknown, or as `layer_memory` does.
    """
    quant = None if scheme == "exact" else resolve_scheme(scheme)
    total = 0
    layers = layer_memory(config, context)
    for index, layer in enumerate(layers):
        exact = layer.kv_heads * (layer.key_dim + layer.value_dim) * dtype.itemsize
        if quant is None or not layer.coded:
            total += layer.tokens * exact
            continue
        sinks = quant.sinks if layer.layer_type == "full_attention" else 0
        residual = min(quant.residual, max(layer.tokens - sinks, 0))
        codecs = make_codecs(quant.for_layer(index, len(layers)), rope_of_layer(config, index, layer.key_dim))
        dims = list(zip(codecs, (layer.key_dim, layer.value_dim), strict=True))
        learning = max(codec.statistics for codec in codecs)
        if layer.window is not None:
            learning = min(learning, layer.window - 1)
        if learning and layer.tokens < sinks + learning:
            residual = max(layer.tokens - sinks, 0)  # too few tokens to learn from: all of them are exact
        else:
            total += sum(codec.bits_per_row(layer.kv_heads, dim) for codec, dim in dims) // 8
        coded = max(layer.tokens - sinks - residual, 0)
        waiting = coded % math.lcm(*(codec.block for codec in codecs))
        residual, coded = residual + waiting, coded - waiting
        bits = sum(codec.bits_per_token(layer.kv_heads, dim, dtype) for codec, dim in dims)
        total += sinks * exact + round_up(residual) * exact + round_up(coded) * bits // 8
    return total * batch


def _dimensions(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Heads, channels of a key and channels of a value, as the layer hands them to a cache."""
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    if not heads:
        raise ValueError(f"the config of a {config.model_type} does not say how many attention heads it has")
    if getattr(config, "kv_lora_rank", None):
        # Multi-head latent attention: the cache gets the latents before they are expanded, as keys and values of one head.
        return 1, config.kv_lora_rank, config.qk_rope_head_dim
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, head_dim, head_dim
