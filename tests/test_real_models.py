"""Every generate mode, on real weights; figures are printed (`pytest -m slow -s tests/test_real_models.py`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from real_models import gemma_for_tests, smollm2_for_tests, wikitext
from transformers import DynamicCache, LlamaForCausalLM

from hf_kvq import ATTENTION, QuantizedCache, expected_nbytes
from hf_kvq.evaluation.divergence import compare_logits
from hf_kvq.evaluation.models import cache_argument, forward

pytestmark = pytest.mark.slow

PROMPT = (
    "The lighthouse stood at the end of the pier. Every evening the keeper climbed the stairs, lit the lamp, and wrote the "
    "weather in a book. One evening the book was gone. Every evening the keeper"
)
SHORT = "A recipe for bread needs"


@pytest.fixture(params=["sdpa", ATTENTION])
def attention(request) -> Iterator[str]:
    """The default model, attending to decoded states and then to codes."""
    model = smollm2_for_tests().model
    model.set_attn_implementation(request.param)
    yield request.param
    model.set_attn_implementation("sdpa")


def encode(loaded, *texts):
    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    return tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1)


def generate(loaded, inputs, cache, **kwargs):
    settings = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False} | kwargs
    name = settings.pop("name", "past_key_values")
    return loaded.model.generate(**inputs, **{name: cache}, pad_token_id=loaded.tokenizer.pad_token_id, **settings)


def quantized(loaded, scheme="int8", **kwargs):
    return QuantizedCache(loaded.model.config, scheme, **kwargs)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "seed_int8", "seed_fp8"])
def test_greedy_decoding_follows_the_exact_cache(scheme, shown, attention):
    loaded = smollm2_for_tests()
    inputs = encode(loaded, PROMPT)
    exact = generate(loaded, inputs, DynamicCache(config=loaded.model.config))
    coded = generate(loaded, inputs, quantized(loaded, scheme))
    start = inputs["input_ids"].shape[1]
    same = (exact == coded)[0, start:].int().cumprod(0).sum().item()
    shown(f"{scheme}, {attention}: the first {same} of 40 greedy tokens equal the exact cache's")
    assert same >= 5


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.usefixtures("attention")
def test_sampling_with_returned_sequences(scheme):
    loaded = smollm2_for_tests()
    torch.manual_seed(0)
    out = generate(
        loaded, encode(loaded, PROMPT), quantized(loaded, scheme, sinks=4), do_sample=True, num_return_sequences=3
    )
    assert out.shape[0] == 3
    assert len({tuple(row.tolist()) for row in out}) == 3


def test_identity_samples_what_the_exact_cache_samples():
    loaded = smollm2_for_tests()
    outs = []
    for cache in (DynamicCache(config=loaded.model.config), quantized(loaded, "identity", sinks=4, residual=16)):
        torch.manual_seed(0)
        outs.append(generate(loaded, encode(loaded, PROMPT), cache, do_sample=True, num_return_sequences=2))
    assert torch.equal(*outs)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.usefixtures("attention")
def test_three_beams_through_either_name_of_the_argument(scheme):
    loaded = smollm2_for_tests()
    names = {"past_key_values", cache_argument(loaded.model)}
    outs = [
        generate(loaded, encode(loaded, PROMPT), quantized(loaded, scheme), num_beams=3, name=name) for name in names
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)
    exact = generate(loaded, encode(loaded, PROMPT), quantized(loaded, "identity"), num_beams=3)
    stock = generate(loaded, encode(loaded, PROMPT), DynamicCache(config=loaded.model.config), num_beams=3)
    assert torch.equal(exact, stock)


@pytest.mark.parametrize("prefill", ["exact", "coded"])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.usefixtures("attention")
def test_drafts_from_the_prompt_give_the_tokens_of_greedy_decoding(scheme, prefill):
    loaded = smollm2_for_tests()
    inputs = encode(loaded, PROMPT)
    greedy = generate(loaded, inputs, quantized(loaded, scheme, prefill=prefill))
    assert torch.equal(
        generate(loaded, inputs, quantized(loaded, scheme, prefill=prefill), prompt_lookup_num_tokens=5), greedy
    )


@pytest.mark.parametrize("prefill", ["exact", "coded"])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.usefixtures("attention")
def test_an_assistant_gives_the_tokens_of_greedy_decoding(scheme, prefill):
    loaded = smollm2_for_tests()
    inputs = encode(loaded, PROMPT)
    config = copy.deepcopy(loaded.model.config)
    config.num_hidden_layers = 12
    assistant = LlamaForCausalLM(config).eval()
    assistant.load_state_dict(loaded.model.state_dict(), strict=False)
    assistant.tie_weights()
    assistant.generation_config = copy.deepcopy(loaded.model.generation_config)
    greedy = generate(loaded, inputs, quantized(loaded, scheme, prefill=prefill))
    assert torch.equal(
        generate(loaded, inputs, quantized(loaded, scheme, prefill=prefill), assistant_model=assistant), greedy
    )


@pytest.mark.parametrize(("scheme", "sinks"), [("int8", 0), ("int8", 4), ("fp8", 0), ("seed_int8", 0)])
def test_left_padded_rows_equal_themselves_alone(scheme, sinks, attention):
    loaded = smollm2_for_tests()
    batch = encode(loaded, SHORT, PROMPT)
    cache = quantized(loaded, scheme, sinks=sinks)
    # Attention over codes learns the padding from the mask.
    if attention == "sdpa" and (sinks or scheme.startswith("seed")):
        cache.set_padding(batch["attention_mask"])
    together = generate(loaded, batch, cache)
    for row, text in enumerate((SHORT, PROMPT)):
        alone = generate(loaded, encode(loaded, text), quantized(loaded, scheme, sinks=sinks))
        assert torch.equal(together[row, -40:], alone[0, -40:])


@pytest.mark.usefixtures("attention")
def test_a_second_turn_on_the_same_cache_reads_what_one_cache_has_read():
    loaded = smollm2_for_tests()
    cache = quantized(loaded, prefill="coded")
    first = generate(loaded, encode(loaded, PROMPT), cache)
    turn = encode(loaded, "\n\nWhat did the keeper do next?")["input_ids"]
    both = torch.cat([first, turn], dim=1)
    inputs = {"input_ids": both, "attention_mask": torch.ones_like(both)}
    second = generate(loaded, inputs, cache)
    assert torch.equal(second, generate(loaded, inputs, quantized(loaded, prefill="coded")))


@pytest.mark.usefixtures("attention")
def test_chunks_of_a_prefill_read_the_same_codes():
    loaded = smollm2_for_tests()
    inputs = encode(loaded, PROMPT)
    whole = generate(loaded, inputs, quantized(loaded, prefill="coded"))
    assert torch.equal(generate(loaded, inputs, quantized(loaded, prefill="coded"), prefill_chunk_size=16), whole)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_fused_and_dense_agree_on_real_text(scheme, shown):
    loaded = smollm2_for_tests()
    ids = encode(loaded, wikitext()[:3000])["input_ids"][:, :512]
    found = {}
    for name, cache in {
        "exact": ("sdpa", DynamicCache(config=loaded.model.config)),
        "dense": ("sdpa", quantized(loaded, scheme, prefill="coded")),
        "fused": (ATTENTION, quantized(loaded, scheme, prefill="coded")),
    }.items():
        loaded.model.set_attn_implementation(cache[0])
        with torch.inference_mode():
            found[name] = forward(loaded.model, ids, cache[1])[0]
    loaded.model.set_attn_implementation("sdpa")
    between = compare_logits(found["dense"], found["fused"], ids[0]).kl
    to_exact = {
        name: compare_logits(found["exact"], found[name], ids[0]).kl.mean().item() for name in ("dense", "fused")
    }
    shown(
        f"{scheme}, 512 tokens: KL between dense and fused mean {between.mean():.2e}, max {between.max():.2e}; "
        f"to exact: dense {to_exact['dense']:.2e}, fused {to_exact['fused']:.2e}"
    )
    # What tips over between the two is part of the coding's own noise: neither is closer to exact than the other.
    assert between.mean() <= to_exact["dense"]
    assert to_exact["fused"] <= 1.25 * to_exact["dense"]


class Norm64(torch.nn.Module):
    """Llama's norm without its detour through float32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


