"""The benchmark of low-bit caches, on tiny models: figures, bytes of stock caches, residuals, the constant in the keys, joined tables and the picture."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from oracles import tiny_llama
from oracles_evaluation import prose, tiny_loaded
from transformers import Qwen3Config, Qwen3ForCausalLM

import eval.table
from eval.bits import __main__ as command
from eval.bits import plot as picture
from eval.bits import scoring
from eval.bits.bias import BIAS, NONE, PLACEMENTS, biased, channels
from eval.bits.records import joined
from eval.bits.schemes import INT4, STOCK, candidates
from eval.bits.scoring import BEGIN, forwards, score
from eval.bits.tables import bits_tables
from hf_kvq import PRESETS, QuantConfig
from hf_kvq.evaluation.divergence import Divergence
from hf_kvq.evaluation.protocols import Measured, measure
from hf_kvq.evaluation.summary import summarize

ENVIRONMENT = {"cpu": "a CPU", "threads": 2, "device": "cpu", "torch": "2", "transformers": "5", "hf_kvq": "0"}
FOUR, TWO = "stock quanto int4", "stock quanto int2"


def ids(windows, tokens):
    return torch.randint(0, 97, (windows, tokens), generator=torch.Generator().manual_seed(0))


def silent(what):
    pass


def scored(names, *, windows=2, tokens=40, sizes=None, residual=0, model=None):
    model = model or tiny_llama()
    chosen = candidates(names, residual=residual)
    return score(model, ids(windows, tokens), chosen, sizes=sizes or [tokens], step=silent)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command on a tiny model and a random text; returns its exit code."""
    monkeypatch.setattr(command, "load", lambda name: tiny_loaded())
    (tmp_path / "text.txt").write_text(prose(2000))

    def with_options(kind, *options):
        place = ("--text", str(tmp_path / "text.txt"), "--results", str(tmp_path / "bits.jsonl"))
        return command.main([kind, *place, "--threads", "1", "--first", "1", *options])

    return with_options


def records(place):
    return [json.loads(line) for line in (place / "bits.jsonl").read_text().splitlines()]


def row(scheme, *, bits=8.25, delta=0.5, mode="pass", kind="affine", residual=0, **more):
    return {
        "scheme": scheme,
        "config": {"name": scheme, "keys": {"kind": kind}, "residual": residual},
        "mode": mode,
        "bits_per_element": bits,
        "delta_percent": delta,
        "delta_percent_se": 0.1,
        "kl_mean": 0.002,
        "kl_mean_se": 0.0004,
        "same_top1": 0.975,
        "exact_perplexity": 26.2,
        **more,
    }


def stock_row(scheme, **more):
    return row(scheme, **more) | {"config": {"name": scheme, "backend": "quanto", "residual_length": 128}}


def record(kind, *rows, **more):
    return {
        "kind": kind,
        "model": "tiny",
        "attention": "fused",
        "weights_sha256": "0",
        "text": "a text",
        "text_sha256": "0",
        "window": 1024,
        "first": 12,
        "windows": 12,
        "bos": False,
        "begin": 4,
        "chunk": 1,
        "single_from": None,
        "environment": ENVIRONMENT,
        "kernels": ["numba", "torch"],
        "failed": {},
        "rows": list(rows),
        **more,
    }


def write(place, *written):
    (place / "bits.jsonl").write_text("".join(json.dumps(each) + "\n" for each in written))
    return place / "bits.jsonl"


@pytest.mark.parametrize(
    ("tokens", "options", "sizes"),
    [
        (7, {}, [4, 1, 1, 1]),
        (3, {}, [3]),
        (12, {"chunk": 3}, [4, 3, 3, 2]),
        (12, {"chunk": 3, "single_from": 8}, [4, 3, 1, 1, 1, 1, 1]),
        (12, {"chunk": 3, "single_from": 0}, [4, *[1] * 8]),
    ],
)
def test_a_window_begins_with_four_tokens_and_goes_on_in_chunks_and_then_alone(tokens, options, sizes):
    assert forwards(tokens, **options) == sizes


