"""The benchmarks of bounded caches, on tiny models: equal bytes, every token scored once, retrieval by an oracle. Times themselves are not tested."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from oracles import tiny_llama
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.bounded import __main__ as command
from eval.bounded import retrieve, speed, stream
from eval.bounded.policies import BLOCK, FULL, KINDS, SINKS, Policy, policies
from eval.bounded.quality import nll_of
from hf_kvq import QuantizedSlidingWindowCache, expected_nbytes

EVERYTHING = Policy(kind=FULL, budget=0)
CLUSTER = (64 + 2) + (64 + 2) + 4 + 8 + 4 + 4
"""Bytes of a cluster of 64 channels."""


class Letters(PreTrainedTokenizerBase):
    """A token for each printable ASCII character."""

    def __init__(self):
        pass

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) - 30 for letter in text]}

    def decode(self, ids):
        return "".join(chr(token + 30) for token in ids)


class Parrot(PreTrainedModel):
    """Goes on as it did after the last 8 tokens, where it saw them before; otherwise it says a space.

    It sees a token up to `memory` tokens ahead of the one that it predicts, and keeps what it saw with the cache.
    """

    _supports_sdpa = True

    def __init__(self, memory):
        super().__init__(tiny_llama(layers=1).config)
        self.memory = memory
        self.attentions = []

    def set_attn_implementation(self, name):
        self.attentions.append(name)

    def forward(self, input_ids, use_cache=True, past_key_values=None):
        seen = past_key_values.__dict__.setdefault("seen", [])
        logits = torch.zeros(1, input_ids.shape[1], 97)
        for place, token in enumerate(input_ids[0].tolist()):
            seen.append(token)
            logits[0, place, self.next_token(seen)] = 30.0
        return SimpleNamespace(logits=logits)

    def next_token(self, seen):
        for at in range(len(seen) - 1, max(len(seen) - self.memory, 8) - 1, -1):
            if seen[at - 8 : at] == seen[-8:]:
                return seen[at]
        return 2


def letters(tokens, seed=0):
    """Random small letters."""
    return torch.randint(67, 93, (tokens,), generator=torch.Generator().manual_seed(seed))


def found_by(model, distances, *, policy=EVERYTHING, trials=2):
    rows = retrieve.retrieve(
        model, Letters(), letters(2000), [policy], distances=distances, trials=trials, seed=3, chunk=50
    )
    return {row["distance"]: row for row in rows}


def fed(policy, model, tokens):
    """A cache of the policy after `tokens` tokens in chunks."""
    cache = policy.make(model.config)
    model.set_attn_implementation("hf_kvq")
    nll_of(model, letters(tokens + 1), cache, chunk=64)
    return cache


@pytest.mark.parametrize("budget", [128, 256, 512, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_spends_its_budget_but_for_less_than_one_token_or_cluster(budget, kind):
    policy = policies(budget, 64)[kind]
    mass = 4 if policy.kept else 0
    waiting = 0 if kind == "sinks + window" else BLOCK - 1
    spent = (policy.window + waiting) * (132 + mass) + policy.kept * (132 + 4 + 4) + policy.clusters * CLUSTER
    spent += 2 * 64 * 4 if policy.clusters else 0
    assert 0 <= (budget - SINKS) * 132 - spent < max(CLUSTER, 140)


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_one_budget_hold_equal_bytes_where_most_tokens_wait_for_their_block(kind):
    budget, kv_heads, head_dim = 128, 2, 64
    model = tiny_llama(layers=1, kv_heads=kv_heads, head_dim=head_dim)
    policy = policies(budget, head_dim)[kind]
    # A window of W + 31 tokens, the next of which lets a block leave.
    tokens = SINKS + policy.window + 8 * BLOCK - 1
    sinks = SINKS * 2 * head_dim * 4 * kv_heads
    # A bank's count of queries belongs to no head.
    held = fed(policy, model, tokens).nbytes_used - sinks - (8 if policy.clusters else 0)
    whole = (budget - SINKS) * 132 * kv_heads
    assert 0 <= whole - held < kv_heads * max(CLUSTER, 140)


def test_nll_in_chunks_is_the_cross_entropy_of_one_forward():
    model, ids = tiny_llama(), letters(130)
    cache = QuantizedSlidingWindowCache(model.config, "identity", window=200)
    model.set_attn_implementation("hf_kvq")
    found = nll_of(model, ids, cache, chunk=37)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        expected = cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.shape == (129,)


@pytest.mark.parametrize("kind", [FULL, *KINDS])
@pytest.mark.parametrize("tokens", [320, 300])
def test_a_stream_predicts_every_token_but_the_first_once(kind, tokens):
    model, ids = tiny_llama(layers=1), letters(tokens + 1)
    policy = {FULL: EVERYTHING, **policies(128, 16)}[kind]
    (row,) = stream.stream(model, ids, [policy], chunk=32, every=64, exact_until=tokens)
    whole = nll_of(model, ids, policy.make(model.config), chunk=32)
    assert len(whole) == tokens
    assert [stretch["end"] for stretch in row["stretches"]] == [64, 128, 192, 256, tokens]
    begin = 0
    for stretch in row["stretches"]:
        assert stretch["begin"] == begin
        begin = stretch["end"]
        assert stretch["nll"] == pytest.approx(whole[stretch["begin"] : begin].double().mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_stream_stay_the_same_once_its_bounds_are_reached(kind):
    model = tiny_llama(layers=1)
    (row,) = stream.stream(model, letters(1025), [policies(128, 16)[kind]], chunk=32, every=64)
    assert row["stretches"][0]["nbytes_used"] < row["stretches"][4]["nbytes_used"]
    assert len({stretch["nbytes_used"] for stretch in row["stretches"][4:]}) == 1
    assert len({stretch["nbytes"] for stretch in row["stretches"][4:]}) == 1
    assert row["stretches"][-1]["nbytes"] >= row["stretches"][-1]["nbytes_used"]


def test_bytes_of_full_attention_are_counted_and_then_computed():
    model = tiny_llama()
    (row,) = stream.stream(model, letters(257), [EVERYTHING], chunk=32, every=64, exact_until=130)
    assert [stretch["nll"] is None for stretch in row["stretches"]] == [False, False, True, True]
    expected = [expected_nbytes(model.config, "exact", tokens, dtype=model.dtype) for tokens in (64, 128, 192, 256)]
    assert [stretch["nbytes"] for stretch in row["stretches"]] == expected


@pytest.mark.parametrize(("chunk", "every", "tokens"), [(0, 64, 65), (32, 0, 65), (32, 64, 1)])
def test_a_stream_of_nothing_is_refused(chunk, every, tokens):
    with pytest.raises(ValueError, match="must be at least 1"):
        stream.stream(tiny_llama(layers=1), letters(tokens), [EVERYTHING], chunk=chunk, every=every)


def test_a_plot_has_a_line_for_each_policy_and_a_dashed_one_for_what_was_not_run(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, draw = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *a, **k: drawn.append((list(a[1]), list(a[2]), k)) or draw(*a, **k))
    full = [
        {"begin": 0, "end": 64, "nll": 1.0, "nbytes": 100, "nbytes_used": 100},
        {"begin": 64, "end": 128, "nll": None, "nbytes": 200, "nbytes_used": 200},
    ]
    bounded = [{**stretch, "nll": 0.0, "nbytes": 50} for stretch in full]
    rows = [{"kind": FULL, "budget": 0, "stretches": full}, {"kind": "both", "budget": 128, "stretches": bounded}]
    stream.plot({"rows": rows, "trained_length": 64}, tmp_path / "stream.png")
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")
    assert [(x, y) for x, y, _ in drawn] == [
        ([32], [pytest.approx(2.718, rel=1e-3)]),
        ([64], [100]),
        ([64, 128], [100, 200]),
        ([32, 96], [1.0, 1.0]),
        ([64, 128], [50, 50]),
    ]
    assert [k["label"] for _, _, k in drawn if k.get("linestyle") == "--"] == [f"{FULL}, computed"]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 71432.", 1.0),
        ("71 432", 1.0),
        (" the number 71432", 1.0),
        ("71423", 0.6),
        ("7143", 0.8),
        ("1432", 0.0),
        ("714325", 1.0),
        ("none", 0.0),
    ],
)
def test_digits_are_right_at_their_place(text, right):
    assert retrieve.digits_right(text, "71432") == pytest.approx(right)


@pytest.mark.parametrize("distance", [64, 100, 401])
def test_the_key_ends_and_a_copy_begins_the_distance_back(distance):
    ids = letters(2000)
    found = retrieve.prompts(Letters(), ids, distance, 1, 0)
    text = Letters().decode(found.passkey.tolist())
    sentence = retrieve.SENTENCE.format(key=found.key)
    assert text.index(sentence) == retrieve.LEAD
    assert text.endswith(retrieve.QUESTION)
    assert len(text) == retrieve.LEAD + len(sentence) + distance + len(retrieve.QUESTION)
    assert len(found.copy) == found.first + distance + retrieve.PASSAGE
    assert torch.equal(found.copy[-retrieve.PASSAGE :], found.copy[found.first :][: retrieve.PASSAGE])
    again, other = (retrieve.prompts(Letters(), ids, distance, *which) for which in ((1, 0), (2, 0)))
    assert torch.equal(again.passkey, found.passkey)
    assert other.key != found.key
    assert not torch.equal(other.copy, found.copy)


def test_keys_and_passages_are_the_same_at_every_distance():
    near, far = (retrieve.prompts(Letters(), letters(20_000), distance, 0, 0) for distance in (100, 400))
    assert near.key == far.key
    assert torch.equal(near.copy[:300], far.copy[:300])


def test_a_model_that_remembers_everything_finds_key_and_passage_at_any_distance():
    found = found_by(Parrot(memory=10_000), [64, 100, 500])
    for row in found.values():
        assert row["digits_right"] == 1.0
        # The parrot needs 8 tokens of the copy, which are those that are not scored.
        assert row["nll_copy"] == pytest.approx(0.0, abs=1e-6)
        assert row["nll_first"] > 10


def test_a_copy_is_scored_from_its_ninth_token_to_its_last():
    # Entry i is the nll of token i + 1: a copy that begins at token 10 is scored on tokens 18 to 73.
    assert retrieve._nll(torch.arange(200.0), 10) == (17 + 72) / 2


def test_a_model_with_a_short_memory_finds_a_passage_within_it_and_no_key_beyond():
    found = found_by(Parrot(memory=100), [99, 100, 101])
    assert [row["nll_copy"] < 1e-6 for row in found.values()] == [True, True, False]
    assert found[101]["nll_copy"] > 10
    assert found[101]["digits_right"] == 0.0


def test_policies_get_the_same_prompts_and_the_attention_that_they_need():
    parrot = Parrot(memory=10_000)
    chosen = [EVERYTHING, policies(128, 16)["both"]]
    rows = retrieve.retrieve(parrot, Letters(), letters(2000), chosen, distances=[100], trials=2)
    assert parrot.attentions == ["sdpa", "hf_kvq"]
    assert rows[0]["keys"] == rows[1]["keys"]
    assert rows[0]["nll_first_by_trial"] == rows[1]["nll_first_by_trial"]
    assert [row["kind"] for row in rows] == [FULL, "both"]


def test_an_answer_ends_after_five_digits_or_twelve_tokens_and_goes_through_the_cache():
    parrot, cache = Parrot(memory=10_000), DynamicCache()
    ids = torch.tensor(Letters()("The pass key is 12345678. xx The pass key is")["input_ids"])
    assert retrieve.answer(parrot, Letters(), ids, cache, chunk=7) == " 12345"
    assert len(cache.seen) == len(ids) + 5  # the last digit was not fed
    assert retrieve.answer(Parrot(memory=9), Letters(), ids, DynamicCache(), chunk=7) == " " * 12


@pytest.mark.parametrize(
    ("distance", "tokens", "trials", "message"),
    [(63, 2000, 1, "at least 64"), (100, 300, 1, "364 are needed"), (100, 2000, 0, "trials must be")],
)
def test_a_retrieval_that_cannot_be_is_refused(distance, tokens, trials, message):
    with pytest.raises(ValueError, match=message):
        retrieve.retrieve(
            Parrot(memory=9), Letters(), letters(tokens), [EVERYTHING], distances=[distance], trials=trials
        )


def test_a_table_of_retrieval_has_a_row_a_policy_and_a_column_a_distance():
    row = {"kind": FULL, "budget": 0, "label": "", "distance": 100, "digits_right": 1.0, "nll_copy": 0.5}
    other = {**row, "kind": "both", "budget": 1024, "label": "W32 M39 C4", "digits_right": 0.28, "nll_copy": 3.456}
    shown = retrieve.table({"rows": [row, {**row, "distance": 1500, "nll_copy": 0.25}, other]}).splitlines()
    assert shown == [
        "| policy | budget | kept | 100 tokens back | 1,500 tokens back |",
        "| --- | ---: | --- | ---: | ---: |",
        f"| {FULL} | - | all | 100 % / 0.50 | 100 % / 0.25 |",
        "| both | 1,024 | W32 M39 C4 | 28 % / 3.46 |  |",
    ]


def test_figures_part_the_steps_in_which_a_block_leaves():
    taken = [*[1.0] * 31, 33.0, *[3.0] * 31, 35.0]
    left = [*[False] * 31, True] * 2
    found = speed._figures(taken, left, [2.0] * 64)
    assert (found["ms_quiet"], found["ms_leaving"], found["leaving"]) == (2.0, 34.0, 2)
    assert found["ms_block_means"] == [2.0, 4.0]
    assert (found["ms_block_mean"], found["ratio_of_means"]) == (3.0, 1.5)
    assert (found["ms"]["median"], found["ratio"]["median"]) == (3.0, 1.5)
    alone = speed._figures(taken, [False] * 64, None)
    assert (alone["ms_quiet"], alone["ms_leaving"], alone["ratio"], alone["ratio_of_means"]) == (3.0, None, None, None)


def test_every_policy_is_timed_and_blocks_leave_in_one_step_of_a_block():
    model = tiny_llama(layers=1)
    chosen = [EVERYTHING, *policies(128, 16).values()]
    rows = speed.speed(model, letters(270), chosen, context=206, steps=32, chunk=64)
    assert [row["kind"] for row in rows] == [FULL, *KINDS]
    assert [row["leaving"] for row in rows] == [0, 0, 1, 1, 1]
    assert rows[0]["ratio"] is None
    assert rows[1]["ratio"]["median"] == rows[1]["ratio_of_means"] == 1.0
    assert all(row["ms"]["median"] > 0 and len(row["ms_block_means"]) == 1 for row in rows)
    shown = speed.table({"rows": rows}).splitlines()
    assert len({line.count("|") for line in shown}) == 1
    assert [line.split(" | ")[0] for line in shown[2:]] == [f"| {kind}" for kind in (FULL, *KINDS)]
    assert " | - | all, from 206 on | " in shown[2]


@pytest.mark.parametrize(("steps", "tokens", "message"), [(40, 500, "try 32"), (32, 163, "164 are needed")])
def test_steps_that_are_not_whole_blocks_or_not_there_are_refused(steps, tokens, message):
    with pytest.raises(ValueError, match=message):
        speed.speed(tiny_llama(layers=1), letters(tokens), [EVERYTHING], context=100, steps=steps)


def test_logits_that_are_not_finite_end_the_run():
    model = tiny_llama(layers=1)
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="full attention, budget 0: logits are not finite"):
        speed.speed(model, letters(100), [EVERYTHING], context=20, steps=32)


@pytest.mark.parametrize(
    ("kind", "options", "rows"),
    [
        ("quality", ["--window", "200", "--first", "0", "--windows", "2", "--scored-from", "100"], 3),
        ("stream", ["--tokens", "256", "--every", "64", "--exact-until", "128"], 3),
        ("retrieve", ["--distances", "64", "100", "--trials", "1"], 6),
        ("speed", ["--context", "64", "--steps", "32"], 3),
    ],
)
def test_the_command_appends_a_record_of_its_kind(tmp_path, capsys, monkeypatch, kind, options, rows):
    loaded = SimpleNamespace(model=tiny_llama(layers=1), tokenizer=Letters(), title="tiny", weights_sha256="0")
    monkeypatch.setattr(command, "load_model", lambda name: loaded)
    text, out, picture = tmp_path / "text.txt", tmp_path / "out.jsonl", tmp_path / "stream.svg"
    text.write_text(Letters().decode(letters(600).tolist()))
    options = [*options, "--budgets", "128", "--kinds", "sinks + window", "both", "--chunk", "32"]
    options += ["--plot", str(picture)] if kind == "stream" else []
    threads = str(torch.get_num_threads())
    command.main([kind, "--text", str(text), "--out", str(out), "--threads", threads, *options])
    (record,) = map(json.loads, out.read_text().splitlines())
    assert (record["kind"], record["model"], record["text"]) == (kind, "tiny", "text.txt")
    assert len(record["rows"]) == rows
    assert [name for name in dict.fromkeys(row["kind"] for row in record["rows"])] == [FULL, "sinks + window", "both"]
    if kind in ("retrieve", "speed"):
        assert {"retrieve": retrieve, "speed": speed}[kind].table(record) in capsys.readouterr().out
    assert picture.exists() == (kind == "stream")


def test_a_stream_longer_than_the_text_says_how_long_it_may_be(tmp_path, monkeypatch):
    loaded = SimpleNamespace(model=tiny_llama(layers=1), tokenizer=Letters(), title="tiny", weights_sha256="0")
    monkeypatch.setattr(command, "load_model", lambda name: loaded)
    (tmp_path / "text.txt").write_text("a" * 100)
    with pytest.raises(SystemExit, match=r"text.txt has 100 tokens, 201 are needed; try --tokens 99"):
        command.main(
            ["stream", "--text", str(tmp_path / "text.txt"), "--tokens", "200", "--out", str(tmp_path / "out")]
        )
