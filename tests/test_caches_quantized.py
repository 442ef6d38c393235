"""The cache in a model: generate, rows, bytes, and what is refused."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from oracles import states, tiny_llama
from transformers import (
    Cache,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from hf_kvq import AffineConfig, IdentityConfig, LayerQuant, QuantConfig, QuantizedCache
from hf_kvq.layers import QuantizedLayer

SCHEMES = ["identity", "int8", "fp8", "seed_int8", "seed_fp8"]


def tiny_gemma(window: int = 8) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=97,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        initializer_range=0.3,
    )
    return Gemma3ForCausalLM(config).eval()


def ids(rows: int = 2, tokens: int = 21, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model, inputs, cache, **kwargs):
    settings = {
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        "attention_mask": torch.ones_like(inputs),
    } | kwargs
    return model.generate(inputs, past_key_values=cache, **settings)


MODES = {
    "greedy": {},
    "sampling with three sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "chunked prefill": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
@pytest.mark.parametrize("mode", MODES)
def test_identity_generates_what_the_default_cache_generates(make, mode):
    model = make()
    torch.manual_seed(1)
    expected = generate(model, ids(), DynamicCache(config=model.config), **MODES[mode])
    torch.manual_seed(1)
    assert torch.equal(generate(model, ids(), QuantizedCache(model.config, "identity"), **MODES[mode]), expected)


# An int8 scale per update makes a draft other codes than its tokens one by one, so seed_int8 promises no equality.
@pytest.mark.parametrize("scheme", ["identity", "int8", "fp8", "seed_fp8"])
@pytest.mark.parametrize(("make", "sinks"), [(tiny_llama, 0), (tiny_llama, 3), (tiny_gemma, 3)])
def test_drafts_from_the_prompt_give_the_tokens_of_greedy_decoding(make, scheme, sinks):
    model = make()
    inputs = ids(rows=1).repeat(1, 2)
    greedy = generate(model, inputs, QuantizedCache(model.config, scheme, prefill="coded", sinks=sinks))
    drafted = generate(
        model, inputs, QuantizedCache(model.config, scheme, prefill="coded", sinks=sinks), prompt_lookup_num_tokens=4
    )
    assert torch.equal(drafted, greedy)


def test_an_assistant_gives_the_tokens_of_greedy_decoding():
    model, assistant = tiny_llama(), tiny_llama(layers=1)
    assistant.model.embed_tokens = model.model.embed_tokens
    greedy = generate(model, ids(rows=1), QuantizedCache(model.config, prefill="coded"))
    assert torch.equal(
        generate(model, ids(rows=1), QuantizedCache(model.config, prefill="coded"), assistant_model=assistant), greedy
    )


def test_both_names_of_the_argument_work_where_the_installed_version_takes_them():
    model = tiny_llama()
    expected = generate(model, ids(), QuantizedCache(model.config))
    names = {"cache", "past_key_values"} & set(inspect.signature(type(model).forward).parameters)
    assert names, "transformers renamed the argument again"
    for name in names:
        settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        got = model.generate(
            ids(), attention_mask=torch.ones_like(ids()), **{name: QuantizedCache(model.config)}, **settings
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (3, 0), (3, 5)])
def test_left_padded_rows_equal_the_same_rows_alone(scheme, sinks, residual):
    # float64: a rounding of float32 that differs with the batch may tip a code over, and one code is more than any tolerance.
    model = tiny_llama().double()
    short, long = ids(1, 9), ids(1, 14, seed=3)
    padded = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(padded)
    mask[0, :5] = 0
    settings = {"output_logits": True, "return_dict_in_generate": True}

    def cache():
        return QuantizedCache(model.config, scheme, sinks=sinks, residual=residual)

    batch = cache()
    batch.set_padding(mask)
    together = generate(model, padded, batch, attention_mask=mask, **settings)
    for row, alone in enumerate((short, long)):
        single = generate(model, alone, cache(), **settings)
        assert torch.equal(together.sequences[row, 14:], single.sequences[0, alone.shape[1] :])
        for ours, theirs in zip(together.logits, single.logits, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], rtol=1e-9, atol=1e-9)


def test_one_rows_content_never_changes_another_rows_output():
    model = tiny_llama()
    other = ids()
    other[1] = ids(seed=7)[1]
    settings = {"output_logits": True, "return_dict_in_generate": True}
    first, second = (
        generate(model, batch, QuantizedCache(model.config, "seed_int8", sinks=2, residual=3), **settings)
        for batch in (ids(), other)
    )
    for ours, theirs in zip(first.logits, second.logits, strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_a_second_turn_goes_on_from_the_same_cache():
    model = tiny_llama()
    cache = QuantizedCache(model.config)
    first = generate(model, ids(), cache)
    seen = cache.get_seq_length()
    second = torch.cat([first, ids(tokens=5, seed=4)], 1)
    generate(model, second, cache)
    assert cache.get_seq_length() == second.shape[1] + 11
    assert seen == first.shape[1] - 1


def test_a_copied_prefix_is_reused():
    model = tiny_llama()
    prefix = QuantizedCache(model.config)
    model(ids(), past_key_values=prefix)
    outs = [generate(model, torch.cat([ids(), ids(tokens=4, seed=s)], 1), copy.deepcopy(prefix)) for s in (5, 6, 5)]
    assert torch.equal(outs[0], outs[2])
    assert prefix.get_seq_length() == 21


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_models_dtype_comes_back_also_on_the_second_question(scheme, dtype):
    model = tiny_llama().to(dtype)
    cache = QuantizedCache(model.config, scheme, sinks=1, residual=2)
    first = generate(model, ids(), cache)
    generate(model, torch.cat([first, ids(tokens=3, seed=1)], 1), cache)
    keys, _ = cache.layers[0].update(*(states(2, 2, 1, 16, dtype=dtype),) * 2)
    assert keys.dtype == dtype


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_one_coded_pass_equals_decoding_token_by_token(scheme):
    model = tiny_llama().double()
    tokens = ids(tokens=40)
    once = model(tokens, past_key_values=QuantizedCache(model.config, scheme, prefill="coded", sinks=4)).logits
    cache = QuantizedCache(model.config, scheme, sinks=4)
    steps = torch.cat([model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(40)], dim=1)
    assert (once - steps).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_the_sum_of_the_storages(scheme, dtype):
    model = tiny_gemma().to(dtype)
    cache = QuantizedCache(model.config, scheme, sinks=2, residual=3, skip_layers=[0])
    generate(model, ids(), cache)
    storages = {}
    for value in walk(cache):
        storage = value.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    assert cache.nbytes == sum(storages.values())
    assert 0 < cache.nbytes_used <= cache.nbytes


def walk(value, seen=None):
    """Every tensor that can be reached from an object."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from walk(entry, seen)
    elif isinstance(value, list | tuple | set):
        for entry in value:
            yield from walk(entry, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from walk(vars(value), seen)


def test_bits_and_tokens_are_counted():
    model = tiny_llama()
    cache = QuantizedCache(model.config, "int8")
    assert (cache.bits_per_element, cache.tokens_coded, cache.nbytes) == (0.0, 0, 0)
    model(ids(tokens=64), past_key_values=cache)
    assert cache.tokens_coded == 2 * 64
    assert cache.bits_per_element == (16 * 8 + 16) / 16
    assert cache.nbytes == cache.nbytes_used == 2 * 2 * 64 * 2 * 2 * (16 + 2)


def test_layers_that_can_not_be_coded_are_transformers_own_and_named():
    model = tiny_gemma()
    cache = QuantizedCache(model.config, "int8", skip_layers=["sliding_attention"])
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer] * 2 + [QuantizedLayer]
    generate(model, ids(), cache)
    assert "coded: 1 x full_attention" in repr(cache)
    assert "transformers' own: 2 x sliding_attention (DynamicSlidingWindowLayer)" in repr(cache)


