"""KIVI: its codes, and stores whose tokens wait for their block."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from oracles import states, tiny_llama
from test_attention import fused, left_padded, logits_over_steps
from test_caches_quantized import generate, ids, tiny_gemma
from test_layers_quantized import codes_of, feed, kv, same

from hf_kvq import ATTENTION, PRESETS, QuantizedCache, QuantizedSlidingWindowCache
from hf_kvq.codecs import make_codec, make_codecs
from hf_kvq.config import AffineConfig, KiviConfig, LayerQuant
from hf_kvq.layers import QuantizedLayer, RowPadding
from hf_kvq.states.region import Region

KIVI4 = PRESETS["kivi4"].for_layer(0, 1)
BLOCK = 32
DIMS = [40, 64, 80, 128]
SIDES = pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])


def groups_of(x: torch.Tensor, keys: bool) -> torch.Tensor:
    """The elements of each group in the last axis."""
    if keys:
        return x.unflatten(2, (-1, BLOCK)).transpose(3, 4)
    size = {40: 20, 64: 32, 80: 20, 128: 32, 256: 32, 16: 16}[x.shape[3]]
    return x.unflatten(3, (-1, size))


def number_of(value: float, towards: float) -> float:
    """The float16 nearest to `value` on the side of `towards`."""
    near = np.float16(value)
    wrong = float(near) > value if towards < 0 else float(near) < value
    return float(np.nextafter(near, np.float16(towards)) if wrong else near)


def oracle(group: list[float], bits: int) -> tuple[float, float]:
    """Scale and minimum of one group."""
    minimum = number_of(min(group), -np.inf)
    step = (np.float32(max(group)) - np.float32(minimum)) / np.float32(2**bits - 1)
    return number_of(float(step), np.inf), minimum


def decoded(x: torch.Tensor, config: KiviConfig | AffineConfig, keys: bool) -> torch.Tensor:
    codec = make_codec(config, keys=keys)
    return codec.decode(codec.encode(x), head_dim=x.shape[-1], dtype=x.dtype)


def as_stored(x: torch.Tensor, keys: bool, *, sinks: int = 0, residual: int = 0) -> torch.Tensor:
    """What is read of `x`: whole blocks behind the sinks as codes, the rest as it is."""
    out = x.clone()
    count = max(x.shape[2] - sinks - residual, 0) // BLOCK * BLOCK
    if count:
        out[:, :, sinks : sinks + count] = decoded(x[:, :, sinks : sinks + count], KiviConfig(), keys)
    return out


def both_as_stored(keys, values, **settings):
    return as_stored(keys, True, **settings), as_stored(values, False, **settings)


@SIDES
@pytest.mark.parametrize("bias", [0.0, 300.0])
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_every_element_is_within_half_a_scale_on_the_grid_of_its_group(dim, bits, bias, keys):
    x = states(1, 2, 2 * BLOCK, dim) + bias
    given, got = groups_of(x, keys), groups_of(decoded(x, KiviConfig(bits=bits), keys).double(), keys)
    for group, read in zip(given.flatten(0, -2).tolist(), got.flatten(0, -2).tolist(), strict=True):
        scale, minimum = oracle(group, bits)
        for element, found in zip(group, read, strict=True):
            code = (found - minimum) / scale
            assert -1e-3 < code < 2**bits - 1 + 1e-3
            assert abs(code - round(code)) < 2e-3
            assert abs(element - found) <= scale / 2 + 1e-6 * abs(element)


@SIDES
@pytest.mark.parametrize("bias", [0.0, 1e5, -1e6, 1e30, -1e30])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 1e5])
def test_the_error_is_bounded_at_any_bias_also_beyond_float16(spread, bias, keys):
    x = states(1, 2, BLOCK, 64) * spread + bias
    groups = groups_of(x.double(), keys)
    largest, span = groups.abs().amax(-1), groups.amax(-1) - groups.amin(-1)
    # The minimum is rounded down by a neighbour's distance at most, the scale up likewise.
    ulp = torch.where(largest > 65504, 2.0**-7, 2.0**-10)
    step = (span + ulp * largest) / 15 * (1 + ulp) + 2.0**-24
    error = (groups_of(decoded(x, KiviConfig(), keys).double(), keys) - groups).abs().amax(-1)
    assert (error <= step / 2 + 1e-6 * largest).all()


@SIDES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decoding_into_a_dtype_rounds_once(dtype, keys):
    codec = make_codec(KiviConfig(), keys=keys)
    codes = codec.encode(states(2, 2, BLOCK, 64, dtype=dtype))
    assert torch.equal(
        codec.decode(codes, head_dim=64, dtype=dtype), codec.decode(codes, head_dim=64, dtype=torch.float32).to(dtype)
    )


@SIDES
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_bits_per_token_are_the_bytes_of_all_parts(dim, bits, keys):
    codec = make_codec(KiviConfig(bits=bits), keys=keys)
    nbytes = sum(part.nbytes for part in codec.encode(states(1, 3, BLOCK, dim)).values())
    assert codec.bits_per_token(3, dim, torch.float32) * BLOCK == nbytes * 8
    group = BLOCK if keys or dim % 32 == 0 else 20
    assert nbytes * 8 / (3 * BLOCK * dim) == bits + 2 * 16 / group


@pytest.mark.parametrize("group_size", [8, 24, 64])
def test_other_group_sizes_hold_their_bound(group_size):
    x = states(1, 2, 192, 40)
    config = KiviConfig(group_size=group_size)
    keys = x.unflatten(2, (-1, group_size))
    span = (keys.amax(3, keepdim=True) - keys.amin(3, keepdim=True)).expand_as(keys).reshape(x.shape)
    assert ((decoded(x, config, True) - x).abs() <= span / 30 * 1.01 + 1e-2).all()
    size = {8: 8, 24: 20, 64: 40}[group_size]
    values = x.unflatten(3, (-1, size))
    span = (values.amax(4, keepdim=True) - values.amin(4, keepdim=True)).expand_as(values).reshape(x.shape)
    assert ((decoded(x, config, False) - x).abs() <= span / 30 * 1.01 + 1e-2).all()


@pytest.mark.usefixtures("as_users_run_it")
def test_what_can_not_be_encoded_is_named():
    with pytest.raises(ValueError, match="blocks of 32 tokens, got 33 tokens"):
        make_codec(KiviConfig(), keys=True).encode(states(1, 1, 33, 16))
    with pytest.raises(ValueError, match=r"head_dim 18 .* does not fill whole bytes"):
        make_codec(KiviConfig(bits=2)).encode(states(1, 1, 32, 18))


def test_any_tokens_of_a_region_decode_as_they_do_within_all():
    region = Region(make_codecs(KIVI4), (40, 64))
    region.restart_at(5)
    region.append(states(2, 2, 96, 40), states(2, 2, 96, 64))
    whole = region.segment(5, 101)
    expected = whole.keys.decode(torch.float32), whole.values.decode(torch.float32)
    for first, end in [(5, 101), (5, 37), (6, 37), (5, 38), (36, 38), (60, 61), (37, 101)]:
        segment = region.segment(first, end)
        assert (segment.first, segment.end) == (first, end)
        for operand, states_ in zip((segment.keys, segment.values), expected, strict=True):
            assert torch.equal(operand.decode(torch.float32), states_[:, :, first - 5 : end - 5])
            part = operand.slice((end - first) // 3, end - first)
            assert part.tokens == end - first - (end - first) // 3
            assert torch.equal(part.decode(torch.float32), states_[:, :, first - 5 + (end - first) // 3 : end - 5])
            assert torch.equal(
                operand.of_rows(torch.tensor([1])).decode(torch.float32), states_[1:, :, first - 5 : end - 5]
            )


@pytest.mark.parametrize("sizes", [[100], [1] * 100, [37, 1, 62], [31, 1, 32, 36]], ids=str)
@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (4, 0), (3, 5), (0, 40)])
def test_whole_blocks_are_codes_and_all_else_is_exact_whatever_the_chunks(sizes, sinks, residual):
    keys, values = kv(100)
    layer, once = (QuantizedLayer(KIVI4, sinks=sinks, residual=residual, prefill="coded") for _ in range(2))
    out = feed(layer, keys, values, sizes)
    assert same(out, both_as_stored(keys, values, sinks=sinks, residual=residual))
    feed(once, keys, values, [100])
    assert codes_of(layer).keys() == codes_of(once).keys()
    assert all(torch.equal(part, codes_of(once)[name]) for name, part in codes_of(layer).items())
    assert layer.tokens_coded == (100 - sinks - residual) // BLOCK * BLOCK
    assert len(layer.store.residual) == 100 - sinks - layer.tokens_coded


def test_old_codes_never_change_when_tokens_are_added():
    keys, values = kv(300)
    layer = QuantizedLayer(KIVI4, residual=8)
    feed(layer, keys, values, [100])
    before = codes_of(layer)
    encoded = []
    for step in range(100, 300):
        layer.update(keys[:, :, step : step + 1], values[:, :, step : step + 1])
        encoded.append(layer.tokens_encoded)
    after = layer.store.coded.buffer.view(0, 64)
    assert all(torch.equal(part, after[name]) for name, part in before.items())
    assert before["key_codes"].shape[2] == 64
    assert encoded[-1] == layer.tokens_coded == 288, "no token is encoded twice"


@pytest.mark.parametrize("residual", [0, 5])
@pytest.mark.parametrize("removed", [1, 4, 5, 33, 40, 70, 96, 99])
def test_a_crop_into_a_block_keeps_what_was_read_and_goes_on(removed, residual):
    keys, values = kv(170)
    layer = QuantizedLayer(KIVI4, sinks=4, residual=residual, prefill="coded")
    read = feed(layer, keys, values, [100])
    read, before = [x.clone() for x in read], codes_of(layer)
    layer.crop(-removed)
    length = 100 - removed
    kept = layer.tokens_coded
    assert kept == min((96 - residual) // BLOCK, max(length - 4, 0) // BLOCK) * BLOCK
    assert all(torch.equal(part, before[name][:, :, :kept]) for name, part in codes_of(layer).items())
    out = feed(layer, keys[:, :, 100:], values[:, :, 100:], [1] * 40)
    start = min(4 + kept, length)
    for is_keys, given, states_, now in zip((True, False), (keys, values), read, out, strict=True):
        rest = torch.cat([states_[:, :, start:length], given[:, :, 100:140]], dim=2)
        expected = as_stored(rest, is_keys, sinks=max(4 - start, 0), residual=residual)
        assert torch.equal(now, torch.cat([states_[:, :, :start], expected], dim=2))


def test_a_crop_far_back_decodes_no_more_than_a_block():
    layer = QuantizedLayer(KIVI4)
    layer.update(*kv(1000))
    layer.crop(-900)
    assert (layer.tokens_coded, len(layer.store.residual)) == (96, 4)
    assert layer.store.residual.buffer.capacity == 64
    layer.crop(-50)
    assert (layer.tokens_coded, len(layer.store.residual)) == (32, 18)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("removed", [0, 1, 5, 11])
@pytest.mark.parametrize("residual", [0, 4])
def test_a_recorded_forward_is_taken_back_without_a_trace(residual, removed, window):
    keys, values = kv(100)

    def fed(*sizes):
        layer = QuantizedLayer(KIVI4, residual=residual, window=window, prefill="coded")
        layer.activate_past_recording()
        start = 0
        for size in sizes:
            layer.update(keys[:, :, start : start + size], values[:, :, start : start + size])
            start += size
            layer.crop(0)
        return layer

    straight, rolled = fed(56, 12 - removed), fed(56)
    rolled.update(keys[:, :, 56:68], values[:, :, 56:68])
    assert rolled.tokens_coded >= 64 - residual // 4 * 32
    rolled.crop(-removed)
    assert rolled.get_mask_sizes(1) == straight.get_mask_sizes(1)
    last = slice(70, 71)
    assert same(
        rolled.update(keys[:, :, last], values[:, :, last]), straight.update(keys[:, :, last], values[:, :, last])
    )
    assert rolled.tokens_coded == straight.tokens_coded


@pytest.mark.parametrize("residual", [0, 40])
@pytest.mark.parametrize("tokens", [1, 12, 150])
def test_an_update_can_be_undone_also_when_it_filled_a_block(tokens, residual):
    keys, values = kv(300)
    layer = QuantizedLayer(KIVI4, sinks=1, residual=residual, prefill="coded")
    feed(layer, keys, values, [60, 1, 1, 1, 1, 64])
    straight = copy.deepcopy(layer)
    layer.update(*kv(tokens, seed=7))
    assert layer.undo_update()
    rest = keys[:, :, 128:], values[:, :, 128:]
    assert same(feed(layer, *rest, [1] * 40), feed(straight, *rest, [1] * 40))
    assert all(torch.equal(part, codes_of(straight)[name]) for name, part in codes_of(layer).items())


@pytest.mark.parametrize("residual", [0, 40])
def test_every_step_can_be_undone_also_when_the_residual_moves_within_its_storage(residual):
    keys, values = kv(160)
    layer, straight = (QuantizedLayer(KIVI4, residual=residual) for _ in range(2))
    for step in range(160):
        layer.update(*kv(1, seed=7))
        assert layer.undo_update()
        pair = keys[:, :, step : step + 1], values[:, :, step : step + 1]
        assert same(layer.update(*pair), straight.update(*pair))


def test_rows_move_with_codes_scales_and_residual():
    keys, values = kv(80, batch=3)
    for rows in ([2, 0, 0], [1]):
        layer, alone = (QuantizedLayer(KIVI4, sinks=2, residual=3, prefill="coded") for _ in range(2))
        feed(layer, keys, values, [79])
        layer.reorder_cache(torch.tensor(rows))
        feed(alone, keys[rows], values[rows], [79])
        last = keys[rows][:, :, 79:], values[rows][:, :, 79:]
        assert same(layer.update(*last), alone.update(*last))


def test_a_copy_is_independent():
    keys, values = kv(80)
    layer = QuantizedLayer(KIVI4, sinks=1)
    feed(layer, keys, values, [60])
    copied = copy.deepcopy(layer)
    layer.update(*kv(20, seed=9))
    rest = keys[:, :, 60:], values[:, :, 60:]
    assert same(feed(copied, *rest, [1] * 20), both_as_stored(keys, values, sinks=1))


@pytest.mark.parametrize("window", [8, 40])
def test_a_sliding_layer_reads_its_window_and_drops_whole_blocks(window):
    keys, values = kv(120)
    layer = QuantizedLayer(KIVI4, window=window, prefill="coded")
    for step in range(120):
        out = layer.update(keys[:, :, step : step + 1], values[:, :, step : step + 1])
        whole = both_as_stored(keys[:, :, : step + 1], values[:, :, : step + 1])
        assert same(out, [x[:, :, -window:] for x in whole])
        assert layer.tokens_held < window + BLOCK
        assert len(layer.store.residual) < BLOCK


@pytest.mark.parametrize("waiting", [0, 10, 70])
def test_a_prompt_longer_than_the_window_reads_what_is_stored_of_it(waiting):
    keys, values = kv(220)
    layer = QuantizedLayer(KIVI4, window=40, prefill="coded")
    feed(layer, keys, values, [1] * waiting)
    out = layer.update(keys[:, :, waiting:215], values[:, :, waiting:215])
    whole = both_as_stored(keys[:, :, :215], values[:, :, :215])
    # Tokens that wait are still exact for this forward, and are encoded with those that come.
    before = both_as_stored(keys[:, :, :waiting], values[:, :, :waiting])
    first = max(waiting - 39, 0)
    assert same(
        out, [torch.cat([x[:, :, first:], y[:, :, waiting:]], dim=2) for x, y in zip(before, whole, strict=True)]
    )
    # The last 39 tokens begin a block of their own.
    step = layer.update(keys[:, :, 215:216], values[:, :, 215:216])
    assert same(step, both_as_stored(keys[:, :, 176:216], values[:, :, 176:216]))


def test_what_padding_holds_does_not_matter():
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :40] = 0
    keys, values = kv(70)
    found = []
    for noise in (1.0, 100.0):
        layer = QuantizedLayer(KIVI4, prefill="coded")
        layer.set_padding(RowPadding.from_mask(mask))
        spoiled = [torch.where(mask[:, None, :, None] > 0, x, x * noise) for x in (keys, values)]
        found.append([x[:, :, 40:].clone() for x in layer.update(*spoiled)])
        assert layer.store.depends_on_padding
    assert same(*found)


def test_codecs_of_a_layer_may_have_blocks_of_different_lengths():
    keys, values = kv(100)
    quant = LayerQuant(keys=KiviConfig(group_size=24), values=AffineConfig())
    layer = QuantizedLayer(quant, sinks=2, prefill="coded")
    out = feed(layer, keys, values, [50] + [1] * 50)
    assert layer.tokens_coded == 96
    for is_keys, config, given, read in zip(
        (True, False), (quant.keys, quant.values), (keys, values), out, strict=True
    ):
        assert torch.equal(read[:, :, 2:98], decoded(given[:, :, 2:98], config, is_keys))
        assert torch.equal(read[:, :, 98:], given[:, :, 98:])


def test_of_a_block_that_is_cut_what_is_still_exact_stays_so():
    keys, values = kv(205)
    config = KiviConfig(group_size=24)
    layer = QuantizedLayer(LayerQuant(keys=config, values=config), prefill="coded")
    layer.activate_past_recording()
    feed(layer, keys, values, [200])
    layer.crop(-130)  # codes reach column 192, so that exact tokens go back to column 64
    out = layer.update(keys[:, :, 200:201], values[:, :, 200:201])
    assert layer.tokens_coded == 48
    for is_keys, given, read in zip((True, False), (keys, values), out, strict=True):
        assert torch.equal(read[:, :, :64], decoded(given[:, :, :72], config, is_keys)[:, :, :64])
        assert torch.equal(read[:, :, 64:], given[:, :, [*range(64, 70), 200]])


@pytest.mark.parametrize("prefill", ["exact", "coded"])
@pytest.mark.parametrize(("scheme", "sinks", "residual"), [("kivi4", 4, 0), ("kivi4", 0, 0), ("kivi2", 3, 6)])
@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_gemma(window=40)], ids=["llama", "gemma"])
def test_fused_equals_dense_in_float64(make, scheme, sinks, residual, prefill):
    dense, mask = make().double(), left_padded(tokens=45)
    models = dense, fused(dense)
    caches = [QuantizedCache(x.config, scheme, sinks=sinks, residual=residual, prefill=prefill) for x in models]
    caches[0].set_padding(mask)  # over codes the mask says it
    expected, got = (
        logits_over_steps(model, cache, mask, first=45) for model, cache in zip(models, caches, strict=True)
    )
    torch.testing.assert_close(got[0][mask.bool()], expected[0][mask.bool()], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert caches[0].nbytes_used == caches[1].nbytes_used
    assert all(layer.tokens_coded for layer in caches[0].coded_layers)


@pytest.mark.parametrize("scheme", ["kivi4", "kivi2"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_greedy_generation_is_the_same_over_codes_and_over_states(make, scheme):
    model = make().double()
    expected = generate(model, ids(), QuantizedCache(model.config, scheme), max_new_tokens=24, min_new_tokens=24)
    model.set_attn_implementation(ATTENTION)
    cache = QuantizedCache(model.config, scheme)
    assert torch.equal(generate(model, ids(), cache, max_new_tokens=24, min_new_tokens=24), expected)
    assert cache.layers[-1].tokens_coded == 32, "a block fills on the way"


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_gemma(window=40)], ids=["llama", "gemma"])
def test_a_loaded_cache_gives_the_same_next_logits(make, tmp_path):
    model = make()
    cache = QuantizedCache(model.config, "kivi4", prefill="coded")
    model(ids(tokens=60), past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = QuantizedCache.load(tmp_path / "cache", model.config)
    assert (loaded.scheme, loaded.tokens_coded, loaded.nbytes_used) == (
        cache.scheme,
        cache.tokens_coded,
        cache.nbytes_used,
    )
    for step in range(12):  # a block of the full layer fills on the way
        token = ids(tokens=1, seed=step)
        assert torch.equal(model(token, past_key_values=loaded).logits, model(token, past_key_values=cache).logits)
    assert cache.layers[-1].tokens_coded == 64


@pytest.mark.parametrize(("scheme", "bits"), [("kivi4", 5), ("kivi2", 3)])
def test_bits_per_element_are_those_of_the_formula(scheme, bits):
    model = tiny_llama(head_dim=64)
    cache = QuantizedCache(model.config, scheme)
    model(ids(tokens=4 + 64), past_key_values=cache)
    assert cache.tokens_coded == 2 * 64
    assert cache.bits_per_element == (64 * bits + 4 * 32) / 68
    assert cache.nbytes == cache.nbytes_used


def test_a_bounded_cache_refuses_blocks_of_tokens():
    model = tiny_llama()
    cache = QuantizedSlidingWindowCache(model.config, "kivi4", window=64)
    with pytest.raises(ValueError, match=r"layer 0: this scheme encodes tokens in blocks of 32.*or QuantizedCache"):
        model(ids(), past_key_values=cache)
