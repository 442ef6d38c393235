"""The seed's bank of clusters, against a bank that still has all its tokens."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from oracles import attention, states
from oracles_far_field import SlowBank, SlowCluster, closed_form, covariance, mean, variances

from hf_kvq.far_field.bank import ClusterBank, birth_and_merge, cluster_responsibilities, ingest, update
from hf_kvq.far_field.protocol import Bank
from hf_kvq.kernels import Partial, merge

SHAPES = [
    # rows, kv_heads, key_dim, value_dim
    (1, 1, 5, 5),
    (3, 2, 8, 6),
    (2, 3, 40, 16),
]


def chunk(rows, kv_heads, tokens, key_dim, value_dim, *, seed=0, centres=3):
    """Tokens around a few centres, with values that follow the keys."""
    generator = torch.Generator().manual_seed(seed)
    centre = 4 * torch.randn(centres, key_dim, generator=torch.Generator().manual_seed(99))
    which = torch.randint(centres, (rows, kv_heads, tokens), generator=generator)
    keys = centre[which] + torch.randn(rows, kv_heads, tokens, key_dim, generator=generator)
    slope = torch.randn(key_dim, value_dim, generator=torch.Generator().manual_seed(98)) / math.sqrt(key_dim)
    return keys, keys @ slope + 0.3 * torch.randn(rows, kv_heads, tokens, value_dim, generator=generator)


def absorb(bank, keys, values, *, rows=None, valid=None):
    rows = torch.arange(len(keys)) if rows is None else torch.tensor(rows)
    valid = torch.ones(keys.shape[:3], dtype=torch.bool) if valid is None else valid
    positions = torch.arange(keys.shape[2]).expand(keys.shape[:3])
    return bank.absorb(rows, keys, values, positions, valid)


def filled(rows=2, kv_heads=2, key_dim=8, value_dim=6, *, chunks=6, clusters=4):
    bank = ClusterBank(clusters, batch=rows)
    for seed in range(chunks):
        absorb(bank, *chunk(rows, kv_heads, 17, key_dim, value_dim, seed=seed))
    return bank


def assert_moments(moments, row, head, slot, cluster: SlowCluster):
    expected = {
        "mean_key": mean(cluster.keys, cluster.weights),
        "mean_value": mean(cluster.values, cluster.weights),
        "key_variance": variances(cluster.keys, cluster.weights),
        "value_on_key": covariance(cluster.values, cluster.keys, cluster.weights),
    }
    assert moments.count[row, head, slot].item() == pytest.approx(cluster.count, rel=1e-14)
    for name, numbers in expected.items():
        torch.testing.assert_close(
            getattr(moments, name)[row, head, slot].double(),
            torch.tensor(numbers, dtype=torch.float64),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_give_the_moments_of_all_tokens_pooled(shape, soft):
    rows, kv_heads, key_dim, value_dim = shape
    bank = ClusterBank(3, batch=rows)
    slow = SlowCluster()
    generator = torch.Generator().manual_seed(1)
    for seed, tokens in enumerate((1, 37, 5)):
        keys, values = chunk(rows, kv_heads, tokens, key_dim, value_dim, seed=seed)
        weights = torch.rand(rows, kv_heads, tokens, 3, generator=generator, dtype=torch.float64)
        weights = weights if soft else torch.nn.functional.one_hot(weights.argmax(-1), 3).double()
        update(bank, keys, values, weights)
        for token in range(tokens):
            if weights[-1, -1, token, 1] > 0:
                slow.add(
                    keys[-1, -1, token].tolist(), values[-1, -1, token].tolist(), weights[-1, -1, token, 1].item()
                )
    assert_moments(bank.moments, rows - 1, kv_heads - 1, 1, slow)


def test_far_means_do_not_cost_the_variance_its_digits():
    keys, values = chunk(1, 1, 50, 4, 4)
    keys = keys + 3000.0
    bank = ClusterBank(1, batch=1)
    for part in zip(keys.split(7, dim=2), values.split(7, dim=2), strict=True):
        absorb(bank, *part)
    expected = keys.double().var(dim=2, correction=0)[:, :, None]
    torch.testing.assert_close(bank.moments.key_variance.double(), expected, rtol=1e-4, atol=0)


def test_counts_are_exact_where_float32_would_stop_counting():
    bank = ClusterBank(1, batch=1)
    one = torch.ones(1, 1, 1, 2)
    update(bank, one, one, torch.full((1, 1, 1, 1), 2.0**24, dtype=torch.float64))
    absorb(bank, one, one)
    assert bank.counts.tolist() == [[2**24 + 1]]


@pytest.mark.parametrize("clusters", [1, 2, 3])
@pytest.mark.parametrize("dims", [(5, 5), (8, 6)])
def test_every_chunk_does_what_the_rule_does_token_by_token(clusters, dims):
    bank = ClusterBank(clusters, batch=2, birth_threshold=2.5)
    slow = [[SlowBank(clusters, 2.5) for _ in range(2)] for _ in range(2)]
    births, merges = 0, 0
    for seed in range(6):
        keys, values = chunk(2, 2, 9, *dims, seed=seed)
        receipt = absorb(bank, keys, values)
        for row in range(2):
            for head in range(2):
                expected = slow[row][head].ingest(keys[row, head], values[row, head])
                assert receipt["birthed"][row, head].item() == expected.birthed
                assert tuple(receipt["merged"][row, head].tolist()) == expected.merged
                assert receipt["assignments"][row, head].tolist() == expected.assignments
                assert receipt["residual"][row, head].tolist() == pytest.approx(expected.residual, rel=1e-3)
                births += expected.birthed > 0
                merges += expected.merged[0] >= 0
    for row in range(2):
        for head in range(2):
            for slot in slow[row][head].live:
                assert_moments(bank.moments, row, head, slot, slow[row][head].slots[slot])
            assert (bank.moments.count[row, head] > 0).nonzero()[:, 0].tolist() == slow[row][head].live
    assert (births > 0) == (clusters > 1)
    assert (merges > 0) == (clusters > 1)


def test_misfit_is_the_mean_residual_of_the_tokens_that_a_cluster_got():
    bank = filled()
    receipt = absorb(bank, *chunk(2, 2, 17, 8, 6, seed=50))
    for row, head in [(0, 0), (1, 1)]:
        for cluster in range(4):
            own = receipt.residual[row, head][receipt.assignments[row, head] == cluster]
            found = receipt["misfit"][row, head, cluster].item()
            assert math.isnan(found) if not len(own) else found == pytest.approx(own.mean().item(), rel=1e-5)


def test_responsibilities_are_posteriors_of_the_diagonal_gaussians():
    bank, slow = ClusterBank(3, batch=1, birth_threshold=2.5), SlowBank(3, 2.5)
    for seed in range(4):
        keys, values = chunk(1, 1, 9, 5, 5, seed=seed)
        absorb(bank, keys, values)
        slow.ingest(keys[0, 0], values[0, 0])
    asked, _ = chunk(1, 1, 7, 5, 5, seed=77)
    found = cluster_responsibilities(bank, asked)[0, 0]
    for token, key in enumerate(asked[0, 0].double().tolist()):
        logs = slow.log_posteriors(key)
        largest = max(logs.values())
        total = math.fsum(math.exp(x - largest) for x in logs.values())
        expected = [math.exp(logs[c] - largest) / total if c in logs else 0.0 for c in range(3)]
        assert found[token].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_an_empty_bank_takes_no_responsibility():
    bank = ClusterBank(3, batch=2)
    absorb(bank, *chunk(1, 1, 4, 5, 5), rows=[1])
    found = cluster_responsibilities(bank, states(2, 1, 6, 5)).sum(dim=-1)
    assert found[0].abs().max() == 0
    torch.testing.assert_close(found[1], torch.ones(1, 6, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clusters", [1, 2, 5])
def test_counts_sum_to_the_tokens_that_came_whatever_comes(clusters, seed):
    generator = torch.Generator().manual_seed(seed)
    bank = ClusterBank(clusters, batch=3, birth_threshold=1.5)
    came = torch.zeros(3, 2, dtype=torch.long)
    for step in range(12):
        tokens = (1, 37, 0, 5)[step % 4]
        rows = torch.randperm(3, generator=generator)[: 1 + step % 3]
        keys, values = chunk(len(rows), 2, tokens, 6, 4, seed=100 * seed + step)
        valid = torch.rand(keys.shape[:3], generator=generator) > 0.4
        receipt = absorb(bank, keys * (1 + step % 3), values, rows=rows.tolist(), valid=valid)
        came[rows] += valid.sum(dim=-1)
        assert torch.equal(bank.counts, came)
        assert torch.equal(receipt["assignments"] >= 0, valid)
        assert torch.equal(bank.moments.count, bank.moments.count.round())
    assert came.min() > 0


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("queries", [1, 70])
def test_attention_is_the_closed_form_cluster_by_cluster(queries, groups):
    bank, slow = ClusterBank(4, batch=1, birth_threshold=2.5), SlowBank(4, 2.5)
    for seed in range(3):
        keys, values = chunk(1, 1, 11, 8, 6, seed=seed)
        absorb(bank, keys, values)
        slow.ingest(keys[0, 0], values[0, 0])
    live = [slow.slots[c] for c in slow.live]
    assert 1 < len(live) < 4
    query = states(1, 1, groups, queries, 8, seed=5)
    found = bank.attend(query, 0.3)
    for group in range(groups):
        for place in {0, queries - 1}:
            output, lse = closed_form(live, query[0, 0, group, place].double().tolist(), 0.3)
            assert found.lse[0, 0, group, place].item() == pytest.approx(lse, rel=1e-5)
            assert found.output[0, 0, group, place].tolist() == pytest.approx(output, rel=1e-3, abs=1e-4)


def test_one_gaussian_is_summed_as_its_samples_are():
    generator = torch.Generator().manual_seed(0)
    tokens, dim, value_dim = 200_000, 6, 4
    spread = torch.tensor([0.5, 1.0, 1.5, 0.2, 0.8, 1.2], dtype=torch.float64)
    keys = torch.randn(1, 1, tokens, dim, generator=generator, dtype=torch.float64) * spread + 2.0
    slope = torch.randn(dim, value_dim, generator=generator, dtype=torch.float64)
    values = keys @ slope + 1.0 + 0.1 * torch.randn(1, 1, tokens, value_dim, generator=generator, dtype=torch.float64)
    query = torch.randn(1, 1, 2, 5, dim, generator=generator, dtype=torch.float64)
    # t'St = 1: beyond that a handful of samples carries the whole sum, and says little of its expectation.
    query = query / (0.4 * query * spread).square().sum(-1, keepdim=True).sqrt()
    bank = ClusterBank(1, batch=1)
    for part in zip(keys.split(50_000, dim=2), values.split(50_000, dim=2), strict=True):
        absorb(bank, *part)
    found = bank.attend(query, 0.4)
    output, lse = attention(query, keys, values, scaling=0.4)
    assert found.lse.dtype == torch.float64
    # Sampling noise of 200,000 tokens; without t'St / 2, or without C t, it is fifty times as far.
    torch.testing.assert_close(found.lse, lse, rtol=0, atol=0.01)
    torch.testing.assert_close(found.output, output, rtol=0, atol=0.03)
    tilt = 0.4 * query.flatten(2, 3)
    assert (tilt.square() * spread.square()).sum(-1).min() / 2 > 0.49
    assert (tilt @ (slope * spread[:, None].square())).abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clusters_of_one_token_attend_as_the_tokens_do(dtype):
    keys, values = (states(2, 2, 5, dim, dtype=dtype, seed=seed) for dim, seed in ((8, 0), (6, 1)))
    bank = ClusterBank(7, batch=2)
    update(bank, keys, values, torch.eye(5, 7).expand(2, 2, -1, -1))
    assert bank.moments.key_variance.abs().max() == 0
    assert bank.moments.value_on_key.abs().max() == 0
    query = states(2, 2, 3, 4, 8, dtype=dtype, seed=2)
    found = bank.attend(query, 0.35)
    output, lse = attention(query, keys, values, scaling=0.35)
    assert found.output.dtype == torch.float32
    torch.testing.assert_close(found.output.double(), output, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.lse.double(), lse, rtol=0, atol=2e-5)


def test_a_single_token_comes_back_bit_for_bit():
    keys, values = states(1, 2, 1, 8), states(1, 2, 1, 6, seed=1)
    bank = ClusterBank(3, batch=1)
    absorb(bank, keys, values)
    found = bank.attend(states(1, 2, 1, 4, 8, seed=2), 0.5)
    assert torch.equal(found.output, values[:, :, None].expand(1, 2, 1, 4, 6))


def test_rows_without_tokens_take_no_weight_and_give_no_nan():
    bank = ClusterBank(3, batch=2)
    query = states(2, 2, 1, 4, 8)
    before = bank.attend(query, 0.5)
    absorb(bank, *chunk(1, 2, 9, 8, 8), rows=[1])
    after = bank.attend(query, 0.5)
    for found in (before.lse, after.lse[:1]):
        assert (found == -torch.inf).all()
    for found in (before.output, after.output[:1]):
        assert found.abs().max() == 0
    assert torch.isfinite(after.lse[1]).all()
    other = Partial(torch.ones(2, 2, 1, 4, 8), torch.zeros(2, 2, 1, 4))
    assert torch.equal(merge([other, after]).output[0], other.output[0])


def test_logits_of_half_precision_queries_do_not_overflow():
    keys = torch.full((1, 1, 2, 8), 300.0, dtype=torch.float16)
    bank = ClusterBank(1, batch=1)
    absorb(bank, keys, keys)
    found = bank.attend(torch.full((1, 1, 1, 1, 8), 300.0, dtype=torch.float16), 1.0)
    assert found.lse.item() == pytest.approx(8 * 300.0 * 300.0 + math.log(2), rel=1e-6)


def test_the_receipt_lists_the_tokens_that_fit_worst_in_the_seeds_form():
    bank = ClusterBank(4, batch=2, birth_threshold=2.5, outlier_top_k=3)
    for seed in range(3):
        keys, values = chunk(2, 2, 17, 8, 6, seed=seed)
        valid = torch.rand(2, 2, 17, generator=torch.Generator().manual_seed(seed)) > 0.2
        receipt = absorb(bank, keys, values, valid=valid)
    listed = receipt["per_cluster_outlier_tokens"]
    for row in range(2):
        for head in range(2):
            clusters = listed[row][head]
            members = torch.cat([entry["members"] for entry in clusters.values()])
            assert torch.equal(members.sort().values, valid[row, head].nonzero()[:, 0])
            for cluster, entry in clusters.items():
                assert (receipt["assignments"][row, head, entry["members"]] == cluster).all()
                residual = receipt["residual"][row, head]
                worst = residual[entry["members"]].sort(descending=True).values[:3]
                assert torch.equal(residual[entry["indices"]].sort(descending=True).values, worst)
                assert torch.equal(entry["k"], keys[row, head, entry["indices"]][:, None])
                assert torch.equal(entry["v"], values[row, head, entry["indices"]][:, None])
    assert max(len(entry["indices"]) for entry in listed[0][0].values()) == 3


def test_the_receipt_is_a_mapping_with_the_seeds_keys():
    receipt = absorb(ClusterBank(2, batch=1), *chunk(1, 1, 5, 4, 4))
    assert {"birthed", "merged", "misfit", "assignments", "per_cluster_outlier_tokens"} <= set(receipt)
    assert len(list(receipt)) == len(receipt)
    assert all(receipt[name] is getattr(receipt, name) for name in receipt)
    assert "items" not in receipt


def test_founders_are_in_the_bank_after_birth_and_merge_and_the_others_after_ingest():
    whole, half = (filled(rows=1, kv_heads=1) for _ in range(2))
    keys, values = chunk(1, 1, 17, 8, 6, seed=50)
    keys[:, :, 3] += 40
    before = half.counts.item()
    receipt = birth_and_merge(half, keys, values)
    founders = (receipt.assignments == receipt.birthed[..., None]).sum().item()
    assert 0 < founders < 17
    assert half.counts.item() == before + founders
    assert ingest(whole, keys, values).assignments.tolist() == receipt.assignments.tolist()
    assert whole.counts.item() == before + 17


def test_rows_that_absorb_nothing_stay_as_they_are():
    bank = filled(rows=3)
    before = copy.deepcopy(bank)
    absorb(bank, *chunk(2, 2, 17, 8, 6, seed=60), rows=[2, 0])
    for new, old in zip(bank.moments.tensors, before.moments.tensors, strict=True):
        assert torch.equal(new[1], old[1])
        assert not torch.equal(new[0], old[0])
        assert not torch.equal(new[2], old[2])


def test_a_row_is_the_same_whatever_its_neighbours_hold():
    query = states(3, 2, 2, 5, 8)
    found = []
    for noise in (1.0, 1000.0):
        bank = ClusterBank(3, batch=3, birth_threshold=2.5)
        for seed in range(5):
            keys, values = chunk(3, 2, 17, 8, 6, seed=seed)
            keys[1], values[1] = keys[1] * noise, values[1] * noise
            receipt = absorb(bank, keys, values)
        found.append((bank.attend(query, 0.3), receipt))
    (one, first), (two, second) = found
    for row in (0, 2):
        assert torch.equal(one.output[row], two.output[row])
        assert torch.equal(one.lse[row], two.lse[row])
        assert torch.equal(first["residual"][row], second["residual"][row])
    assert not torch.equal(one.output[1], two.output[1])


def test_what_stands_where_there_is_no_token_is_never_read():
    valid = torch.tensor([[[True, False, True, True, False]]])
    found = []
    for rubbish in (float("nan"), float("inf"), 7.0):
        bank = ClusterBank(2, batch=1)
        for seed in range(3):
            keys, values = chunk(1, 1, 5, 8, 6, seed=seed)
            keys[~valid], values[~valid] = rubbish, rubbish
            receipt = absorb(bank, keys, values, valid=valid)
        assert all(torch.isfinite(tensor).all() for tensor in bank.moments.tensors)
        found.append((*bank.moments.tensors, receipt["residual"], receipt["chunk_keys"]))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_same_tokens_alone_and_with_gaps_give_the_same_bank():
    keys, values = chunk(1, 2, 12, 8, 6)
    valid = torch.arange(12).expand(1, 2, 12) % 3 > 0
    gaps, alone = ClusterBank(3, batch=1), ClusterBank(3, batch=1)
    with_gaps = absorb(gaps, keys, values, valid=valid)
    kept = valid[0, 0]
    without = absorb(alone, keys[:, :, kept], values[:, :, kept])
    torch.testing.assert_close(with_gaps["residual"][:, :, kept], without["residual"], rtol=1e-5, atol=0)
    torch.testing.assert_close(with_gaps["misfit"], without["misfit"], rtol=1e-5, atol=0, equal_nan=True)
    for a, b in zip(gaps.moments.tensors, alone.moments.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_rows_can_be_chosen_and_repeated_before_and_after_tokens_came():
    bank = ClusterBank(4, batch=2)
    bank.select_rows(torch.tensor([1, 0, 1]))
    assert bank.counts.shape[0] == 3
    for seed in range(3):
        absorb(bank, *chunk(3, 2, 9, 8, 6, seed=seed))
    query = states(3, 2, 1, 4, 8)
    before = bank.attend(query, 0.3)
    bank.select_rows(torch.tensor([2, 2, 0, 1]))
    after = bank.attend(query[[2, 2, 0, 1]], 0.3)
    torch.testing.assert_close(after.output, before.output[[2, 2, 0, 1]])
    assert bank.counts.tolist() == [[27, 27]] * 4


def test_a_copy_goes_its_own_way():
    bank = filled()
    copied, before = copy.deepcopy(bank), [tensor.clone() for tensor in bank.moments.tensors]
    absorb(copied, *chunk(2, 2, 17, 8, 6, seed=60))
    assert all(torch.equal(a, b) for a, b in zip(bank.moments.tensors, before, strict=True))
    assert (copied.counts == bank.counts + 17).all()


def test_tokens_after_nothing_but_zeros_found_a_cluster_and_no_nan():
    bank = ClusterBank(3, batch=1)
    zeros = torch.zeros(1, 1, 5, 8)
    absorb(bank, zeros, zeros)
    receipt = absorb(bank, *(1e4 * states for states in chunk(1, 1, 5, 8, 8)))
    assert receipt["birthed"].item() == 1
    assert torch.isfinite(receipt["residual"]).all()
    assert torch.isfinite(receipt["misfit"][0, 0, 1])
    found = bank.attend(states(1, 1, 1, 4, 8) * 1e-8, 1.0)
    assert found.lse[0, 0, 0].tolist() == pytest.approx([math.log(10)] * 4, abs=0.1)
    assert torch.isfinite(found.output).all()


def test_states_that_want_a_gradient_leave_none_behind():
    bank = ClusterBank(2, batch=1)
    keys, values = (states.requires_grad_() for states in chunk(1, 1, 5, 4, 4))
    receipt = absorb(bank, keys, values)
    assert not any(tensor.requires_grad for tensor in bank.moments.tensors)
    assert not receipt["chunk_keys"].requires_grad
    update(bank, keys, values, torch.ones(1, 1, 5, 2))
    assert not any(tensor.requires_grad for tensor in bank.moments.tensors)


def test_a_shallow_copy_keeps_what_was():
    bank = filled()
    snapshot, before = copy.copy(bank), [tensor.clone() for tensor in bank.moments.tensors]
    absorb(bank, *chunk(2, 2, 17, 8, 6, seed=60))
    assert all(torch.equal(a, b) for a, b in zip(snapshot.moments.tensors, before, strict=True))
    assert (bank.counts == snapshot.counts + 17).all()


def test_the_bank_is_what_the_cache_asks_for():
    bank = ClusterBank(4, batch=2)
    assert isinstance(bank, Bank)
    assert not bank.is_allocated
    assert bank.counts.tolist() == [[0], [0]]
    absorb(bank, *chunk(2, 2, 5, 8, 6))
    assert bank.is_allocated


def test_the_receipt_brings_the_positions_along():
    keys, values = chunk(1, 2, 5, 8, 6)
    positions = torch.arange(10).view(1, 2, 5) + 300
    receipt = ClusterBank(2, batch=1).absorb(
        torch.tensor([0]), keys, values, positions, torch.ones(1, 2, 5, dtype=torch.bool)
    )
    assert torch.equal(receipt["positions"], positions)


def test_bytes_are_those_of_the_tensors_and_do_not_grow():
    bank = ClusterBank(4, batch=2)
    assert bank.nbytes == bank.nbytes_used == 0
    absorb(bank, *chunk(2, 3, 9, 8, 6))
    expected = 2 * 3 * 4 * (8 + 4 * (8 + 6 + 8 + 8 * 6))
    assert bank.nbytes == expected == 2 * 3 * 4 * ClusterBank.bytes_per_cluster(8, 6)
    assert bank.nbytes_used == expected // 4
    for seed in range(5):
        absorb(bank, *chunk(2, 3, 37, 8, 6, seed=seed))
    assert bank.nbytes == expected


def test_queries_and_their_padding_leave_no_trace():
    bank = filled()
    before = [tensor.clone() for tensor in bank.moments.tensors]
    bank.observe(states(2, 2, 1, 4, 8), torch.ones(2, 4, dtype=torch.bool))
    bank.observe(states(2, 2, 1, 4, 8), None)
    assert all(torch.equal(a, b) for a, b in zip(bank.moments.tensors, before, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"outlier_top_k": -1}, "outlier_top_k must be at least 0, got -1"),
        ({"birth_threshold": 0.0}, "birth_threshold must be positive, got 0.0"),
        ({"birth_threshold": float("nan")}, "birth_threshold must be positive, got nan"),
    ],
)
def test_settings_that_mean_nothing_are_named(changes, message):
    settings = {"count": 4, "batch": 1} | changes
    with pytest.raises(ValueError, match=message):
        ClusterBank(settings.pop("count"), **settings)


@pytest.mark.parametrize("shape", [(3, 8, 6), (2, 9, 6), (2, 8, 7)])
def test_states_of_another_shape_are_refused_and_change_nothing(shape):
    bank = filled()
    before = bank.counts
    kv_heads, key_dim, value_dim = shape
    with pytest.raises(ValueError, match=r"must stay \(2, 8, 6\)"):
        absorb(bank, *chunk(2, kv_heads, 5, key_dim, value_dim))
    assert torch.equal(bank.counts, before)


def test_a_cluster_of_the_seed_takes_the_room_of_130_int8_tokens():
    assert ClusterBank.bytes_per_cluster(64, 64) == 17_160 == 130 * (2 * (64 + 2))