def test_linear_layers_pass_through_in_a_hybrid_model():
    config = Qwen3NextConfig(
        num_hidden_layers=4, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    cache = QuantizedCache(config, "int8")
    kinds = [type(layer) for layer in cache.layers]
    assert kinds.count(LinearAttentionLayer) == 3
    assert kinds.count(QuantizedLayer) == 1


def test_a_sliding_model_keeps_its_window_as_codes_without_sinks():
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=97,
        sliding_window=8,
    )
    model = MistralForCausalLM(config).eval()
    cache = QuantizedCache(config, "int8", sinks=4)
    generate(model, ids(), cache, max_new_tokens=40, min_new_tokens=40)
    assert cache.tokens_coded == 2 * 7
    assert cache.get_max_length() == 8


def test_keys_values_and_layers_may_have_codecs_of_their_own():
    model = tiny_llama()
    scheme = QuantConfig(
        keys=AffineConfig(mode="int8"),
        values=AffineConfig(mode="fp8"),
        layers={1: LayerQuant(keys=IdentityConfig(), values=IdentityConfig())},
    )
    cache = QuantizedCache(model.config, scheme)
    model(ids(), past_key_values=cache)
    kept = [layer.store.coded.buffer.tensors for layer in cache.coded_layers]
    assert [kept[0]["key_codes"].dtype, kept[0]["value_codes"].dtype] == [torch.int8, torch.float8_e4m3fn]
    assert kept[1]["key_codes"].dtype == torch.float32


