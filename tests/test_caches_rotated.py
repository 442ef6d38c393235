"""Low-bit codes in a basis in models: when they begin, what they cost, and everything that a cache does with them."""

from __future__ import annotations

import copy
from typing import Any

import oracles_rotated as oracle
import pytest
import torch
from oracles import attention
from oracles_bounded import turned
from oracles_rotated import Stream, differing, held, scheme_of, stream_of
from test_layers_rotary import SMALL, config_of
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvq import (
    AffineConfig,
    Clusters,
    HeavyHitters,
    QuantConfig,
    QuantizedCache,
    QuantizedSlidingWindowCache,
    expected_nbytes,
)
from hf_kvq.config import RotatedConfig
from hf_kvq.kernels import Visibility
from hf_kvq.layers import BoundedLayer, QuantizedLayer
from hf_kvq.layers.live import LiveConfig

LEARNED = 132
TIERS = RotatedConfig(bits=(6, 4, 3, 3), trellis=True)
ATTENTION = {"dense": "sdpa", "fused": "hf_kvq"}


def rare(*values, **kwargs):
    """One of the many cases that only a slow run takes."""
    return pytest.param(*values, marks=pytest.mark.slow, **kwargs)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10_000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "qwen2": ("qwen2", {}),
    "gpt_neox": (
        "gpt_neox",
        dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.25)),
    ),
    "cohere": ("cohere", {}),
    "gemma3": (
        "gemma3_text",
        dict(head_dim=16, sliding_window=40, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt2": ("gpt2", dict(vocab_size=64, n_positions=512, n_embd=64, n_layer=2, n_head=4, initializer_range=0.15)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0])),
}


def tiny(name: str = "llama", **settings: Any):
    """A random model of two layers whose attention is soft; biases are random where there are any."""
    model_type, own = MODELS[name]
    base = {} if "n_embd" in own else {**SMALL, "num_hidden_layers": 2, "initializer_range": 0.15}
    base |= {} if "n_embd" in own else {"max_position_embeddings": 512}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **(base | own | settings))).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("k_proj.bias", "q_proj.bias")):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def ids(tokens: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model, tokens, cache, sizes: list[int], attention: str | None = None, mask=None) -> list[torch.Tensor]:
    """Logits of a text fed in chunks."""
    if attention is not None:
        model.set_attn_implementation(attention)
    out, start = [], 0
    for size in sizes:
        seen = cache.get_seq_length() + size
        extra: dict[str, Any] = {}
        if mask is not None:
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, cache.get_seq_length() : seen]
            extra = {"attention_mask": mask[:, :seen], "position_ids": places}
        out.append(model(tokens[:, start : start + size], past_key_values=cache, **extra).logits)
        start += size
    return out


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Error of logits, relative to their spread."""
    return float((got - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm())


# When codes begin


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_are_exact_until_enough_tokens_are_there(name, attention):
    model, text = tiny(name), ids(LEARNED + 8)
    sizes = [100, 1, 30, 1, 1, 7]
    exact = run(model, text, DynamicCache(config=model.config), sizes, "sdpa")
    cache = QuantizedCache(model.config, scheme_of(4))
    found, coded, start = [], [], 0
    for size in sizes:
        found += run(model, text[:, start : start + size], cache, [size], attention)
        coded.append(cache.tokens_coded)
        start += size
    assert coded == [0, 0, 0, 2 * 128, 2 * 129, 2 * 136]
    for got, expected in zip(found[:3], exact[:3], strict=True):
        if attention == "sdpa":
            assert torch.equal(got, expected)
        assert relative(got, expected) < 1e-5
    assert relative(found[4], exact[4]) > 0.01


def test_a_prompt_is_read_exactly_and_its_codes_from_then_on():
    model, text = tiny(), ids(200)
    exact = run(model, text, DynamicCache(config=model.config), [190, 10], "sdpa")
    cache = QuantizedCache(model.config, scheme_of(4))
    prompt, more = run(model, text, cache, [190, 10])
    assert torch.equal(prompt, exact[0])
    assert 0.01 < relative(more, exact[1]) < 0.5


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("bits", [4, rare(TIERS, id="tiers")])
def test_one_coded_pass_after_learning_equals_decoding_token_by_token(bits, attention):
    model, text = tiny().double(), ids(LEARNED + 12)
    results = []
    for sizes in ([LEARNED, 12], [LEARNED] + [1] * 12):
        cache = QuantizedCache(model.config, scheme_of(bits), prefill="coded")
        results.append(torch.cat(run(model, text, cache, sizes, attention)[1:], dim=1))
    assert (results[0] - results[1]).abs().max() < 1e-9


# Model types


@torch.no_grad()
def recorded(model, text: torch.Tensor) -> list[tuple[Stream, float]]:
    """What each layer's attention is asked, and the factor of its dot products."""
    found = []

    def record(module, query, key, value, attention_mask, scaling=None, **kwargs):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        found.append((Stream(query, key, value), scaling))
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("recorded", record)
    try:
        model.set_attn_implementation("recorded")
        model(text, use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["recorded"]
    return found


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.03), (4, 0.25)], ids=["8", "4"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_over_codes_is_close_to_exact_attention(name, bits, limit):
    model = tiny(name)
    asked = recorded(model, ids(156))
    model.set_attn_implementation("hf_kvq")
    cache = QuantizedCache(model.config, scheme_of(bits))
    assert len(asked) == len(cache.layers)
    for layer, (stream, scaling) in zip(cache.layers, asked, strict=True):
        layer.update(stream.keys[:, :, :150], stream.values[:, :, :150])[0].view.attend(
            stream.query[:, :, :150], Visibility(0, 150, layer.window), scaling=scaling
        )
        for step in range(150, 156):
            part = stream[step : step + 1]
            view = layer.update(part.keys, part.values)[0].view
            got = view.attend(part.query, Visibility(step, 1, layer.window), scaling=scaling)
            first = 0 if layer.window is None else step + 1 - layer.window
            seen = stream[first : step + 1]
            query = part.query.unflatten(1, (seen.keys.shape[1], -1))
            exact, _ = attention(query, seen.keys, seen.values, scaling=scaling)
            assert (got - exact.flatten(1, 2)).norm() < limit * exact.norm()
        assert layer.tokens_coded == (152 if layer.window is None else layer.window - 1)


@pytest.mark.parametrize("name", MODELS)
def test_dense_and_fused_read_the_same_codes_alike(name):
    model = tiny(name)
    fused = QuantizedCache(model.config, scheme_of(4))
    run(model, ids(150), fused, [140, 10], "hf_kvq")
    assert fused.tokens_coded > 0
    dense = copy.deepcopy(fused)
    step = ids(6, seed=1)
    expected = torch.cat(run(model, step, fused, [1, 1, 4], "hf_kvq"), dim=1)
    got = torch.cat(run(model, step, dense, [1, 1, 4], "sdpa"), dim=1)
    assert relative(got, expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "hf_kvq") for name in MODELS), ("llama", "sdpa"), *(rare(name, "sdpa") for name in list(MODELS)[1:])],
)
def test_greedy_decoding_runs_past_the_tokens_that_teach(name, attention):
    model = tiny(name)
    model.set_attn_implementation(attention)
    cache = QuantizedCache(model.config, scheme_of(4))
    text = ids(128)
    settings = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(
        text, attention_mask=torch.ones_like(text), past_key_values=cache, output_logits=True, **settings
    )
    assert found.sequences.shape == (2, 138)
    assert torch.isfinite(torch.stack(found.logits)).all()
    assert cache.layers[-1].tokens_coded == 137 - 4


