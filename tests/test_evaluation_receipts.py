"""Receipts: complete, readable again, and repeatable."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from oracles_evaluation import prose, tiny_config, tiny_folder

from hf_kvq import AffineConfig, IdentityConfig, LayerQuant, QuantConfig
from hf_kvq.evaluation import Receipt, evaluate_schemes, rerun
from hf_kvq.evaluation.receipts import SCHEMA

MIXED = QuantConfig(
    keys=AffineConfig(mode="int8"),
    values=AffineConfig(mode="fp8"),
    sinks=2,
    layers=((1, LayerQuant(keys=IdentityConfig(), values=AffineConfig(mode="int8"))),),
    name="mixed",
)


def paths(value, prefix=()):
    """Every field of a receipt's JSON, by its keys from the outside in."""
    for name, inner in value.items():
        yield (*prefix, name)
        if isinstance(inner, dict) and name != "scheme":
            yield from paths(inner, (*prefix, name))


def dotted(path):
    return ".".join(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    tiny_folder(folder / "model")
    (folder / "prose.txt").write_text(prose())
    return folder


@pytest.fixture(scope="module")
def receipts(place):
    config = tiny_config(
        model=str(place / "model"),
        text=str(place / "prose.txt"),
        schemes=("exact", "int8", MIXED),
        noise_floor_tokens=16,
        timed_tokens=2,
    )
    return evaluate_schemes(config)


def test_there_is_one_receipt_a_scheme_in_order_and_of_one_run(receipts):
    assert [receipt.name for receipt in receipts] == ["exact", "int8", "mixed"]
    assert len({(receipt.run, receipt.date) for receipt in receipts}) == 1
    assert receipts[0].settings.schemes == ("exact", "int8", "mixed")


def test_the_exact_receipt_differs_from_itself_by_nothing(receipts):
    result = receipts[0].results
    assert (result.delta_nll, result.delta_percent, result.kl_max, result.same_top1) == (0, 0, 0, 1)
    assert (result.tokens_coded, result.nbytes, result.ms_per_token_ratio) == (0, result.exact_nbytes, 1)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_receipt_survives_json_and_disk(receipts, tmp_path, index):
    receipt = receipts[index]
    assert Receipt.from_json(receipt.to_json()) == receipt
    assert Receipt.from_json(receipt.to_json(indent=None)) == receipt
    assert "\n" not in receipt.to_json(indent=None)
    receipt.save(tmp_path / "receipt.json")
    assert Receipt.load(tmp_path / "receipt.json") == receipt


def test_a_receipt_holds_what_repeats_it(receipts, place):
    data = json.loads(receipts[2].to_json())
    assert data["schema"] == SCHEMA
    assert QuantConfig.from_dict(data["settings"]["scheme"]) == MIXED
    assert (data["settings"]["sinks"], data["settings"]["residual"]) == (2, 0)
    assert data["text"]["path"] == str(place / "prose.txt")
    assert (data["settings"]["stride"], data["settings"]["bos"]) == (32, "none")
    assert (data["settings"]["prefill"], data["settings"]["chunk"]) == ("coded", None)
    for name in ("python", "torch", "transformers", "tokenizers", "hf_kvq", "cpu", "cores", "threads", "device"):
        assert data["environment"][name]


def test_every_field_is_mandatory(receipts):
    full = json.loads(receipts[1].to_json())
    found = list(paths(full))
    assert len(found) > 70
    for path in found:
        data = json.loads(receipts[1].to_json())
        inner = data
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        with pytest.raises(ValueError, match=rf"'{dotted(path)}'"):
            Receipt.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(extra=1), "unknown fields 'extra'"),
        (lambda data: data["settings"].update(extra=1), "unknown fields 'settings.extra'"),
        (lambda data: data["results"]["nll_by_position"][0].pop("first"), "'results.nll_by_position.first'"),
        (
            lambda data: data.update(schema=SCHEMA + 1),
            f"has schema {SCHEMA + 1}, this version of hf_kvq reads 1 and {SCHEMA}",
        ),
        (lambda data: data.update(model="tiny"), "field 'model' must be an object, got 'tiny'"),
        (lambda data: data["settings"]["scheme"].pop("name"), "'settings.scheme.name'"),
    ],
)
def test_what_is_no_receipt_is_refused_by_name(receipts, change, message):
    data = json.loads(receipts[1].to_json())
    change(data)
    with pytest.raises(ValueError, match=message):
        Receipt.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"), [("", "it is no JSON"), ("[]", "'schema' is missing"), ("{}", "'schema'")]
)
def test_a_foreign_file_is_refused_with_its_name(tmp_path, text, message):
    (tmp_path / "foreign.json").write_text(text)
    with pytest.raises(ValueError, match=rf"foreign.json: not a receipt: .*{message}"):
        Receipt.load(tmp_path / "foreign.json")