@pytest.mark.parametrize("options", [{"chunk": 0}, {"single_from": 13}, {"single_from": -1}])
def test_forwards_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="chunk must be at least 1, and from between 0 and the window of 12"):
        forwards(12, **options)


@pytest.mark.parametrize("chunk", [None, 1])
def test_figures_are_those_of_the_evaluation(chunk):
    model, chosen = tiny_llama(), candidates(["int8", "kivi2"], residual=0)
    sizes = [40] if chunk is None else [1] * 40
    found = scored(["int8", "kivi2"], windows=2, tokens=40, sizes=sizes, model=model)
    expected = measure(model, ids(2, 40), chosen, chunk=chunk, step=silent)
    for figures in found.rows:
        measured = expected[figures["scheme"]]
        results = summarize(measured, exact_nbytes=1, floor=None, speed=None)
        for name in ("delta_percent", "delta_percent_se", "kl_mean", "same_top1", "bits_per_element", "tokens_coded"):
            assert figures[name] == pytest.approx(getattr(results, name), rel=1e-9), name
        kl = [each.kl.mean().item() for each in measured.divergences]
        assert figures["kl_by_window"] == pytest.approx(kl)
        assert figures["kl_mean_se"] == pytest.approx(torch.tensor(kl).std().item() / math.sqrt(2), rel=1e-5)
    assert all(figures["kl_mean"] > 0 for figures in found.rows)
    assert found.failed == {}


def test_a_cache_that_fails_is_named_and_the_others_go_on():
    # hqq packs the rows of four tokens together; a first forward of one token has two.
    found = scored(["int8", "stock-hqq2"], sizes=[1] * 40, model=tiny_llama(head_dim=64))
    assert [figures["scheme"] for figures in found.rows] == ["int8"]
    assert "size of tensor" in found.failed["stock hqq int2"]


def test_what_is_not_finite_is_no_number_in_a_record():
    nan = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    divergence = Divergence(exact_nll=nan.nan_to_num(), coded_nll=nan, kl=nan, same_top1=torch.tensor([True, False]))
    memory = measure(tiny_llama(), ids(1, 8), candidates(["int8"], residual=0), chunk=None, step=silent)["int8"].memory
    figures = scoring._figures(Measured(divergences=(divergence, divergence), memory=memory), 1)
    assert (figures["delta_percent"], figures["kl_mean"], figures["nll_by_window"]) == (None, None, [None, None])
    assert figures["same_top1"] == 0.5
    json.dumps(figures, allow_nan=False)


@pytest.mark.parametrize("name", sorted(STOCK))
@pytest.mark.parametrize("tokens", [60, 150])
def test_bytes_of_a_stock_cache_are_those_of_its_layout(name, tokens):
    layers, kv_heads, head_dim = 2, 2, 64
    (figures,) = scored([name], windows=1, tokens=tokens, sizes=forwards(tokens), model=tiny_llama(head_dim=64)).rows
    # The first forward's tokens are codes at once, then 128 more whenever they are there.
    coded = tokens if name == "stock-fp8" else BEGIN if tokens < BEGIN + 128 else BEGIN + 128
    elements = 2 * layers * kv_heads * head_dim
    if name == "stock-fp8":
        expected = elements * coded + 2 * layers * 4
    else:
        bits = int(name[-1]) + 2 * 32 / 64  # a scale and a zero point in float32 for 64 numbers
        expected = elements * coded * bits / 8 + elements * (tokens - coded) * 4
    assert figures["nbytes_used"] == figures["nbytes"] == expected
    assert figures["bits_per_element"] == pytest.approx(8 * expected / (elements * tokens))
    assert figures["tokens_coded"] == layers * coded
    assert figures["kl_mean"] > 0


def test_all_stock_caches_can_be_asked_for_at_once():
    assert [each.name for each in candidates(["stock"], residual=None)] == [each.name for each in STOCK.values()]