@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=["beams", "sampling"]
)
def test_beams_and_samples_reorder_what_was_learned(mode):
    model = tiny()
    model.set_attn_implementation("hf_kvq")
    text = ids(128)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "attention_mask": torch.ones_like(text)} | mode
    cache = QuantizedCache(model.config, scheme_of(TIERS))
    found = model.generate(text, past_key_values=cache, **settings)
    assert found.shape[1] == 140
    assert cache.layers[0].tokens_coded == 135


# A bias that per-token codes cannot hold

BIASED = [(7, 15), (6, 7), (0, 8), (3, 12)]
PER_TOKEN = QuantConfig(keys=AffineConfig(mode="int4"), values=AffineConfig(mode="int4"), sinks=4)


def with_key_bias(channels: tuple[int, int] | None):
    model = tiny(attention_bias=True)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data.view(2, 16)
        bias.zero_()
        layer.self_attn.q_proj.bias.data.zero_()
        if channels is not None:
            bias[:, channels[0]], bias[:, channels[1]] = 100.0, -60.0
    return model


def loss(model, scheme, attention: str = "hf_kvq") -> float:
    text, sizes = ids(158), [150] + [1] * 8
    exact = run(model, text, DynamicCache(config=model.config), sizes, "sdpa")
    got = run(model, text, QuantizedCache(model.config, scheme), sizes, attention)
    return relative(torch.cat(got[1:], dim=1), torch.cat(exact[1:], dim=1))


