"""The speed measurements, on a few tokens: what they record, what they refuse, and their tables. Times themselves are not tested."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from real_models import WIKITEXT, smollm2_for_tests

import eval.table
from eval.speed import caches, kernels, layers, peak, prefill, records, resident, tables, timing
from eval.speed.__main__ import RESULTS, main
from eval.speed.caches import DENSE, DYNAMIC, FP8, INT8, STATIC
from hf_kvq.states import StoreView

ENVIRONMENT = {"cpu": "a CPU", "threads": 2, "device": "cpu", "torch": "2", "transformers": "5", "hf_kvq": "0"}
SPREAD = {"median": 2.0, "p20": 1.0, "p80": 3.0}


def run(capsys, path, kind, *options):
    """The record of a run, which is the last line on standard output and of the file."""
    assert main([kind, *options, "--results", str(path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(printed.splitlines()[-1])
    assert json.loads(path.read_text().splitlines()[-1]) == record
    assert (record["kind"], record["environment"]["torch"]) == (kind, torch.__version__)
    assert tables.full_table(record) in printed
    return record


def old_record():
    row = {"ms_per_token": 80.0, "p20": 75.0, "p80": 90.0, "ratio": 1.25, "max_logit_difference": 0.0}
    return {
        "model": "a model",
        "text": "a text",
        "context": 4096,
        "steps": 24,
        "environment": ENVIRONMENT,
        "caches": {"hf_kvq int8": row},
    }


def model_record():
    speeds = {f"speed_to_{name}": SPREAD for name in ("dynamic", "exact", "quantized")}
    row = {"ms_per_token": 50.0, "p20": 45.0, "p80": 55.0, "ratio": 0.5, **speeds}
    return {
        **old_record(),
        "kind": "model",
        "kernels": ["numba", "torch"],
        "quickest_exact": STATIC,
        "quickest_quantized": "stock fp8",
        "caches": {INT8: row},
        "skipped": {"stock hqq int4": "it is not installed"},
    }


def two_runs():
    """One record of two lengths of context."""
    record = model_record()
    shared = {name: record.pop(name) for name in ("kind", "model", "text", "environment")}
    return {**shared, "runs": [{**record, "context": 1024}, record]}


def test_a_record_of_several_contexts_has_a_table_for_each():
    shown = tables.full_table(two_runs())
    assert shown.count("| stock hqq int4 | skipped") == 2
    assert shown.index("1,024 tokens of context") < shown.index("4,096 tokens of context")
    assert shown.count("Machine:") == 1


def layers_record():
    ratios = {"dynamic_cost_to_int8": 4.0, "static_cost_to_int8": None, "int8_to_dynamic_short": SPREAD}
    figures = {"ms_short": SPREAD, "ms": SPREAD, "cost_ms": SPREAD}
    place = {"shape": "9x3x64", "dtype": "float32", "batch": 1}
    return {
        "kind": "layers",
        "layers": 4,
        "steps": 20,
        "short": 64,
        "environment": ENVIRONMENT,
        "combinations": [
            {
                **place,
                "context": 1024,
                "skipped": None,
                "caches": dict.fromkeys(layers.CACHES, figures),
                "ratios": ratios,
            },
            {**place, "context": 32768, "skipped": "would take 12.3 GiB of caches, --max-gib is 10"},
        ],
    }


def prefill_record():
    row = {"ms": {"median": 2000.0, "p20": 1000.0, "p80": 3000.0}, "time_to_dynamic": SPREAD, "peak_bytes": 2**30}
    own = {"model": "a model", "text": "a text", "tokens": 8192, "repeats": 3}
    return {"kind": "prefill", **own, "environment": ENVIRONMENT, "caches": {DYNAMIC: row}}


def peak_record():
    contexts = [{"context": 4096, "bytes": {"DynamicCache, sdpa": 4_000_000, "int8": 2340}}]
    own = {"shape": "9x3x64", "dtype": "float32", "tile_bytes": 4194304}
    return {"kind": "peak", **own, "environment": ENVIRONMENT, "contexts": contexts}


def write(path, *written):
    path.write_text("".join(json.dumps(record) + "\n" for record in written))


@pytest.mark.parametrize(("shape", "dtype", "batch"), [("4x2x32", "float32", "2"), ("2x1x40", "bfloat16", "1")])
def test_layers_record_costs_ratios_and_equality_of_every_cache(tmp_path, capsys, shape, dtype, batch):
    options = ("--shape", shape, "--dtype", dtype, "--batch", batch, "--context", "100", "--steps", "2")
    record = run(capsys, tmp_path / "speed.jsonl", "layers", *options, "--layers", "2")
    (row,) = record["combinations"]
    assert (row["shape"], row["dtype"], row["batch"], row["context"]) == (shape, dtype, int(batch), 100)
    assert set(row["caches"]) == {DYNAMIC, STATIC, INT8, FP8, DENSE}
    for figures in row["caches"].values():
        assert all(
            figures[name]["p20"] <= figures[name]["median"] <= figures[name]["p80"] for name in ("ms", "cost_ms")
        )
    equality = row["equality"]
    assert equality.pop("bound") == caches.BOUNDS[dtype]
    assert set(equality) == {STATIC, INT8, FP8, DENSE}
    assert all(0 <= found <= caches.BOUNDS[dtype] for found in equality.values())
    # Codes are not the states: the check against the exact cache sees that they were read.
    assert row["caches"][INT8]["difference"] > equality[INT8]
    assert row["ratios"]["int8_to_dynamic_short"]["median"] > 0


def test_layers_that_would_take_too_much_memory_are_skipped_and_named(tmp_path, capsys):
    options = ("--shape", "4x2x32", "--dtype", "float32", "--batch", "1", "--context", "70", "--max-gib", "0.0001")
    record = run(capsys, tmp_path / "speed.jsonl", "layers", *options)
    (row,) = record["combinations"]
    assert re.fullmatch(r"would take \S+ GiB of caches, --max-gib is 0.0001", row["skipped"])
    assert "caches" not in row


def test_unequal_results_end_the_run_and_nothing_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(caches.BOUNDS, "float32", 0.0)
    options = ("--shape", "2x1x16", "--dtype", "float32", "--batch", "1", "--context", "70", "--steps", "2")
    assert main(["layers", *options, "--results", str(tmp_path / "speed.jsonl")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "must be equal within 0 standard deviations" in err
    assert not (tmp_path / "speed.jsonl").exists()


@pytest.mark.parametrize("found", [0.2, float("nan"), float("inf")])
def test_a_difference_above_its_bound_or_no_number_is_unequal(found):
    with pytest.raises(caches.UnequalError, match=r"a against b: the results must be equal within 0\.1"):
        caches.require_equal("a against b", found, 0.1)


def test_a_wrong_shape_says_what_a_shape_is(tmp_path, capsys):
    assert main(["layers", "--shape", "9x3", "--results", str(tmp_path / "speed.jsonl")]) == 1
    assert "got '9x3'; try 9x3x64" in capsys.readouterr().err


def test_modes_are_equal_and_a_mode_that_reads_something_else_is_seen(monkeypatch):
    model = layers.random_llama("2x1x32", dtype=torch.float32, layers=2)
    cache = caches.CONTENDERS[INT8].build(model.config, 80)
    tokens = torch.tensor([5, 6, 7]).view(3, 1, 1)
    dense = StoreView.dense
    with torch.inference_mode():
        for layer in range(2):
            cache.update(torch.randn(1, 1, 70, 32), torch.randn(1, 1, 70, 32), layer)
        assert caches.mode_difference(model, tokens, cache) < 1e-4
        assert cache.get_seq_length() == 70
        monkeypatch.setattr(StoreView, "dense", lambda view: tuple(1.1 * states for states in dense(view)))
        assert caches.mode_difference(model, tokens, cache) > caches.BOUNDS["float32"]


def test_contenders_take_turns_in_an_order_that_rotates():
    seen, checked = [], []
    times = timing.in_turns(
        "abc",
        2,
        prepare=lambda key: seen.append(key.upper()),
        run=lambda key, number: seen.append(key) or (key, number),
        check=checked.append,
        warm_up=1,
    )
    assert "".join(seen) == "AaBbCc" + "BbCcAa" + "CcAaBb"
    assert [len(taken) for taken in times.values()] == [2, 2, 2]
    assert checked[2] == {"a": ("a", 2), "b": ("b", 2), "c": ("c", 2)}


def test_spreads_are_of_the_ratios_of_each_round():
    assert timing.spread([5.0, 1.0, 2.0, 3.0, 4.0, 0.0]) == {"median": 2.5, "p20": 1.0, "p80": 4.0}
    assert timing.ratio_spread([2.0, 9.0], [1.0, 3.0])["median"] == 2.5


def test_a_package_that_is_missing_is_named_and_the_others_are_built(monkeypatch):
    def missing(config, length):
        raise ImportError("it is\nnot installed")

    monkeypatch.setitem(caches.CONTENDERS, "stock hqq int4", caches.Contender(build=missing))
    config = layers.random_llama("2x1x16", dtype=torch.float32, layers=1).config
    found, skipped = caches.built([DYNAMIC, "stock hqq int4", STATIC], config, 8)
    assert list(found) == [DYNAMIC, STATIC]
    assert skipped == {"stock hqq int4": "it is not installed"}


def test_peaks_are_those_of_the_states_that_a_step_makes(tmp_path, capsys):
    record = run(capsys, tmp_path / "speed.jsonl", "peak", "--shape", "4x2x32", "--context", "100", "1500")
    short, long = ({**row["bytes"]} for row in record["contexts"])
    kernel = record["kernels"][0]
    states = 2 * 1500 * 32 * 4  # keys of all heads, or values
    assert states < long["DynamicCache, sdpa"] < 3 * states  # one of them is copied at a time, then read
    assert 2 * states < long["int8 dense, sdpa"] < 4 * states
    # Tiles are of 1,024 tokens here, whatever the context.
    assert long["int8 fused, torch tiles"] < 2 * 1024 * 32 * 4 * 1.5
    if kernel == "numba":
        assert long["int8 fused, numba as installed"] == short["int8 fused, numba as installed"] < 10_000


def test_kernels_are_timed_on_the_same_codes(tmp_path, capsys):
    record = run(
        capsys, tmp_path / "speed.jsonl", "kernels", "--shape", "4x2x32", "--context", "40", "300", "--steps", "3"
    )
    assert [(row["context"], row["codes"]) for row in record["rows"]] == [
        (context, codes) for context in (40, 300) for codes in kernels.MODES
    ]
    for row in record["rows"]:
        assert row["kernels"]["torch"]["torch_over_it"]["median"] == 1.0
        assert set(row["kernels"]) == set(record["kernels"])


def test_encoding_is_timed_one_token_at_a_time_and_all_at_once(tmp_path, capsys):
    path = tmp_path / "speed.jsonl"
    record = run(capsys, path, "encode", "--shape", "2x32", "--tokens", "64", "--steps", "3")
    one, many = record["rows"]
    assert (one["at_once"], many["at_once"]) == (1, 64)
    assert set(many["schemes"]) - set(one["schemes"]) == {"kivi4"}
    assert one["schemes"]["int8"]["to_int8"]["median"] == many["schemes"]["int8"]["to_int8"]["median"] == 1.0
    assert "| kivi4 |  |  |" in tables.compact_table(record)


def test_a_peak_counts_what_is_held_at_once_and_temporaries_inside_of_operations():
    def attend(module, query, keys, values):
        for _ in range(3):
            torch.zeros(10_000)
        return keys.sum(), torch.zeros(5_000)

    model = layers.random_llama("2x1x16", dtype=torch.float32, layers=1)
    model.set_attn_implementation("sdpa")
    cache = caches.CONTENDERS[DENSE].build(model.config, 0)
    held, _ = peak.peak_of_step(model, cache, 70, attend)
    assert 40_000 <= held < 80_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_memory_forgets_what_was_before():
    torch.zeros(30_000_000).sum()
    assert 30_000_000 < resident.peak_of(lambda: torch.zeros(10_000_000).sum()) < 60_000_000


def test_the_newest_record_of_each_kind_is_found_and_old_ones_are_of_the_model(tmp_path):
    path = tmp_path / "speed.jsonl"
    write(path, peak_record(), old_record(), layers_record(), {**peak_record(), "shape": "newer"})
    found = records.newest(path)
    assert list(found) == ["model", "layers", "peak"]
    assert found["peak"]["shape"] == "newer"
    assert found["model"] == {**old_record(), "kind": "model"}
    write(path, old_record(), model_record())
    assert records.newest(path) == {"model": model_record()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no results file speed.jsonl"),
        ("", "speed.jsonl has no record"),
        ("{", "speed.jsonl, line 1"),
        ('{"kind": "other"}\n', "line 1: a record's kind must be one of .*, got 'other'"),
        ("[]\n", "got None"),
    ],
)
def test_results_that_give_no_table_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "speed.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        records.newest(tmp_path / "speed.jsonl")


def test_committed_records_stay_readable():
    for kind, record in records.newest(RESULTS).items():
        named = {"kernels": "torch", "encode": "int8"}.get(kind, "DynamicCache")
        assert named in tables.compact_table(record)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (model_record(), f"| {INT8} | 50.0 (45.0 to 55.0) | 20.0 |" + " 2.00 (1.00 to 3.00) |" * 3),
        (model_record(), "| stock hqq int4 | skipped: it is not installed |  |  |  |  |"),
        (two_runs(), f"| {INT8} | 50.0 (45.0 to 55.0) | 20.0 |" + " 2.00 (1.00 to 3.00) |" * 3),
        ({**old_record(), "kind": "model"}, "| hf_kvq int8 | 80.0 (75.0 to 90.0) | 12.5 | 0.80 |"),
        (layers_record(), "| 9x3x64 | float32 | 1 | 4.00x, - | skipped | 2.00 (1.00 to 3.00) |"),
        (prefill_record(), "| DynamicCache | 2.00 (1.00 to 3.00) | 2.00 (1.00 to 3.00) | 1,024 |"),
        (peak_record(), "| 4,096 | 4,000,000 | 2,340 |"),
    ],
)
def test_a_compact_table_has_this_line_and_cells_for_every_column(record, line):
    shown = tables.compact_table(record)
    assert line in shown.splitlines()
    assert "a CPU, 2 threads" in shown
    rows = [row for row in shown.splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_the_full_table_of_layers_names_what_was_skipped_and_every_cost():
    shown = tables.full_table(layers_record())
    assert "| 9x3x64 | float32 | 1 | 32,768 | skipped: would take 12.3 GiB of caches, --max-gib is 10 |" in shown
    assert all(f"{name}, cost ms" in shown for name in layers.CACHES)


def test_the_readme_gets_the_newest_record_of_each_kind(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "speed.jsonl", old_record(), model_record(), layers_record(), peak_record())
    readme = tmp_path / "README.md"
    readme.write_text("before\n\n<!-- results:speed -->\nold\n<!-- /results -->\n\nafter\n")
    arguments = ["--readme", str(readme), "--results", str(tmp_path / "results")]
    assert eval.table.main([*arguments, "--check"]) == 1
    assert eval.table.main(arguments) == 0
    written = readme.read_text()
    for record in (model_record(), layers_record(), peak_record()):
        assert tables.compact_table(record) in written
    assert written.startswith("before\n\n<!-- results:speed -->\n\nDecode step of a model")
    assert written.endswith(".\n\n<!-- /results -->\n\nafter\n")
    assert eval.table.main([*arguments, "--check"]) == 0


@pytest.mark.slow
def test_a_real_model_is_timed_and_its_caches_are_equal_where_they_must_be(tmp_path, capsys):
    smollm2_for_tests()
    text = ("--text", str(WIKITEXT)) if WIKITEXT.is_file() else ()
    record = run(capsys, tmp_path / "speed.jsonl", "model", *text, "--context", "200", "140", "--steps", "2")
    assert [found["context"] for found in record["runs"]] == [200, 140]
    for found in record["runs"]:
        assert {DYNAMIC, STATIC, "stock fp8", INT8, FP8, DENSE} <= set(found["caches"])
        assert {"stock hqq int4", "stock quanto int4"} <= {*found["caches"], *found["skipped"]}
        assert found["quickest_exact"] in (DYNAMIC, STATIC)
        assert found["caches"][DYNAMIC]["speed_to_dynamic"]["median"] == 1.0
    assert "/" not in record["text"] + record["model"]


@pytest.mark.slow
def test_a_prefill_is_timed_and_its_peak_is_measured_apart(tmp_path, capsys):
    smollm2_for_tests()
    text = ("--text", str(WIKITEXT)) if WIKITEXT.is_file() else ()
    record = run(capsys, tmp_path / "speed.jsonl", "prefill", *text, "--tokens", "200", "--repeats", "2")
    assert list(record["caches"]) == list(prefill.CACHES)
    assert all(row["peak_bytes"] > 0 for row in record["caches"].values())
