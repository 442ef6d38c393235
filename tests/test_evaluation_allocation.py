"""Bits by layer: what is measured, how bits are given out, and the scheme that comes of it."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from oracles import tiny_llama
from oracles_evaluation import character_tokenizer, prose
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import hf_kvq
from hf_kvq import QuantConfig, QuantizedCache
from hf_kvq.codecs.rotated import encode_grid, grid_for
from hf_kvq.config import RotatedConfig
from hf_kvq.evaluation import Sensitivity, allocate, assign_bits, sensitivities
from hf_kvq.evaluation.allocation import LADDER, PROBE_BITS, average_bits, scheme_of, token_ids

TOKENS = 160
PARTS = [(layer, part) for layer in (0, 1) for part in ("keys", "values")]
SCALES = 8 / 64


def ids(tokens=TOKENS):
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(2))


def made_up(kls, **overrides):
    return [
        Sensitivity(layer=layer, part=part, kl=kl, **overrides) for (layer, part), kl in zip(PARTS, kls, strict=True)
    ]


def expected_kl(found, assigned):
    """What a model is to lose: parts add up, and each falls with the codec's error."""
    return sum(each.kl * LADDER[assigned[each.layer, each.part]] / LADDER[PROBE_BITS] for each in found)


def best_by_brute_force(found, average, rungs):
    choices = (dict(zip(PARTS, bits, strict=True)) for bits in itertools.product(rungs, repeat=4))
    return min(
        (chosen for chosen in choices if average_bits(found, chosen) <= average + 1e-9),
        key=lambda chosen: expected_kl(found, chosen),
    )


def tiny_gemma():
    """Two layers that slide, and one that does not."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    return Gemma3ForCausalLM(config).eval()


def tiny_hybrid():
    """A layer of linear attention, and one that can be coded."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=97,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1],
    )
    return Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize("bits", LADDER)
