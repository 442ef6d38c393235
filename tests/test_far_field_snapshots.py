"""The generation hook: in memory, in a folder, and back."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from oracles import states
from safetensors.torch import load_file, save_file

from hf_kvq.codecs.affine import dequantize_kv_cache
from hf_kvq.codecs.sorted_profile import fit_sorted_profile
from hf_kvq.far_field.bank import ClusterBank
from hf_kvq.far_field.block import EvictedBlock
from hf_kvq.far_field.outliers import dequantize_cluster_outliers, quantize_cluster_outliers
from hf_kvq.far_field.snapshots import OutlierSnapshots

BATCH, HEADS, TOKENS = 3, 2, 15


def block(*, layer=0, rows=(0, 2), seed=0, dtype=torch.float32, tokens=TOKENS, **changes):
    keys = states(len(rows), HEADS, tokens, 8, seed=seed, dtype=dtype)
    values = states(len(rows), HEADS, tokens, 6, seed=seed + 50, dtype=dtype)
    positions = torch.arange(tokens).expand(len(rows), tokens) + 100 * seed
    return EvictedBlock(layer=layer, rows=torch.tensor(rows), keys=keys, values=values, positions=positions, **changes)


def with_receipt(bank, given, *, valid=None):
    valid = torch.ones(given.keys.shape[:3], dtype=torch.bool) if valid is None else valid
    positions = given.positions[:, None].expand(-1, HEADS, -1)
    return dataclasses.replace(given, receipt=bank.absorb(given.rows, given.keys, given.values, positions, valid))


def taken(hook, *blocks):
    for one in blocks:
        hook(one)
    return hook.encodings


def assert_equal_clusters(found, expected):
    assert list(found) == list(expected)
    for cluster, one in found.items():
        two = expected[cluster]
        assert one.cluster_id == two.cluster_id == cluster
        for name in ("outlier_k", "outlier_v"):
            a, b = getattr(one, name), getattr(two, name)
            assert (a is None) == (b is None)
            if a is not None:
                assert (a.scale, a.mode, a.codes.dtype) == (b.scale, b.mode, b.codes.dtype)
                assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
        for name in ("tail_k", "tail_v"):
            a, b = getattr(one, name), getattr(two, name)
            assert (a is None) == (b is None)
            assert a is None or a.to_bytes() == b.to_bytes()
        for name in ("outlier_indices", "member_indices", "tail_indices"):
            a, b = getattr(one, name), getattr(two, name)
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and np.array_equal(a, b))


def assert_equal_encodings(found, expected):
    assert list(found) == list(expected)
    for layer in found:
        assert len(found[layer]) == len(expected[layer])
        for one, two in zip(found[layer], expected[layer], strict=True):
            assert one.layer == two.layer == layer
            assert [(h.row, h.head) for h in one.heads] == [(h.row, h.head) for h in two.heads]
            for a, b in zip(one.heads, two.heads, strict=True):
                assert np.array_equal(a.positions, b.positions)
                assert_equal_clusters(a.clusters, b.clusters)


def a_generation():
    """Blocks of two layers: with a receipt, with mass, with neither, of one token, and of none."""
    bank = ClusterBank(3, batch=BATCH, birth_threshold=2.0, outlier_top_k=2)
    mass = torch.rand(2, HEADS, TOKENS, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(2, HEADS, TOKENS, generator=torch.Generator().manual_seed(1)) > 0.3
    return [
        with_receipt(bank, block(layer=4)),
        block(layer=1, seed=1, mass=mass),
        with_receipt(bank, block(layer=4, seed=2), valid=valid),
        block(layer=1, seed=3, rows=(1,)),
        block(layer=1, seed=4, tokens=1),
        block(layer=1, seed=5, tokens=0),
    ]


def test_a_receipt_decides_the_clusters_of_every_row_and_head():
    bank = ClusterBank(3, batch=BATCH, birth_threshold=2.0, outlier_top_k=2)
    hook = OutlierSnapshots()
    for seed in range(3):
        given = with_receipt(bank, block(seed=seed))
        hook(given)
    snapshot = hook.encodings[0][2]
    assert [(h.row, h.head) for h in snapshot.heads] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    for place, head in enumerate(snapshot.heads):
        row, kv_head = divmod(place, HEADS)
        expected = quantize_cluster_outliers(
            given.receipt["per_cluster_outlier_tokens"][row][kv_head],
            given.keys[row, kv_head][:, None],
            given.values[row, kv_head][:, None],
        )
        assert_equal_clusters(head.clusters, expected)
        assert head.positions.tolist() == given.positions[row].tolist()
    assert max(len(head.clusters) for head in snapshot.heads) > 1


def test_tokens_that_the_bank_was_not_given_are_not_in_the_snapshot():
    bank = ClusterBank(3, batch=BATCH, birth_threshold=2.0, outlier_top_k=2)
    valid = torch.rand(2, HEADS, TOKENS, generator=torch.Generator().manual_seed(1)) > 0.3
    given = with_receipt(bank, block(seed=2), valid=valid)
    (snapshot,) = taken(OutlierSnapshots(), given)[0]
    for place, head in enumerate(snapshot.heads):
        row, kv_head = divmod(place, HEADS)
        kept = valid[row, kv_head].nonzero()[:, 0]
        assert 0 < len(kept) < TOKENS
        assert head.positions.tolist() == given.positions[row, kept].tolist()
        for q in head.clusters.values():
            tokens = kept[q.outlier_indices]
            expected = given.keys[row, kv_head, tokens][:, None]
            error = (dequantize_kv_cache(q.outlier_k) - expected).abs().max()
            assert error <= q.outlier_k.scale / 2 * (1 + 1e-5)
        assert sum(len(q.member_indices) for q in head.clusters.values()) == len(kept)


def test_without_a_receipt_the_outliers_are_the_tokens_with_most_mass():
    mass = torch.rand(2, HEADS, TOKENS, generator=torch.Generator().manual_seed(0))
    (snapshot,) = taken(OutlierSnapshots(outliers=3), block(mass=mass))[0]
    for place, head in enumerate(snapshot.heads):
        expected = sorted(range(TOKENS), key=lambda i: -mass[divmod(place, HEADS)][i].item())[:3]
        assert head.clusters[0].outlier_indices.tolist() == sorted(expected)


def test_without_mass_the_outliers_are_the_keys_farthest_from_their_mean():
    given = block()
    (snapshot,) = taken(OutlierSnapshots(outliers=3), given)[0]
    for place, head in enumerate(snapshot.heads):
        keys = given.keys[divmod(place, HEADS)].double()
        expected = sorted(range(TOKENS), key=lambda i: -(keys[i] - keys.mean(0)).norm().item())[:3]
        (q,) = head.clusters.values()
        assert q.outlier_indices.tolist() == sorted(expected)
        assert q.member_indices.tolist() == list(range(TOKENS))
        tail = keys[[i for i in range(TOKENS) if i not in expected]][:, None].float()
        assert q.tail_k.to_bytes() == fit_sorted_profile(tail).to_bytes()


def test_a_receipt_that_names_no_outliers_leaves_the_choice_here():
    given = dataclasses.replace(block(), receipt={"birthed": 3})
    assert_equal_encodings(taken(OutlierSnapshots(), given), taken(OutlierSnapshots(), block()))


def test_a_receipt_without_members_gives_the_seeds_tails():
    given = block(rows=(1,))
    keys, values = given.keys[0, 0][:, None], given.values[0, 0][:, None]
    indices = torch.tensor([2, 7])
    split = {5: {"k": keys[indices], "v": values[indices], "indices": indices}}
    receipt = {"per_cluster_outlier_tokens": [[split, {}]]}
    (snapshot,) = taken(OutlierSnapshots(), dataclasses.replace(given, receipt=receipt))[0]
    assert_equal_clusters(snapshot.heads[0].clusters, quantize_cluster_outliers(split, keys, values))
    assert snapshot.heads[1].clusters == {}


def test_tokens_that_others_displaced_are_in_the_snapshot_in_their_place():
    bank = ClusterBank(3, batch=BATCH, birth_threshold=2.0, outlier_top_k=2)
    displaced = with_receipt(bank, block(seed=7, tokens=9))
    left = dataclasses.replace(block(seed=1), receipt=displaced.receipt)
    assert_equal_encodings(taken(OutlierSnapshots(), left), taken(OutlierSnapshots(), displaced))
    (snapshot,) = taken(OutlierSnapshots(), left)[0]
    assert snapshot.heads[0].positions.tolist() == list(range(700, 709))


def test_a_receipt_of_another_chunk_is_refused():
    receipt = dict(with_receipt(ClusterBank(3, batch=BATCH), block(tokens=9)).receipt)
    del receipt["chunk_keys"], receipt["chunk_values"], receipt["positions"]
    with pytest.raises(ValueError, match="9 assignments and 15 positions for 15 tokens"):
        OutlierSnapshots()(dataclasses.replace(block(), receipt=receipt))


def test_a_receipt_that_loses_a_token_is_refused():
    given = with_receipt(ClusterBank(3, batch=BATCH), block())
    receipt = dict(given.receipt)
    receipt["assignments"] = receipt["assignments"].clone()
    receipt["per_cluster_outlier_tokens"][0][0][0]["members"] = torch.arange(1, TOKENS)
    receipt["per_cluster_outlier_tokens"][0][0][0]["indices"] = torch.arange(1, 5)
    with pytest.raises(ValueError, match=r"tokens \[0\] are in no cluster"):
        OutlierSnapshots()(dataclasses.replace(given, receipt=receipt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_encoded_as_the_same_numbers_in_float32(dtype):
    given = block(dtype=dtype)
    wide = dataclasses.replace(given, keys=given.keys.float(), values=given.values.float())
    assert_equal_encodings(taken(OutlierSnapshots(), given), taken(OutlierSnapshots(), wide))


def test_a_snapshot_does_not_follow_what_becomes_of_the_states():
    given = block()
    found = taken(OutlierSnapshots(), given)
    before = dequantize_cluster_outliers(found[0][0].heads[0].clusters[0])
    positions = found[0][0].heads[0].positions.copy()
    given.keys.zero_()
    given.values.zero_()
    after = dequantize_cluster_outliers(found[0][0].heads[0].clusters[0])
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert np.array_equal(positions, found[0][0].heads[0].positions)


def test_the_oldest_chunks_are_dropped_and_counted():
    hook = OutlierSnapshots(capacity=3)
    found = taken(hook, *(block(layer=seed % 2, seed=seed) for seed in range(5)))
    assert (hook.chunks, hook.dropped) == (5, 2)
    assert repr(hook) == "OutlierSnapshots(chunks=5, held=3, dropped=2)"
    first_positions = {layer: [s.heads[0].positions[0] for s in chunks] for layer, chunks in found.items()}
    assert first_positions == {0: [200, 400], 1: [300]}


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_a_folder_gives_back_equal_encodings(tmp_path, mode):
    settings = {"mode": mode, "tail_family": "laplace", "tail_top_k": 2}
    hook = OutlierSnapshots(folder=tmp_path / "new" / "folder", **settings)
    streamed = taken(hook, *a_generation())
    expected = taken(OutlierSnapshots(**settings), *a_generation())
    assert {layer: len(chunks) for layer, chunks in expected.items()} == {4: 2, 1: 4}
    assert_equal_encodings(streamed, expected)
    assert_equal_encodings(OutlierSnapshots.read(tmp_path / "new" / "folder"), expected)
    assert (hook.chunks, hook.dropped, len(hook._held)) == (6, 0, 0)
    assert str(tmp_path) in repr(hook)


def test_a_folder_without_chunks_is_an_empty_account(tmp_path):
    OutlierSnapshots(folder=tmp_path)
    assert OutlierSnapshots.read(tmp_path) == {}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="must be an empty folder"):
        OutlierSnapshots(folder=tmp_path)
    with pytest.raises(ValueError, match="must be an empty folder"):
        OutlierSnapshots(folder=tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def truncate(folder):
    path = folder / "00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def lose(folder):
    (folder / "00000001.safetensors").unlink()


def empty_tensors(folder):
    save_file({}, folder / "00000001.safetensors")


def damage_a_tail(folder):
    path = folder / "00000001.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("tail_k"))
    tensors[name][20] ^= 1
    save_file(tensors, path)


def foreign_format(folder):
    lines = (folder / "index.jsonl").read_text().splitlines()
    (folder / "index.jsonl").write_text("\n".join([json.dumps({"format": "other"}), *lines[1:]]))


def newer_version(folder):
    text = (folder / "index.jsonl").read_text()
    (folder / "index.jsonl").write_text(text.replace('"version": 1', '"version": 2'))


def cut_line(folder):
    text = (folder / "index.jsonl").read_text()
    (folder / "index.jsonl").write_text(text[:-20])


def no_text(folder):
    (folder / "index.jsonl").write_bytes(b"\xff\xfe\x00rubbish")


def no_object(folder):
    (folder / "index.jsonl").write_text("[1, 2]\n")


def nothing(folder):
    (folder / "index.jsonl").write_text("")


def no_index(folder):
    (folder / "index.jsonl").unlink()


def lines_without_content(folder):
    lines = (folder / "index.jsonl").read_text().splitlines()
    (folder / "index.jsonl").write_text("\n".join([lines[0], lines[1], "{}"]))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate, r"00000001.safetensors is cut off, damaged"),
        (lose, r"00000001.safetensors is missing"),
        (empty_tensors, r"00000001.safetensors is cut off, damaged, or not what the index says"),
        (damage_a_tail, r"00000001.safetensors is cut off, damaged"),
        (foreign_format, "does not open with format 'hf_kvq.outlier_snapshots'"),
        (newer_version, "format version 2, this hf_kvq reads 1"),
        (cut_line, "line 3 of .*index.jsonl is cut off"),
        (no_text, "line 1 of .*index.jsonl is cut off or no JSON"),
        (no_object, r"must be a JSON object, got \[1, 2\]"),
        (nothing, "does not open with format"),
        (no_index, "holds no snapshots"),
        (lines_without_content, "not what the index says of it"),
    ],
)
def test_a_folder_that_is_broken_or_foreign_is_named(tmp_path, harm, message):
    taken(OutlierSnapshots(folder=tmp_path), block(), block(seed=1))
    harm(tmp_path)
    with pytest.raises(ValueError, match=message):
        OutlierSnapshots.read(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no snapshots"):
        OutlierSnapshots.read(tmp_path / "nowhere")


def test_what_came_before_a_stop_can_be_read(tmp_path):
    taken(OutlierSnapshots(folder=tmp_path), block(), block(seed=1))
    lines = (tmp_path / "index.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "index.jsonl").write_text("".join(lines[:2]))
    assert_equal_encodings(OutlierSnapshots.read(tmp_path), taken(OutlierSnapshots(), block()))


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outliers": -1}, "outliers must be at least 0, got -1"),
        ({"capacity": 0}, "capacity must be at least 1 chunk, got 0"),
        ({"capacity": 5, "folder": "somewhere"}, "capacity=5 says nothing"),
        ({"mode": "int4"}, "'int4'"),
    ],
)
def test_settings_that_mean_nothing_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        OutlierSnapshots(**settings)


def test_rank_bits_and_threshold_reach_the_tails():
    plain, small = OutlierSnapshots(), OutlierSnapshots(tail_gof_threshold=1.0, tail_rank_bits=3)
    for hook in (plain, small):
        hook(block(tokens=40))
    tails = [hook.encodings[0][0].heads[0].clusters[0].tail_k for hook in (plain, small)]
    assert tails[1].rank_bits == 3
    assert not tails[1].is_dense
    assert tails[1].nbytes < tails[0].nbytes / 2
