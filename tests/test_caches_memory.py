"""The closed formula of bytes against the storages of filled caches."""

from __future__ import annotations

import pytest
import torch
from oracles import tiny_llama
from test_caches_quantized import SCHEMES, ids, tiny_gemma
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3NextConfig,
)

from hf_kvq import QuantizedCache, expected_nbytes, resolve_scheme
from hf_kvq.caches import layer_memory


def tiny_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=97, n_positions=512)).eval()


def tiny_deepseek() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        vocab_size=97,
    )
    return DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("context", [1, 37, 128, 129, 300])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma, tiny_gpt2, tiny_deepseek])
@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (4, 16)])
def test_the_formula_gives_the_bytes_of_the_storages(make, scheme, context, sinks, residual):
    model = make()
    cache = QuantizedCache(model.config, scheme, sinks=sinks, residual=residual)
    model(ids(rows=3, tokens=context), past_key_values=cache)
    quant = resolve_scheme(scheme, sinks=sinks, residual=residual)
    assert expected_nbytes(model.config, quant, context, batch=3, dtype=torch.float32) == cache.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_exact_is_what_dynamic_cache_keeps(make, dtype):
    model = make().to(dtype)
    cache = DynamicCache(config=model.config)
    model(ids(tokens=50), past_key_values=cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert expected_nbytes(model.config, "exact", 50, batch=2, dtype=dtype) == kept


def test_layers_without_keys_hold_nothing():
    layers = layer_memory(Qwen3NextConfig(num_hidden_layers=4), 100)
    assert [layer.elements > 0 for layer in layers] == [False, False, False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: expected_nbytes(c, "int8", 0), "context must be at least 1 token, got 0"),
        (lambda c: expected_nbytes(c, "int9", 10), "unknown scheme 'int9'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(tiny_llama().config)