@pytest.mark.parametrize(("residual", "expected"), [(None, 64), (0, 0), (128, 128)])
def test_a_residual_replaces_that_of_every_preset(monkeypatch, residual, expected):
    codec = PRESETS["int8"].keys
    of_64 = QuantConfig(keys=codec, values=codec, sinks=4, residual=64, name="of_64")
    monkeypatch.setattr("hf_kvq.config.PRESETS", {**PRESETS, "of_64": of_64})
    (found,) = candidates(["of_64"], residual=residual)
    assert (found.config.residual, found.config.sinks, found.prefill) == (expected, 4, "coded")


@pytest.mark.parametrize(
    ("names", "message"),
    [(["q7"], "unknown scheme 'q7'"), (["int8", "fp8", "int8"], "schemes must differ, got int8 more than once")],
)
def test_schemes_that_are_unknown_or_named_twice_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        candidates(names, residual=0)


def test_plain_int4_can_be_asked_for():
    (found,) = candidates(["int4"], residual=0)
    assert found.config == INT4


def test_one_pass_is_recorded_with_what_repeats_it(run, tmp_path, capsys):
    assert run("windows", "--schemes", "int8", "kivi4", "--windows", "3", "--window", "70") == 0
    (found,) = records(tmp_path)
    assert (found["kind"], found["model"], found["text"], found["attention"]) == (
        "windows",
        "tiny",
        "text.txt",
        "fused",
    )
    assert (found["first"], found["windows"], found["window"], found["begin"]) == (1, 3, 70, 70)
    assert len(found["weights_sha256"]) == len(found["text_sha256"]) == 64
    assert found["environment"]["torch"] == torch.__version__
    int8, kivi4 = found["rows"]
    assert int8["config"] == PRESETS["int8"].to_dict()
    assert int8["tokens_coded"] == 2 * 70
    assert len(int8["kl_by_window"]) == 3
    assert kivi4["delta_percent_se"] > 0
    assert "| int8 | 9.00 |" in capsys.readouterr().out  # 16 channels share 16 bits of scale


def test_one_pass_leaves_no_residual_exact(run, tmp_path, monkeypatch):
    codec = PRESETS["int8"].keys
    with_residual = QuantConfig(keys=codec, values=codec, residual=64, name="with_residual")
    monkeypatch.setattr("hf_kvq.config.PRESETS", {**PRESETS, "with_residual": with_residual})
    assert run("windows", "--schemes", "with_residual", "--windows", "1", "--window", "70") == 0
    assert records(tmp_path)[0]["rows"][0]["tokens_coded"] == 2 * 70


def test_codes_that_need_several_tokens_get_a_note_in_one_pass(run, capsys):
    run("windows", "--schemes", "kivi4", "--windows", "1", "--window", "70")
    assert "One pass is not token by token" in capsys.readouterr().out
    run("windows", "--schemes", "int8", "--windows", "1", "--window", "70")
    assert "One pass is not token by token" not in capsys.readouterr().out


def test_both_attentions_read_the_same_codes(run, tmp_path):
    for attention in ("dense", "fused"):
        run("windows", "--schemes", "int8", "--windows", "1", "--window", "70", "--attention", attention)
    dense, fused = records(tmp_path)
    assert dense["rows"][0]["kl_mean"] == pytest.approx(fused["rows"][0]["kl_mean"], rel=0.2)
    assert dense["rows"][0]["kl_mean"] != fused["rows"][0]["kl_mean"]
    assert len(joined(tmp_path / "bits.jsonl")) == 2


def test_bos_comes_before_every_window(run, tmp_path):
    run("windows", "--schemes", "int8", "--windows", "2", "--window", "70", "--bos")
    (found,) = records(tmp_path)
    assert (found["bos"], found["rows"][0]["tokens_coded"]) == (True, 2 * 71)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["windows", "--schemes", "int8", "stock"], "one pass reads no codes of stock quanto int4"),
        (["windows", "--schemes", "q7"], "unknown scheme 'q7'"),
        (["decode", "--schemes", "int8", "--window", "70", "--windows", "1", "--chunk", "0"], "chunk must be"),
        (["windows", "--schemes", "int8", "--window", "1500", "--windows", "1"], "asked for 1 from window 1 on"),
    ],
)
def test_what_cannot_be_measured_ends_the_run_and_nothing_is_recorded(run, tmp_path, capsys, options, message):
    assert run(*options) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "bits.jsonl").exists()


