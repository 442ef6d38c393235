"""One layer: what it stores, what it returns, what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from oracles import states
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_kvq import PRESETS, AffineConfig, IdentityConfig, LayerQuant
from hf_kvq.codecs import make_codec
from hf_kvq.layers import QuantizedLayer, RowPadding
from hf_kvq.states import ROLLBACK

INT8 = LayerQuant(keys=AffineConfig(), values=AffineConfig())
IDENTITY = LayerQuant(keys=IdentityConfig(), values=IdentityConfig())
WITHIN_TOKEN = ["identity", "int8", "fp8"]


def quant(name: str) -> LayerQuant:
    return PRESETS[name].for_layer(0, 1)


def kv(tokens: int, *, batch: int = 2, heads: int = 2, dim: int = 16, seed: int = 0, dtype=torch.float32):
    return states(batch, heads, tokens, dim, seed=seed, dtype=dtype), states(
        batch, heads, tokens, dim, seed=seed + 1, dtype=dtype
    )


def round_trip(x: torch.Tensor, config=AffineConfig()) -> torch.Tensor:
    codec = make_codec(config)
    return codec.decode(codec.encode(x), head_dim=x.shape[-1], dtype=x.dtype)


def feed(layer: QuantizedLayer, keys, values, sizes):
    start, out = 0, None
    for size in sizes:
        out = layer.update(keys[:, :, start : start + size], values[:, :, start : start + size])
        start += size
    return out


def codes_of(layer: QuantizedLayer) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in layer.store.coded.buffer.view().items()}


def same(a, b) -> bool:
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WITHIN_TOKEN)
@pytest.mark.parametrize("sizes", [[37], [1] * 37, [5, 1, 30, 1]])
def test_coded_prefill_reads_the_codes_of_all_tokens_whatever_the_chunks(name, sizes, dtype):
    keys, values = kv(37, dtype=dtype)
    layer = QuantizedLayer(quant(name), prefill="coded")
    out = feed(layer, keys, values, sizes)
    expected = [round_trip(x, quant(name).keys) for x in (keys, values)]
    assert same(out, expected)
    assert out[0].dtype == dtype


def test_exact_prefill_sees_the_current_tokens_as_they_are_and_earlier_ones_as_codes():
    keys, values = kv(30)
    layer = QuantizedLayer(INT8)
    assert same(feed(layer, keys, values, [20]), (keys[:, :, :20], values[:, :, :20]))
    out = layer.update(keys[:, :, 20:], values[:, :, 20:])
    assert same(out, (torch.cat([round_trip(x[:, :, :20]), x[:, :, 20:]], dim=2) for x in (keys, values)))


def test_a_single_token_reads_its_own_code():
    keys, values = kv(6)
    layer = QuantizedLayer(INT8)
    assert same(feed(layer, keys, values, [5, 1]), (round_trip(keys), round_trip(values)))


def test_a_draft_is_verified_on_codes_while_the_past_is_recorded():
    keys, values = kv(12)
    layer = QuantizedLayer(INT8)
    layer.activate_past_recording()
    assert same(feed(layer, keys, values, [8]), (keys[:, :, :8], values[:, :, :8]))
    assert same(layer.update(keys[:, :, 8:], values[:, :, 8:]), (round_trip(keys), round_trip(values)))


@pytest.mark.parametrize("residual", [1, 8, 64])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1, 5])
@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_sinks_and_the_newest_tokens_are_exact_and_all_between_are_codes(residual, sinks, extra, chunk):
    tokens = 3 * residual + extra
    keys, values = kv(tokens + 1)
    layer = QuantizedLayer(INT8, sinks=sinks, residual=residual, prefill="coded")
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)] + [1]
    out = feed(layer, keys, values, sizes)
    begin, end = min(sinks, tokens + 1), max(tokens + 1 - residual, min(sinks, tokens + 1))
    for states_read, given in zip(out, (keys, values), strict=True):
        assert torch.equal(states_read[:, :, :begin], given[:, :, :begin])
        assert torch.equal(states_read[:, :, begin:end], round_trip(given[:, :, begin:end]))
        assert torch.equal(states_read[:, :, end:], given[:, :, end:])
    assert layer.tokens_coded == end - begin
    assert len(layer.store.residual) == tokens + 1 - end, "the exact part is bounded by sinks and residual"


def test_old_codes_never_change_when_tokens_are_added():
    keys, values = kv(300)
    layer = QuantizedLayer(INT8, residual=8)
    feed(layer, keys, values, [100])
    before = codes_of(layer)
    feed(layer, keys[:, :, 100:], values[:, :, 100:], [1] * 200)
    after = layer.store.coded.buffer.view(0, before["key_codes"].shape[2])
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("residual", [0, 8])
def test_a_step_encodes_only_the_new_token(residual):
    keys, values = kv(200)
    layer = QuantizedLayer(INT8, residual=residual)
    feed(layer, keys, values, [100])
    for step in range(100, 200):
        before = layer.tokens_encoded
        layer.update(keys[:, :, step : step + 1], values[:, :, step : step + 1])
        assert layer.tokens_encoded == before + 1


@pytest.mark.parametrize("residual", [0, 8])
@pytest.mark.parametrize("removed", [1, 7, 8, 9, 30, 37])
def test_crop_keeps_what_was_coded_and_forgets_the_rest(residual, removed):
    keys, values = kv(60)
    layer = QuantizedLayer(INT8, sinks=2, residual=residual)
    feed(layer, keys, values, [37])
    kept = codes_of(layer)
    layer.crop(-removed)
    assert layer.get_seq_length() == 37 - removed
    after = layer.store.coded.buffer.view()
    for name in kept:
        assert torch.equal(after[name], kept[name][:, :, : after[name].shape[2]])
    out = feed(layer, keys[:, :, 37 - removed :], values[:, :, 37 - removed :], [1] * 23)
    assert out[0].shape[2] == 60 - removed


@pytest.mark.parametrize("residual", [0, 4, 16])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("removed", [0, 1, 5, 11])
def test_a_recorded_forward_is_taken_back_without_a_trace(residual, window, removed):
    keys, values = kv(100)

    def fed(*sizes):
        layer = QuantizedLayer(INT8, residual=residual, window=window, prefill="coded")
        layer.activate_past_recording()
        start = 0
        for size in sizes:
            layer.update(keys[:, :, start : start + size], values[:, :, start : start + size])
            start += size
            layer.crop(0)
        return layer

    straight = fed(40, 12 - removed)
    rolled = fed(40)
    rolled.update(keys[:, :, 40:52], values[:, :, 40:52])
    rolled.crop(-removed)
    last = slice(60, 61)
    assert rolled.get_mask_sizes(1) == straight.get_mask_sizes(1)
    assert same(
        rolled.update(keys[:, :, last], values[:, :, last]), straight.update(keys[:, :, last], values[:, :, last])
    )


def test_recording_holds_a_bounded_number_of_exact_tokens():
    keys, values = kv(1000)
    layer = QuantizedLayer(INT8, residual=8)
    layer.activate_past_recording()
    feed(layer, keys, values, [900, 50, 50])
    assert len(layer.store.residual) <= 8 + ROLLBACK


@pytest.mark.parametrize("window", [2, 8])
@pytest.mark.parametrize("sizes", [[1] * 20, [20], [7, 1, 12], [8, 8, 1, 3], [9, 11]])
@pytest.mark.parametrize("recording", [False, True])
def test_a_sliding_layer_of_identity_equals_transformers(window, sizes, recording):
    keys, values = kv(20)
    ours, theirs = QuantizedLayer(IDENTITY, window=window), DynamicSlidingWindowLayer(sliding_window=window)
    if recording:
        ours.activate_past_recording()
        theirs.activate_past_recording()
    start = 0
    for size in sizes:
        assert ours.get_mask_sizes(size) == theirs.get_mask_sizes(size)
        pair = keys[:, :, start : start + size], values[:, :, start : start + size]
        assert same(ours.update(*pair), theirs.update(*pair))
        start += size
    assert ours.get_max_length() == theirs.get_max_length()


@pytest.mark.parametrize("window", [4, 8])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_window_fills_without_an_off_by_one(window, offset):
    keys, values = kv(window + offset + 1)
    layer = QuantizedLayer(INT8, window=window, prefill="coded")
    out = feed(layer, keys, values, [1] * (window + offset + 1))
    expected = round_trip(keys)[:, :, -window:]
    assert same((out[0],), (expected,))
    assert layer.tokens_held == min(window - 1, window + offset + 1)


@pytest.mark.parametrize("prefill", ["exact", "coded"])
def test_a_prompt_longer_than_the_window_leaves_a_window_of_codes(prefill):
    keys, values = kv(500)
    layer = QuantizedLayer(INT8, window=16, prefill=prefill)
    out = feed(layer, keys, values, [500])
    assert same(out, (keys, values) if prefill == "exact" else (round_trip(keys), round_trip(values)))
    assert layer.tokens_coded == 15
    assert layer.store.coded.buffer.capacity <= 64
    more = kv(1, seed=5)
    assert same(
        layer.update(*more),
        (
            torch.cat([round_trip(x)[:, :, -15:], round_trip(y)], dim=2)
            for x, y in zip((keys, values), more, strict=True)
        ),
    )


def test_a_sliding_layer_that_dropped_tokens_refuses_to_go_back():
    layer = QuantizedLayer(INT8, window=8, index=3)
    layer.update(*kv(20))
    assert not layer.is_croppable
    with pytest.raises(RuntimeError, match=r"layer 3 keeps 7 tokens of its window of 8.*activate_past_recording"):
        layer.crop(-1)
    layer.activate_past_recording()
    assert layer.is_croppable
    layer.update(*kv(4))
    layer.crop(-4)
    assert layer.get_seq_length() == 20


def test_crop_refuses_what_it_can_not_do_and_changes_nothing():
    keys, values = kv(10)
    layer = QuantizedLayer(INT8, index=2)
    layer.update(keys, values)
    before = codes_of(layer)
    with pytest.raises(ValueError, match=r"negative number.*got 4"):
        layer.crop(4)
    with pytest.raises(ValueError, match=r"layer 2 holds 10 tokens and can not remove 11"):
        layer.crop(-11)
    assert all(torch.equal(before[n], codes_of(layer)[n]) for n in before)


@pytest.mark.parametrize("residual", [0, 3])
def test_rows_move_with_codes_scales_sinks_and_residual(residual):
    keys, values = kv(10, batch=3)
    moves = {
        "reorder": (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        "select": (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        "mask": (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    }
    for move, rows in moves.values():
        layer, alone = (QuantizedLayer(INT8, sinks=2, residual=residual) for _ in range(2))
        feed(layer, keys, values, [9])
        move(layer)
        feed(alone, keys[rows], values[rows], [9])
        last = keys[rows][:, :, 9:], values[rows][:, :, 9:]
        assert same(layer.update(*last), alone.update(*last))


def test_a_copy_is_independent():
    keys, values = kv(12)
    layer = QuantizedLayer(INT8, sinks=1, residual=4)
    feed(layer, keys, values, [10])
    copied = copy.deepcopy(layer)
    layer.update(*kv(2, seed=9))
    assert copied.get_seq_length() == 10
    straight = QuantizedLayer(INT8, sinks=1, residual=4)
    feed(straight, keys, values, [10])
    last = keys[:, :, 10:11], values[:, :, 10:11]
    assert same(copied.update(*last), straight.update(*last))


def test_reset_forgets_all_and_takes_another_batch():
    layer = QuantizedLayer(INT8, sinks=1, residual=4)
    layer.update(*kv(10))
    layer.reset()
    assert (layer.nbytes, layer.get_seq_length(), layer.is_initialized) == (0, 0, False)
    layer.update(*kv(3, batch=5, dtype=torch.bfloat16))


def test_offload_moves_codes_and_prefetch_brings_them_back():
    keys, values = kv(10)
    layer = QuantizedLayer(INT8, sinks=1, residual=4)
    feed(layer, keys, values, [9])
    before = codes_of(layer)
    layer.offload()
    layer.prefetch()
    assert all(torch.equal(before[n], codes_of(layer)[n]) for n in before)
    assert layer.update(keys[:, :, 9:], values[:, :, 9:])[0].shape[2] == 10


def test_trimming_to_a_prefix_frees_bytes():
    layer = QuantizedLayer(INT8)
    layer.update(*kv(1000))
    before = layer.nbytes
    layer.crop(-900)
    assert layer.nbytes <= before // 4


def test_values_may_be_narrower_than_keys():
    keys, values = states(1, 4, 9, 24), states(1, 4, 9, 16)
    layer = QuantizedLayer(INT8, sinks=1, residual=2, prefill="coded")
    out = layer.update(keys, values)
    assert [x.shape[-1] for x in out] == [24, 16]


def test_gradients_stop_at_the_codes():
    keys, values = kv(4)
    layer = QuantizedLayer(INT8)
    layer.update(keys.requires_grad_(), values.requires_grad_())
    assert not any(x.requires_grad for x in layer.update(*kv(1)))


def test_a_layer_filled_under_inference_mode_goes_on_outside_of_it():
    layer = QuantizedLayer(INT8, sinks=2, residual=4)
    with torch.inference_mode():
        layer.update(*kv(20))
    assert layer.update(*kv(1))[0].shape[2] == 21


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "chunks"),
    # The seed's scale belongs to an update, so its rows alone are fed in the same updates.
    [
        ("int8", [8, 1, 1]),
        ("int8", [2, 6, 1, 1]),
        ("int8", [1] * 10),
        ("seed_int8", [8, 1, 1]),
        ("seed_fp8", [8, 1, 1]),
    ],
)
@pytest.mark.parametrize("residual", [0, 3])
def test_a_left_padded_row_reads_what_the_row_alone_reads(name, chunks, residual):
    keys, values = kv(10, batch=3)
    keys[0, :, :3] *= 50  # what padding holds must not matter
    settings = {"sinks": 2, "residual": residual, "prefill": "coded"}
    together = QuantizedLayer(quant(name), **settings)
    together.set_padding(RowPadding.from_mask(PADDED))
    out = feed(together, keys, values, chunks)
    for row, pad in enumerate([3, 0, 1]):
        alone = QuantizedLayer(quant(name), **settings)
        sizes = [8 - pad, 1, 1] if chunks[0] == 8 else [1] * (10 - pad)
        expected = feed(alone, keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:], sizes)
        assert same([x[row : row + 1, :, pad:] for x in out], expected)


def test_padding_follows_rows_and_beams():
    keys, values = kv(9, batch=6)
    layer = QuantizedLayer(INT8, sinks=2)
    layer.set_padding(RowPadding.from_mask(PADDED))
    feed(layer, keys, values, [8])
    layer.batch_select_indices(torch.tensor([4, 0]))
    out = layer.update(keys[[4, 0]][:, :, 8:], values[[4, 0]][:, :, 8:])
    # Rows 4 and 5 repeat the third row of the mask, whose first token is in column 1; rows 0 and 1 the first.
    assert torch.equal(out[0][0, :, 1:3], keys[4, :, 1:3])
    assert torch.equal(out[0][1, :, 3:5], keys[0, :, 3:5])
    assert not torch.equal(out[0][1, :, 5:7], keys[0, :, 5:7])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3), r"must be \[batch, columns\]"),
        (torch.tensor([[1, 1], [0, 0]]), r"no token at all in rows \[1\]"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_bad_padding_mask_is_named(mask, message):
    with pytest.raises(ValueError, match=message):
        RowPadding.from_mask(mask)


def test_padding_comes_before_the_first_update_and_must_fit_the_batch():
    layer = QuantizedLayer(INT8, index=1)
    layer.set_padding(RowPadding.from_mask(PADDED))
    with pytest.raises(ValueError, match="3 rows, and the first forward has 2"):
        layer.update(*kv(8))
    layer.reset()
    layer.update(*kv(8))
    with pytest.raises(RuntimeError, match="layer 1 holds 8 tokens already"):
        layer.set_padding(RowPadding.from_mask(PADDED))


BAD_STATES = {
    "nan": (
        lambda k, v: (k.index_fill(2, torch.tensor([0]), float("nan")), v),
        ValueError,
        "layer 7: .* NaN or infinity",
    ),
    "infinite values": (
        lambda k, v: (k, v.index_fill(3, torch.tensor([1]), float("inf"))),
        ValueError,
        "NaN or infinity",
    ),
    "another dtype": (lambda k, v: (k.half(), v.half()), ValueError, "layer 7 holds .*float32.* got .*float16"),
    "integers": (lambda k, v: (k.int(), v.int()), TypeError, "must be float32.* got torch.int32"),
    "no token": (lambda k, v: (k[:, :, :0], v[:, :, :0]), ValueError, "at least one token"),
    "another batch": (lambda k, v: (k[:1], v[:1]), ValueError, "batch=2.* got .*batch=1"),
    "another head_dim": (lambda k, v: (k[..., :8], v), ValueError, "key_dim=16.* got .*key_dim=8"),
    "keys without values": (lambda k, v: (k, v[:, :, :1]), ValueError, "must agree"),
    "three axes": (lambda k, v: (k[0], v[0]), ValueError, r"must be \[batch, kv_heads, tokens, head_dim\]"),
}


@pytest.mark.parametrize("residual", [0, 4])
@pytest.mark.parametrize("case", BAD_STATES)
def test_bad_states_are_named_and_change_nothing(case, residual):
    spoil, error, message = BAD_STATES[case]
    keys, values = kv(20)
    layer = QuantizedLayer(INT8, index=7, sinks=2, residual=residual)
    untouched = QuantizedLayer(INT8, index=7, sinks=2, residual=residual)
    for each in (layer, untouched):
        feed(each, keys, values, [15])
    with pytest.raises(error, match=message) as caught:
        layer.update(*spoil(*kv(3, seed=4)))
    print(f"\n{case}: {caught.value}")
    assert layer.nbytes_used == untouched.nbytes_used
    last = keys[:, :, 15:], values[:, :, 15:]
    assert same(layer.update(*last), untouched.update(*last))


def test_a_refused_first_update_leaves_an_empty_layer():
    layer = QuantizedLayer(INT8)
    keys, values = kv(3)
    keys[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.update(keys, values)
    assert (layer.is_initialized, layer.nbytes, layer.get_seq_length()) == (False, 0, 0)
    layer.update(*kv(3, batch=1))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("residual", [0, 3])
@pytest.mark.parametrize("history", [[20], [20, 1], [5, 1, 1], []])
def test_an_update_can_be_undone(window, residual, history):
    keys, values = kv(40)
    layer = QuantizedLayer(INT8, window=window, residual=residual)
    straight = QuantizedLayer(INT8, window=window, residual=residual)
    for each in (layer, straight):
        feed(each, keys, values, history)
    layer.update(*kv(1, seed=6))
    assert layer.undo_update()
    start = sum(history)
    last = keys[:, :, start : start + 2], values[:, :, start : start + 2]
    assert layer.get_seq_length() == start
    assert same(layer.update(*last), straight.update(*last))


def test_identity_equals_transformers_dynamic_layer():
    keys, values = kv(20)
    ours, theirs = QuantizedLayer(IDENTITY), DynamicLayer()
    for start, end in [(0, 9), (9, 10), (10, 20)]:
        pair = keys[:, :, start:end], values[:, :, start:end]
        assert same(ours.update(*pair), theirs.update(*pair))