def test_a_receipt_from_before_attention_over_codes_is_read_as_dense(receipts):
    data = json.loads(receipts[1].to_json())
    data["schema"] = 1
    del data["settings"]["attention"]
    assert Receipt.from_json(json.dumps(data)) == receipts[1]


def test_fused_receipts_agree_with_dense_ones_and_leave_the_model_as_it_was(place):
    fused, dense = (
        evaluate_schemes(
            tiny_config(
                model=str(place / "model"),
                text=str(place / "prose.txt"),
                schemes=("exact", "int8"),
                attention=attention,
            )
        )
        for attention in ("fused", "dense")
    )
    assert fused[0].results.perplexity == dense[0].results.perplexity
    assert fused[1].results.perplexity == pytest.approx(dense[1].results.perplexity, rel=1e-3)
    assert fused[1].settings.attention == "fused"
    assert fused[1].results.kl_mean != dense[1].results.kl_mean, (
        "the same numbers to the last bit: was it fused at all?"
    )
    assert rerun(fused[1]).results.perplexity == fused[1].results.perplexity


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the receipt .*gone\.json"):
        Receipt.load(tmp_path / "gone.json")


def test_a_figure_that_is_no_number_is_not_written(receipts):
    broken = replace(receipts[1], results=replace(receipts[1].results, kl_max=float("nan")))
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.to_json()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_rerun_gives_the_same_figures(receipts, index):
    recorded = Receipt.from_json(receipts[index].to_json())
    found = rerun(recorded)
    assert found.run != recorded.run
    assert (found.model, found.text) == (recorded.model, recorded.text)
    assert replace(found.settings, schemes=()) == replace(recorded.settings, schemes=())
    untimed = {"ms_per_token": None, "ms_per_token_ratio": None}
    assert replace(found.results, **untimed) == replace(recorded.results, **untimed)


def test_a_decode_receipt_is_rerun_with_its_chunk_and_prefill(place):
    config = tiny_config(
        model=str(place / "model"),
        text=str(place / "prose.txt"),
        schemes=("int8",),
        protocol="decode",
        chunk=5,
        residual=3,
        sinks=1,
        first=2,
        count=1,
        bos="each window",
    )
    recorded = evaluate_schemes(config)[0]
    found = rerun(Receipt.from_json(recorded.to_json()))
    assert found.settings == recorded.settings
    assert found.results == recorded.results
    assert (found.settings.chunk, found.settings.residual, found.settings.prefill) == (5, 3, "exact")


def test_a_rerun_takes_a_moved_model_and_text(receipts, place, tmp_path):
    moved = replace(
        receipts[1],
        model=replace(receipts[1].model, name="elsewhere"),
        text=replace(receipts[1].text, path="prose.txt"),
    )
    with pytest.raises(ValueError, match=r"cannot read the text file prose\.txt"):
        rerun(moved)
    shutil.copytree(place, tmp_path / "new")
    found = rerun(moved, model=str(tmp_path / "new" / "model"), text=str(tmp_path / "new" / "prose.txt"))
    assert found.results.perplexity == receipts[1].results.perplexity


def test_a_rerun_on_other_weights_is_refused(receipts, tmp_path):
    with pytest.raises(ValueError, match=r"not the receipt's weights: it has model with SHA-256 \w{16}"):
        rerun(receipts[1], model=tiny_folder(tmp_path, seed=1))


def test_a_rerun_on_another_text_is_refused(receipts, tmp_path):
    (tmp_path / "other.txt").write_text(prose() + ".")
    with pytest.raises(ValueError, match=r"not the receipt's text: it has prose\.txt .* here other\.txt"):
        rerun(receipts[1], text=str(tmp_path / "other.txt"))


def test_a_rerun_with_another_tokenizer_is_refused(receipts, place, tmp_path):
    folder = Path(shutil.copytree(place / "model", tmp_path / "model"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match="not the receipt's tokens"):
        rerun(receipts[1], model=str(folder))
