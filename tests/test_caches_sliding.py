from __future__ import annotations

import copy
import gc
from itertools import pairwise

import pytest
import torch
from oracles import states, tiny_llama
from oracles_window import stream
from transformers import Gemma3TextConfig, LlamaConfig

from hf_kvq import Clusters, EvictedBlock, HeavyHitters, HookError, QuantizedCache, QuantizedSlidingWindowCache
from hf_kvq.kernels import Visibility
from hf_kvq.layers import BoundedLayer, QuantizedLayer
from hf_kvq.states.schedule import Schedule

WINDOW, SINKS, BLOCK = 24, 4, 8
CHUNKS = {"one by one": 1, "by seven": 7, "by 37": 37, "at once": 1000}
FAR_FIELDS = {
    "none": None,
    "heavy hitters": HeavyHitters(16),
    "clusters": Clusters(6),
    "both": (HeavyHitters(12), Clusters(4)),
}
WITH_SEEDS = FAR_FIELDS | {"mgf": Clusters(6, "mgf")}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(max_position_embeddings=4096)


def make(model, scheme: str = "identity", **settings) -> QuantizedSlidingWindowCache:
    return QuantizedSlidingWindowCache(model.config, scheme, **({"window": WINDOW, "block": BLOCK} | settings))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, ids, cache, chunk: int = 1000, attention: str = "hf_kvq", mask=None) -> torch.Tensor:
    model.set_attn_implementation(attention)
    out = []
    for begin in range(0, ids.shape[1], chunk):
        seen = cache.get_seq_length() + min(chunk, ids.shape[1] - begin)
        extra = (
            {} if mask is None else {"attention_mask": mask[:, :seen], "position_ids": positions(mask, cache, seen)}
        )
        out.append(model(ids[:, begin : begin + chunk], past_key_values=cache, **extra).logits)
    return torch.cat(out, dim=1)


def positions(mask, cache, seen):
    return (mask.cumsum(1) - 1).clamp(min=0)[:, cache.get_seq_length() : seen]


@torch.no_grad()
def banded(model, ids, window: int = WINDOW, sinks: int = SINKS) -> torch.Tensor:
    """Sinks and a window by a mask over the whole text, which is what a bounded cache must come to."""
    model.set_attn_implementation("sdpa")
    place = torch.arange(ids.shape[1])
    seen = (place <= place[:, None]) & ((place > place[:, None] - window) | (place < sinks))
    return model(ids, attention_mask=seen[None, None].expand(len(ids), -1, -1, -1)).logits


def kept_positions(cache, layer: int = 0) -> torch.Tensor:
    kept = cache.layers[layer].held.far.kept
    return kept.positions[:, :, : kept.most]


# What is seen


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_a_query_sees_the_sinks_and_its_window_whatever_the_chunks(model, chunk, sinks):
    ids = tokens(2, 90)
    got = feed(model, ids, make(model, sinks=sinks), chunk)
    torch.testing.assert_close(got, banded(model, ids, sinks=sinks), rtol=1e-4, atol=1e-3)


def test_a_window_of_another_size_is_another_output(model):
    ids = tokens(1, 150)
    assert (feed(model, ids, make(model)) - banded(model, ids, WINDOW + 1)).abs().max() > 0.1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", ["identity", "int8"])
def test_dense_and_fused_decode_alike(model, scheme, attention):
    ids = tokens(2, 90)
    fused, dense = (feed(model, ids, make(model, scheme), 1, name) for name in ("hf_kvq", attention))
    torch.testing.assert_close(dense, fused, rtol=1e-4, atol=2e-2 if scheme == "int8" else 1e-3)


def test_a_dense_forward_of_several_tokens_sees_all_of_them(model):
    ids = tokens(1, 60)
    model.set_attn_implementation("sdpa")
    whole = model(ids, use_cache=False).logits
    assert torch.equal(feed(model, ids, make(model), attention="sdpa"), whole)


