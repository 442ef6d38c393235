"""The metric of the `evaluate` library."""

from __future__ import annotations

import evaluate
import pytest
from oracles_evaluation import prose, tiny_config, tiny_folder, tiny_loaded

from hf_kvq import PRESETS
from hf_kvq.evaluation import evaluate_model
from hf_kvq.evaluation.data import text_in_memory
from hf_kvq.evaluation.metric import CachePerplexity

TEXTS = [prose(200), prose(150)]
FIGURES = ["perplexity", "exact_perplexity", "delta_percent", "kl_mean", "bits_per_element", "tokens_coded"]


@pytest.fixture
def metric(tmp_path):
    return CachePerplexity(cache_dir=str(tmp_path))


@pytest.mark.parametrize("scheme", ["int8", PRESETS["seed_fp8"]])
@pytest.mark.parametrize("protocol", ["windows", pytest.param("decode", marks=pytest.mark.slow)])
def test_it_gives_the_figures_of_the_receipts(metric, scheme, protocol):
    loaded = tiny_loaded()
    found = metric.compute(
        predictions=TEXTS,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        scheme=scheme,
        window=32,
        protocol=protocol,
    )
    config = tiny_config(schemes=(scheme,), count=None, protocol=protocol)
    expected = evaluate_model(loaded, text_in_memory("\n\n".join(TEXTS), name="texts"), config)[0].results
    assert found == {name: getattr(expected, name) for name in FIGURES}
    assert found["tokens_coded"] > 0


def test_it_loads_a_model_by_name(metric, tmp_path):
    found = metric.compute(predictions=TEXTS, model=tiny_folder(tmp_path / "model"), window=32)
    loaded = tiny_loaded()
    assert found == metric.compute(predictions=TEXTS, model=loaded.model, tokenizer=loaded.tokenizer, window=32)


def test_it_is_a_metric_with_what_evaluate_shows_of_one(metric):
    assert isinstance(metric, evaluate.Metric)
    assert metric.name == "cache_perplexity"
    assert "scheme: A preset of hf_kvq" in metric.inputs_description


def test_texts_come_in_batches_too(metric):
    loaded = tiny_loaded()
    arguments = {"model": loaded.model, "tokenizer": loaded.tokenizer, "window": 32}
    for text in TEXTS:
        metric.add_batch(predictions=[text])
    assert metric.compute(**arguments) == metric.compute(predictions=TEXTS, **arguments)


def test_a_model_without_its_tokenizer_is_refused(metric):
    with pytest.raises(ValueError, match="pass tokenizer="):
        metric.compute(predictions=TEXTS, model=tiny_loaded().model)


def test_texts_shorter_than_a_window_are_refused(metric):
    loaded = tiny_loaded()
    with pytest.raises(ValueError, match="352 tokens, which make 0 windows of 512"):
        metric.compute(predictions=TEXTS, model=loaded.model, tokenizer=loaded.tokenizer)
