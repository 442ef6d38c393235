"""The comparison of sorted profiles with codes per token, on a random model."""

from __future__ import annotations

import json

import pytest
import torch
from oracles import tiny_llama
from transformers import DynamicCache

import eval.profile_rate
from eval.profile_rate import RANK_BITS, measure, table
from hf_kvq.codecs.affine import PerTokenAffineCodec
from hf_kvq.codecs.sorted_profile import fit_sorted_profile, reconstruct
from hf_kvq.evaluation.models import cache_argument

IDS = torch.arange(3, 83).reshape(2, 40)
BLOCK = 16


@pytest.fixture(scope="module")
def record():
    return measure(tiny_llama(layers=2, kv_heads=2, head_dim=16), IDS, block=BLOCK)


def groups(name):
    """All whole blocks of all windows, layers and heads."""
    model = tiny_llama(layers=2, kv_heads=2, head_dim=16)
    for window in IDS:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(window[None], **{cache_argument(model): cache})
        for layer in cache.layers:
            for head in getattr(layer, name)[0]:
                yield from (head[first : first + BLOCK] for first in (0, 16))


def test_every_whole_block_of_every_layer_and_head_is_a_group(record):
    assert (record["groups"], record["elements"]) == (2 * 2 * 2 * 2, 16 * 16)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_errors_are_means_of_squared_error_over_energy(record, name):
    errors, coded = [], []
    codec = PerTokenAffineCodec("int8")
    for group in groups(name):
        decoded = torch.from_numpy(reconstruct(fit_sorted_profile(group, gof_threshold=1.0, rank_bits=3)))
        errors.append(((decoded - group) ** 2).sum() / (group**2).sum())
        decoded = codec.decode(codec.encode(group[None, None]), head_dim=16)
        coded.append(((decoded - group) ** 2).sum() / (group**2).sum())
    methods = record["methods"]
    expected = float(torch.stack(errors).mean())
    assert methods["sorted profile, rank codes of 3 bits"][f"nmse_{name}"] == pytest.approx(expected, rel=1e-4)
    assert methods["int8 per token"][f"nmse_{name}"] == pytest.approx(float(torch.stack(coded).mean()), rel=1e-4)


def test_bits_count_all_bytes(record):
    # 58 bytes beside the codes of a group: header, two sizes, two parameters, checksum.
    expected = {method: (bits or 8) + 58 * 8 / 256 for method, bits in RANK_BITS.items()}
    expected |= {"int8 per token": 8 + 16 / 16, "int4 per token": 4 + 16 / 16}
    assert {method: row["bits"] for method, row in record["methods"].items()} == pytest.approx(expected)


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("gate", ["seed", "lilliefors"])
def test_shares_are_of_groups_that_are_not_dense(record, gate, name):
    passed = [not fit_sorted_profile(group, gate=gate).is_dense for group in groups(name)]
    assert record["pass"][gate][name] == sum(passed) / len(passed)


def test_the_table_has_a_row_for_each_method_and_gates_for_profiles_only(record):
    lines = table(record).splitlines()
    assert len(lines) == 2 + len(record["methods"])
    for line, (method, row) in zip(lines[2:], record["methods"].items(), strict=True):
        assert line.startswith(f"| {method} | {row['bits']:.3f} | {row['nmse_keys']:.3g} | {row['nmse_values']:.3g} |")
        assert ("%" in line) == (method in RANK_BITS)


@pytest.mark.parametrize("block", [0, 41])
def test_a_block_must_fit_a_window(block):
    with pytest.raises(ValueError, match=f"1 to the 40 tokens of a window, got {block}"):
        measure(tiny_llama(), IDS, block=block)


def test_a_run_prints_the_table_and_appends_the_record(tmp_path, monkeypatch, capsys):
    class Loaded:
        model, title, weights_sha256 = tiny_llama(), "a model", "0" * 64

        def tokenizer(self, text, **_):
            return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    (tmp_path / "text.txt").write_text("all that is needed is letters " * 4)
    loaded = Loaded()
    monkeypatch.setattr(eval.profile_rate, "load_model", lambda name: loaded)
    monkeypatch.setattr(eval.profile_rate, "tokenize", lambda text, call: torch.tensor(call(text.text)["input_ids"]))
    results = tmp_path / "results" / "rate.jsonl"
    options = ["--text", str(tmp_path / "text.txt"), "--window", "32", "--windows", "2", "--block", "32"]
    for lines in (1, 2):
        assert eval.profile_rate.main([*options, "--results", str(results)]) == 0
        printed = capsys.readouterr().out
        assert len(results.read_text().splitlines()) == lines
        written = json.loads(results.read_text().splitlines()[-1])
        assert json.loads(printed.splitlines()[-1]) == written
        assert table(written) in printed
    assert (written["text"], written["windows"], written["environment"]["torch"]) == ("text.txt", 2, torch.__version__)
    assert str(tmp_path) not in results.read_text()


def test_a_text_that_is_too_short_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("short")
    monkeypatch.setattr(eval.profile_rate, "load_model", lambda name: type("Loaded", (), {"tokenizer": None}))
    monkeypatch.setattr(eval.profile_rate, "tokenize", lambda text, tokenizer: torch.arange(5))
    results = tmp_path / "rate.jsonl"
    assert eval.profile_rate.main(["--text", str(tmp_path / "text.txt"), "--results", str(results)]) == 1
    assert capsys.readouterr().err.startswith("eval.profile_rate: the text has 5 tokens")
    assert not results.exists()
