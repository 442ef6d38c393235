"""Suites, their results and the README's tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from oracles_evaluation import prose, tiny_config, tiny_folder

import eval.run
import eval.table
from eval.suites import SUITES
from hf_kvq.evaluation import Receipt, evaluate_schemes, table

README = "before\n\n<!-- results:tiny -->\nold\n<!-- /results -->\n\nafter\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    tiny_folder(tmp_path / "model")
    (tmp_path / "prose.txt").write_text(prose())
    (tmp_path / "README.md").write_text(README)
    monkeypatch.setattr(eval.run, "SUITES", {"tiny": tiny_config()})
    return tmp_path


def run(place, *more):
    options = (
        "--model",
        str(place / "model"),
        "--text",
        str(place / "prose.txt"),
        "--results",
        str(place / "results"),
    )
    assert eval.run.main(["tiny", *options, *more]) == 0
    return (place / "results" / "tiny.jsonl").read_text()


def make_table(place, *more):
    return eval.table.main(["--readme", str(place / "README.md"), "--results", str(place / "results"), *more])


def test_the_suites_compare_eight_bit_schemes_with_the_exact_cache():
    assert {"demo", "wikitext8", "decode8"} <= set(SUITES)
    for name, suite in SUITES.items():
        assert suite.schemes == ("exact", "int8", "fp8", "seed_int8", "seed_fp8"), name
        # A suite's model and text are settled on the command line, never by a path in here.
        assert (suite.model, suite.text) == (None, None), name
    assert (SUITES["wikitext8"].window, SUITES["wikitext8"].count, SUITES["wikitext8"].protocol) == (
        1024,
        12,
        "windows",
    )
    assert SUITES["decode8"].protocol == "decode"


def test_a_run_appends_one_line_a_receipt_and_changes_no_old_one(place):
    first = run(place)
    assert [Receipt.from_json(line).name for line in first.splitlines()] == ["exact", "int8"]
    second = run(place)
    assert second.startswith(first)
    assert len(second.splitlines()) == 4


def test_results_name_text_and_model_without_their_folders(place):
    written = run(place)
    assert str(place) not in written
    receipt = Receipt.from_json(written.splitlines()[1])
    assert (receipt.text.path, receipt.model.name) == ("prose.txt", "model")


@pytest.mark.parametrize("name", [None, "someone/some-model"])
def test_a_hub_id_and_the_default_keep_their_name(place, name):
    receipt = Receipt.from_json(run(place).splitlines()[0])
    receipt = replace(receipt, model=replace(receipt.model, name=name), text=replace(receipt.text, path=None))
    assert eval.run.without_folders(receipt) == receipt


def test_the_readme_gets_the_table_of_the_newest_run(place):
    run(place)
    newest = [Receipt.from_json(line) for line in run(place).splitlines()[2:]]
    assert eval.table.newest_run(place / "results" / "tiny.jsonl") == newest
    assert make_table(place) == 0
    written = (place / "README.md").read_text()
    assert written.startswith("before\n\n<!-- results:tiny -->\n")
    assert written.endswith("<!-- /results -->\n\nafter\n")
    assert table(newest) in written
    assert "- Text: prose.txt, raw, 600 tokens" in written
    assert "old" not in written.splitlines()


def test_a_second_writing_changes_nothing(place):
    run(place)
    make_table(place)
    once = (place / "README.md").read_text()
    assert make_table(place) == 0
    assert (place / "README.md").read_text() == once


def test_check_fails_with_a_diff_while_stale_and_writes_nothing(place, capsys):
    run(place)
    assert make_table(place, "--check") == 1
    assert (place / "README.md").read_text() == README
    assert "-old" in (shown := capsys.readouterr().err)
    assert "run: python -m eval.table" in shown
    make_table(place)
    assert make_table(place, "--check") == 0


def test_an_incomplete_run_is_passed_over(place):
    complete = run(place)
    run(place)
    path = place / "results" / "tiny.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    found = eval.table.newest_run(path)
    assert [receipt.run for receipt in found] == [json.loads(complete.splitlines()[0])["run"]] * 2


@pytest.mark.parametrize(
    ("results", "message"),
    [(None, "no results file tiny.jsonl"), ("", "no complete run"), ("{}\n", "tiny.jsonl, line 1: .*'schema'")],
)
def test_results_that_give_no_table_are_named(place, capsys, results, message):
    (place / "results").mkdir()
    if results is not None:
        (place / "results" / "tiny.jsonl").write_text(results)
    assert make_table(place, "--check") == 2
    assert capsys.readouterr().err.startswith("eval.table: ")
    with pytest.raises(ValueError, match=message):
        eval.table.newest_run(place / "results" / "tiny.jsonl")


def test_a_readme_without_a_block_is_refused(place):
    (place / "README.md").write_text("nothing here\n")
    assert make_table(place) == 2


def test_committed_results_hold_no_folder_and_can_be_read():
    kept = [Path(eval.table.ROOT / "eval" / "results" / f"{suite}.jsonl") for suite in SUITES]
    assert any(path.is_file() for path in kept)
    for path in filter(Path.is_file, kept):
        for line in path.read_text(encoding="utf-8").splitlines():
            receipt = Receipt.from_json(line)
            assert "/" not in (receipt.text.path or "")
            assert not (receipt.model.name or "").startswith("/")


def test_the_demo_suite_ends_quickly_on_a_small_model(place):
    config = replace(SUITES["demo"], model=str(place / "model"), window=32, text=str(place / "prose.txt"))
    assert [receipt.name for receipt in evaluate_schemes(config)] == list(SUITES["demo"].schemes)
