"""Attention over codes in models: what dense attention gives, and what is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
from oracles import tiny_llama
from test_caches_quantized import generate, ids, tiny_gemma
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from hf_kvq import ATTENTION, QuantizedCache
from hf_kvq.attention import CompactMask
from hf_kvq.states import CodedStates

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "initializer_range": 0.3,
}


def tiny_mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**TINY, num_hidden_layers=2, sliding_window=8)).eval()


def tiny_gemma2():
    """Softcapped logits, sliding and full layers; sdpa refuses it, so eager is its dense attention."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **TINY, num_hidden_layers=2, sliding_window=8, attn_logit_softcapping=4.0, attn_implementation="eager"
    )
    return Gemma2ForCausalLM(config).eval()


def tiny_gpt_oss():
    """Learned sink logits, sliding and full layers, experts; eager for the same reason."""
    torch.manual_seed(0)
    config = GptOssConfig(
        **TINY,
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


MODELS = {
    "llama": tiny_llama,
    "one kv head": lambda: tiny_llama(kv_heads=1),
    "as many kv heads as heads": lambda: tiny_llama(kv_heads=4),
    "gemma3": tiny_gemma,
    "mistral": tiny_mistral,
    "gemma2": tiny_gemma2,
    "gpt_oss": tiny_gpt_oss,
}
STEPS = (1, 1, 5, 1, 20, 1)


def logits_over_steps(model, cache, mask, first=11):
    """Logits of a prefill and of forwards of one and of several tokens, with a mask of the first forward that grows."""
    found = []
    with torch.inference_mode():
        for number, tokens in enumerate((first, *STEPS)):
            if number:
                mask = torch.cat([mask, torch.ones(len(mask), tokens, dtype=mask.dtype)], dim=1)
            inputs = ids(len(mask), tokens, seed=number)
            found.append(model(inputs, attention_mask=mask, past_key_values=cache).logits)
    return found


def left_padded(rows=2, tokens=11, padding=4):
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :padding] = 0
    return mask


def padding_for(model):
    """Padding, but none for Gemma 2: its own attention in float64 turns rows that see nothing into NaN."""
    return left_padded(padding=0 if isinstance(model, Gemma2ForCausalLM) else 4)


def fused(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.mark.parametrize("prefill", ["exact", "coded"])
@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (3, 0), (0, 6), (3, 6)])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_fused_equals_dense_in_float64(make, sinks, residual, prefill):
    model = make().double()
    mask = padding_for(model)
    dense = QuantizedCache(model.config, "int8", sinks=sinks, residual=residual, prefill=prefill)
    dense.set_padding(mask)
    expected = logits_over_steps(model, dense, mask)
    model = fused(model)
    # The mask says what is padding: nobody has to call set_padding here.
    cache = QuantizedCache(model.config, "int8", sinks=sinks, residual=residual, prefill=prefill)
    got = logits_over_steps(model, cache, mask)
    torch.testing.assert_close(got[0][mask.bool()], expected[0][mask.bool()], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert cache.nbytes_used == dense.nbytes_used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["identity", "int8", "fp8", "seed_int8", "seed_fp8"])
def test_fused_is_as_close_to_exact_as_dense(scheme, dtype):
    # One layer: behind a second one a code that tips over a rounding edge moves logits by far more than attention's own error.
    model = tiny_llama(layers=1).to(dtype)
    exact = logits_over_steps(copy.deepcopy(model).double(), DynamicCache(config=model.config), left_padded())
    dense = QuantizedCache(model.config, scheme)
    dense.set_padding(left_padded())
    expected = logits_over_steps(model, dense, left_padded())
    got = logits_over_steps(fused_ := fused(model), QuantizedCache(fused_.config, scheme), left_padded())
    ours, theirs = (
        torch.cat([(x.double() - y)[:, -1].abs() for x, y in zip(logits, exact, strict=True)]).mean()
        for logits in (got, expected)
    )
    assert ours <= 1.2 * theirs + 1e-5


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_of_the_users_own_is_followed(kind):
    model = tiny_llama().double()
    inputs, torch_seed = ids(2, 12), torch.Generator().manual_seed(5)
    seen = torch.rand(2, 1, 12, 12, generator=torch_seed) < 0.5
    seen |= torch.eye(12, dtype=torch.bool)
    mask = (
        seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).double()
    )
    after = torch.rand(2, 1, 1, 13, generator=torch_seed) < 0.5
    after[..., -1] = True
    after = (
        after
        if kind == "bool"
        else torch.zeros(after.shape).masked_fill(~after, torch.finfo(torch.float32).min).double()
    )
    found = []
    for attending in (model, fused(model)):
        cache = QuantizedCache(attending.config, "int8")
        with torch.inference_mode():
            first = attending(inputs, attention_mask=mask, past_key_values=cache).logits
            found.append((first, attending(ids(2, 1), attention_mask=after, past_key_values=cache).logits))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_rows_padded_on_the_right_follow_the_mask():
    model = tiny_llama().double()
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 7:] = 0
    expected = logits_over_steps(model, QuantizedCache(model.config, "int8"), mask)
    model = fused(model)
    got = logits_over_steps(model, QuantizedCache(model.config, "int8"), mask)
    torch.testing.assert_close(got[0][mask.bool()], expected[0][mask.bool()], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


OTHER_CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
    "every layer skipped but one": lambda config: QuantizedCache(config, "identity", skip_layers=[0]),
}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma, tiny_mistral])
@pytest.mark.parametrize("other", OTHER_CACHES)
def test_tensors_go_to_sdpa_bit_for_bit(make, other):
    model = make()
    expected = logits_over_steps(model, OTHER_CACHES[other](model.config), left_padded())
    model = fused(model)
    got = logits_over_steps(model, OTHER_CACHES[other](model.config), left_padded())
    real = left_padded().bool()
    bound = {"rtol": 1e-4, "atol": 1e-4} if "skipped" in other else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(got[0][real], expected[0][real], **bound)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, **bound)