@pytest.mark.parametrize("residual", [0, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [7, 37, 1000])
@pytest.mark.parametrize("far_field", [FAR_FIELDS["heavy hitters"], FAR_FIELDS["both"]], ids=["heavy", "both"])
def test_what_is_kept_does_not_depend_on_the_chunks(model, far_field, chunk, residual):
    ids, settings = tokens(2, 100), {"far_field": far_field, "prefill": "coded", "residual": residual}
    if residual:
        settings["prefill"] = "exact"
    first, second = make(model, **settings), make(model, **settings)
    by_token, by_chunk = feed(model, ids, first, 1), feed(model, ids, second, chunk)
    torch.testing.assert_close(by_chunk, by_token, rtol=1e-4, atol=5e-3)
    for layer in range(2):
        assert torch.equal(kept_positions(first, layer), kept_positions(second, layer))
        assert torch.equal(first.accounting()[layer]["clusters"], second.accounting()[layer]["clusters"])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("longest", [None, 40])
@pytest.mark.parametrize("chunk", [1, 11, 150])
def test_heavy_hitters_are_those_of_a_slow_reference(groups, longest, chunk):
    """Queries, keys and values of one layer, without a model; keys beyond the trained length are moved ahead."""
    config = LlamaConfig(
        hidden_size=16 * groups, num_attention_heads=groups, num_key_value_heads=1, head_dim=16, num_hidden_layers=1,
        max_position_embeddings=4096 if longest is None else longest + 1, attn_implementation="hf_kvq",
    )  # fmt: skip
    cache = QuantizedSlidingWindowCache(
        config, "identity", window=WINDOW, block=BLOCK, sinks=SINKS, far_field=HeavyHitters(12)
    )
    query, keys, values = (
        states(1, groups, 150, 16, seed=1),
        states(1, 1, 150, 16, seed=2),
        states(1, 1, 150, 16, seed=3),
    )
    output = []
    for begin in range(0, 150, chunk):
        part = slice(begin, begin + chunk)
        handle, _ = cache.update(keys[:, :, part], values[:, :, part], 0)
        some = query[:, :, part]
        seen = Visibility(begin, some.shape[2])
        output.append(handle.view.attend(some, seen, scaling=0.1))
    inv_freq = [10000.0 ** (-j / 8) for j in range(8)]
    expected, kept = stream(
        query[0] * 0.1, keys[0, 0], values[0, 0], window=WINDOW, sinks=SINKS, block=BLOCK, kept=12, longest=longest,
        inv_freq=inv_freq,
    )  # fmt: skip
    torch.testing.assert_close(torch.cat(output, dim=2)[0].double(), expected, rtol=1e-4, atol=1e-5)
    assert kept_positions(cache)[0, 0].tolist() == kept


@pytest.mark.parametrize("window", [2, 24, 33])
@pytest.mark.parametrize("block", [1, 8, 32])
def test_blocks_leave_in_order_and_never_from_a_window(window, block):
    schedule = Schedule(window, 4, block)
    for position in range(200):
        step = schedule.step(position)
        assert schedule.first_query(step) <= position <= schedule.last_query(step)
        seen = position + 1 - schedule.gone(step)
        assert seen >= min(window, position + 1 - 4)
        assert step <= 0 or seen < window + block
    assert all(
        after - before in (0, block) for before, after in pairwise(schedule.gone(schedule.step(p)) for p in range(200))
    )


# Memory


@pytest.mark.parametrize("far_field", WITH_SEEDS.values(), ids=WITH_SEEDS)
def test_bytes_stay_the_same_once_everything_is_full(model, far_field):
    cache = make(model, "int8", far_field=far_field)
    feed(model, tokens(1, 400), cache, 50)
    sizes = set()
    for seed in range(20):
        feed(model, tokens(1, BLOCK, seed=seed), cache, BLOCK)
        sizes.add(cache.nbytes)
    assert len(sizes) == 1
    every = QuantizedCache(model.config, "int8")
    feed(model, tokens(1, 560), every)
    if not isinstance(far_field, Clusters) or far_field.closure != "mgf":
        assert cache.nbytes < every.nbytes / 2


@pytest.mark.parametrize("far_field", WITH_SEEDS.values(), ids=WITH_SEEDS)
def test_every_token_is_accounted_for(model, far_field):
    cache = make(model, "int8", far_field=far_field)
    mask = torch.ones(2, 131, dtype=torch.long)
    mask[1, :35] = 0
    feed(model, tokens(2, 131), cache, 40, mask=mask)
    for counts in cache.accounting().values():
        assert counts["seen"].tolist() == [[131, 131], [96, 96]]
        assert torch.equal(counts["seen"], sum(number for place, number in counts.items() if place != "seen"))
        if isinstance(far_field, Clusters | tuple):
            assert counts["clusters"].min() > 0
            assert not counts["forgotten"].any()


@pytest.mark.parametrize("far_field", [None, HeavyHitters(1), Clusters(2), (HeavyHitters(1), Clusters(2))], ids=str)
@pytest.mark.parametrize("budget", [20_000, 60_000])
def test_a_budget_is_kept_and_nearly_used_up(far_field, budget):
    model = tiny_llama(head_dim=64, layers=1)
    cache = make(model, "int8", window=None, block=32, budget_bytes_per_head=budget, far_field=far_field)
    feed(model, tokens(1, 1200), cache, 400)
    # A bank's count of queries belongs to no head.
    held = (cache.nbytes_used - (8 if isinstance(far_field, Clusters | tuple) else 0)) / 2
    assert 0.8 * budget < held <= budget


def test_kept_positions_are_those_of_each_row(model):
    mask = torch.ones(2, 110, dtype=torch.long)
    mask[1, :37] = 0
    cache = make(model, "int8", far_field=HeavyHitters(40))
    assert cache.kept_positions() == {}
    cache.set_padding(mask)
    feed(model, tokens(2, 110), cache, 40, mask=mask)
    for layer, rows in cache.kept_positions().items():
        # 110 - 28 = 82 tokens left in ten blocks, and of the shorter row 73 - 28 = 45 in five: more than there are slots, and fewer.
        assert [row.shape for row in rows] == [(2, 40), (2, 40)]
        for row, left in zip(rows, (80, 40), strict=True):
            assert (row.diff(dim=1) > 0).all()
            assert row.min() >= SINKS
            assert row.max() < SINKS + left
        assert torch.equal(cache.accounting()[layer]["kept"], torch.full((2, 2), 40))
        assert rows[1].tolist() == [list(range(4, 44))] * 2


# Batches


@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        pytest.param(40, True, id="set_padding"),
        pytest.param(40, False, id="from the mask"),
        pytest.param(1, True, marks=pytest.mark.slow, id="set_padding, one by one"),
    ],
)
def test_left_padded_rows_equal_the_rows_alone(model, far_field, chunk, said):
    """The first column alone of a padded row says nothing of the padding that follows: one by one it must be said.

    In float64: where means of clusters are rounded to int8, the noise of float32 may move some over an edge.
    """
    model = copy.deepcopy(model).double()
    ids, mask = tokens(3, 80), torch.ones(3, 80, dtype=torch.long)
    mask[1, :13] = 0
    mask[2, :37] = 0
    cache = make(model, far_field=far_field, prefill="coded")
    if said:
        cache.set_padding(mask)
    together = feed(model, ids, cache, chunk, mask=mask)
    for row, padding in enumerate((0, 13, 37)):
        alone = make(model, far_field=far_field, prefill="coded")
        expected = feed(model, ids[row : row + 1, padding:], alone, chunk)
        torch.testing.assert_close(together[row : row + 1, padding:], expected, rtol=1e-5, atol=1e-4)
        for layer, counts in alone.accounting().items():
            for place, number in counts.items():
                assert torch.equal(cache.accounting()[layer][place][row], number[0]), place
            if alone.layers[layer].held.far.kept is not None:
                mine = cache.layers[layer].held.far.kept
                assert torch.equal(mine.positions[row, :, : mine.filled[row]], kept_positions(alone, layer)[0])


