"""Outliers in 8 bits and tails as fitted distributions: the seed's functions, and the account of every token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import states

from hf_kvq.codecs.affine import quantize_kv_cache
from hf_kvq.codecs.sorted_profile import fit_sorted_profile, reconstruct
from hf_kvq.far_field.bank import ClusterBank
from hf_kvq.far_field.outliers import (
    QuantizedClusterOutliers,
    dequantize_cluster_outliers,
    quantize_cluster_outliers,
)


def entry(flat_k, flat_v, indices, members=None):
    indices = torch.tensor(indices, dtype=torch.long)
    found = {"k": flat_k[indices], "v": flat_v[indices], "indices": indices}
    return found if members is None else found | {"members": torch.tensor(members, dtype=torch.long)}


@pytest.fixture
def flat():
    return states(12, 2, 8), states(12, 2, 6, seed=1)


@pytest.fixture
def split(flat):
    """Twelve tokens in two clusters, each with outliers and a tail."""
    return {
        3: entry(*flat, [1, 4], members=[0, 1, 4, 5, 6, 7]),
        0: entry(*flat, [11, 9], members=[2, 3, 8, 9, 10, 11]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_outliers_are_the_seeds_eight_bits_and_tails_its_sorted_profile(flat, mode, dtype):
    flat_k, flat_v = (states.to(dtype) for states in flat)
    found = quantize_cluster_outliers({5: entry(flat_k, flat_v, [7, 2])}, flat_k, flat_v, mode=mode)
    assert list(found) == [5]
    q = found[5]
    assert isinstance(q, QuantizedClusterOutliers)
    assert (q.cluster_id, q.outlier_indices.tolist()) == (5, [7, 2])
    for tier, tail, states_ in ((q.outlier_k, q.tail_k, flat_k), (q.outlier_v, q.tail_v, flat_v)):
        expected = quantize_kv_cache(states_[[7, 2]], mode=mode)
        assert (tier.mode, tier.scale) == (mode, expected.scale)
        assert torch.equal(tier.codes.float(), expected.codes.float())
        others = [token for token in range(12) if token not in (7, 2)]
        assert tail.to_bytes() == fit_sorted_profile(states_[others].float()).to_bytes()


def test_without_members_a_tail_is_the_whole_chunk_but_the_clusters_outliers(flat):
    split = {0: entry(*flat, [1, 4]), 2: entry(*flat, [9])}
    found = quantize_cluster_outliers(split, *flat)
    assert found[0].tail_indices.tolist() == [0, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert found[2].tail_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert found[0].tail_k.shape == (10, 2, 8)
    assert found[0].member_indices is None


def test_with_members_every_token_is_in_one_tier_of_one_cluster(flat, split):
    found = quantize_cluster_outliers(split, *flat)
    times = [0] * 12
    for q in found.values():
        for token in (*q.outlier_indices.tolist(), *q.tail_indices.tolist()):
            times[token] += 1
    assert times == [1] * 12
    assert found[3].tail_indices.tolist() == [0, 5, 6, 7]
    assert found[3].tail_v.shape == (4, 2, 6)
    assert found[0].member_indices.tolist() == [2, 3, 8, 9, 10, 11]


def test_tails_are_fitted_as_asked(flat, split):
    found = quantize_cluster_outliers(split, *flat, tail_family="laplace", tail_top_k=5)
    tail = flat[0][[0, 5, 6, 7]]
    assert found[3].tail_k.to_bytes() == fit_sorted_profile(tail, top_k=5, tail_family="laplace").to_bytes()
    assert found[3].tail_k.to_bytes() != fit_sorted_profile(tail).to_bytes()


def test_what_comes_back_is_within_the_bounds_of_its_tier(flat, split):
    for q in quantize_cluster_outliers(split, *flat).values():
        found = dequantize_cluster_outliers(q)
        assert set(found) == {"outlier_k", "outlier_v", "tail_k", "tail_v"}
        for name, states_ in zip(("k", "v"), flat, strict=True):
            outliers, tail = found[f"outlier_{name}"], found[f"tail_{name}"]
            bound = getattr(q, f"outlier_{name}").scale / 2 * (1 + 1e-5)
            assert (outliers - states_[q.outlier_indices]).abs().max() <= bound
            assert isinstance(tail, np.ndarray)
            assert np.array_equal(tail, reconstruct(getattr(q, f"tail_{name}")))
            assert tail.shape == (len(q.tail_indices), *states_.shape[1:])


def test_a_tier_without_tokens_is_none(flat):
    split = {0: entry(*flat, [0, 1], members=[0, 1]), 1: entry(*flat, [], members=range(2, 12))}
    found = quantize_cluster_outliers(split, *flat)
    assert (found[0].tail_k, found[0].tail_v, found[0].tail_indices) == (None, None, None)
    assert (found[1].outlier_k, found[1].outlier_v, found[1].outlier_indices) == (None, None, None)
    assert dequantize_cluster_outliers(found[0])["tail_k"] is None
    assert dequantize_cluster_outliers(found[1])["outlier_v"] is None


def test_no_clusters_give_no_encodings(flat):
    assert quantize_cluster_outliers({}, *flat) == {}


def test_arrays_do_as_well_as_tensors(flat, split):
    arrays = {c: {name: part.numpy() for name, part in entry.items()} for c, entry in split.items()}
    one, two = (quantize_cluster_outliers(given, *flat) for given in (split, arrays))
    for c in split:
        assert torch.equal(one[c].outlier_k.codes, two[c].outlier_k.codes)
        assert one[c].tail_v.to_bytes() == two[c].tail_v.to_bytes()


def test_a_banks_receipt_fits(flat):
    bank = ClusterBank(4, batch=2, birth_threshold=2.5, outlier_top_k=3)
    for seed in range(4):
        keys, values = states(2, 2, 15, 8, seed=seed) * (1 + 2 * seed), states(2, 2, 15, 6, seed=seed + 50)
        positions = torch.arange(15).expand(2, 2, 15)
        receipt = bank.absorb(torch.arange(2), keys, values, positions, torch.ones(2, 2, 15, dtype=torch.bool))
        for row in range(2):
            for head in range(2):
                split = receipt["per_cluster_outlier_tokens"][row][head]
                found = quantize_cluster_outliers(split, keys[row, head][:, None], values[row, head][:, None])
                assert sum(len(q.member_indices) for q in found.values()) == 15
                assert set(found) == set(receipt["assignments"][row, head].tolist())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({3: [0, 1, 4, 5, 6]}, r"tokens \[7\] are in no cluster"),
        ({3: [0, 1, 4, 5, 6, 7, 8]}, r"tokens \[8\] are in several clusters"),
        ({3: [0, 1, 4], 0: [9, 11]}, r"tokens \[2, 3, 5, 6, 7, 8, 10\] are in no cluster"),
        ({3: [0, 1, 5, 6, 7]}, r"cluster 3: outliers \[4\] are no members"),
        ({0: None}, r"none for clusters \[0\]"),
    ],
)
def test_a_token_that_is_lost_or_counted_twice_is_named(flat, split, broken, message):
    for cluster, members in broken.items():
        split[cluster] = entry(*flat, split[cluster]["indices"].tolist(), members=members)
    with pytest.raises(ValueError, match=message):
        quantize_cluster_outliers(split, *flat)


def test_a_long_list_of_lost_tokens_is_cut(flat):
    with pytest.raises(ValueError, match=r"tokens \[2, 3, 4, 5, 6, 7, 8, 9\] and 2 more are in no cluster"):
        quantize_cluster_outliers({0: entry(*flat, [0], members=[0, 1])}, *flat)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": torch.tensor([1, 12])}, r"cluster 3: indices must be 0 to 11, the chunk's 12 tokens, got \[12\]"),
        ({"indices": torch.tensor([-1, 4])}, r"got \[-1\]"),
        ({"indices": torch.tensor([4, 4])}, r"cluster 3: indices must name a token once, got \[4\]"),
        ({"indices": torch.tensor([1.0, 4.0])}, "whole numbers on one axis, got float32"),
        ({"indices": torch.tensor([[1, 4]])}, r"on one axis, got int64 of shape \(1, 2\)"),
        ({"members": torch.tensor([0, 1, 4, 5, 6, 70])}, r"cluster 3: members must be 0 to 11.*got \[70\]"),
        ({"k": torch.zeros(3, 2, 8)}, r"cluster 3: k must hold the 2 tokens.*\(2, 2, 8\), got \(3, 2, 8\)"),
        ({"v": torch.zeros(2, 2, 8)}, r"cluster 3: v must hold.*\(2, 2, 6\), got \(2, 2, 8\)"),
    ],
)
def test_entries_that_disagree_with_the_chunk_are_named(flat, split, changes, message):
    split[3] = split[3] | changes
    with pytest.raises(ValueError, match=message):
        quantize_cluster_outliers(split, *flat)


@pytest.mark.usefixtures("as_users_run_it")
def test_keys_and_values_of_other_tokens_are_refused(flat, split):
    with pytest.raises(ValueError, match=r"same tokens and heads, got \(12, 2, 8\) and \(11, 2, 6\)"):
        quantize_cluster_outliers(split, flat[0], flat[1][:11])


@pytest.mark.usefixtures("as_users_run_it")
def test_an_unknown_mode_is_named(flat, split):
    with pytest.raises(ValueError, match="'int4'"):
        quantize_cluster_outliers(split, *flat, mode="int4")