@pytest.mark.parametrize("channels", [BIASED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in BIASED[1:])])
@pytest.mark.parametrize(
    ("bits", "attention"), [(8, "hf_kvq"), (6, "hf_kvq"), pytest.param(8, "sdpa", marks=pytest.mark.slow)]
)
def test_a_constant_bias_of_the_keys_costs_little(bits, attention, channels):
    plain, biased = (loss(with_key_bias(each), scheme_of(bits), attention) for each in (None, channels))
    assert biased < 3 * plain
    assert plain < {8: 0.03, 6: 0.1}[bits]


def test_a_constant_bias_of_the_keys_breaks_codes_of_four_bits_per_token():
    assert loss(with_key_bias(BIASED[0]), PER_TOKEN) > max(4 * loss(with_key_bias(None), PER_TOKEN), 0.7)


# Files


@pytest.mark.parametrize("attention", [rare("sdpa", id="dense"), pytest.param("hf_kvq", id="fused")])
@pytest.mark.parametrize("tokens", [60, 150], ids=["while learning", "after"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("llama", {}, id="llama"),
        rare("llama", {"residual": 10}, id="residual"),
        pytest.param("gemma3", {}, id="gemma3"),
        pytest.param("gpt2", {"skip": [0]}, id="gpt2"),
    ],
)
def test_a_loaded_cache_gives_the_same_next_logits(name, settings, tokens, attention, tmp_path):
    model = tiny(name)
    residual, skip = settings.get("residual", 0), settings.get("skip", [])
    cache = QuantizedCache(model.config, scheme_of(TIERS, residual=residual), skip_layers=skip, prefill="coded")
    run(model, ids(tokens), cache, [tokens - 1, 1], attention)
    cache.save(tmp_path / "c")
    loaded = QuantizedCache.load(tmp_path / "c", model.config)
    assert loaded.scheme == cache.scheme
    assert (loaded.tokens_coded, loaded.nbytes_used) == (cache.tokens_coded, cache.nbytes_used)
    for ours, theirs in zip(loaded.coded_layers, cache.coded_layers, strict=True):
        assert differing(held(ours), held(theirs)) == []
    more = ids(80, seed=1)
    for got, expected in zip(*(run(model, more, each, [1, 78, 1]) for each in (loaded, cache)), strict=True):
        assert torch.equal(got, expected)
    for ours, theirs in zip(loaded.coded_layers, cache.coded_layers, strict=True):
        assert differing(held(ours), held(theirs)) == []


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("tokens", [60, 150], ids=["while learning", "after"])
def test_padded_rows_are_saved_with_where_they_begin(tokens, attention, tmp_path):
    model, mask = tiny(), torch.ones(2, 240, dtype=torch.long)
    mask[0, :9] = 0
    cache = QuantizedCache(model.config, scheme_of(4))
    cache.set_padding(mask[:, :tokens])
    run(model, ids(tokens), cache, [tokens], attention, mask)
    cache.save(tmp_path / "c")
    loaded = QuantizedCache.load(tmp_path / "c", model.config)
    more = ids(90, seed=1)
    for got, expected in zip(
        *(run(model, more, each, [1, 88, 1], None, mask) for each in (loaded, cache)), strict=True
    ):
        assert torch.equal(got, expected)


def test_a_cache_that_was_cropped_to_nothing_can_be_saved(tmp_path):
    model = tiny()
    cache = QuantizedCache(model.config, scheme_of(4))
    run(model, ids(150), cache, [150], "hf_kvq")
    cache.crop(-150)
    cache.save(tmp_path / "c")
    loaded = QuantizedCache.load(tmp_path / "c", model.config)
    for got, expected in zip(*(run(model, ids(150, seed=1), each, [149, 1]) for each in (loaded, cache)), strict=True):
        assert torch.equal(got, expected)