def test_defaults_leave_out_presets_that_there_are_not(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "DEFAULTS", {"windows": ("int8", "q7")})
    assert run("windows", "--windows", "1", "--window", "70") == 0
    assert "no such preset: q7" in capsys.readouterr().err
    assert [each["scheme"] for each in records(tmp_path)[0]["rows"]] == ["int8"]


def test_decoding_is_recorded_with_own_and_with_equal_residuals_and_joined(run, tmp_path):
    options = ("--windows", "1", "--window", "140")
    assert run("decode", *options, "--schemes", "int8", "stock-quanto4") == 0
    assert run("decode", *options, "--schemes", "int8", "--residual", "128") == 0
    own, equal = records(tmp_path)
    assert [(each["scheme"], each["mode"]) for each in own["rows"]] == [("int8", "own"), (FOUR, "stock")]
    assert (own["begin"], own["chunk"], own["single_from"]) == (BEGIN, 1, None)
    assert own["rows"][0]["tokens_coded"] == 2 * 140
    assert equal["rows"][0]["config"]["residual"] == 128
    assert equal["rows"][0]["tokens_coded"] == 2 * 12
    (group,) = joined(tmp_path / "bits.jsonl")
    assert [(each["scheme"], each["mode"]) for each in group.rows] == [
        ("int8", "own"),
        (FOUR, "stock"),
        ("int8", "128"),
    ]
    lines = [line for line in bits_tables(tmp_path / "bits.jsonl").splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| int8", "0"],
        ["| int8", "128"],
        [f"| {FOUR}", "0 to 127"],
    ]


@pytest.mark.parametrize(("residual", "stock"), [("own", True), ("128", False)])
def test_stock_caches_are_measured_by_default_beside_own_residuals_alone(run, tmp_path, monkeypatch, residual, stock):
    monkeypatch.setattr(command, "DEFAULTS", {"decode": ("int8", "stock")})
    options = ("--windows", "1", "--window", "140", "--chunk", "34")
    assert run("decode", *options, "--residual", residual) == 0
    (found,) = records(tmp_path)
    assert (FOUR in [each["scheme"] for each in found["rows"]]) == stock
    assert found["chunk"] == 34


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_biased_copy_changes_two_channels_of_every_head_and_leaves_the_original(placement, bias):
    model = tiny_llama(layers=3, attention_bias=bias)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = biased(model, placement)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    states = torch.randn(5, 64)
    first, second = channels(placement, 16)
    for old, new in zip(model.model.layers, copied.model.layers, strict=True):
        added = (new.self_attn.k_proj(states) - old.self_attn.k_proj(states)).detach().unflatten(1, (2, 16))
        assert torch.equal(added.round(decimals=3).unique(dim=0), added[:1].round(decimals=3))
        expected = torch.zeros(16)
        expected[[first, second]] = torch.tensor(BIAS)
        torch.testing.assert_close(added, expected.expand(5, 2, 16), atol=1e-4, rtol=0)
    changed = [
        name
        for name, tensor in copied.state_dict().items()
        if name not in before or not torch.equal(tensor, before[name])
    ]
    assert changed == [f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(3)]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_placements_are_two_pairs_from_slow_to_quick(head_dim):
    half = head_dim // 2
    pairs = {name: tuple(channel % half for channel in channels(name, head_dim)) for name in PLACEMENTS}
    assert pairs["low"] == (half - 2, half - 1)
    assert pairs["high"] == (0, 1)
    assert abs(sum(pairs["mid"]) / 2 - half / 2) <= 1
    assert all(channels(name, head_dim)[0] < half <= channels(name, head_dim)[1] for name in PLACEMENTS)


def test_no_placement_is_the_model_itself():
    model = tiny_llama()
    assert biased(model, NONE) is model


