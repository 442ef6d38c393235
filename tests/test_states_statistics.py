"""Layers whose codecs learn: what they learn from, when tokens become codes, and how to go back across it."""

from __future__ import annotations

import copy
import functools

import oracles_rotated as oracle
import pytest
import torch
from oracles import attention, states
from oracles_rotated import Stream, as_read, differing, feed, held, in_chunks, stream_of

from hf_kvq.config import AffineConfig, LayerQuant, RotatedConfig
from hf_kvq.kernels import Visibility
from hf_kvq.layers import QuantizedLayer, RowPadding
from hf_kvq.states.statistics import Statistics

TIERS = (6, 4, 3, 3)
PATH = RotatedConfig(bits=(4, 3, 3, 2), trellis=True)
SINKS = 4
LEARNED = SINKS + 128
MODES = {"dense": False, "fused": True}


def rare(*values, **kwargs):
    """One of the many cases that only a slow run takes."""
    return pytest.param(*values, marks=pytest.mark.slow, **kwargs)


def layer_of(bits=4, *, fused: bool = True, dim: int = 64, **settings) -> QuantizedLayer:
    settings = {"sinks": SINKS, "model": oracle.llama_config(fused=fused, dim=dim)} | settings
    return QuantizedLayer(oracle.quant_of(bits), **settings)


def same(a, b) -> bool:
    """Whether two feeds gave the same, bit for bit."""
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else all(map(torch.equal, x, y))
        for x, y in zip(a, b, strict=True)
    )


def exact_attention(stream: Stream, keys: torch.Tensor, values: torch.Tensor, queries: int) -> torch.Tensor:
    """What the newest queries see of all columns, in float64."""
    query = stream.query[:, :, -queries:].unflatten(1, (keys.shape[1], -1))
    tokens = keys.shape[2]
    visible = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
    output, _ = attention(query, keys, values, scaling=query.shape[-1] ** -0.5, visible=visible)
    return output.flatten(1, 2)


def learned_by(layer: QuantizedLayer) -> dict[str, torch.Tensor]:
    return {name: part for name, part in held(layer).items() if name.startswith("learned")}


# The queries


def queries_of(statistics: Statistics, query: torch.Tensor, sizes: list[int], first: int = 0) -> torch.Tensor:
    start = 0
    for size in sizes:
        statistics.ask(query[:, :, :, start : start + size], first + start)
        start += size
    return statistics.chosen_queries(query.shape[-1])


@pytest.mark.parametrize("size", [1, 7, 37, 300])
@pytest.mark.parametrize("first", [[4, 4], [13, 4], [4, 40]])
def test_queries_are_those_of_each_rows_own_tokens_whatever_the_chunks(first, size):
    query = states(2, 3, 2, 90, 16)
    found = queries_of(Statistics(37, first), query, in_chunks(90, size))
    for row, begin in enumerate(first):
        expected = query[row, :, :, begin : begin + 37]
        assert torch.equal(found[row], expected.transpose(1, 2).flatten(1, 2))


def test_queries_that_were_not_shown_are_zero():
    query = states(1, 2, 3, 90, 16)
    statistics = Statistics(37, [4])
    statistics.ask(query[:, :, :, :10], 0)
    statistics.ask(query[:, :, :, 20:30], 20)
    found = statistics.chosen_queries(16).unflatten(2, (37, 3)).transpose(2, 3)
    expected = torch.zeros(1, 2, 3, 37, 16)
    expected[:, :, :, :6], expected[:, :, :, 16:26] = query[:, :, :, 4:10], query[:, :, :, 20:30]
    assert torch.equal(found, expected)
    assert Statistics(37, [4]).chosen_queries(16) is None


