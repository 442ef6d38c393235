"""Which rotation a model's config gives to the keys of one layer.

Source: transformers' `modeling_rope_utils` (RoPE types, `rope_parameters`, flat or one dict per layer type) and its modeling files, which
alone say what no config does: how channels are paired, which layers turn nothing, where a norm follows the rotation. The
tables below hold those facts by model type, and a test compares each with the keys that such a model puts into its cache.
Departs from it: where frequencies change with the length of the sequence (dynamic, longrope), the ones up to `trained_length` are given.

None means that no rotation by a difference of positions moves this layer's cached keys: it has no positions (NoPE, ALiBi), learned
ones, or keys that something else than RoPE made last. A model type that no table names is taken to turn its channels as Llama does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_kvq.rope import Rope

__all__ = ["rope_of_layer", "trained_length"]

INTERLEAVED = frozenset(
    {
        # rotate_every_two
        "codegen",
        "gptj",
        # rotate_half of channels 0::2 and 1::2
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "glm",
        "glm4",
        "glm4v_text",
        "glm_ocr_text",
        "helium",
        "moonshine",
        "moonshine_streaming",
        # view_as_complex of channels [..., 2]
        "llama4_text",
    }
)
"""Model types that turn channels 2j and 2j + 1 together."""

FIXED_THETA = {"codegen": 10_000.0, "gptj": 10_000.0}
"""Model types without `rope_parameters`; `config.rotary_dim` says how many channels turn."""

BACKWARDS = frozenset({"nanochat"})
"""Model types that turn the other way: rotate_half is (x2, -x1)."""

NOT_A_ROTATION = {
    "hunyuan_v1_dense": "keys are normalized after RoPE, with a weight per channel",
    "hunyuan_v1_moe": "keys are normalized after RoPE, with a weight per channel",
    "hunyuan_vl_text": "keys are normalized after RoPE, with a weight per channel",
}
"""Model types that turn keys and then change them in a way that no rotation passes through."""

SLIDING_LAYERS_ONLY = frozenset(
    {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini"}
)
"""Model types whose full-attention layers have no positions where the model has sliding layers."""


def rope_of_layer(config: PreTrainedConfig, layer_index: int, head_dim: int) -> Rope | None:
    """How one layer turns its keys, or None if it does not.

    Args:
        config: The model's config, or its text config.
        layer_index: Number of the layer, as the cache counts it.
        head_dim: Channels of this layer's keys.
    """
    config = config.get_text_config(decoder=True)
    model_type = config.model_type
    latent = getattr(config, "kv_lora_rank", None) is not None
    if latent or model_type in NOT_A_ROTATION or not _has_positions(config, layer_index):
        return None
    if model_type in FIXED_THETA:
        inv_freq = _default(FIXED_THETA[model_type], config.rotary_dim or head_dim)
    else:
        layer_type, parameters = _parameters(config, layer_index)
        if not parameters or parameters.get("rope_theta") is None:
            return None
        inv_freq = _inv_freq(config, layer_type, parameters, head_dim)
    if model_type in BACKWARDS:
        inv_freq = -inv_freq
    return Rope(tuple(inv_freq.double().tolist()), model_type in INTERLEAVED)


def trained_length(config: PreTrainedConfig) -> int | None:
    """Positions that the model was trained, or scaled, to tell apart; None where its config names no bound.

    For longrope that is the length up to which its short factors hold.
    """
    config = config.get_text_config(decoder=True)
    lengths = [getattr(config, "max_position_embeddings", None)]
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            lengths.append(each.get("original_max_position_embeddings"))
    return min((length for length in lengths if length is not None), default=None)


def _has_positions(config: PreTrainedConfig, layer_index: int) -> bool:
    """Whether this layer turns its keys at all."""
    # `no_rope_layers` means the opposite of its name: 1 marks a layer that turns its keys. A theta of 0 marks one that does not.
    for name in ("no_rope_layers", "layer_rope_theta"):
        turning = getattr(config, name, None)
        if turning and not turning[layer_index]:
            return False
    if getattr(config, "alibi", False) or not getattr(config, "use_mem_rope", True):
        return False
    if getattr(config, "position_embedding_type", "rope") != "rope":
        return False
    if config.model_type in SLIDING_LAYERS_ONLY and getattr(config, "sliding_window", None):
        return config.layer_types[layer_index] == "sliding_attention"
    return True


def _parameters(config: PreTrainedConfig, layer_index: int) -> tuple[str | None, dict[str, Any] | None]:
    """RoPE parameters of a layer, and its layer type where they differ between layer types."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return None, None
    if any(isinstance(each, dict) for each in parameters.values()):
        layer_type = config.layer_types[layer_index]
        return layer_type, parameters.get(layer_type)
    thetas = getattr(config, "layer_rope_theta", None)
    return None, {**parameters, "rope_theta": thetas[layer_index]} if thetas else parameters


def _inv_freq(
    config: PreTrainedConfig, layer_type: str | None, parameters: dict[str, Any], head_dim: int
) -> torch.Tensor:
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_INIT_FUNCTIONS:
        return _default(parameters["rope_theta"], int(head_dim * parameters.get("partial_rotary_factor", 1.0)))
    config = copy.deepcopy(config)  # These functions write defaults into the config that they are given.
    if layer_type is None:
        config.rope_parameters = dict(parameters)
    inv_freq, _ = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), layer_type=layer_type)
    return inv_freq


def _default(theta: float, rotary_dim: int) -> torch.Tensor:
    """float32, as models compute them."""
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim))