def test_a_model_that_normalizes_keys_is_refused():
    config = Qwen3Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=97,
    )  # fmt: skip
    with pytest.raises(ValueError, match="normalizes its keys"):
        biased(Qwen3ForCausalLM(config), "low")


def test_the_constant_is_measured_at_every_placement_against_the_biased_model(run, tmp_path, capsys):
    assert run("bias", "--schemes", "int8", "int4", "--windows", "1", "--window", "70") == 0
    (found,) = records(tmp_path)
    assert [(each["placement"], each["scheme"]) for each in found["rows"]] == [
        (placement, scheme) for placement in (NONE, *PLACEMENTS) for scheme in ("int8", "int4")
    ]
    kl = {(each["placement"], each["scheme"]): each["kl_mean"] for each in found["rows"]}
    assert kl["low", "int4"] > 2 * kl[NONE, "int4"]
    exact = {each["placement"]: each["exact_perplexity"] for each in found["rows"]}
    assert len(set(exact.values())) == 4
    shown = capsys.readouterr().out
    assert f"| cache | no constant (exact {exact[NONE]:.2f}) | low frequency (exact {exact['low']:.2f}) |" in shown


def test_the_newest_row_of_a_scheme_wins_among_equal_settings(tmp_path):
    old = record("windows", row("int8", delta=1.0), row("fp8", delta=2.0))
    path = write(tmp_path, record("windows", row("q4"), windows=2), old, record("windows", row("int8", delta=3.0)))
    (group,) = joined(path)
    assert [(each["scheme"], each["delta_percent"]) for each in group.rows] == [("int8", 3.0), ("fp8", 2.0)]
    assert group.runs == 2


@pytest.mark.parametrize("change", [{"model": "other"}, {"attention": "dense"}, {"kind": "bias"}])
def test_kinds_models_and_attentions_are_groups_of_their_own(tmp_path, change):
    path = write(tmp_path, record("windows", row("int8")), record("windows", row("fp8")) | change)
    assert [[each["scheme"] for each in group.rows] for group in joined(path)] == [["int8"], ["fp8"]]


@pytest.mark.parametrize(
    "change", ["weights_sha256", "text_sha256", "window", "first", "windows", "bos", "begin", "chunk", "single_from"]
)
def test_rows_of_other_settings_are_not_joined(tmp_path, change):
    path = write(tmp_path, record("windows", row("int8"), **{change: "other"}), record("windows", row("fp8")))
    (group,) = joined(path)
    assert [each["scheme"] for each in group.rows] == ["fp8"]


def test_what_failed_once_and_was_measured_later_is_no_failure(tmp_path):
    failed = record("decode", row("int8", mode="own"), failed={FOUR: "not installed", TWO: "not installed"})
    path = write(tmp_path, failed, record("decode", stock_row(FOUR, mode="stock")))
    (group,) = joined(path)
    assert group.failed == {TWO: "not installed"}
    assert f"- {TWO}: not measured, not installed." in bits_tables(path)


