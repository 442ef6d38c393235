"""Tables and pictures of receipts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from oracles_evaluation import prose, tiny_config, tiny_loaded

from hf_kvq.evaluation import compare, evaluate_model, heading, plot, table
from hf_kvq.evaluation.data import text_in_memory


@pytest.fixture(scope="module")
def receipts():
    config = tiny_config(schemes=("exact", "int8", "seed_fp8"), noise_floor_tokens=16, timed_tokens=2)
    return evaluate_model(tiny_loaded(), text_in_memory(prose(), name="prose"), config)


def changed(receipt, **results):
    return replace(receipt, results=replace(receipt.results, **results))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_is_aligned_and_has_a_row_for_each_receipt(receipts):
    lines = table(receipts).splitlines()
    assert [cells(line)[0] for line in lines] == ["scheme", "--------", "exact", "int8", "seed_fp8"]
    assert len({len(line) for line in lines}) == 1
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines}) == 1


def test_a_row_says_what_the_receipt_says(receipts):
    receipt = changed(
        receipts[1],
        perplexity=26.1834,
        delta_percent=0.0414,
        delta_percent_se=0.0361,
        kl_mean=0.000684,
        kl_p99=0.00512,
        same_top1=0.98533,
        bits_per_element=8.25,
        nbytes=3 * 2**20,
        exact_nbytes=12 * 2**20,
        tokens_coded=30720,
        ms_per_token=61.26,
        ms_per_token_ratio=1.187,
    )
    lines = table([receipt]).splitlines()
    assert dict(zip(cells(lines[0])[:8], cells(lines[2])[:8], strict=True)) == {
        "scheme": "int8",
        "bits/element": "8.25",
        "perplexity": "26.183",
        "delta % ± se": "+0.041 ± 0.036",
        "KL mean e-3": "0.684",
        "KL 99 % e-3": "5.12",
        "same top-1 %": "98.53",
        "cache MiB": "3.00",
    }
    assert cells(lines[0])[8:] == ["of exact", "tokens coded", "ms/token", "of exact"]
    assert cells(lines[2])[8:] == ["0.25x", "30,720", "61.3", "1.19x"]


def test_what_was_not_measured_is_a_dash_and_one_window_has_no_error(receipts):
    receipt = changed(
        receipts[1], delta_percent=-0.05, delta_percent_se=None, ms_per_token=None, ms_per_token_ratio=None
    )
    row = cells(table([receipt]).splitlines()[2])
    assert row[3] == "-0.050"
    assert row[-2:] == ["-", "-"]


def test_the_heading_names_model_text_protocol_noise_floor_and_machine(receipts):
    lines = heading(receipts).splitlines()
    assert lines[0] == "Model: tiny, float32 (a model held in memory)."
    assert lines[1] == "Text: prose, raw, 600 tokens (a text held in memory)."
    assert lines[2].startswith("Protocol windows: 3 windows of 32 tokens, one teacher-forced pass each")
    assert lines[3].startswith("Noise floor, exact in one pass against token by token on 16 tokens: KL ")
    assert receipts[0].environment.cpu in lines[4]


@pytest.mark.parametrize(
    ("chunk", "words"), [(1, "fed 1 token at a time, prefill exact"), (4, "fed 4 tokens at a time")]
)
def test_the_heading_states_the_chunk(chunk, words):
    config = tiny_config(protocol="decode", chunk=chunk, count=1)
    receipts = evaluate_model(tiny_loaded(), text_in_memory(prose(), name="prose"), config)
    assert f"Protocol decode: 1 window of 32 tokens, {words}" in heading(receipts)
    assert "Noise floor" not in heading(receipts)


def test_receipts_of_two_runs_do_not_share_a_table(receipts):
    with pytest.raises(ValueError, match="come from 2 runs"):
        table([receipts[0], replace(receipts[1], run="another")])
    with pytest.raises(ValueError, match="no receipt"):
        table([])


def test_a_rerun_stands_beside_its_receipt(receipts):
    lines = compare(receipts[1], changed(receipts[1], perplexity=12.3456789, ms_per_token=None)).splitlines()
    figures = {cells(line)[0]: cells(line)[1:] for line in lines}
    assert figures["perplexity"] == [f"{receipts[1].results.perplexity:.6g}", "12.3457"]
    assert figures["ms_per_token"][1] == "-"


@pytest.mark.parametrize("wide", [False, True])
def test_a_plot_shows_every_coded_scheme_by_name(receipts, tmp_path, monkeypatch, wide):
    from matplotlib.axes import Axes

    named, bars, scales = [], [], []
    annotate, errorbar, scale = Axes.annotate, Axes.errorbar, Axes.set_yscale
    monkeypatch.setattr(
        Axes,
        "annotate",
        lambda self, name, *a, **k: named.append((name, k["xytext"])) or annotate(self, name, *a, **k),
    )
    monkeypatch.setattr(
        Axes, "errorbar", lambda self, *a, **k: bars.append((*a, k["yerr"])) or errorbar(self, *a, **k)
    )
    monkeypatch.setattr(Axes, "set_yscale", lambda self, *a, **k: scales.append(a) or scale(self, *a, **k))
    shown = [
        receipts[0],
        changed(receipts[1], bits_per_element=8.25, delta_percent=0.5, delta_percent_se=0.1),
        changed(receipts[2], bits_per_element=8.26, delta_percent=68.5 if wide else 0.501, delta_percent_se=None),
    ]
    plot(shown, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert bars == [(8.25, 0.5, 0.1), (8.26, 68.5 if wide else 0.501, None)]
    assert [name for name, _ in named] == ["int8", "seed_fp8"]
    # Two points at one place: the second name moves up by more than a line of text.
    assert named[0][1][1] == pytest.approx(0)
    assert named[1][1][1] == pytest.approx(0) if wide else named[1][1][1] > 9
    assert scales == ([("symlog",)] if wide else [])


def test_a_plot_of_the_exact_cache_alone_is_refused(receipts, tmp_path):
    with pytest.raises(ValueError, match="at least one quantized cache"):
        plot(receipts[:1], tmp_path / "plot.png")


def test_the_evaluation_imports_without_its_extras():
    blocked = ("evaluate", "datasets", "matplotlib", "gguf", "rich")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\nimport hf_kvq.evaluation"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