# Rows


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_left_padded_rows_equal_the_same_rows_alone(name, attention):
    # float64: a rounding of float32 that differs with the batch may tip a code over, and one code is more than any tolerance.
    model = tiny(name).double()
    long, short = ids(170, rows=1), ids(161, rows=1, seed=1)
    text = torch.cat((torch.cat((torch.zeros(1, 9, dtype=torch.long), short), dim=1), long))
    mask = torch.ones(2, 170, dtype=torch.long)
    mask[0, :9] = 0
    cache = QuantizedCache(model.config, scheme_of(4))
    if attention == "sdpa":
        cache.set_padding(mask)  # over codes the mask of the forward says it
    together = run(model, text, cache, [150, 1, 18, 1], attention, mask)
    for row, (alone, first) in enumerate(((short, 9), (long, 0))):
        one = QuantizedCache(model.config, scheme_of(4))
        expected = run(model, alone, one, [150 - first, 1, 18, 1], attention)
        for got, theirs in zip(together[1:], expected[1:], strict=True):
            assert (got[row] - theirs[0]).abs().max() < 1e-4


def test_the_mask_of_the_first_forward_says_what_padding_is():
    model, mask = tiny(), torch.ones(2, 170, dtype=torch.long)
    mask[0, :9] = 0
    told, found = (QuantizedCache(model.config, scheme_of(4)) for _ in range(2))
    told.set_padding(mask)
    for got, expected in zip(
        *(run(model, ids(170), each, [100, 1, 60, 1, 8], "hf_kvq", mask) for each in (found, told)), strict=True
    ):
        assert torch.equal(got, expected)
    assert found.layers[0].store.statistics.first == [13, 4]


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_one_rows_content_never_changes_another_rows_output(attention):
    model, text, other = tiny(), ids(170), ids(170)
    other[1] = ids(170, seed=7)[1]
    sizes = [140, 1, 28, 1]
    first, second = (
        run(model, each, QuantizedCache(model.config, scheme_of(TIERS)), sizes, attention) for each in (text, other)
    )
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_a_forward_that_a_layer_refuses_is_taken_back_in_all_layers_also_where_it_taught(attention):
    model = tiny()
    text = ids(150)
    cache = QuantizedCache(model.config, scheme_of(4))
    run(model, text, cache, [120], attention)
    reference = copy.deepcopy(cache)
    weight = model.model.layers[1].self_attn.k_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"layer 1: .* NaN or infinity"):
            run(model, ids(20, seed=9), cache, [20])
        weight.copy_(kept)
    assert cache.tokens_coded == 0
    assert [layer.get_seq_length() for layer in cache.layers] == [120, 120]
    for got, expected in zip(*(run(model, text[:, 120:], each, [20, 10]) for each in (cache, reference)), strict=True):
        assert torch.equal(got, expected)


# Bytes


@pytest.mark.parametrize("context", [1, rare(100), LEARNED - 1, LEARNED, rare(LEARNED + 1), 300])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("bits", [rare(4), pytest.param(TIERS, id="tiers")])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_formula_gives_the_bytes_of_the_storages(name, bits, attention, context):
    model = tiny(name)
    cache = QuantizedCache(model.config, scheme_of(bits))
    run(model, ids(context, rows=3), cache, [context], attention)
    expected = expected_nbytes(model.config, scheme_of(bits), context, batch=3, dtype=torch.float32)
    # What queries are held while a layer learns is beyond the formula, and says so.
    queries = sum(layer.store.statistics.nbytes for layer in cache.layers)
    assert cache.nbytes == expected + queries
    assert (queries > 0) == (attention == "hf_kvq" and context < LEARNED and (context > 4 or name == "gemma3"))


def test_four_bits_are_four_bits_and_what_they_take_beside():
    model = tiny(head_dim=64)
    cache = QuantizedCache(model.config, scheme_of(4, sinks=0))
    run(model, ids(320), cache, [320], "hf_kvq")
    # A byte of scale for 64 channels; and of each head once: means of 64 and 32 bytes, gains of 32 and 1, an aim of 33, two scales of the means; of each row twice where it begins.
    assert cache.bits_per_element == pytest.approx(
        4 + 8 / 64 + 8 * (64 + 32 + 32 + 1 + 33 + 2) / (320 * 128) + 64 / (2 * 320 * 128)
    )


# Bounded caches