@pytest.mark.parametrize("line", ["{", '{"kind": "speed"}', "3"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "bits.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"bits\.jsonl, line 1: "):
        joined(tmp_path / "bits.jsonl")


def test_a_table_shows_every_cache_by_bits(tmp_path):
    rows = [row("q2", bits=2.5, delta=123.456, kind="rotated"), row("int8"), row("bad", delta=None, bits=3.0)]
    lines = bits_tables(write(tmp_path, record("windows", *rows))).splitlines()
    assert lines[0].startswith(
        "One pass over each window, every token read as codes: tiny on a text, windows 12 to 23 of 1,024"
    )
    assert lines[2:7] == [
        "| cache | bits/element | delta % ± se | KL mean e-3 ± se | same top-1 % |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| int8 | 8.25 | +0.500 ± 0.100 | 2.000 ± 0.400 | 97.50 |",
        "| bad | 3.00 | not finite | 2.000 ± 0.400 | 97.50 |",
        "| q2 | 2.50 | +123.5 ± 0.1 | 2.000 ± 0.400 | 97.50 |",
    ]
    assert lines[-1].startswith("- Machine: a CPU, 2 threads, cpu; torch 2")


def test_the_picture_is_shown_once_there_is_one(tmp_path):
    path = write(tmp_path, record("windows", row("int8")))
    assert "![" not in bits_tables(path)
    (tmp_path / "bits.png").write_bytes(b"")
    assert bits_tables(path).endswith("](eval/results/bits.png)\n")


@pytest.mark.parametrize("results", [None, "", "a record"])
def test_the_readme_has_its_block_with_and_without_records(tmp_path, results):
    if results is not None:
        write(tmp_path, *([record("windows", row("int8"))] if results else []))
    readme = tmp_path / "README.md"
    readme.write_text("before\n\n<!-- results:bits -->\nold\n<!-- /results -->\n\nafter\n")
    place = ["--readme", str(readme), "--results", str(tmp_path)]
    assert eval.table.main([*place, "--check"]) == 1
    assert eval.table.main(place) == 0
    assert eval.table.main([*place, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n\n<!-- results:bits -->\n\n")
    assert text.endswith("\n<!-- /results -->\n\nafter\n")
    assert ("| int8 | 8.25 |" in text, "Nothing is recorded yet" in text) == (bool(results), not results)


def test_the_picture_has_a_panel_for_each_protocol_and_model_and_every_finite_name_once(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    titles, names, annotate = [], [], Axes.annotate
    monkeypatch.setattr(Axes, "set_title", lambda axes, text, **_: titles.append(text.split("\n")[0]))

    def noted(axes, text, *arguments, **options):
        if "xytext" in options:
            names.append(text)
        return annotate(axes, text, *arguments, **options)

    monkeypatch.setattr(Axes, "annotate", noted)
    decode = [row("q4", mode="own"), row("q4", mode="128"), stock_row(FOUR, mode="stock")]
    write(
        tmp_path,
        record("windows", row("int8"), row("q4", bits=4.5, kind="rotated"), row("bad", delta=None)),
        record("windows", row("int8"), model="other"),
        record("decode", *decode),
        record("bias", row("int4", placement="low")),
    )
    out = tmp_path / "drawn.png"
    assert command.main(["plot", "--results", str(tmp_path / "bits.jsonl"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert titles == [
        "tiny, one pass, every token read as codes",
        "other, one pass, every token read as codes",
        "tiny, token by token",
    ]
    assert sorted(names) == ["int8", "int8", "q4", "q4", "q4 +128", "quanto int4"]


def test_a_picture_of_nothing_is_refused(tmp_path, capsys):
    write(tmp_path, record("windows", row("bad", delta=None)), record("bias", row("int4", placement="low")))
    assert command.main(["plot", "--results", str(tmp_path / "bits.jsonl"), "--out", str(tmp_path / "a.png")]) == 1
    assert "no record of windows or decode" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("seed", range(5))
def test_labels_cover_neither_each_other_nor_a_mark_and_stay_inside(seed):
    draw, bounds = random.Random(seed), (0.0, 0.0, 350.0, 270.0)
    # Marks come in heaps, as caches of about equal bits and losses do.
    heaps = [(draw.uniform(60, 290), draw.uniform(40, 230)) for _ in range(6)]
    anchors = [(x + draw.gauss(0, 12), y + draw.gauss(0, 8)) for x, y in heaps for _ in range(4)]
    sizes = [(draw.uniform(12, 50), 9.0) for _ in anchors]
    boxes = picture.place(anchors, sizes, bounds)
    for number, (left, bottom, right, top) in enumerate(boxes):
        assert (right - left, top - bottom) == pytest.approx(sizes[number])
        assert left >= 0
        assert right <= bounds[2]
        assert bottom >= 0
        assert top <= bounds[3]
        others = boxes[:number]
        assert all(left >= r or right <= l or bottom >= t or top <= b for l, b, r, t in others)  # noqa: E741
        assert not any(left < x < right and bottom < y < top for x, y in anchors)