@pytest.mark.parametrize("column", [0, 4, 5, 20, 60])
def test_queries_that_were_cropped_come_again(column):
    query = states(1, 2, 3, 90, 16)
    statistics = Statistics(37, [4])
    statistics.ask(-query[:, :, :, :60], 0)
    statistics.crop(column)
    found = queries_of(statistics, query[:, :, :, column:], in_chunks(90 - column, 7), column)
    expected = torch.cat((-query[:, :, :, :column], query[:, :, :, column:]), dim=3)[:, :, :, 4:41]
    assert torch.equal(found, expected.transpose(2, 3).flatten(2, 3))


def test_what_is_learned_from_are_each_rows_first_tokens():
    x = states(2, 3, 60, 16)
    statistics = Statistics(20, [4, 13])
    assert statistics.end == 33
    found = statistics.chosen(x[:, :, 4:], 4)
    assert torch.equal(found, torch.stack((x[0, :, 4:24], x[1, :, 13:33])))
    assert statistics.columns(x.device).tolist() == [list(range(4, 24)), list(range(13, 33))]


def test_the_newest_token_stands_for_those_that_a_row_has_too_few_of():
    x = states(2, 3, 30, 16)
    found = Statistics(20, [4, 20]).chosen(x[:, :, 4:], 4)
    assert torch.equal(found[1, :, :10], x[1, :, 20:])
    assert torch.equal(found[1, :, 10:], x[1, :, -1:].expand(-1, 10, -1))


# What is learned, and from which tokens

CHUNKS = [rare(1), 37, 128, 300]
WAYS = [
    pytest.param(True, "exact", id="fused"),
    pytest.param(False, "coded", id="dense coded"),
    rare(True, "coded", id="fused coded"),
    rare(False, "exact", id="dense"),
]


@functools.cache
def in_uneven_chunks(bits, fused: bool, prefill: str) -> dict[str, torch.Tensor]:
    layer = layer_of(bits, fused=fused, prefill=prefill)
    feed(layer, stream_of(300), [3, 50, 1, 79, 1, 166])
    return held(layer)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("fused", "prefill"), WAYS)
@pytest.mark.parametrize("bits", [4, pytest.param(TIERS, id="tiers"), pytest.param(PATH, id="path"), rare(8)])
def test_codes_and_what_is_learned_do_not_depend_on_the_chunks(bits, fused, prefill, chunk):
    layer = layer_of(bits, fused=fused, prefill=prefill)
    feed(layer, stream_of(300), in_chunks(300, chunk))
    assert layer.tokens_coded == 300 - SINKS
    assert differing(held(layer), in_uneven_chunks(bits, fused, prefill)) == []


@pytest.mark.parametrize("fused", MODES.values(), ids=MODES)
def test_one_token_at_a_time_teaches_the_same(fused):
    stream = stream_of(140, dim=40)
    one, whole = (layer_of(fused=fused, dim=40) for _ in range(2))
    feed(one, stream, [1] * 140)
    feed(whole, stream, [140])
    assert differing(held(one), held(whole)) == []


@pytest.mark.parametrize("fused", MODES.values(), ids=MODES)
@pytest.mark.parametrize("residual", [0, 16])
@pytest.mark.parametrize("sinks", [0, 4])
def test_tokens_are_exact_until_enough_are_there_to_learn_from(sinks, residual, fused):
    stream, learned = stream_of(sinks + 160), sinks + 128
    layer = layer_of(fused=fused, sinks=sinks, residual=residual)
    for start, size in [(0, 100), (100, 28), (128, sinks - 1)] if sinks else [(0, 100), (100, 27)]:
        feed(layer, stream[start : start + size], [size])
        assert (layer.tokens_coded, layer.tokens_encoded) == (0, 0)
        keys, values = as_read(layer)
        assert torch.equal(keys, stream.keys[:, :, : start + size].double())
        assert torch.equal(values, stream.values[:, :, : start + size].double())
    feed(layer, stream[learned - 1 : learned], [1])
    assert layer.tokens_coded == 128 - residual
    feed(layer, stream[learned:], [5, 1, 26])
    assert layer.tokens_coded == 160 - residual
    keys, values = as_read(layer)
    end = sinks + 160 - residual
    for read, given in ((keys, stream.keys), (values, stream.values)):
        assert torch.equal(read[:, :, :sinks], given[:, :, :sinks].double())
        assert torch.equal(read[:, :, end:], given[:, :, end:].double())
        error = (read - given)[:, :, sinks:end].norm(dim=-1)
        assert (error > 0).all()
        assert error.square().mean().sqrt() < 0.25 * given.norm(dim=-1).square().mean().sqrt()


