"""The rotation that a config promises, against the keys that such a model puts into its cache."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from transformers import AutoModel, DynamicCache, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from hf_kvq.layers.rotary import (
    BACKWARDS,
    FIXED_THETA,
    INTERLEAVED,
    NOT_A_ROTATION,
    SLIDING_LAYERS_ONLY,
    rope_of_layer,
    trained_length,
)

SMALL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MOE: dict[str, Any] = dict(
    moe_intermediate_size=16, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2
)
GPT: dict[str, Any] = dict(
    vocab_size=64, n_positions=256, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, initializer_range=0.3
)
MROPE: dict[str, Any] = dict(
    hidden_size=128,
    head_dim=32,
    rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.5, mrope_section=[2, 3, 3]),
)
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"] * 2


def scaled(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=10_000.0, **parameters))


# What a model of this type is made of beyond SMALL, and which of its layers turn their keys.
ALL, NONE = "all", "none"
CASES: list[tuple[str, dict[str, Any], str | list[bool]]] = [
    ("llama", {}, ALL),
    ("llama", dict(head_dim=40), ALL),
    ("llama", scaled("linear", factor=4.0), ALL),
    (
        "llama",
        scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        ALL,
    ),
    ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=64), ALL),
    ("llama", scaled("dynamic", factor=4.0), ALL),
    (
        "phi3",
        scaled(
            "longrope",
            short_factor=[1.0 + j / 10 for j in range(8)],
            long_factor=[2.0 + j for j in range(8)],
            original_max_position_embeddings=128,
        )
        | dict(original_max_position_embeddings=128),
        ALL,
    ),
    ("mistral", dict(sliding_window=8), ALL),
    ("qwen2", {}, ALL),
    ("qwen3", dict(head_dim=24), ALL),
    ("gemma3_text", dict(head_dim=16, layer_types=SLIDING_THEN_FULL), ALL),
    (
        "gpt_neox",
        dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.25)),
        ALL,
    ),
    ("phi", {}, ALL),
    ("smollm3", dict(no_rope_layers=[1, 0, 1, 0]), [True, False, True, False]),
    ("granitemoehybrid", dict(layer_types=["attention"] * 4, num_local_experts=0), NONE),
    (
        "granitemoehybrid",
        dict(layer_types=["attention"] * 4, num_local_experts=0, position_embedding_type="rope"),
        ALL,
    ),
    ("granite_swa", dict(layer_rope_theta=[1e4, 0, 5e5, 0]), [True, False, True, False]),
    ("jamba", dict(attn_layer_period=1, attn_layer_offset=0, num_experts=2), NONE),
    ("mpt", dict(d_model=64, n_heads=4, n_layers=2, vocab_size=64), NONE),
    ("bloom", dict(hidden_size=64, n_head=4, n_layer=2, vocab_size=64), NONE),
    ("falcon", dict(alibi=True), NONE),
    ("falcon", {}, ALL),
    ("gptj", GPT, ALL),
    ("codegen", GPT, ALL),
    ("cohere", {}, ALL),
    ("cohere2", dict(layer_types=SLIDING_THEN_FULL), [True, False] * 2),
    (
        "cohere2_moe",
        dict(**MOE, layer_types=SLIDING_THEN_FULL, mlp_layer_types=["sparse"] * 4),
        [True, False] * 2,
    ),
    ("ernie4_5", {}, ALL),
    ("ernie4_5_moe", dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16), ALL),
    (
        "ernie4_5_vl_moe_text",
        dict(
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=[16, 16],
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=[3, 3, 2]),
        ),
        ALL,
    ),
    ("glm", dict(head_dim=16), ALL),
    ("glm4", dict(head_dim=16), ALL),
    ("glm4v_text", MROPE, ALL),
    ("glm_ocr_text", MROPE, ALL),
    ("helium", dict(head_dim=16), ALL),
    (
        "llama4_text",
        dict(**MOE, head_dim=16, intermediate_size_mlp=64, no_rope_layers=[1, 1, 1, 0]),
        [True] * 3 + [False],
    ),
    ("nanochat", {}, ALL),
    ("afmoe", dict(**MOE, head_dim=16, layer_types=SLIDING_THEN_FULL), [True, False] * 2),
    ("exaone4", dict(sliding_window=8, layer_types=SLIDING_THEN_FULL), [True, False] * 2),
    ("exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 4), ALL),
    ("exaone_moe", dict(**MOE, sliding_window=8, layer_types=SLIDING_THEN_FULL), [True, False] * 2),
    ("kolibri1", dict(**MOE, sliding_window=8, layer_types=SLIDING_THEN_FULL), [True, False] * 2),
    ("lara_mini", dict(head_dim=16, sliding_window=8, layer_types=SLIDING_THEN_FULL), [True, False] * 2),
    ("flint", dict(sliding_window=8, layer_types=SLIDING_THEN_FULL), [True, False] * 2),
]


def config_of(model_type: str, **settings: Any) -> Any:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    kind: Any = CONFIG_MAPPING[model_type]
    return kind(**settings)


def model_of(model_type: str, settings: dict[str, Any]) -> PreTrainedModel:
    base = {} if "n_embd" in settings or "n_layers" in settings or "n_head" in settings else SMALL
    config = config_of(model_type, **{**base, **settings})
    kind = type(config)
    torch.manual_seed(0)
    try:
        return AutoModel.from_config(config).eval()
    except ValueError:  # A text part that has no Auto class of its own.
        module = importlib.import_module(kind.__module__.replace("configuration", "modeling"))
        return getattr(module, kind.__name__.replace("Config", "Model"))(config).eval()


def keys_at(model: PreTrainedModel, position: int) -> list[Any]:
    """Keys of one and the same token at a position. It attends itself alone, so what enters the next layer does not depend on the position."""
    cache = DynamicCache()
    with torch.no_grad():
        model(
            input_ids=torch.tensor([[5]]),
            position_ids=torch.tensor([[position]]),
            past_key_values=cache,
            use_cache=True,
        )
    layers: list[Any] = cache.layers
    return [layer.keys for layer in layers]


@pytest.mark.parametrize(("model_type", "settings", "turning"), CASES, ids=lambda value: str(value)[:60])
def test_the_keys_of_a_token_at_two_positions_are_a_rotation_apart(model_type, settings, turning):
    model = model_of(model_type, settings)
    config = model.config
    near, far = keys_at(model, 3), keys_at(model, 120)
    expected = [turning == ALL] * len(near) if isinstance(turning, str) else turning
    assert len(near) == len(expected)
    for index, (keys, moved) in enumerate(zip(near, far, strict=True)):
        rope = rope_of_layer(config, index, keys.shape[-1])
        assert (rope is not None) == expected[index]
        size = float(keys.abs().max())
        if rope is None:
            torch.testing.assert_close(moved, keys, rtol=0, atol=1e-5 * size)
            continue
        assert (moved - keys).abs().max() > 0.1 * size
        # float32: the model's own angles carry 120 * 2^-24, and deeper layers a few products more.
        torch.testing.assert_close(rope.rotate(keys, 117), moved, rtol=0, atol=5e-5 * size)
        torch.testing.assert_close(rope.rotate(moved, -117), keys, rtol=0, atol=5e-5 * size)


def test_every_entry_of_the_tables_is_held_against_a_model():
    tested = {model_type for model_type, _, _ in CASES} | UNTESTED
    assert INTERLEAVED | BACKWARDS | SLIDING_LAYERS_ONLY | set(FIXED_THETA) <= tested


UNTESTED = {"moonshine", "moonshine_streaming"}
"""Their decoders run behind a speech encoder alone."""


@pytest.mark.parametrize("model_type", sorted(NOT_A_ROTATION))
def test_keys_that_a_norm_changed_after_rope_are_no_rotation_apart(model_type):
    config = config_of(model_type, **{**SMALL, "head_dim": 16})
    assert rope_of_layer(config, 0, 16) is None
    if model_type != "hunyuan_v1_dense":
        return
    model = model_of(model_type, dict(head_dim=16))
    for name, parameter in model.named_parameters():
        if "key_layernorm" in name:
            parameter.data = torch.linspace(0.5, 2.0, 16)
    near, far = keys_at(model, 3)[0], keys_at(model, 120)[0]
    from_llama = rope_of_layer(model_of("llama", {}).config, 0, 16)
    assert from_llama is not None
    assert (from_llama.rotate(near, 117) - far).abs().max() > 0.05 * near.abs().max()


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", dict(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=4)),
        (
            "opt",
            dict(
                vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
            ),
        ),
        ("deepseek_v3", {}),
        ("kimi_linear", {}),
        ("zamba2", dict(use_mem_rope=False)),
    ],
)
def test_learned_positions_latent_keys_and_no_positions_have_no_rotation(model_type, settings):
    assert rope_of_layer(config_of(model_type, **settings), 0, 64) is None


def test_gemmas_layers_turn_at_two_speeds():
    config = config_of("gemma3_text", **SMALL, head_dim=16, layer_types=SLIDING_THEN_FULL)
    local, world = (rope_of_layer(config, index, 16) for index in (0, 1))
    assert local is not None
    assert world is not None
    assert local.inv_freq[1] == pytest.approx(10_000 ** (-1 / 8))
    assert world.inv_freq[1] == pytest.approx(1_000_000 ** (-1 / 8))


def test_a_multimodal_config_answers_for_its_text_part():
    text = dict(**SMALL, head_dim=16, layer_types=SLIDING_THEN_FULL)
    whole = config_of("gemma3", text_config=text)
    assert rope_of_layer(whole, 1, 16) == rope_of_layer(config_of("gemma3_text", **text), 1, 16)
    assert trained_length(whole) == 256


@pytest.mark.parametrize(("model_type", "settings", "turning"), CASES[:7], ids=lambda value: str(value)[:60])
def test_asking_changes_no_config(model_type, settings, turning):
    config = config_of(model_type, **{**SMALL, **settings})
    before = copy.deepcopy(config.to_dict())
    rope_of_layer(config, 0, 16)
    trained_length(config)
    assert config.to_dict() == before


def test_the_trained_length_is_where_the_frequencies_given_stop_to_hold():
    assert trained_length(config_of("llama", **SMALL)) == 256
    assert trained_length(config_of("gpt2", n_positions=77)) == 77
    assert trained_length(config_of("bloom")) is None
    model_type, settings, _ = CASES[6]
    assert trained_length(config_of(model_type, **{**SMALL, **settings})) == 128
    assert (
        trained_length(
            config_of("llama", **{**SMALL, **scaled("yarn", factor=4.0, original_max_position_embeddings=64)})
        )
        == 256
    )