def test_a_dense_padded_batch_equals_the_rows_alone(model):
    ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.long)
    mask[1, :13] = 0
    cache = make(model)
    cache.set_padding(mask)
    together = feed(model, ids, cache, 1, "sdpa", mask)
    for row, padding in enumerate((0, 13)):
        expected = feed(model, ids[row : row + 1, padding:], make(model), 1, "sdpa")
        torch.testing.assert_close(together[row : row + 1, padding:], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
def test_one_rows_tokens_never_change_another_rows_output(model, far_field, chunk):
    ids = tokens(3, 60)
    other = ids.clone()
    other[1] = tokens(60, seed=5)
    first, second = (feed(model, x, make(model, "int8", far_field=far_field), chunk) for x in (ids, other))
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    assert not torch.equal(first[1], second[1])


# What transformers does with a cache


def generate(model, cache, ids=None, **settings) -> torch.Tensor:
    model.set_attn_implementation("hf_kvq")
    ids = tokens(1, 30) if ids is None else ids
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None} | settings
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings)


@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_generate_runs_on_past_the_window(model, far_field, settings):
    cache = make(model, "int8", far_field=far_field)
    assert generate(model, cache, **settings).shape[1] == 70
    for counts in cache.accounting().values():
        assert torch.equal(counts["seen"], sum(number for place, number in counts.items() if place != "seen"))
        assert counts["seen"].unique().tolist() == [69]