def bounded(
    *, fused: bool = True, dim: int = 64, trained: int = 4096, bits=4, prefill="coded", **settings
) -> BoundedLayer:
    """A layer of a bounded cache of a Llama whose keys are turned as those of `stream_of`."""
    config = oracle.llama_config(fused=fused, dim=dim).config
    config.max_position_embeddings = trained
    settings = {"window": 40, "block": 8} | settings
    cache = QuantizedSlidingWindowCache(config, scheme_of(bits), prefill=prefill, **settings)
    (layer,) = cache.layers
    assert isinstance(layer, BoundedLayer)
    layer.cache = cache
    return layer


def ask(layer, stream: Stream, sizes: list[int], real=None) -> list[torch.Tensor]:
    out, start = [], 0
    for size in sizes:
        part = stream[start : start + size]
        view = layer.update(part.keys, part.values)[0].view
        visibility = Visibility(view.end - size, size, real=real)
        out.append(view.attend(part.query, visibility, scaling=part.query.shape[3] ** -0.5))
        start += size
    return out


def read_region(layer: BoundedLayer, codes, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States of codes that stood at columns, bytes taken one at a time."""
    region, out = layer.store.tokens.coded, []
    for label, codec, dim in zip(("key", "value"), (region.key_codec, region.value_codec), region.dims, strict=True):
        grid = codec.grid_of(dim)
        numbers = oracle.decoded(codes[f"{label}_codes"], codes[f"{label}_scale"], grid)
        places = columns - codec.tensors["origin"][:, None, None]
        out.append(oracle.restored(numbers, codec.tensors, len(grid.bits), codec.basis.rope, places))
    return out[0], out[1]


def what_is_seen(layer: BoundedLayer, longest: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values that the newest query of each row sees, in float64: sinks, window and kept tokens, moved ahead where they stand too far back."""
    store = layer.store
    region, kept, rope = store.tokens.coded, store.far.kept, store.bounds.rope
    columns = torch.arange(region.first, region.end).expand(store.shape.batch, store.shape.kv_heads, -1)
    window = read_region(layer, region.buffer.view(), columns)
    places = kept.positions[:, :, : kept.most].long()
    individually = read_region(layer, kept.held(), places + torch.tensor(store.rows.first)[:, None, None])
    found = []
    for row, held_from in enumerate(store.rows.held_from):
        oldest = store.rows.schedule.last_query(store.rows.steps[row]) - longest
        sink_keys, sink_values = (states[row : row + 1].double() for states in store.tokens.sinks.tensors)
        if oldest > 0:
            sink_keys = turned(sink_keys, rope, torch.tensor(oldest))
        kept_keys, kept_values = (x[row : row + 1, :, : kept.filled[row]] for x in individually)
        behind = (oldest - places[row : row + 1, :, : kept.filled[row]]).clamp(min=0)
        near_keys, near_values = (x[row : row + 1, :, held_from - region.first :] for x in window)
        keys = torch.cat((sink_keys, turned(kept_keys, rope, behind), near_keys), dim=2)
        found.append((keys, torch.cat((sink_values, kept_values, near_values), dim=2)))
    return found


def assert_decoded(layer: BoundedLayer, query: torch.Tensor, got: torch.Tensor, longest: int) -> None:
    """Whether a single query was answered as if everything had been decoded."""
    for row, (keys, values) in enumerate(what_is_seen(layer, longest)):
        assert keys.shape[2] == 4 + 12 + int(layer.store.accounting()["window"][row, 0])
        exact, _ = attention(query[row : row + 1].unflatten(1, (2, 2)), keys, values, scaling=0.125)
        assert (got[row] - exact[0].flatten(0, 1)).abs().max() < 5e-5 * exact.abs().max()


@pytest.mark.parametrize("trained", [4096, 100], ids=["within", "past the trained length"])
@pytest.mark.parametrize("bits", [4, rare(TIERS, id="tiers")])
def test_kept_tokens_are_attended_to_as_decoding_all_of_them_would(bits, trained):
    stream = stream_of(260)
    layer = bounded(bits=bits, far_field=HeavyHitters(12), trained=trained)
    ask(layer, stream[:240], [100, 37, 103])
    for step in range(240, 260):
        part = stream[step : step + 1]
        (got,) = ask(layer, part, [1])
        if step % 9 == 0:
            assert_decoded(layer, part.query, got, trained - 1)


def test_padded_rows_keep_tokens_at_columns_of_their_own():
    stream = stream_of(220)
    layer = bounded(far_field=HeavyHitters(12), trained=100)
    mask = torch.ones(2, 220, dtype=torch.bool)
    mask[0, :21] = False
    for start, size in ((0, 150), (150, 60), *((step, 1) for step in range(210, 220))):
        part = stream[start : start + size]
        handle, _ = layer.update(part.keys, part.values)
        view = handle.view if handle.on_padding is None else handle.on_padding(mask[:, :size])
        got = view.attend(part.query, Visibility(start, size, real=mask), scaling=0.125)
        if size == 1 and start % 5 == 0:
            assert_decoded(layer, part.query, got, 99)
    assert layer.store.rows.first == [21, 0]


FAR_FIELDS = {
    "none": None,
    "heavy hitters": HeavyHitters(12),
    "clusters": Clusters(6),
    "both": (HeavyHitters(8), Clusters(4)),
}


@pytest.mark.parametrize(
    ("far_field", "window"),
    [
        (FAR_FIELDS["heavy hitters"], 40),
        (FAR_FIELDS["clusters"], 40),
        *(rare(FAR_FIELDS[name], 40) for name in ("none", "both")),
        *(rare(far_field, 150) for far_field in FAR_FIELDS.values()),
    ],
    ids=str,
)
def test_generation_in_bounded_memory_runs_past_the_trained_length(far_field, window):
    model = tiny(max_position_embeddings=160)
    model.set_attn_implementation("hf_kvq")
    cache = QuantizedSlidingWindowCache(model.config, scheme_of(4), window=window, block=8, far_field=far_field)
    text = ids(155)
    found = model.generate(
        text,
        attention_mask=torch.ones_like(text),
        past_key_values=cache,
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert found.sequences.shape == (2, 175)
    assert torch.isfinite(torch.stack(found.logits)).all()
    for counts in cache.accounting().values():
        assert (counts["seen"] == 174).all()
        assert (sum(part for place, part in counts.items() if place != "seen") == 174).all()
    kept = far_field[0].tokens if isinstance(far_field, tuple) else getattr(far_field, "tokens", 0)
    assert all(layer.store.tokens.is_fitted for layer in cache.layers)
    assert all(layer.tokens_coded >= window - 1 + kept for layer in cache.layers)


@pytest.mark.parametrize("window", [40, rare(150)])
@pytest.mark.parametrize("far_field", [None, HeavyHitters(12)], ids=["none", "heavy hitters"])
def test_what_is_kept_and_its_codes_do_not_depend_on_the_chunks(far_field, window):
    stream = stream_of(230)
    layers = [bounded(window=window, far_field=far_field) for _ in range(2)]
    for layer, sizes in zip(layers, ([230], [30, 1, 64, 5, 130]), strict=True):
        ask(layer, stream, sizes)
    first, second = (layer.store for layer in layers)
    ours, theirs = (store.tokens.coded.buffer.view() for store in (first, second))
    assert differing(ours, theirs) == []
    assert differing(first.tokens.coded.key_codec.tensors, second.tokens.coded.key_codec.tensors) == []
    if far_field is not None:
        assert torch.equal(first.far.kept.positions, second.far.kept.positions)
        assert differing(first.far.kept.held(), second.far.kept.held()) == []


@pytest.mark.parametrize(
    "far_field",
    [FAR_FIELDS["heavy hitters"], FAR_FIELDS["clusters"], *(rare(FAR_FIELDS[name]) for name in ("none", "both"))],
    ids=str,
)
def test_a_bounded_forward_that_taught_can_be_undone(far_field):
    stream, other = stream_of(120), stream_of(50, seed=50)
    layer, straight = (bounded(far_field=far_field) for _ in range(2))
    for each in (layer, straight):
        ask(each, stream[:30], [30])
    ask(layer, other, [50])
    assert layer.undo_update()
    outputs = [ask(each, stream[30:], [40, 1, 49]) for each in (layer, straight)]
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("far_field", [rare(None), HeavyHitters(12)], ids=["none", "heavy hitters"])
@pytest.mark.parametrize(("first", "draft", "accepted"), [(40, 8, 0), (40, 8, 2), (30, 20, 5)])
def test_a_recorded_draft_teaches_a_bounded_layer_nothing(first, draft, accepted, far_field):
    stream, other = stream_of(80), stream_of(80, seed=50)
    rolled, straight = (bounded(far_field=far_field) for _ in range(2))
    for layer in (rolled, straight):
        layer.activate_past_recording()
        ask(layer, stream[:first], [first])
    ask(rolled, stream[first : first + accepted].before(other[accepted:draft]), [draft])
    rolled.crop(accepted - draft)
    ask(straight, stream[first : first + accepted], [1] * accepted)
    rest = stream[first + accepted : first + accepted + 5]
    for ours, theirs in zip(*(ask(layer, rest, [1] * 5) for layer in (rolled, straight)), strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_a_recorded_draft_of_a_bounded_layer_that_has_learned_is_taken_back():
    stream, other = stream_of(80), stream_of(80, seed=50)
    rolled, straight = (bounded(far_field=HeavyHitters(12)) for _ in range(2))
    for layer in (rolled, straight):
        layer.activate_past_recording()
        ask(layer, stream[:50], [50])
    ask(rolled, stream[50:53].before(other[3:8]), [8])
    rolled.crop(-5)
    ask(straight, stream[50:53], [1] * 3)
    for ours, theirs in zip(*(ask(layer, stream[53:], [1] * 27) for layer in (rolled, straight)), strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_a_hook_that_raises_where_codecs_learned_takes_all_of_it_back():
    stream = stream_of(200)
    layer, straight = (bounded() for _ in range(2))
    for each in (layer, straight):
        ask(each, stream[:30], [30])
    handle = layer.cache.register_chunk_hook(lambda block: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        ask(layer, stream[30:150], [120])
    layer.undo_update()
    handle.remove()
    for ours, theirs in zip(*(ask(each, stream[30:], [120, 50]) for each in (layer, straight)), strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_that_leave_are_shown_as_they_are_read():
    stream, blocks = stream_of(130), []
    layer = bounded()
    layer.cache.register_chunk_hook(blocks.append)
    ask(layer, stream, [130])
    assert [int(block.positions[0, 0]) for block in blocks] == list(range(4, 84, 8))
    codec = layer.store.tokens.coded.key_codec
    for block in blocks:
        start = int(block.positions[0, 0])
        given = stream.keys[:, :, start : start + 8]
        codes = codec.encode(given, start)
        read = codec.basis_at(start, 8).restore(codec.decode(codes, head_dim=64))
        assert (block.keys - read).abs().max() < 1e-4 * given.abs().max()
        assert (block.keys - given).norm() < 0.2 * given.norm()


def test_a_long_coded_forward_of_a_bounded_layer_reads_its_sinks_exactly():
    stream = stream_of(60)
    layer = bounded(fused=False)
    keys, values = layer.update(stream.keys, stream.values)
    assert torch.equal(keys[:, :, :4], stream.keys[:, :, :4])
    assert torch.equal(values[:, :, :4], stream.values[:, :, :4])


def test_a_budget_counts_codes_and_tokens_are_exact_while_codecs_learn():
    layer = bounded(window=None, block=32, budget_bytes_per_head=20_000)
    ask(layer, stream_of(90, batch=1), [90])
    assert layer.tokens_coded == 0
    keys_values_and_two_queries = 90 * 4 * 64 * 4
    assert 20_000 < layer.nbytes_used / 2 <= keys_values_and_two_queries


def test_a_budget_is_kept_once_they_have_learned():
    layer = bounded(window=None, block=32, budget_bytes_per_head=20_000)
    ask(layer, stream_of(400, batch=1), [300, 50, 50])
    assert 0.8 * 20_000 < layer.nbytes_used / 2 <= 20_000


def test_a_model_of_sliding_and_full_layers_is_bounded_too():
    model = tiny("gemma3")
    cache = QuantizedSlidingWindowCache(model.config, scheme_of(4), window=60, block=8, far_field=HeavyHitters(10))
    logits = run(model, ids(200), cache, [150, 1, 40, 9], "hf_kvq")
    assert all(torch.isfinite(each).all() for each in logits)
    sliding, full = cache.layers
    assert isinstance(sliding, QuantizedLayer)
    assert sliding.tokens_coded == 39
    assert isinstance(full, BoundedLayer)


def test_codes_of_keys_alone_can_be_kept():
    scheme = QuantConfig(keys=RotatedConfig(bits=4), values=AffineConfig(), sinks=4)
    config = LiveConfig(oracle.llama_config(fused=True).config).config
    cache = QuantizedSlidingWindowCache(config, scheme, window=40, block=8, far_field=HeavyHitters(12))
    outputs = ask(cache.layers[0], stream_of(150), [140, 1, 9])
    assert all(torch.isfinite(each).all() for each in outputs)