def test_the_ladder_holds_what_the_codec_loses(bits):
    normal = torch.randn(1, 1, 1024, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grid, decoded = grid_for((bits,), 64, trellis=bits != 8), torch.empty_like(normal)
    normal = normal / grid.best_scale(bits)
    grid.decode_into(*encode_grid(normal, grid), decoded)
    error = (decoded - normal).square().mean().item() * grid.best_scale(bits) ** 2
    assert error == pytest.approx(LADDER[bits], rel=0.03)


@pytest.mark.parametrize("average", [2.125, 2.5, 3.3, 3.375, 4.2, 5.0])
@pytest.mark.parametrize("kls", [(1.0, 0.1, 0.01, 0.001), (0.2, 0.3, 0.25, 0.2), (0.0, 3.0, 0.0, 1e-4)])
def test_bits_are_the_best_ones_where_all_steps_cost_the_same(kls, average):
    # Below 6 bits each step is one bit more.
    found = made_up(kls)
    assigned = assign_bits(found, average)
    assert average_bits(found, assigned) <= average
    if max(assigned.values()) < 6:
        best = best_by_brute_force(found, average, (2, 3, 4, 5))
        assert expected_kl(found, assigned) == pytest.approx(expected_kl(found, best), rel=1e-12)


@pytest.mark.parametrize("average", [2.2, 3.7, 5.4, 6.1, 7.0])
def test_bits_are_close_to_the_best_where_they_do_not(average):
    found = [*made_up((1.0, 0.3, 0.2, 0.1), elements=1)[:2], *made_up((1.0, 0.3, 0.2, 0.1), elements=3)[2:]]
    assigned = assign_bits(found, average)
    assert average_bits(found, assigned) <= average + 1e-9
    best = expected_kl(found, best_by_brute_force(found, average, LADDER))
    # No more is lost than by one step that no longer fitted.
    step = max(
        each.kl * (LADDER[now] - LADDER[after]) / LADDER[PROBE_BITS]
        for each in found
        for now, after in itertools.pairwise(LADDER)
        if assigned[each.layer, each.part] == now
    )
    assert best <= expected_kl(found, assigned) <= best + step


def test_what_costs_most_gets_most():
    assigned = assign_bits(made_up((0.001, 0.01, 1.0, 0.1)), 4.125)
    assert sorted(PARTS, key=lambda part: assigned[part]) == [(0, "keys"), (0, "values"), (1, "values"), (1, "keys")]


def test_equal_parts_get_equal_bits():
    assert set(assign_bits(made_up((0.1,) * 4), 4 + SCALES).values()) == {4}


def test_more_than_enough_bits_are_eight_for_all():
    assert set(assign_bits(made_up((0.1, 0.0, 0.2, 0.3)), 16.0).values()) == {8}


def test_bits_go_where_each_of_them_gains_most():
    # Three small parts lose more by a bit each than the large one does by one that takes as much.
    found = [*made_up((0.5,) * 4)[:3], *made_up((1.0,) * 4, elements=3)[3:]]
    assert list(assign_bits(found, 2 + SCALES + 3 / 6).values()) == [3, 3, 3, 2]


def test_a_part_of_few_elements_is_given_bits_at_little_cost():
    small, large = made_up((0.1,) * 4)[0], made_up((0.1,) * 4, elements=100)[1]
    assigned = assign_bits([small, large], 3.3)
    assert assigned[0, "keys"] == 8
    assert average_bits([small, large], assigned) <= 3.3


@pytest.mark.parametrize("head_dim", [16, 37, 40, 80, 172])
def test_the_average_counts_what_codes_of_odd_sizes_take(head_dim):
    found = made_up((1.0, 0.1, 0.01, 0.001), head_dim=head_dim, elements=head_dim)
    average = average_bits(found, dict.fromkeys(PARTS, 2)) + 1.3
    assigned = assign_bits(found, average)
    scheme = scheme_of(assigned, sinks=0, residual=0, name="odd")
    taken = [
        8 * (grid.width + grid.groups) / head_dim
        for layer in (0, 1)
        for codec in (scheme.for_layer(layer, 2).keys, scheme.for_layer(layer, 2).values)
        for grid in [grid_for(codec.tiers, head_dim, trellis=codec.trellis)]
    ]
    assert sum(taken) / 4 == pytest.approx(average_bits(found, assigned))
    assert sum(taken) / 4 <= average + 1e-9


@pytest.mark.parametrize("attending", ["sdpa", "hf_kvq"])
def test_sensitivities_are_divergences_with_one_part_coded(attending):
    model = tiny_llama()
    model.set_attn_implementation(attending)
    found = sensitivities(model, ids())
    assert [(each.layer, each.part) for each in found] == PARTS
    assert [each.elements for each in found] == [TOKENS * 2 * 16] * 4
    values = QuantConfig(
        keys=hf_kvq.IdentityConfig(),
        values=hf_kvq.IdentityConfig(),
        sinks=4,
        layers={
            1: hf_kvq.LayerQuant(keys=hf_kvq.IdentityConfig(), values=RotatedConfig(bits=PROBE_BITS, trellis=True))
        },
    )
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        exact, coded = (
            model(ids()[None], past_key_values=cache).logits[0, :-1].double().log_softmax(-1)
            for cache in (DynamicCache(config=model.config), QuantizedCache(model.config, values, prefill="coded"))
        )
    kl = (exact.exp() * (exact - coded)).sum(-1).mean().item()
    assert found[3].kl == pytest.approx(kl, rel=1e-3)
    assert model.config._attn_implementation == "sdpa"


def test_the_models_attention_stays_as_it_was():
    model = tiny_llama(layers=1)
    model.set_attn_implementation("hf_kvq")
    allocate(model, ids(140))
    assert model.config._attn_implementation == "hf_kvq"


@pytest.mark.parametrize("bits", [3.0, 4.2, 6.5])
def test_a_scheme_runs_survives_json_and_keeps_to_its_bits(bits, tmp_path):
    model = tiny_llama(layers=3, head_dim=64)
    scheme = allocate(model, ids(), bits, residual=2)
    scheme.save(tmp_path / "scheme.json")
    assert hf_kvq.resolve_scheme(str(tmp_path / "scheme.json")) == scheme
    assert (scheme.sinks, scheme.residual, scheme.name) == (4, 2, f"allocated-{bits:g}")
    cache = QuantizedCache(model.config, str(tmp_path / "scheme.json"))
    with torch.inference_mode():
        model(ids()[None], past_key_values=cache)
    # Without what is kept exactly and what is learned of a row, only codes and their scales are left.
    coded = [part.nbytes for layer in cache.coded_layers for part in layer.held.coded.buffer.view().values()]
    elements = 3 * 2 * 2 * 64 * (TOKENS - 4 - 2)
    assert bits - 0.5 < 8 * sum(coded) / elements <= bits


def test_layers_that_slide_weigh_what_they_keep():
    model = tiny_gemma()
    found = sensitivities(model, ids())
    assert [each.layer for each in found] == [0, 0, 1, 1, 2, 2]
    # The window holds the new token too.
    assert [each.elements // 16 for each in found] == [23, 23, 23, 23, TOKENS, TOKENS]
    assert all(each.kl > 0 for each in found)
    scheme = allocate(model, ids(), 4.2)
    cache = QuantizedCache(model.config, scheme)
    with torch.inference_mode():
        model(ids()[None], past_key_values=cache)
    assert cache.tokens_coded == 23 + 23 + TOKENS - 4


def test_layers_that_cannot_be_coded_are_left_out():
    model = tiny_hybrid()
    found = sensitivities(model, ids(140))
    assert [(each.layer, each.part) for each in found] == [(1, "keys"), (1, "values")]
    scheme = scheme_of(assign_bits(found, 4.5), sinks=4, residual=0, name="hybrid")
    assert [index for index, _ in scheme.overrides] == [1]
    assert [layer.index for layer in QuantizedCache(model.config, scheme).coded_layers] == [1]


def test_a_text_is_cut_after_so_many_tokens():
    model, told = tiny_llama(layers=1), []
    tokenizer, text = character_tokenizer(adds_bos=True), prose(300)
    used = token_ids(text, tokenizer, 140)
    assert used.tolist() == [1, *tokenizer(text, add_special_tokens=False)["input_ids"][:139]]
    scheme = allocate(model, text, tokenizer=tokenizer, tokens=140, progress=lambda *step: told.append(step))
    assert scheme == allocate(model, used)
    assert told == [
        (0, 3, "exact"),
        (1, 3, "keys of layer 0"),
        (2, 3, "values of layer 0"),
        (3, 3, "done"),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: allocate(tiny_llama(), ids(132)), "132 tokens are too few, 133 are needed; give a longer text"),
        (lambda: allocate(tiny_llama(), ids(), tokens=50), "50 tokens are too few"),
        (lambda: allocate(tiny_llama(), ids(), tokens=0), "tokens must be at least 1, got 0"),
        (lambda: allocate(tiny_llama(), ids(0)), "0 tokens are too few"),
        (lambda: allocate(tiny_llama(), "a text"), "a text needs the model's tokenizer; pass tokenizer="),
        (lambda: allocate(tiny_llama(), ids()[None]), r"got shape \(1, 160\); try input_ids\[0\]"),
        (lambda: allocate(tiny_llama(head_dim=64), ids(), 2.1), "bits must be at least 2.125, .* got 2.1"),
        (lambda: allocate(tiny_llama(head_dim=64), ids(), float("nan")), "bits must be at least 2.125, .* got nan"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bits_that_are_out_of_reach_are_said_before_anything_is_measured():
    told = []
    with pytest.raises(ValueError, match="bits must be at least"):
        allocate(tiny_llama(), ids(), 1.0, progress=lambda *step: told.append(step))
    assert told == []


def test_the_package_offers_it_without_importing_evaluations():
    code = (
        "import sys, hf_kvq\n"
        "assert 'hf_kvq.evaluation' not in sys.modules\n"
        "assert hf_kvq.allocate is sys.modules['hf_kvq.evaluation'].allocate\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'alocate'"):
        hf_kvq.alocate  # noqa: B018