def test_greedy_generation_is_that_of_the_banded_model(model):
    ids = tokens(1, 30)
    out = generate(model, make(model), ids)
    for length in range(30, 70):
        assert banded(model, out[:, :length])[0, -1].argmax() == out[0, length]


@pytest.mark.parametrize("far_field", [None, HeavyHitters(16)], ids=["none", "heavy"])
def test_beams_take_their_rows_along(model, far_field):
    ids, cache = tokens(3, 60), make(model, far_field=far_field)
    feed(model, ids, cache, 20)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    fresh = make(model, far_field=far_field)
    feed(model, ids[order], fresh, 20)
    rest = tokens(3, 30, seed=9)
    torch.testing.assert_close(feed(model, rest, cache, 1), feed(model, rest, fresh, 1), rtol=1e-5, atol=1e-4)


def test_rows_are_repeated_selected_copied_and_forgotten(model):
    ids, cache = tokens(2, 60), make(model, far_field=FAR_FIELDS["both"])
    feed(model, ids, cache, 20)
    twin = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1, 2]))
    rest = tokens(2, 30, seed=9)
    torch.testing.assert_close(feed(model, rest, cache, 1), feed(model, rest, twin, 1), rtol=1e-5, atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = make(model, far_field=FAR_FIELDS["both"])
    assert torch.equal(feed(model, ids, cache, 20), feed(model, ids, again, 20))


# Rollback


@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
def test_a_recorded_forward_is_taken_back_exactly(model, far_field):
    """Queries that were cropped leave no weight behind, and what left the window for them is back."""
    ids, drafts = tokens(1, 51), tokens(1, 12, seed=3)
    cache, plain = (make(model, far_field=far_field) for _ in range(2))
    cache.activate_past_recording()
    for c in (cache, plain):
        feed(model, ids, c, 1)
    feed(model, drafts, cache, 12)
    assert cache.is_croppable
    cache.crop(-12)
    # What a query sees is decided when it comes.
    assert torch.equal(feed_one(model, cache), feed_one(model, plain))
    for layer in range(2):
        mine, theirs = cache.layers[layer].held, plain.layers[layer].held
        mine.settle(mine.seen)
        assert mine.accounting().keys() == theirs.accounting().keys()
        assert all(torch.equal(mine.accounting()[place], theirs.accounting()[place]) for place in mine.accounting())
        if mine.mass is not None:
            assert torch.equal(mine.mass.tensor, theirs.mass.tensor)
            assert torch.equal(mine.far.kept.mass, theirs.far.kept.mass)
    rest = tokens(1, 20, seed=4)
    assert torch.equal(feed(model, rest, cache, 1), feed(model, rest, plain, 1))


def test_accepted_drafts_leave_the_weight_that_they_gave(model):
    ids, drafts = tokens(1, 51), tokens(1, 12, seed=3)
    cache, plain = (make(model, far_field=HeavyHitters(16)) for _ in range(2))
    cache.activate_past_recording()
    feed(model, ids, cache, 1)
    feed(model, drafts, cache, 12)
    cache.crop(-8)
    feed(model, torch.cat([ids, drafts[:, :4]], dim=1), plain, 1)
    for c in (cache, plain):
        feed_one(model, c)
    for layer in range(2):
        mine, theirs = cache.layers[layer].held, plain.layers[layer].held
        mine.settle(mine.seen)
        columns = min(mine.mass.tensor.shape[2], theirs.mass.tensor.shape[2])
        torch.testing.assert_close(
            mine.mass.tensor[..., -columns:], theirs.mass.tensor[..., -columns:], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("far_field", WITH_SEEDS.values(), ids=WITH_SEEDS)
def test_what_left_can_not_be_cropped_back(model, far_field):
    cache = make(model, far_field=far_field)
    feed(model, tokens(1, 20), cache)
    assert cache.is_croppable
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    feed(model, tokens(1, 60), cache)
    assert not cache.is_croppable
    before = feed_one(model, copy.deepcopy(cache))
    with pytest.raises(RuntimeError, match=r"layer 0: tokens have left the window.*activate_past_recording"):
        cache.crop(-40)
    assert torch.equal(before, feed_one(model, cache))


def feed_one(model, cache) -> torch.Tensor:
    return feed(model, tokens(1, 1, seed=8), cache)


def test_prompt_lookup_without_a_far_field_is_plain_greedy_decoding(model):
    ids = torch.cat([tokens(1, 20)] * 2, dim=1)
    plain = generate(model, make(model), ids)
    assert torch.equal(generate(model, make(model), ids, prompt_lookup_num_tokens=4), plain)


@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
def test_prompt_lookup_keeps_the_accounts(model, far_field):
    cache = make(model, "int8", far_field=far_field)
    out = generate(model, cache, torch.cat([tokens(1, 20)] * 2, dim=1), prompt_lookup_num_tokens=4)
    for counts in cache.accounting().values():
        assert counts["seen"].unique().tolist() == [out.shape[1] - 1]
        assert torch.equal(counts["seen"], sum(number for place, number in counts.items() if place != "seen"))


# The hook


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
def test_a_hook_sees_every_block_once_in_each_layer(model, far_field, chunk):
    cache, blocks = make(model, far_field=far_field), []
    handle = cache.register_chunk_hook(blocks.append)
    ids = tokens(2, 76)
    logits = feed(model, ids, cache, chunk)
    assert torch.equal(logits, feed(model, ids, make(model, far_field=far_field), chunk))
    for layer in range(2):
        mine = [block for block in blocks if block.layer == layer]
        gone = torch.cat([block.positions[0] for block in mine])
        assert gone.tolist() == list(range(4, 4 + BLOCK * len(mine)))
        assert len(mine) == (76 - WINDOW - SINKS) // BLOCK
        assert all(block.rows.tolist() == [0, 1] for block in mine)
        assert all((block.mass is not None) == isinstance(far_field, HeavyHitters | tuple) for block in mine)
        assert (mine[-1].receipt is not None) == isinstance(far_field, Clusters | tuple)
    handle.remove()
    count = len(blocks)
    feed(model, tokens(2, 10, seed=2), cache, chunk)
    assert len(blocks) == count


def test_a_hook_sees_the_states_that_the_model_stored(model):
    exact, cache, blocks = QuantizedCache(model.config, "identity"), make(model, "int8"), []
    cache.register_chunk_hook(blocks.append)
    ids = tokens(2, 60)
    feed(model, ids, exact)
    feed(model, ids, cache)
    block = next(block for block in blocks if block.layer == 0)
    keys, _ = exact.layers[0].store.view(0).dense()
    bound = keys.abs().amax(dim=-1, keepdim=True)[:, :, 4:12] / 127
    assert ((block.keys - keys[:, :, 4:12]).abs() <= bound).all()
    block.keys.zero_()
    assert torch.equal(feed_one_row(model, cache), feed_one_row(model, fed(model, ids, "int8")))


def fed(model, ids, scheme):
    cache = make(model, scheme)
    feed(model, ids, cache)
    return cache


def feed_one_row(model, cache):
    return feed(model, tokens(2, 1, seed=8), cache)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 30])