def in_float64(model):
    model = copy.deepcopy(model).double()
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, Norm64(module))
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", ["identity", "int8", "fp8"])
def test_one_coded_pass_equals_token_by_token_on_256_real_tokens(scheme, dtype, shown):
    loaded = smollm2_for_tests()
    model = loaded.model if dtype == torch.float32 else in_float64(loaded.model)
    ids = encode(loaded, wikitext()[:3000])["input_ids"][:, :256]
    with torch.inference_mode():
        once = forward(model, ids, QuantizedCache(model.config, scheme, prefill="coded"))[0]
        cache = QuantizedCache(model.config, scheme)
        steps = torch.cat([forward(model, ids[:, i : i + 1], cache) for i in range(256)], dim=1)[0]
        exact = forward(model, ids, DynamicCache(config=model.config))[0]
    targets = torch.zeros(256, dtype=torch.long)
    between, coding = compare_logits(once, steps, targets), compare_logits(exact, once, targets)
    difference, moved = (once - steps).abs().max().item(), (exact - once).abs().max().item()
    shown(
        f"{scheme}, {dtype}: one pass against token by token: max logit difference {difference:.2e}, "
        f"mean KL {between.kl.mean():.2e} (exact against coded: {moved:.2e}, {coding.kl.mean():.2e})"
    )
    if dtype == torch.float64:
        assert difference < 1e-10
    elif scheme == "identity":
        assert difference < 1e-3
    else:
        # float32 adds in another order, which tips single codes over, and each tipped code moves the states of later layers as much as
        # coding itself does: the two passes are two draws of the same rounding noise, and no further apart than that.
        assert between.kl.mean() < 2 * coding.kl.mean()


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_the_same_real_states_give_the_same_codes_in_one_pass_and_token_by_token(scheme):
    loaded = smollm2_for_tests()
    ids = encode(loaded, wikitext()[:3000])["input_ids"][:, :256]
    exact, once, steps = DynamicCache(config=loaded.model.config), quantized(loaded, scheme), quantized(loaded, scheme)
    with torch.inference_mode():
        forward(loaded.model, ids, exact)
        for index, layer in enumerate(exact.layers):
            once.update(layer.keys, layer.values, index)
            for token in range(256):
                steps.update(layer.keys[:, :, token : token + 1], layer.values[:, :, token : token + 1], index)
    for one, other in zip(once.coded_layers, steps.coded_layers, strict=True):
        codes, expected = one.store.coded.buffer.view(), other.store.coded.buffer.view()
        assert all(torch.equal(codes[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "fp8", "seed_int8"])
def test_bytes_agree_with_the_storages_and_with_the_formula(scheme, dtype, shown):
    loaded = smollm2_for_tests()
    model = loaded.model if dtype == torch.float32 else copy.deepcopy(loaded.model).to(dtype)
    ids = encode(loaded, wikitext()[:8000])["input_ids"][:, :1024]
    cache, exact = QuantizedCache(model.config, scheme), DynamicCache(config=model.config)
    with torch.inference_mode():
        forward(model, ids, cache)
        forward(model, ids, exact)
    storages = sum(
        tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in layer.store.coded.buffer.tensors.values()
    )
    stock = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)
    formula = expected_nbytes(model.config, scheme, 1024, dtype=dtype)
    shown(
        f"{scheme} {dtype}: nbytes {cache.nbytes:,}, storages {storages:,}, formula {formula:,} "
        f"({formula / cache.nbytes - 1:+.2%}), DynamicCache {stock:,}: ratio {stock / cache.nbytes:.2f}"
    )
    assert cache.nbytes == storages
    assert abs(formula / cache.nbytes - 1) < 0.01
    assert expected_nbytes(model.config, "exact", 1024, dtype=dtype) == stock