@pytest.mark.parametrize("make", [tiny_gemma2, tiny_gpt_oss])
def test_tensors_with_a_softcap_or_sink_logits_are_computed_too(make):
    model = make().double()
    mask = padding_for(model)
    expected = logits_over_steps(model, DynamicCache(config=model.config), mask)
    model = fused(model)
    got = logits_over_steps(model, DynamicCache(config=model.config), mask)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_cache_trains_as_with_sdpa():
    losses = []
    for attending in (tiny_llama(), fused(tiny_llama())):
        attending.train()
        loss = attending(ids(), labels=ids(), use_cache=False).loss
        loss.backward()
        losses.append((loss.detach(), attending.model.layers[0].self_attn.q_proj.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))


MODES = {
    "greedy": {},
    "sampling with three sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "chunked prefill": {"prefill_chunk_size": 7},
    "drafts from the prompt": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma, tiny_gpt_oss])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", ["identity", "int8"])
def test_every_generate_mode_gives_what_dense_gives(make, mode, scheme):
    outs = []
    inputs = ids(1) if "drafts" in mode else ids()
    for attending in (model := make().double(), fused(model)):
        torch.manual_seed(1)
        cache = QuantizedCache(attending.config, scheme, sinks=2)
        outs.append(generate(attending, inputs, cache, **MODES[mode]))
    assert torch.equal(*outs)


def test_the_cache_follows_the_models_switch_and_a_copy_follows_too():
    model = tiny_llama()
    cache = QuantizedCache(model.config, "int8")
    with torch.inference_mode():
        model(ids(), past_key_values=cache)
        assert "attention: dense" in repr(cache)
        model.set_attn_implementation(ATTENTION)
        assert "attention: fused" in repr(cache)
        assert "torch on cpu" in repr(cache)
        copied = copy.deepcopy(cache)
        states_of_layer_0 = torch.zeros(2, 2, 1, 16)
        assert isinstance(copied.update(states_of_layer_0, states_of_layer_0, 0)[0], CodedStates)
        model.set_attn_implementation("sdpa")
        assert isinstance(cache.update(states_of_layer_0, states_of_layer_0, 0)[0], torch.Tensor)


def handle():
    model = fused(tiny_llama())
    states = torch.randn(1, 2, 3, 16)
    return QuantizedCache(model.config, "int8", prefill="coded").update(states, states, 0)[0]


