"""Bounded caches on a real model and real text."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from real_models import smollm2_for_tests, wikitext
from transformers import DynamicCache

from eval.bounded.policies import FULL, KINDS, Policy, policies
from eval.bounded.quality import compare, nll_of
from hf_kvq import HeavyHitters, QuantizedSlidingWindowCache

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    loaded = smollm2_for_tests()
    return torch.tensor(loaded.tokenizer(wikitext()[:60_000], add_special_tokens=False)["input_ids"])


def test_heavy_hitters_beat_a_window_of_the_same_bytes(ids):
    model = smollm2_for_tests().model
    found = policies(128, 64)
    chosen = [Policy(kind=FULL, budget=0), found[KINDS[0]], found[KINDS[2]]]
    rows = compare(model, [ids[:2048]], chosen, scored_from=512, chunk=512)
    full, window, heavy = (row["nll"][0] for row in rows)
    print(
        f"\nperplexity: full {math.exp(full):.2f}, sinks + window {math.exp(window):.2f}, heavy hitters {math.exp(heavy):.2f}"
    )
    assert full < heavy < window - 0.03
    assert rows[2]["nbytes_per_head"] <= rows[1]["nbytes_per_head"] + 132


def test_a_window_beyond_the_text_loses_what_int8_loses(ids):
    model = smollm2_for_tests().model
    model.set_attn_implementation("sdpa")
    exact = nll_of(model, ids[:768], DynamicCache(config=model.config), chunk=256)
    model.set_attn_implementation("hf_kvq")
    cache = QuantizedSlidingWindowCache(model.config, "int8", window=1024, far_field=HeavyHitters(16), prefill="coded")
    coded = nll_of(model, ids[:768], cache, chunk=256)
    assert abs(coded.mean() - exact.mean()) < 0.005


def test_sinks_that_are_moved_ahead_still_take_the_weight_of_sinks(ids):
    """With a trained length of 256 in the config every sink moves; the model hardly notices, as it would a sink that is gone or wrongly turned."""
    model = smollm2_for_tests().model
    model.set_attn_implementation("hf_kvq")
    near = copy.deepcopy(model.config)
    near.max_position_embeddings = 256
    near._attn_implementation = "hf_kvq"
    nll = {}
    for name, config, sinks in (("kept", model.config, 4), ("moved", near, 4), ("none", model.config, 0)):
        cache = QuantizedSlidingWindowCache(config, "int8", window=128, sinks=sinks)
        nll[name] = nll_of(model, ids[:1025], cache, chunk=512)[512:].mean().item()
    print("\nnll of 512 tokens:", {name: round(value, 4) for name, value in nll.items()})
    assert abs(nll["moved"] - nll["kept"]) < 0.03
    assert nll["none"] > nll["kept"] + 0.2
