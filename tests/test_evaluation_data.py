"""Texts: how they are read, joined, tokenized and cut."""

from __future__ import annotations

import hashlib
import platform
import socket

import datasets
import pytest
import torch
from oracles_evaluation import character_tokenizer

from hf_kvq.evaluation import load_text
from hf_kvq.evaluation.data import _hub_answers, join_rows, text_in_memory, tokenize, windows

ROWS = ["", " = Title = \n", "", " One row with\x0ban odd separator\u2028inside . \n", "", " Another . \n"]
FILE = " \n = Title = \n \n One row with\x0ban odd separator\u2028inside . \n \n Another . \n"


def test_a_raw_file_is_taken_byte_for_byte(tmp_path):
    content = "\ufeffa line\r\nanother \u00e9\n\n".encode()
    (tmp_path / "some.txt").write_bytes(content)
    text = load_text(str(tmp_path / "some.txt"))
    assert text.text.encode() == content
    assert text.sha256 == hashlib.sha256(content).hexdigest()
    assert (text.name, text.path, text.join) == ("some.txt", str(tmp_path / "some.txt"), "raw")


@pytest.mark.parametrize("end", ["", " \n"])
def test_a_file_read_as_rows_is_the_fields_perplexity_string(tmp_path, end):
    (tmp_path / "wiki.txt").write_bytes((FILE + end).encode())
    text = load_text(str(tmp_path / "wiki.txt"), join="rows")
    assert text.text == "\n\n".join(ROWS + [""] * bool(end))
    assert text.join == "rows"


def test_rows_keep_their_final_newline_and_blank_rows_become_empty():
    assert join_rows([" \n", " a \n", "", " b \n"]) == "\n\n a \n\n\n\n\n b \n"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read the text file .*gone.txt"), (b"", "gone.txt is empty"), (b" \n\n", "gone.txt is empty")],
)
def test_a_file_that_gives_no_text_is_refused_by_name(tmp_path, content, message):
    if content is not None:
        (tmp_path / "gone.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(str(tmp_path / "gone.txt"))


def test_a_folder_is_no_text_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read the text file"):
        load_text(str(tmp_path))


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 \(byte 3 is 0xe9\)"):
        load_text(str(tmp_path / "latin.txt"))


def test_wikitext_comes_through_datasets_joined_by_rows(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((*args, *kwargs.values()))
        return {"text": ROWS}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    text = load_text()
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    assert text.text == "\n\n".join(ROWS)
    assert (text.join, text.path) == ("rows", None)


@pytest.mark.parametrize("error", [ConnectionError, FileNotFoundError])
def test_without_the_data_set_pydocs_topics_stand_in_and_say_so(monkeypatch, error):
    def load_dataset(*args, **kwargs):
        raise error("nothing there")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    text = load_text()
    assert text.name == f"pydoc_data.topics (Python {platform.python_version()})"
    assert "in place of wikitext, since the hub cannot be reached" in text.source
    assert len(text.text) > 100_000
    assert text.text.index('The "assert" statement') < text.text.index('The "yield" statement')


def test_an_unreachable_hub_is_not_asked_for_the_data_set(monkeypatch, tmp_path):
    def load_dataset(*args, **kwargs):
        raise AssertionError("datasets retries for tens of seconds")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    assert load_text().name.startswith("pydoc_data.topics")


def test_a_hub_is_reachable_when_a_connection_opens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert _hub_answers(f"http://127.0.0.1:{port}")
    assert not _hub_answers(f"http://127.0.0.1:{port}")


def test_a_text_is_tokenized_without_special_tokens():
    tokenizer = character_tokenizer(adds_bos=True)
    assert tokenizer("ab")["input_ids"][0] == tokenizer.bos_token_id
    ids = tokenize(text_in_memory("abc", name="letters"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("first", "count", "rows"), [(0, None, [0, 1, 2]), (1, None, [1, 2]), (0, 2, [0, 1]), (2, 1, [2])]
)
def test_windows_do_not_overlap_and_the_tail_is_dropped(first, count, rows):
    cut = windows(torch.arange(37), 12, first, count)
    assert cut.tolist() == [list(range(12 * row, 12 * row + 12)) for row in rows]


def test_a_bos_token_stands_before_every_window_and_takes_no_place_in_it():
    cut = windows(torch.arange(10, 16), 3, bos_id=1)
    assert cut.tolist() == [[1, 10, 11, 12], [1, 13, 14, 15]]


@pytest.mark.parametrize(
    ("size", "first", "count", "message"),
    [
        (1, 0, None, "window must be at least 2 tokens .* got 1"),
        (12, 0, 4, "37 tokens, which make 3 windows of 12; asked for 4 from window 0 on"),
        (12, 2, 2, "asked for 2 from window 2 on"),
        (12, 3, None, "asked for window 3 and all after it"),
        (64, 0, None, "make 0 windows of 64"),
    ],
)
def test_too_few_tokens_are_refused_with_what_there_is(size, first, count, message):
    with pytest.raises(ValueError, match=message):
        windows(torch.arange(37), size, first, count)