def test_until_then_attention_is_exact():
    stream = stream_of(131)
    layer = layer_of()
    for output, end in zip(feed(layer, stream, [100, 1, 30]), (100, 101, 131), strict=True):
        part = stream[:end]
        expected = exact_attention(part, part.keys, part.values, output.shape[2])
        assert (output - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("fused", [pytest.param(True, id="fused"), rare(False, id="dense")])
@pytest.mark.parametrize(("window", "learned"), [(2, 1), (40, 39), (129, 128), (200, 128)])
@pytest.mark.parametrize("sizes", [[230], [20, 1, 209], rare([7] * 32 + [6])], ids=["at once", "in parts", "by seven"])
def test_a_short_window_learns_from_what_it_holds(window, learned, sizes, fused):
    stream = stream_of(230)
    layer = layer_of(fused=fused, window=window, sinks=0)
    start = 0
    for size in sizes:
        feed(layer, stream[start : start + size], [size])
        start += size
        coded = min(start, window - 1) if start >= learned else 0
        assert layer.tokens_coded == coded
    other = layer_of(fused=fused, window=window, sinks=0)
    feed(other, stream, [230])
    assert differing(held(layer), held(other)) == []
    basis = layer.store.coded.value_codec.basis
    mean = stream.values[:, :, :learned].double().mean(dim=2)
    step = mean.abs().amax(dim=-1, keepdim=True) / 7 * 2**0.125
    assert ((basis.means(torch.float64) - mean).abs() <= step / 2 * (1 + 1e-9)).all()


def test_keys_and_values_may_learn_apart_or_not_at_all():
    stream = stream_of(200)
    for quant in (
        LayerQuant(keys=RotatedConfig(bits=4), values=AffineConfig()),
        LayerQuant(keys=AffineConfig(), values=RotatedConfig(bits=3)),
        LayerQuant(keys=RotatedConfig(bits=TIERS), values=RotatedConfig(bits=2)),
    ):
        layer = QuantizedLayer(quant, sinks=SINKS, model=oracle.llama_config(fused=True))
        outputs = feed(layer, stream, [131, 1, 67, 1])
        assert layer.tokens_coded == 196
        expected = exact_attention(stream, *(x.double() for x in layer.store.view(0).dense()), 1)
        assert (outputs[-1] - expected).abs().max() < 1e-4


def test_values_may_be_narrower_than_keys():
    stream = stream_of(160)
    stream.values = stream.values[..., :40]
    layer = layer_of()
    output = feed(layer, stream, [159, 1])[-1]
    expected = exact_attention(stream, *as_read(layer), 1)
    assert (output - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_coded_and_read_in_its_own_dtype(dtype):
    stream = stream_of(160).map(lambda x: x.to(dtype))
    layer = layer_of()
    output = feed(layer, stream, [131, 28, 1])[-1]
    assert output.dtype == dtype
    expected = exact_attention(stream, *as_read(layer), 1)
    assert (output - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()
    dense = layer_of(fused=False)
    assert feed(dense, stream, [160])[-1][0].dtype == dtype


# What attention reads


@pytest.mark.parametrize("queries", [1, rare(5), 70])
@pytest.mark.parametrize(("bits", "residual"), [(4, 0), (TIERS, 16), (PATH, 0), rare(4, 16), rare(TIERS, 0)], ids=str)
def test_attention_over_codes_is_attention_over_what_they_stand_for(bits, residual, queries):
    stream = stream_of(140 + queries)
    layer = layer_of(bits, residual=residual, prefill="coded")
    output = feed(layer, stream, [140, queries])[-1]
    expected = exact_attention(stream, *as_read(layer), queries)
    assert (output - expected).abs().max() < 2e-5 * expected.abs().max()


def test_dense_gives_what_codes_stand_for():
    stream = stream_of(150)
    layer = layer_of(TIERS, fused=False, residual=5)
    read = feed(layer, stream, [140, 9, 1])[-1]
    for got, expected in zip(read, as_read(layer), strict=True):
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_one_coded_pass_after_learning_reads_what_token_by_token_reads():
    stream = stream_of(LEARNED + 40)
    sizes = {"once": [LEARNED, 40], "steps": [LEARNED] + [1] * 40}
    dense = {name: feed(layer_of(fused=False, prefill="coded"), stream, each) for name, each in sizes.items()}
    assert same(dense["once"][-1:], dense["steps"][-1:])
    fused = {name: feed(layer_of(prefill="coded"), stream, each) for name, each in sizes.items()}
    steps = torch.cat(fused["steps"][1:], dim=2)
    assert (fused["once"][-1] - steps).abs().max() < 1e-5 * steps.abs().max()


def test_a_model_may_change_its_attention_while_codecs_learn():
    stream = stream_of(160)
    layer = layer_of(fused=False)
    feed(layer, stream[:50], [50])
    layer.model.config._attn_implementation = "hf_kvq"
    feed(layer, stream[50:100], [50])
    layer.model.config._attn_implementation = "sdpa"
    read = feed(layer, stream[100:], [59, 1])[-1]
    assert layer.tokens_coded == 156
    for got, expected in zip(read, as_read(layer), strict=True):
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_what_was_learned_under_inference_mode_is_used_outside_of_it():
    stream = stream_of(160)
    layer = layer_of(TIERS)
    with torch.inference_mode():
        feed(layer, stream[:150], [140, 10])
    feed(layer, stream[150:], [10])
    assert layer.tokens_coded == 156


# Old codes


def steps_leave_codes_alone(count: int) -> None:
    stream = stream_of(LEARNED + count, batch=1, dim=40)
    layer = layer_of(fused=True, dim=40)
    feed(layer, stream[:LEARNED], [LEARNED])
    before = held(layer)
    for step in range(LEARNED, LEARNED + count):
        layer.update(stream.keys[:, :, step : step + 1], stream.values[:, :, step : step + 1])
    after = held(layer)
    assert layer.tokens_coded == 128 + count
    for name, part in before.items():
        kept = after[name] if name.startswith("learned") else after[name][:, :, :128]
        assert torch.equal(kept, part)


def test_old_codes_never_change_when_tokens_are_added():
    steps_leave_codes_alone(70)


@pytest.mark.slow
def test_old_codes_never_change_in_a_thousand_steps():
    steps_leave_codes_alone(1000)


def test_a_step_encodes_only_the_new_token():
    stream = stream_of(LEARNED + 20)
    layer = layer_of()
    feed(layer, stream[:LEARNED], [LEARNED])
    for step in range(20):
        feed(layer, stream[LEARNED + step : LEARNED + step + 1], [1])
        assert layer.tokens_encoded == 128 + step + 1


# Going back


@pytest.mark.parametrize("residual", [0, rare(16)])
@pytest.mark.parametrize("length", [200, 150, LEARNED, LEARNED - 1, 100, SINKS + 1])
def test_a_crop_keeps_what_was_learned_and_the_codes_that_are_left(length, residual):
    stream, other = stream_of(220), stream_of(220, seed=50)
    layer = layer_of(residual=residual, prefill="coded")
    feed(layer, stream, [220])
    before = held(layer)
    layer.crop(length - 220)
    assert layer.get_seq_length() == length
    for name, part in held(layer).items():
        assert torch.equal(part, before[name] if name.startswith("learned") else before[name][:, :, : part.shape[2]])
    assert layer.tokens_coded == min(length, 220 - residual) - SINKS
    output = feed(layer, other[length:], [219 - length, 1])[-1]
    assert differing(learned_by(layer), {name: part for name, part in before.items() if "learned" in name}) == []
    expected = exact_attention(other, *as_read(layer), 1)
    assert (output - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("fused", MODES.values(), ids=MODES)
@pytest.mark.parametrize("length", [0, 1, SINKS])
def test_a_crop_to_where_no_code_is_left_learns_anew(length, fused):
    stream, other = stream_of(180), stream_of(180, seed=50)
    layer, fresh = (layer_of(fused=fused) for _ in range(2))
    feed(layer, stream, [180])
    layer.crop(length - 180)
    assert layer.tokens_coded == 0
    mixed = stream[:length].before(other[length:])
    outputs = feed(layer, mixed[length:], [120 - length, 60])
    expected = feed(fresh, mixed, [120, 60])
    assert differing(held(layer), held(fresh)) == []
    assert fused or same(outputs[-1:], expected[-1:])


@pytest.mark.parametrize("length", [0, 3, 50, 100])
def test_a_crop_before_anything_was_learned_leaves_no_trace(length):
    stream, other = stream_of(180), stream_of(180, seed=50)
    layer, straight = (layer_of() for _ in range(2))
    feed(layer, stream[:110], [60, 50])
    layer.crop(length - 110)
    mixed = stream[:length].before(other[length:])
    feed(layer, mixed[length:], in_chunks(180 - length, 37))
    feed(straight, mixed, [180])
    assert differing(held(layer), held(straight)) == []


@pytest.mark.parametrize("fused", MODES.values(), ids=MODES)
@pytest.mark.parametrize("residual", [0, rare(16)])
@pytest.mark.parametrize(
    ("history", "size"), [([], 150), ([100], 60), ([100, 31], 1), ([131], 5), ([140], 1)], ids=str
)
def test_an_update_that_taught_can_be_undone(history, size, residual, fused):
    stream, other = stream_of(190), stream_of(size, seed=50)
    layer, straight = (layer_of(fused=fused, residual=residual) for _ in range(2))
    start = sum(history)
    for each in (layer, straight):
        feed(each, stream[:start], history)
    feed(layer, other, [size])
    assert layer.undo_update()
    assert layer.get_seq_length() == start
    rest = in_chunks(190 - start, 13)
    assert same(feed(layer, stream[start:], rest), feed(straight, stream[start:], rest))
    assert differing(held(layer), held(straight)) == []


def test_an_update_that_nobody_asked_about_is_stored_without_queries():
    stream = stream_of(160)
    layer, dense = layer_of(), layer_of(fused=False)
    layer.update(stream.keys[:, :, :150], stream.values[:, :, :150])
    assert layer.tokens_coded == 146
    feed(layer, stream[150:], [10])
    feed(dense, stream, [160])
    assert differing(held(layer), held(dense)) == []


def test_an_answer_comes_once_the_states_are_stored_and_not_after_they_were_taken_back():
    stream = stream_of(20)
    layer = layer_of()
    handle, _ = layer.update(stream.keys, stream.values)
    assert layer.undo_update()
    with pytest.raises(ValueError, match=r"layer 0: these states were taken back .*; run the forward again"):
        handle.view.attend(stream.query, Visibility(0, 20), scaling=0.125)
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize(("first", "draft", "accepted"), [(130, 5, 0), (130, 5, 1), (100, 60, 20)])
def test_a_recorded_draft_that_taught_is_taken_back_without_a_trace(first, draft, accepted):
    stream, other = stream_of(180), stream_of(draft, seed=50)
    rolled, straight = layer_of(), layer_of()
    for layer in (rolled, straight):
        layer.activate_past_recording()
        feed(layer, stream[:first], [first])
    mixed = stream[first : first + accepted].before(other[accepted:])
    feed(rolled, mixed, [draft])
    rolled.crop(accepted - draft)
    feed(straight, stream[first : first + accepted], [1] * accepted)
    assert differing(held(rolled), held(straight)) == []


def test_a_recorded_draft_whose_accepted_tokens_taught_changes_nothing():
    stream, other = stream_of(180), stream_of(5, seed=50)
    rolled, straight = layer_of(), layer_of()
    for layer in (rolled, straight):
        layer.activate_past_recording()
        feed(layer, stream[:130], [130])
    mixed = stream[130:132].before(other[2:])
    feed(rolled, mixed, [5])
    rolled.crop(-3)
    feed(straight, stream[130:132], [1, 1])
    assert differing(held(rolled), held(straight)) == []


# Rows

MOVES = {
    "reorder": (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
    "mask": (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("when", [60, 145], ids=["while learning", "after"])
def test_rows_move_with_what_they_learned_and_what_they_are_learning(when, move):
    stream = stream_of(160, batch=3)
    act, rows = move
    layer, alone = layer_of(TIERS, residual=6), layer_of(TIERS, residual=6)
    feed(layer, stream[:when], [when])
    act(layer)
    feed(alone, stream.rows(rows)[:when], [when])
    rest = [160 - when - 1, 1]
    assert same(feed(layer, stream.rows(rows)[when:], rest), feed(alone, stream.rows(rows)[when:], rest))
    assert differing(held(layer), held(alone)) == []


@pytest.mark.parametrize("when", [60, 145], ids=["while learning", "after"])
def test_a_copy_is_independent(when):
    stream, other = stream_of(160), stream_of(160, seed=50)
    layer, straight = layer_of(), layer_of()
    for each in (layer, straight):
        feed(each, stream[:when], [when])
    copied = copy.deepcopy(layer)
    feed(layer, other[when:], [160 - when])
    assert same(feed(copied, stream[when:], [160 - when]), feed(straight, stream[when:], [160 - when]))
    assert differing(held(copied), held(straight)) == []


@pytest.mark.parametrize("when", [60, 145], ids=["while learning", "after"])
def test_offload_moves_what_was_learned_and_prefetch_brings_it_back(when):
    stream = stream_of(160)
    layer, straight = layer_of(TIERS), layer_of(TIERS)
    for each in (layer, straight):
        feed(each, stream[:when], [when])
    layer.offload()
    layer.prefetch()
    assert same(feed(layer, stream[when:], [160 - when]), feed(straight, stream[when:], [160 - when]))
    assert differing(held(layer), held(straight)) == []


@pytest.mark.parametrize("fused", MODES.values(), ids=MODES)
def test_one_rows_content_never_changes_another_rows_output(fused):
    stream, other = stream_of(170, batch=3), stream_of(170, batch=3, seed=50)
    other = oracle.joined(stream.rows([0]), other.rows([1, 2]))
    first, second = (layer_of(fused=fused) for _ in range(2))
    outputs = [feed(layer, each, [140, 1, 28, 1]) for layer, each in ((first, stream), (second, other))]
    for ours, theirs in zip(*outputs, strict=True):
        ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(ours, theirs, strict=True))
    assert differing({n: t[:1] for n, t in held(first).items()}, {n: t[:1] for n, t in held(second).items()}) == []


def padded(stream: Stream, other: Stream, padding: int) -> tuple[Stream, torch.Tensor]:
    """A row with noise before it and a row without; the mask."""
    noise = stream_of(padding, batch=1, seed=70)
    both = oracle.joined(noise.map(lambda x: x * 50).before(stream), other)
    mask = torch.ones(2, both.tokens, dtype=torch.long)
    mask[0, :padding] = 0
    return both, mask


def padded_and_alone(model, fused_sizes) -> tuple[QuantizedLayer, list[QuantizedLayer], int]:
    padding, tokens = 9, 180
    row, other = stream_of(tokens - padding, batch=1), stream_of(tokens, batch=1, seed=50)
    both, mask = padded(row, other, padding)
    together = layer_of(model=model)
    together.set_padding(RowPadding.from_mask(mask))
    feed(together, both, fused_sizes)
    alone = [layer_of(model=model) for _ in range(2)]
    feed(alone[0], row, [tokens - padding])
    feed(alone[1], other, [tokens])
    return together, alone, padding


@pytest.mark.parametrize("sizes", [[180], [5, 37, 1, 137]], ids=["at once", "in parts"])
@pytest.mark.parametrize("fused", [False, True], ids=MODES)
def test_a_padded_row_has_the_codes_of_the_row_alone(fused, sizes):
    # Without RoPE, where a column says nothing: keys of models that turn none, and values of all models.
    model = oracle.llama_config(fused=fused)
    model.config.rope_parameters = None
    together, alone, padding = padded_and_alone(model, sizes)
    first, second = held(alone[0]), held(alone[1])
    for name, part in held(together).items():
        if name.endswith("origin"):  # where a row begins is what differs
            continue
        assert torch.equal(part[:1] if name.startswith("learned") else part[:1, :, padding:], first[name]), name
        assert torch.equal(part[1:], second[name]), name


def test_values_of_a_padded_row_have_the_codes_of_the_row_alone_and_keys_their_error():
    together, alone, padding = padded_and_alone(oracle.llama_config(fused=True), [180])
    first = held(alone[0])
    for name, part in held(together).items():
        if "value" in name and not name.endswith("origin"):
            assert torch.equal(part[:1] if name.startswith("learned") else part[:1, :, padding:], first[name]), name
        elif name.endswith(("gain", "order")):
            assert torch.equal(part[:1], first[name])
    row = stream_of(180 - padding, batch=1)
    errors = [
        (as_read(layer)[0][:1, :, start:] - row.keys).norm() for layer, start in ((together, padding), (alone[0], 0))
    ]
    assert errors[0] == pytest.approx(float(errors[1]), rel=0.02)


def test_a_padded_row_of_a_rope_model_has_the_codes_of_the_row_alone():
    together, alone, padding = padded_and_alone(oracle.llama_config(fused=True), [180])
    assert torch.equal(held(together)["key_codes"][:1, :, padding:], held(alone[0])["key_codes"])


def test_rows_that_are_dropped_while_learning_take_no_queries_of_others_along():
    both, mask = padded(stream_of(171, batch=1), stream_of(180, batch=1, seed=50), 9)
    together, alone = layer_of(), layer_of()
    together.set_padding(RowPadding.from_mask(mask))
    alone.set_padding(RowPadding.from_mask(mask[:1]))
    feed(together, both[:60], [60])
    together.batch_select_indices(torch.tensor([0]))
    feed(together, both.rows([0])[60:], [120])
    feed(alone, both.rows([0]), [60, 120])
    assert differing(learned_by(together), learned_by(alone)) == []


def test_a_token_that_stands_for_missing_ones_is_turned_back_from_where_it_stood():
    # One token repeated: whatever stands for whom, its mean is the token.
    rope, token = oracle.rope_of(64, "full"), states(1, 2, 1, 64, seed=3).double()
    keys = rope.rotate(token.expand(2, -1, 60, -1), torch.arange(60)).float()
    layer = layer_of()
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :40] = 0
    layer.set_padding(RowPadding.from_mask(mask))
    feed(layer, Stream(keys.repeat(1, 2, 1, 1), keys, keys), [60])
    layer.store.encode_now()
    means = layer.store.coded.key_codec.basis.means(torch.float64)
    assert (means - token[:, :, 0]).abs().max() < 0.02 * token.abs().max()