def test_it_is_a_cache_and_shows_what_it_does():
    model = tiny_llama()
    cache = QuantizedCache(model.config, "int8", sinks=4, residual=8)
    generate(model, ids(tokens=40), cache)
    assert isinstance(cache, Cache)
    shown = repr(cache)
    for part in (
        "scheme int8",
        "sinks 4",
        "residual 8",
        "2 x full_attention",
        "dense",
        "51 seen, 39 coded",
        f"{cache.nbytes:,} allocated",
        "bits an element",
    ):
        assert part in shown


def test_a_layer_that_refuses_its_states_takes_the_forward_back_everywhere():
    model = tiny_llama(layers=3)
    cache = QuantizedCache(model.config, "int8", residual=3)
    model(ids(), past_key_values=cache)
    reference = copy.deepcopy(cache)
    weight = model.model.layers[2].self_attn.k_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"layer 2: .* NaN or infinity"):
            model(ids(tokens=1, seed=2), past_key_values=cache)
        weight.copy_(kept)
    assert {layer.get_seq_length() for layer in cache.layers} == {21}
    step = ids(tokens=1, seed=3)
    assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=reference).logits)


LINEAR = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention"] * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: QuantizedCache(c, "int7"), "unknown scheme 'int7'"),
        (lambda c: QuantizedCache("gpt2"), "config must be the model's config, got str"),
        (lambda c: QuantizedCache(c, prefill="both"), "prefill must be 'exact' or 'coded', got 'both'"),
        (lambda c: QuantizedCache(c, skip_layers=[2]), "indices 0 to 1, got 2"),
        (
            lambda c: QuantizedCache(c, skip_layers=["slidin"]),
            "skip_layers names 'slidin'; this model has full_attention",
        ),
        (
            lambda c: QuantizedCache(c, skip_layers=[0, 1]),
            r"no layer of this model would be coded .*skipped: \[0, 1\]",
        ),
        (lambda c: QuantizedCache(LINEAR), "no layer of this model would be coded .*2 x linear_attention"),
        (
            lambda c: QuantizedCache(
                c,
                QuantConfig(
                    keys=AffineConfig(),
                    values=AffineConfig(),
                    layers={9: LayerQuant(keys=AffineConfig(), values=AffineConfig())},
                ),
            ),
            r"overrides layers \[9\], the model has layers 0 to 1",
        ),
        (
            lambda c: QuantizedCache(MistralConfig(num_hidden_layers=1, sliding_window=1)),
            "layer 0: a sliding window must be at least 2, got 1",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_arguments_are_named_at_construction(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(LlamaConfig(num_hidden_layers=2))
    print(f"\n{caught.value}")


def test_skipped_layers_stay_exact():
    model = tiny_llama()
    cache = QuantizedCache(model.config, "int8", skip_layers=[1])
    model(ids(), past_key_values=cache)
    assert [type(layer) for layer in cache.layers] == [QuantizedLayer, DynamicLayer]