@pytest.fixture
def two_threads():
    """Gemma's vocabulary of 262,144 words takes most of its time."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def divergence_by_position(loaded, ids, *caches):
    """KL divergence from the exact cache at every position of one row, for each cache."""
    exact = DynamicCache(config=loaded.model.config)
    kl: list[list[torch.Tensor]] = [[] for _ in caches]
    with torch.inference_mode():
        for part in ids.split(100, dim=1):
            reference, unscored = forward(loaded.model, part, exact)[0], torch.zeros(part.shape[1], dtype=torch.long)
            for found, cache in zip(kl, caches, strict=True):
                found.append(compare_logits(reference, forward(loaded.model, part, cache)[0], unscored).kl)
    return [torch.cat(found) for found in kl]


@pytest.mark.usefixtures("two_threads")
def test_gemma_generates_1200_tokens_and_keeps_its_windows(shown):
    loaded = gemma_for_tests()
    window = loaded.model.config.sliding_window
    torch.manual_seed(0)
    prompt = encode(loaded, "The history of the lighthouse began")
    cache = quantized(loaded)
    out = generate(loaded, prompt, cache, do_sample=True, top_k=0, max_new_tokens=1200, min_new_tokens=1200)
    (kl,) = divergence_by_position(loaded, out[:, :-1], quantized(loaded, prefill="coded"))
    shown(
        f"{cache}\nGemma 3 270M, int8, {out.shape[1]} tokens of its own: mean KL {kl[:window].mean():.2e} before position "
        f"{window}, {kl[window:].mean():.2e} beyond; median {kl[:window].median():.2e}, {kl[window:].median():.2e}"
    )
    assert out.shape[1] == prompt["input_ids"].shape[1] + 1200
    expected = {"sliding_attention": window - 1, "full_attention": out.shape[1] - 1}
    assert [layer.tokens_coded for layer in cache.coded_layers] == [expected[kind] for kind in cache.layer_types]


@pytest.mark.usefixtures("two_threads")
def test_gemma_past_its_window_reads_the_same_codes_fused_and_dense(shown):
    loaded = gemma_for_tests()
    window = loaded.model.config.sliding_window
    ids = encode(loaded, wikitext()[:20_000])["input_ids"][:, : window + 200]
    logits = {}
    for attention in ("sdpa", ATTENTION):
        loaded.model.set_attn_implementation(attention)
        cache = quantized(loaded)
        with torch.inference_mode():
            # In one forward past the window, in one of several tokens, and token by token.
            parts = [
                forward(loaded.model, part, cache)[0, -20:] for part in ids.split([window + 60, 100, *[1] * 40], dim=1)
            ]
        logits[attention] = torch.cat(parts)
    loaded.model.set_attn_implementation("sdpa")
    kl = compare_logits(logits["sdpa"], logits[ATTENTION], torch.zeros(len(logits["sdpa"]), dtype=torch.long)).kl
    shown(
        f"Gemma 3 270M past its window of {window}, int8: KL between dense and fused mean {kl.mean():.2e}, max {kl.max():.2e}"
    )
    assert len(kl) == 80
    # Coding itself moves this model by some 4e-3.
    assert kl.mean() < 1e-3


@pytest.mark.usefixtures("two_threads")
def test_gemma_is_no_worse_beyond_its_window_than_before_it(shown):
    loaded = gemma_for_tests()
    window, config = loaded.model.config.sliding_window, loaded.model.config
    ids = encode(loaded, wikitext()[:40_000])["input_ids"][:, 1:]
    start = torch.tensor([[loaded.tokenizer.bos_token_id]])
    names = ("sliding layers coded", "full layers coded", "all layers coded")
    rows = []
    for part in ids[:, :3600].split(1200, dim=1):
        caches = [
            QuantizedCache(config, "int8", prefill="coded", skip_layers=skipped)
            for skipped in (["full_attention"], ["sliding_attention"], [])
        ]
        rows.append(divergence_by_position(loaded, torch.cat([start, part], dim=1), *caches))
    means = {}
    shown(f"Gemma 3 270M, int8, 3 windows of 1,200 tokens, KL before position {window} and beyond")
    for name, found in zip(names, zip(*rows, strict=True), strict=True):
        before, beyond = (torch.cat([kl[part] for kl in found]) for part in (slice(window), slice(window, None)))
        means[name] = before.mean().item(), beyond.mean().item()
        shown(
            f"  {name}: mean {means[name][0]:.2e}, {means[name][1]:.2e}; median {before.median():.2e}, {beyond.median():.2e}"
        )
    # The window is the sliding layers' own; full layers read ever more coded tokens, which costs a little at any position.
    before, beyond = means["sliding layers coded"]
    assert beyond <= before
