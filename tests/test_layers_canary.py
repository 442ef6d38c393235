"""The check of a layer's first codes: silent where they fit a model, and a warning where they do not."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from oracles import attention, states, tiny_llama

import hf_kvq.layers.quantized
from hf_kvq import AffineConfig, CodesUnfitWarning, QuantConfig, QuantizedCache
from hf_kvq.layers.canary import LIMIT, attention_error, warn_if_unfit

ATTENTION = {"dense": "sdpa", "fused": "hf_kvq"}
FORWARDS = {
    # tokens of each forward, and what they see of each other
    "one prefill": ([200], "exact"),
    "one coded prefill": ([200], "coded"),
    "odd chunks": ([5, 130, 1, 37], "exact"),
    "odd coded chunks": ([5, 130, 1, 37], "coded"),
    "token by token": ([1] * 140, "exact"),
}
INT4 = QuantConfig(keys=AffineConfig(mode="int4"), values=AffineConfig(mode="int4"), name="int4")


def biased_llama():
    """A Llama whose keys hold a large constant in two channels, as some trained models' do."""
    model = tiny_llama(attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(2, 16)
            bias[:, 13], bias[:, 14] = 100.0, -60.0
    return model


def forward(model, scheme, chunks, *, attending="dense", prefill="exact", check=True):
    """The cache and the logits of a batch of two, fed in forwards of so many tokens."""
    model.set_attn_implementation(ATTENTION[attending])
    cache = QuantizedCache(model.config, scheme, prefill=prefill, check=check)
    ids = torch.randint(3, 97, (2, sum(chunks)), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = [model(part, past_key_values=cache).logits for part in ids.split(chunks, dim=1)]
    return cache, torch.cat(logits, dim=1)


@pytest.fixture
def checked(monkeypatch):
    """Layers whose codes were checked, in order; nothing is warned of."""
    layers = []
    monkeypatch.setattr(hf_kvq.layers.quantized, "warn_if_unfit", lambda error, layer: layers.append(layer))
    return layers


@pytest.mark.parametrize("attending", ATTENTION)
@pytest.mark.parametrize("prefill", ["exact", "coded"])
@pytest.mark.parametrize("scheme", ["q8", "q4", "int8"])
def test_codes_that_fit_are_checked_in_silence(scheme, prefill, attending):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CodesUnfitWarning)
        cache, _ = forward(tiny_llama(), scheme, [200], attending=attending, prefill=prefill)
    assert cache.tokens_coded > 0


@pytest.mark.parametrize("attending", ATTENTION)
@pytest.mark.parametrize("prefill", ["exact", "coded"])
def test_a_bias_that_four_bits_do_not_hold_is_a_warning_of_each_layer(prefill, attending):
    with pytest.warns(CodesUnfitWarning) as caught:
        forward(biased_llama(), INT4, [200], attending=attending, prefill=prefill)
    messages = [str(each.message) for each in caught if each.category is CodesUnfitWarning]
    assert len(messages) == 2
    for index, message in enumerate(messages):
        assert message.startswith((f"layer {index}, kv head 0: ", f"layer {index}, kv head 1: "))
        assert f"take more bits (q8), or skip_layers=({index},)" in message


@pytest.mark.parametrize("attending", ATTENTION)
def test_the_same_bias_fits_codes_that_learn_it(attending):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CodesUnfitWarning)
        forward(biased_llama(), "q8", [200], attending=attending)


def test_without_check_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CodesUnfitWarning)
        forward(biased_llama(), INT4, [200], check=False)


@pytest.mark.parametrize("attending", ATTENTION)
@pytest.mark.parametrize("scheme", ["q8", "q4", "int8"])
@pytest.mark.parametrize(("chunks", "prefill"), FORWARDS.values(), ids=FORWARDS)
def test_each_layer_is_checked_once_and_nothing_else_changes(chunks, prefill, scheme, attending, checked):
    model, settings = tiny_llama(), {"attending": attending, "prefill": prefill}
    cache, logits = forward(model, scheme, chunks, **settings)
    assert checked == [0, 1]
    plain, expected = forward(model, scheme, chunks, check=False, **settings)
    assert checked == [0, 1]
    assert torch.equal(logits, expected)
    for layer, other in zip(cache.coded_layers, plain.coded_layers, strict=True):
        codes, others = layer.held.coded.buffer.view(), other.held.coded.buffer.view()
        assert codes.keys() == others.keys()
        assert all(torch.equal(codes[name], others[name]) for name in codes)


def test_what_was_not_coded_yet_is_not_checked(checked):
    forward(tiny_llama(), "q8", [37])
    assert checked == []


def test_a_cache_that_was_reset_is_checked_again(checked):
    cache, _ = forward(tiny_llama(), "int8", [37])
    cache.reset()
    with torch.inference_mode():
        tiny_llama()(torch.arange(3, 40)[None], past_key_values=cache)
    assert checked == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("batch", "kv_heads", "groups", "queries", "tokens", "ahead", "dims"),
    [
        (1, 1, 1, 1, 1, 0, (40, 40)),
        (3, 2, 2, 37, 37, 0, (64, 64)),
        (1, 2, 4, 5, 37, 36, (16, 24)),
        (2, 8, 1, 37, 129, 60, (16, 16)),
    ],
)
def test_the_error_is_that_of_slow_attention(batch, kv_heads, groups, queries, tokens, ahead, dims):
    query = torch.stack([states(batch, kv_heads, queries, dims[0], seed=seed) for seed in range(groups)], dim=2)
    exact = tuple(states(batch, kv_heads, tokens, dim, seed=9 + dim) for dim in dims)
    read = tuple(x + 0.3 * states(*x.shape, seed=seed) for seed, x in enumerate(exact, start=5))
    found = attention_error(query, exact, read, ahead=ahead, scaling=0.1)

    seen = torch.arange(tokens) <= torch.arange(queries)[:, None] + ahead
    (wanted, _), (got, _) = (attention(query, *pair, scaling=0.1, visible=seen) for pair in (exact, read))
    for head in range(kv_heads):
        error = math.sqrt((got[:, head] - wanted[:, head]).square().mean())
        size = math.sqrt(wanted[:, head].square().mean())
        assert found[head].item() == pytest.approx(error / size, rel=1e-4)


def test_states_that_are_read_as_they_came_have_no_error():
    exact = states(1, 2, 37, 40), states(1, 2, 37, 40, seed=1)
    error = attention_error(states(1, 2, 1, 5, 40, seed=2), exact, exact, ahead=32, scaling=0.2)
    assert error.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("error", [LIMIT + 0.01, math.inf, math.nan])
def test_the_worst_head_is_named(error):
    with pytest.warns(CodesUnfitWarning, match="layer 7, kv head 1: "):
        warn_if_unfit(torch.tensor([0.2, error, 0.1]), 7)


def test_an_error_below_the_limit_is_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CodesUnfitWarning)
        warn_if_unfit(torch.tensor([LIMIT - 0.01, 0.0]), 7)