@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
def test_a_hook_that_raises_leaves_the_cache_as_it_was(model, far_field, chunk):
    def fails(block: EvictedBlock) -> None:
        if block.layer == 1 and block.positions[0, 0] >= 20:
            raise KeyError("disk full")

    ids = tokens(2, 64)
    cache, plain = (make(model, "int8", far_field=far_field) for _ in range(2))
    handle = cache.register_chunk_hook(fails)
    message = r"chunk hook .*fails raised KeyError \('disk full'\) at layer 1, tokens 20 to 27"
    with pytest.raises(HookError, match=message):
        feed(model, ids, cache, chunk)
    done = cache.get_seq_length()
    assert 0 < done < 64
    assert done % chunk == 0
    handle.remove()
    feed(model, ids[:, :done], plain, chunk)
    assert [c["seen"].tolist() for c in cache.accounting().values()] == [
        c["seen"].tolist() for c in plain.accounting().values()
    ]
    assert torch.equal(feed(model, ids[:, done:], cache, chunk), feed(model, ids[:, done:], plain, chunk))


def test_a_hook_works_inside_generate_with_beams_and_batches(model):
    cache, blocks = make(model, "int8", far_field=HeavyHitters(8)), []
    cache.register_chunk_hook(blocks.append)
    generate(model, cache, tokens(2, 30), num_beams=2)
    assert {len(block.rows) for block in blocks} == {4}
    assert len(blocks) == 2 * ((69 - WINDOW - SINKS) // BLOCK)


def test_removed_hooks_leave_nothing_behind(model):
    cache = make(model)
    handle = cache.register_chunk_hook(lambda block: None)
    assert "hooks 1" in repr(cache)
    handle.remove()
    gc.collect()
    assert "hooks 0" in repr(cache)


# A model's own layers, and models


def test_a_models_own_sliding_layers_keep_their_window():
    config = Gemma3TextConfig(
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=8, hidden_size=16, sliding_window=12,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    cache = QuantizedSlidingWindowCache(config, "int8", window=WINDOW)
    assert [type(layer) for layer in cache.layers] == [BoundedLayer, QuantizedLayer, BoundedLayer]
    assert cache.layers[1].window == 12
    assert cache.layers[1].sinks == 0


def test_a_model_without_full_attention_is_refused():
    config = Gemma3TextConfig(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=12)
    with pytest.raises(ValueError, match="nothing would be bounded"):
        QuantizedSlidingWindowCache(config, "int8", window=WINDOW)


def test_a_stream_past_the_trained_length_moves_the_sinks_along():
    """Within the trained length nothing moves; beyond it the outputs part from those of a model that was trained further."""
    short, long = (tiny_llama(max_position_embeddings=length) for length in (64, 4096))
    ids = tokens(1, 160)
    got, other = (feed(m, ids, make(m, far_field=HeavyHitters(8)), 20) for m in (short, long))
    assert torch.equal(got[:, :50], other[:, :50])
    assert (got[:, 100:] - other[:, 100:]).abs().max() > 1e-2


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window must be at least 2"),
        ({"window": 8, "residual": 8}, "above the residual of 8"),
        ({"window": None}, "either window or budget_bytes_per_head"),
        ({"budget_bytes_per_head": 10}, "either window or budget_bytes_per_head"),
        ({"block": 0}, "block must be at least 1"),
        ({"far_field": "heavy"}, "far_field must be None, HeavyHitters"),
        ({"far_field": (HeavyHitters(3), HeavyHitters(4))}, "a pair of both"),
        ({"sinks": -1}, "sinks must be a whole number"),
        ({"prefill": "fast"}, "prefill must be"),
        ({"scheme": "int7"}, "unknown scheme 'int7'"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_arguments_are_named(model, settings, message):
    with pytest.raises(ValueError, match=message):
        make(model, **({"scheme": "int8"} | settings))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: HeavyHitters(0), "tokens must be"),
        (lambda: HeavyHitters(4, decay=1.5), "decay must be"),
        (lambda: Clusters(1), "count must be"),
        (lambda: Clusters(4, "seed"), "closure must be one of 'bounded', 'mgf'"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_far_field_can_not_hold_a_bad_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_budget_that_is_too_small_says_what_it_takes(model):
    cache = make(model, "int8", window=None, budget_bytes_per_head=500)
    with pytest.raises(ValueError, match=r"layer 0: budget_bytes_per_head=500 does not pay .*; give at least \d+"):
        feed(model, tokens(1, 10), cache)
    assert cache.get_seq_length() == 0


def test_a_far_field_needs_attention_over_codes(model):
    cache = make(model, far_field=HeavyHitters(4))
    with pytest.raises(ValueError, match=r"layer 0: a far field needs attention over codes.*far_field=None"):
        feed(model, tokens(1, 10), cache, attention="sdpa")
    assert cache.get_seq_length() == 0
    feed(model, tokens(1, 10), cache)
    with pytest.raises(ValueError, match="a far field needs attention over codes"):
        feed(model, tokens(1, 10), cache, attention="sdpa")
    assert cache.get_seq_length() == 10


def test_padding_at_the_right_and_in_between_is_refused(model):
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    with pytest.raises(ValueError, match="padding_side = 'left'"):
        make(model).set_padding(mask)
    cache = make(model)
    feed(model, ids, cache)
    later = torch.ones(2, 30, dtype=torch.long)
    later[1, 20:25] = 0
    with pytest.raises(ValueError, match="layer 0: the attention mask hides columns"):
        feed(model, tokens(2, 10), cache, mask=later)
    assert cache.get_seq_length() == 20


def test_a_mask_of_the_users_own_is_refused(model):
    cache = make(model)
    model.set_attn_implementation("hf_kvq")
    with pytest.raises(ValueError, match="gives a mask of its own; use QuantizedCache"):
        model(tokens(1, 8), attention_mask=torch.ones(1, 1, 8, 8).tril().bool(), past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("far_field", [None, HeavyHitters(4)], ids=["none", "heavy"])
def test_states_that_are_not_finite_are_refused_and_change_nothing(model, far_field):
    cache = make(model, far_field=far_field)
    feed(model, tokens(1, 40), cache)
    before = feed_one(model, copy.deepcopy(cache))
    keys = torch.full((1, 2, 1, 16), torch.nan)
    with pytest.raises(ValueError, match="layer 0: key or value states hold NaN"):
        cache.update(keys, keys, 0)
    assert torch.equal(feed_one(model, cache), before)


def test_tokens_that_nobody_asked_about_are_stored(model):
    """An update without attention, as tools that fill a cache by hand do it."""
    model.set_attn_implementation("hf_kvq")
    cache = make(model, far_field=HeavyHitters(4))
    for layer in range(2):
        for _ in range(2):
            cache.update(states(1, 2, 30, 16), states(1, 2, 30, 16), layer)
    assert cache.get_seq_length() == 60
    assert cache.accounting()[1]["seen"].tolist() == [[60, 60]]
    assert cache.accounting()[1]["kept"].tolist() == [[4, 4]]