USES = {
    "attribute": lambda x: x.shape,
    "index": lambda x: x[:, :, 0],
    "arithmetic": lambda x: 2 * x,
    "torch function": lambda x: torch.cat([torch.zeros(1), x]),
    "matmul": lambda x: torch.zeros(1, 2, 3, 16) @ x,
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(torch.zeros(1, 2, 3, 16), x, x),
    "length": len,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_handle_used_as_a_tensor_names_the_way_out(use):
    with pytest.raises(TypeError, match=r"layer 0: .* call model.set_attn_implementation\(\"sdpa\"\)"):
        use(handle())


def test_a_handle_decodes_on_request():
    keys, values = handle().dense()
    assert keys.shape == values.shape == (1, 2, 3, 16)
    assert not hasattr(handle(), "__array_interface__")


REFUSED = {
    "attention weights": (
        lambda model, cache: model(ids(), past_key_values=cache, output_attentions=True),
        "output_attentions=True",
    ),
    "training": (
        lambda model, cache: model.train()(ids(), past_key_values=cache, use_cache=True),
        "gives no gradient",
    ),
    "a mask that is too short": (
        lambda model, cache: model(
            ids(), past_key_values=cache, attention_mask=torch.ones(2, 1, 21, 5, dtype=torch.bool)
        ),
        r"a mask over 21 columns must be .* got shape \(2, 1, 21, 5\)",
    ),
    "a row of padding with sinks": (
        lambda model, cache: model(
            ids(), past_key_values=cache, attention_mask=torch.tensor([[0], [1]]).repeat(1, 21)
        ),
        "layer 0: attention_mask has no token at all in rows .0.; .* cache.set_padding",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_not_computed_is_refused(case):
    model = fused(tiny_llama())
    act, message = REFUSED[case]
    cache = QuantizedCache(model.config, "int8", sinks=2, prefill="coded")
    with pytest.raises(ValueError, match=message):
        act(model, cache)
    assert [layer.seen for layer in cache.coded_layers] == [0, 0]


def test_a_forward_that_attention_refuses_is_taken_back_in_every_layer(monkeypatch):
    model = fused(tiny_llama())
    cache = QuantizedCache(model.config, "int8")
    with torch.inference_mode():
        model(ids(), past_key_values=cache)
        expected = model(ids(2, 1), past_key_values=copy.deepcopy(cache)).logits
        update = cache.update

        def looked_at(keys, values, layer, *args, **kwargs):
            """As in a model whose second layer looks at keys between the cache and the attention."""
            states = update(keys, values, layer, *args, **kwargs)
            return states if layer == 0 else states[0].shape

        monkeypatch.setattr(cache, "update", looked_at)
        with pytest.raises(TypeError, match="layer 1: keys and values are codes"):
            model(ids(2, 1), past_key_values=cache)
        monkeypatch.undo()
        assert [layer.seen for layer in cache.coded_layers] == [21, 21]
        assert torch.equal(model(ids(2, 1), past_key_values=cache).logits, expected)


class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operation made anew."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_makes_no_tensor_of_the_caches_length(compiled, monkeypatch):
    from hf_kvq.kernels import TiledKernel

    if not compiled:
        monkeypatch.setattr("hf_kvq.kernels.kernels_for", lambda device: (TiledKernel(),))
    model = fused(tiny_llama(layers=1, max_position_embeddings=8192))
    found = []
    for context in (1500, 3000, 6000):
        cache = QuantizedCache(model.config, "int8")
        states = torch.randn(1, 2, context, 16)
        cache.update(states, states, 0)
        with torch.inference_mode():
            model(ids(1, 1), past_key_values=cache)
            pointers = [x.data_ptr() for x in cache.layers[0].store.coded.buffer.tensors.values()]
            encoded = cache.layers[0].tokens_encoded
            with Largest() as largest:
                model(ids(1, 1), past_key_values=cache)
        assert cache.layers[0].tokens_encoded == encoded + 1
        assert [x.data_ptr() for x in cache.layers[0].store.coded.buffer.tensors.values()] == pointers
        found.append(largest.elements)
    assert found[0] == found[1] == found[2]
    assert found[0] <= 2 * 1024 * 16


def test_a_prefill_makes_no_tensor_of_queries_by_tokens():
    model = fused(tiny_llama(layers=1, max_position_embeddings=8192))
    tokens = 3000
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[0, :5] = 0
    for prefill in ("exact", "coded"):
        with torch.inference_mode(), Largest() as largest:
            model(
                ids(1, tokens),
                attention_mask=mask,
                past_key_values=QuantizedCache(model.config, prefill=prefill),
                logits_to_keep=1,
            )
        assert largest.elements < tokens * tokens


def test_a_mask_used_as_a_tensor_is_sdpas():
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    arguments = {
        "batch_size": 2, "q_length": 3, "kv_length": 11, "q_offset": 8, "kv_offset": 0, "mask_function": causal_mask_function,
        "attention_mask": left_padded().bool(), "device": "cpu",
    }  # fmt: skip
    mask, expected = CompactMask(arguments), sdpa_mask(**arguments)
    assert torch.equal(mask[:, :, 0], expected[:, :, 0])
    assert mask.shape == expected.shape
    assert torch.equal(torch.logical_not(mask), ~expected)


UNTOUCHED = """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def everything():
        return [dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping), dict(DYNAMIC_LAYER_TYPE_MAPPING)]

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)).eval()
    inputs = torch.arange(20)[None]
    before, registered = model(inputs).logits, everything()
    import hf_kvq
    model.set_attn_implementation("hf_kvq")
    with torch.inference_mode():
        cache = hf_kvq.QuantizedCache(model.config, "int8")
        model(inputs, past_key_values=cache)
        model(inputs[:, :1], past_key_values=cache)
    model.set_attn_implementation("sdpa")
    now = everything()
    assert now[0].pop("hf_kvq") and now[1].pop("hf_kvq")
    assert now == registered
    assert torch.equal(model(inputs).logits, before)
    print("untouched")
"""


def test_importing_and_running_leave_everything_else_as_it_was():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNTOUCHED)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "untouched", done.stderr
