"""The bank of clusters against lists of members, and by what must hold of any bank."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import attention, int8_per_token, states
from oracles_bounded import Bank, Cluster, query_energy, turned

from hf_kvq.far_field.bounded import BoundedBank
from hf_kvq.far_field.pooled import changed
from hf_kvq.rope import Rope

HALVES = Rope(tuple(10_000.0 ** (-j / 8) for j in range(8)))
EVERY_TWO = Rope(HALVES.inv_freq, interleaved=True)
PARTIAL = Rope(HALVES.inv_freq[:3])
ROPES = [None, HALVES, EVERY_TWO, PARTIAL]


def block(
    bank_rows: int, heads: int, tokens: int, *, dim: int = 16, value_dim: int = 12, first: int = 0, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Keys, values, positions, all valid."""
    keys = states(bank_rows, heads, tokens, dim, seed=seed)
    values = states(bank_rows, heads, tokens, value_dim, seed=seed + 1000)
    positions = torch.arange(first, first + tokens).expand(bank_rows, heads, tokens).contiguous()
    return keys, values, positions, torch.ones(bank_rows, heads, tokens, dtype=torch.bool)


def state_of(bank: BoundedBank) -> dict[str, torch.Tensor]:
    """Every tensor of a bank, in an order of its own."""
    found: list[torch.Tensor] = []
    copy.deepcopy(bank).map(lambda tensor: found.append(tensor) or tensor)
    return {str(number): tensor for number, tensor in enumerate(found)}


def filled(rope: Rope | None = HALVES, *, batch: int = 2, count: int = 6, blocks: int = 3, **settings) -> BoundedBank:
    bank = BoundedBank(count, batch=batch, rope=rope, **settings)
    bank.observe(states(batch, 2, 3, 40, 16, seed=5), None)
    for number in range(blocks):
        bank.absorb(torch.arange(batch), *block(batch, 2, 8, first=8 * number, seed=number))
    return bank


@pytest.mark.parametrize("most_births", [0, 1, 32])
@pytest.mark.parametrize("rope", ROPES)
def test_tokens_go_where_wards_criterion_sends_them_and_answers_follow(rope, most_births):
    batch, heads, groups, dim = 2, 2, 3, 16
    bank = BoundedBank(5, batch=batch, rope=rope, most_births=most_births)
    seen = states(batch, heads, groups, 30, dim, seed=7)
    bank.observe(seen, None)
    energy = {(b, h): query_energy(seen[b, h].flatten(0, 1), rope) for b in range(batch) for h in range(heads)}
    oracles = {place: Bank(5, most_births) for place in energy}
    first = 0
    for number, tokens in enumerate((3, 7, 1, 9, 6)):
        keys, values, positions, valid = block(batch, heads, tokens, first=first, seed=number)
        first += tokens
        keys[:, :, 0] *= 4  # one that no cluster suits
        receipt = bank.absorb(torch.arange(batch), keys, values, positions, valid)
        before = turned(keys, rope, -positions)
        for (b, h), oracle in oracles.items():
            came = [
                Cluster(1, before[b, h, t], values[b, h, t].double(), int(positions[b, h, t])) for t in range(tokens)
            ]
            assert receipt["assignments"][b, h].tolist() == oracle.absorb(came, energy[b, h])
    query = states(batch, heads, groups, 2, dim, seed=99)
    for oldest in (None, 20):
        output, lse = bank.attend(query, 0.3, None if oldest is None else torch.full((batch,), oldest))
        for (b, h), oracle in oracles.items():
            for g in range(groups):
                for i in range(2):
                    at = oldest if oldest is not None else -math.inf
                    expected, its_lse = oracle.attend(query[b, h, g, i], energy[b, h], rope, 0.3, at)
                    # A mean that falls between two codes may be rounded either way: one step of 1/127 in one channel.
                    torch.testing.assert_close(output[b, h, g, i].double(), expected, rtol=0, atol=2e-2)
                    assert float(lse[b, h, g, i]) == pytest.approx(its_lse, abs=2e-2)


@pytest.mark.parametrize("offset", [0.0, 3000.0])
@pytest.mark.parametrize("seed", range(4))
def test_one_block_of_many_births_goes_where_the_oracle_puts_it(seed, offset):
    centres = states(6, 16, seed=seed) * 3
    keys = states(1, 1, 30, 16, seed=seed + 100) * 0.5 + centres[torch.arange(30) * 7 % 6 * (torch.arange(30) > 11)]
    keys += offset  # As a bias gives it to keys: distances are small differences of large numbers.
    _, values, positions, valid = block(1, 1, 30)
    bank = BoundedBank(9, batch=1, rope=None)
    receipt = bank.absorb(torch.tensor([0]), keys, values, positions, valid)
    came = [Cluster(1, keys[0, 0, t].double(), values[0, 0, t].double(), t) for t in range(30)]
    assert receipt["assignments"][0, 0].tolist() == Bank(9, 32).absorb(came, torch.ones(16, dtype=torch.float64))
    assert int(receipt["birthed"]) > 9


def test_a_token_that_suits_no_cluster_takes_a_slot_that_a_merge_frees():
    bank = BoundedBank(3, batch=1, rope=None)
    near = torch.tensor([[1.0, 0.0], [1.1, 0.0], [0.0, 5.0]]).view(1, 1, 3, 2)
    bank.absorb(torch.tensor([0]), near, near, *block(1, 1, 3)[2:])
    far = torch.tensor([[40.0, 40.0], [0.0, 5.1]]).view(1, 1, 2, 2)
    receipt = bank.absorb(torch.tensor([0]), far, far, *block(1, 1, 2, first=3)[2:])
    assert receipt["assignments"].tolist() == [[[1, 2]]]
    assert (receipt["birthed"].tolist(), receipt["merged"].tolist()) == ([[1]], [[1]])
    assert receipt["misfit"][0, 0, 0] == 0
    # 1 * 1 / (1 + 1) * |f - f_c|^2 with d = 2, from where the code has put the 5.
    coded = float(int8_per_token(near[:, :, 2:])[..., 1])
    assert float(receipt["misfit"][0, 0, 1]) == pytest.approx((5.1 - coded) ** 2 / 4, rel=0.01)


def on_a_line(count: int, places: list[float]) -> dict[str, list[float]]:
    """What becomes of tokens with keys of one channel that come in one block."""
    keys = torch.tensor(places).view(1, 1, -1, 1)
    receipt = BoundedBank(count, batch=1, rope=None).absorb(
        torch.tensor([0]), keys, keys, *block(1, 1, len(places))[2:]
    )
    return {name: part.flatten().tolist() for name, part in receipt.items()}


def test_a_merge_is_weighed_from_where_the_merged_cluster_is():
    # 10 and 0 merge to 5 for the sake of 30. Then -16.5 costs 2/3 21.5^2 = 308 there, 5 and 30 would cost 2/3 25^2 = 417; from
    # where the 10 was, they would have cost 267.
    assert on_a_line(2, [10.0, 0.0, 30.0, -16.5])["assignments"] == [0, 0, 1, 0]


def test_a_token_whose_cluster_is_merged_again_is_not_placed_twice():
    # 0 and 1 merge for 100; then 50 and 100 merge, for 1,250, rather than put -45 to 0 and 1, for 1,380.
    receipt = on_a_line(3, [0.0, 1.0, 50.0, 100.0, -45.0])
    assert receipt["assignments"] == [0, 0, 1, 1, 2]
    assert receipt["misfit"] == [0.0] * 5
    assert (receipt["birthed"], receipt["merged"]) == ([5], [0])


def test_no_more_clusters_are_founded_than_a_block_may():
    for most, expected in ((0, 0), (2, 2)):
        bank = filled(blocks=1, most_births=most)
        keys, values, positions, valid = block(2, 2, 8, first=8, seed=3)
        assert bank.absorb(torch.arange(2), keys * 50, values, positions, valid)["birthed"].amax() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [0, 50_000_001])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 1, 1), (3, 2, 37)])
def test_single_tokens_are_attended_as_their_int8_codes_wherever_they_stand(batch, heads, tokens, rope, first, dtype):
    bank = BoundedBank(40, batch=batch, rope=rope)
    keys, values, positions, valid = block(batch, heads, tokens, first=first)
    keys, values = keys.to(dtype), values.to(dtype)
    query = states(batch, heads, 2, 3, 16, seed=4).to(dtype)
    bank.observe(query, None)
    bank.absorb(torch.arange(batch), keys, values, positions, valid)
    before = turned(keys, rope, -positions).float()
    coded = turned(int8_per_token(before), rope, positions)
    expected, lse = attention(query, coded, int8_per_token(values), scaling=0.25)
    answer = bank.attend(query, 0.25)
    assert answer.output.dtype == torch.float32
    # In one channel of one token the rounding to int8 may fall on either side of a half.
    torch.testing.assert_close(answer.output.double(), expected, rtol=0, atol=5e-3)
    torch.testing.assert_close(answer.lse.double(), lse, rtol=0, atol=5e-3)


@pytest.mark.parametrize("rope", [HALVES, EVERY_TWO, PARTIAL])
def test_keys_further_back_than_the_oldest_position_are_moved_ahead_to_it(rope):
    bank = BoundedBank(9, batch=2, rope=rope)
    keys, values, positions, valid = block(2, 1, 9)
    bank.absorb(torch.arange(2), keys, values, positions, valid)
    oldest = torch.tensor([5, 100])
    moved = turned(
        int8_per_token(turned(keys, rope, -positions).float()), rope, positions.maximum(oldest[:, None, None])
    )
    query = states(2, 1, 2, 1, 16, seed=4)
    expected, lse = attention(query, moved, int8_per_token(values), scaling=0.25)
    answer = bank.attend(query, 0.25, oldest)
    torch.testing.assert_close(answer.output.double(), expected, rtol=0, atol=5e-3)
    torch.testing.assert_close(answer.lse.double(), lse, rtol=0, atol=5e-3)
    assert (answer.lse - bank.attend(query, 0.25).lse).abs().amax() > 0.05


def test_copies_of_one_token_weigh_as_many_and_are_exact():
    bank = BoundedBank(2, batch=1, rope=None)
    keys, values = (part.repeat(1, 1, 5, 1) for part in block(1, 1, 2)[:2])
    bank.absorb(torch.tensor([0]), keys, values, *block(1, 1, 10)[2:])
    query = states(1, 1, 1, 1, 16, seed=4)
    expected, lse = attention(query, int8_per_token(keys), int8_per_token(values), scaling=0.25)
    answer = bank.attend(query, 0.25)
    # The copies that joined were held against the coded mean: half a step apart, which tau counts.
    torch.testing.assert_close(answer.lse.double(), lse, rtol=0, atol=1e-2)
    torch.testing.assert_close(answer.output.double(), expected, rtol=0, atol=1e-2)


def test_a_query_scaled_up_and_a_scaling_scaled_down_are_the_same():
    bank = filled()
    query = states(2, 2, 3, 4, 16, seed=8)
    one, other = bank.attend(query, 0.25), bank.attend(query * 4, 0.0625)
    torch.testing.assert_close(one.lse, other.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.output, other.output, rtol=1e-5, atol=1e-5)


def test_the_spread_of_a_cluster_raises_its_weight_and_a_single_tokens_does_not():
    keys = torch.tensor([[1.0, -1.0], [1.0, 1.0]]).view(1, 1, 2, 2)
    query = torch.tensor([0.0, 2.0]).view(1, 1, 1, 1, 2)
    pair, singles = (BoundedBank(count, batch=1, rope=None) for count in (1, 2))
    for bank in (pair, singles):
        bank.absorb(torch.tensor([0]), keys, keys, *block(1, 1, 2)[2:])
    # Without queries Q is 1. Mean (1, 0), variance (0, 1): tau = 1/2, s2 = (1/2) (2^2) = 2.
    assert float(pair.attend(query, 1.0).lse) == pytest.approx(math.log(2) + math.log(1 + 2 / 2), rel=1e-5)
    assert float(singles.attend(query, 1.0).lse) == pytest.approx(math.log(math.exp(2) + math.exp(-2)), rel=2e-3)


@pytest.mark.parametrize("rope", ROPES)
def test_what_queries_are_like_is_the_same_before_and_after_rope(rope):
    before = states(1, 2, 3, 20, 16)
    after = before if rope is None else rope.rotate(before, torch.arange(20) * 13)
    energy = []
    for query in (before, after):
        bank = BoundedBank(2, batch=1, rope=rope)
        bank.observe(query, None)
        energy.append(bank._query_energy(2, 16, torch.device("cpu")))
    torch.testing.assert_close(*energy, rtol=1e-5, atol=0)
    expected = torch.stack([query_energy(before[0, h].flatten(0, 1), rope) for h in range(2)])
    torch.testing.assert_close(energy[0][0].double(), expected, rtol=1e-5, atol=0)


def test_statistics_end_with_the_first_queries_and_count_no_padding():
    query = states(2, 1, 2, 9, 16)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :4] = False
    query[1, :, :, :4] = float("nan")
    bank = BoundedBank(2, batch=2, rope=HALVES, query_tokens=5)
    for step in range(9):
        bank.observe(query[:, :, :, step : step + 1], real[:, step : step + 1])
    bank.observe(torch.full_like(query, 1e4), None)
    whole = BoundedBank(2, batch=2, rope=HALVES, query_tokens=5)
    whole.observe(query, real)
    held = bank._query_energy(1, 16, torch.device("cpu"))
    torch.testing.assert_close(held, whole._query_energy(1, 16, torch.device("cpu")))
    for row, first in ((0, 0), (1, 4)):
        expected = query_energy(query[row, 0, :, first : first + 5].flatten(0, 1), HALVES)
        torch.testing.assert_close(held[row, 0].double(), expected, rtol=1e-5, atol=0)


def test_a_channel_that_no_query_uses_divides_by_no_zero():
    query = states(1, 1, 1, 9, 16)
    query[..., 3] = query[..., 11] = 0
    bank = BoundedBank(2, batch=1, rope=HALVES)
    bank.observe(query, None)
    bank.absorb(torch.tensor([0]), *block(1, 1, 9))
    loud = torch.zeros(1, 1, 1, 1, 16)
    loud[..., 3] = 100.0
    assert torch.isfinite(bank.attend(loud, 0.25).lse).all()
    energy = bank._query_energy(1, 16, torch.device("cpu"))[0, 0]
    assert float(energy[3]) == pytest.approx(1e-3 * float(query.square().mean()), rel=1e-4)


def test_nothing_taken_in_answers_nothing():
    bank = BoundedBank(4, batch=3, rope=HALVES)
    query = states(3, 2, 2, 2, 16)
    answer = bank.attend(query, 0.25)
    assert (answer.output == 0).all()
    assert (answer.lse == -torch.inf).all()
    assert (bank.nbytes, bank.is_allocated, bank.counts.tolist()) == (0, False, [[0]] * 3)
    bank.absorb(torch.tensor([1]), *block(1, 2, 3))
    output, lse = bank.attend(query, 0.25)
    assert output.shape == (3, 2, 2, 2, 12)
    for row in (0, 2):
        assert (output[row] == 0).all()
        assert (lse[row] == -torch.inf).all()
    assert torch.isfinite(lse[1]).all()
    assert bank.counts.tolist() == [[0, 0], [3, 3], [0, 0]]
    assert bank.is_allocated


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_token_is_in_exactly_one_cluster_whatever_happens(data):
    batch, heads = 3, 2
    bank = BoundedBank(
        data.draw(st.integers(1, 5)), batch=batch, rope=HALVES, most_births=data.draw(st.integers(0, 4))
    )
    counts = torch.zeros(batch, heads, dtype=torch.int64)
    sums = torch.zeros(batch, heads, dtype=torch.int64)
    for step in range(data.draw(st.integers(1, 6))):
        seed = data.draw(st.integers(0, 99))
        if data.draw(st.booleans()):
            rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=3, max_size=3)))
            bank.select_rows(rows)
            counts, sums = counts[rows], sums[rows]
        if data.draw(st.booleans()):
            bank.observe(states(batch, heads, 1, 3, 16, seed=seed), None)
        rows = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))[: data.draw(st.integers(1, batch))]
        tokens = data.draw(st.integers(1, 7))
        keys, values, positions, valid = block(len(rows), heads, tokens, first=step * 1000, seed=seed)
        valid = torch.rand(valid.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
        receipt = bank.absorb(rows, keys, values, positions, valid)
        counts[rows] += valid.sum(dim=2)
        sums[rows] += (positions * valid).sum(dim=2)
        assert torch.equal(bank.counts, counts)
        assert torch.equal(receipt["birthed"] + receipt["merged"], valid.sum(dim=2))
        assert torch.equal(receipt["assignments"] == -1, ~valid)
        assert (receipt["assignments"] < bank.live[rows][..., None]).all()
        assert torch.equal(bank.live, counts.clamp(max=bank.count))
        assert torch.equal(bank._clusters["position_sum"].sum(dim=2), sums)
        assert (receipt["misfit"] >= 0).all()


def test_no_row_is_touched_by_what_another_one_holds():
    query = states(2, 2, 3, 4, 16, seed=8)
    quiet, loud = (BoundedBank(6, batch=2, rope=HALVES) for _ in range(2))
    for bank, factor in ((quiet, 1.0), (loud, 300.0)):
        other = torch.tensor([1.0, factor])[:, None, None, None]
        bank.observe(query * other[..., None], None)
        for number in range(4):
            keys, values, positions, valid = block(2, 2, 8, first=8 * number, seed=number)
            bank.absorb(torch.arange(2), keys * other, values * other, positions, valid)
    for name, tensor in state_of(quiet).items():
        assert torch.equal(tensor[0], state_of(loud)[name][0])
    one, other = quiet.attend(query, 0.25), loud.attend(query, 0.25)
    assert torch.equal(one.output[0], other.output[0])
    assert torch.equal(one.lse[0], other.lse[0])
    assert not torch.equal(one.output[1], other.output[1])


def test_only_the_rows_named_change():
    bank = filled(batch=3)
    before = state_of(bank)
    bank.absorb(torch.tensor([2, 0]), *block(2, 2, 8, first=24, seed=9))
    after = state_of(bank)
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    assert any(not torch.equal(before[name][0], after[name][0]) for name in before)
    assert any(not torch.equal(before[name][2], after[name][2]) for name in before)


def test_a_cluster_that_nothing_joins_keeps_its_codes():
    bank = filled(batch=1)
    before = copy.deepcopy(bank)._clusters
    receipt = bank.absorb(torch.tensor([0]), *block(1, 2, 1, first=24, seed=9))
    assert receipt["merged"].tolist() == [[1, 1]]
    for head in range(2):
        joined = int(receipt["assignments"][0, head, 0])
        for name, tensor in bank._clusters.items():
            same = (tensor[0, head] == before[name][0, head]).flatten(1).all(dim=1) if tensor.ndim == 4 else None
            same = tensor[0, head] == before[name][0, head] if same is None else same
            assert same.sum() >= 5
            assert name not in ("count", "key_codes") or not same[joined]


def test_slots_that_took_in_a_token_or_a_cluster_have_changed():
    # Four clusters, of which the last joined the first, and four tokens: into slots 3 and 1, and two that are none.
    home = torch.tensor([[0, 1, 2, 0, 3, 1, -1, -1], [0, 1, 2, 3, -1, -1, -1, -1]])
    assert changed(home, 4).tolist() == [[True, True, False, True], [False] * 4]


@pytest.mark.parametrize("rope", ROPES)
def test_what_stands_in_absent_tokens_is_never_read(rope):
    keys, values, positions, valid = block(2, 2, 8)
    valid[:, :, 2] = valid[1, :, 5:] = valid[0, 1, :] = False
    answers = []
    for nonsense in (0.0, float("nan"), float("inf")):
        bank = BoundedBank(3, batch=2, rope=rope)
        for number in range(3):
            bank.absorb(
                torch.arange(2),
                (keys + number).masked_fill(~valid[..., None], nonsense),
                values.masked_fill(~valid[..., None], nonsense),
                positions.masked_fill(~valid, 0 if nonsense == 0 else -12345),
                valid,
            )
        answers.append(bank.attend(states(2, 2, 1, 2, 16, seed=4), 0.25))
    for answer in answers[1:]:
        assert torch.equal(answer.output, answers[0].output)
        assert torch.equal(answer.lse, answers[0].lse)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("magnitude", [65504.0, 6e-8, 0.0])
def test_states_at_the_ends_of_float16_give_no_nan(magnitude, rope):
    bank = BoundedBank(3, batch=1, rope=rope)
    sign = torch.randint(0, 2, (1, 2, 24, 16), generator=torch.Generator().manual_seed(0)) * 2 - 1
    extreme = (sign * magnitude).to(torch.float16)
    bank.observe(extreme[:, :, None], None)
    for first in range(0, 24, 8):
        _, _, positions, valid = block(1, 2, 8, first=first)
        bank.absorb(
            torch.tensor([0]), extreme[:, :, first : first + 8], extreme[:, :, first : first + 8], positions, valid
        )
    answer = bank.attend(extreme[:, :, None, :3], 0.25)
    assert torch.isfinite(answer.output).all()
    assert torch.isfinite(answer.lse).all()
    assert (answer.output.abs() <= magnitude * 1.02).all()


def test_every_byte_is_counted():
    bank = BoundedBank(10, batch=2, rope=None)
    bank.absorb(torch.tensor([1]), *block(1, 3, 4, dim=64, value_dim=40))
    assert bank.bytes_per_cluster(64, 64) == 152
    energy = 2 * 3 * 64 * 4
    assert bank.nbytes == 2 * 3 * 10 * bank.bytes_per_cluster(64, 40) + energy
    assert bank.nbytes_used == 3 * 4 * bank.bytes_per_cluster(64, 40) + energy
    bank.observe(states(2, 3, 2, 1, 64), None)
    assert bank.nbytes - bank.nbytes_used == (60 - 12) * bank.bytes_per_cluster(64, 40)
    assert bank.nbytes == sum(tensor.nbytes for tensor in state_of(bank).values())


def test_memory_does_not_grow_with_tokens():
    bank = filled(blocks=1)
    before = bank.nbytes
    for number in range(5):
        bank.absorb(torch.arange(2), *block(2, 2, 8, seed=number))
    assert bank.nbytes == before
    assert bank.counts.tolist() == [[48, 48], [48, 48]]


def test_a_copy_goes_its_own_way():
    bank = filled()
    twin, snapshot = copy.deepcopy(bank), copy.copy(bank)
    held = state_of(twin)
    for _ in range(2):
        assert all(torch.equal(tensor, state_of(snapshot)[name]) for name, tensor in held.items())
        bank.absorb(torch.arange(2), *block(2, 2, 8, seed=77))
    assert all(torch.equal(tensor, state_of(twin)[name]) for name, tensor in held.items())
    assert torch.equal(bank.counts - twin.counts, torch.full((2, 2), 16))
    twin.absorb(torch.arange(2), *block(2, 2, 8, seed=77))
    twin.absorb(torch.arange(2), *block(2, 2, 8, seed=77))
    assert all(torch.equal(tensor, state_of(twin)[name]) for name, tensor in state_of(bank).items())


def test_rows_are_selected_repeated_and_moved_as_a_whole():
    bank = filled(batch=3)
    query = states(3, 2, 1, 2, 16, seed=6)
    before = bank.attend(query, 0.25)
    rows = torch.tensor([2, 0, 2, 1])
    bank.select_rows(rows)
    after = bank.attend(query[rows], 0.25)
    torch.testing.assert_close(after.output, before.output[rows])
    assert bank.batch == 4
    bank.map(lambda tensor: tensor.repeat_interleave(2, dim=0))
    assert bank.batch == 8
    assert bank.counts.shape == (8, 2)
    empty = BoundedBank(2, batch=3, rope=None)
    empty.select_rows(rows)
    empty.map(lambda tensor: tensor.repeat_interleave(2, dim=0))
    assert empty.batch == 8


def test_a_query_in_float64_is_answered_in_float64_and_gets_its_gradient():
    query = states(2, 2, 1, 2, 16, seed=6).double().requires_grad_()
    answer = filled().attend(query, 0.25)
    assert (answer.output.dtype, answer.lse.dtype) == (torch.float64, torch.float64)
    answer.lse.sum().backward()
    assert query.grad is not None
    assert torch.isfinite(query.grad).all()


def test_positions_may_come_in_32_bits():
    keys, values, positions, valid = block(1, 1, 5, first=2_000_000_000)
    narrow, wide = (BoundedBank(2, batch=1, rope=HALVES) for _ in range(2))
    narrow.absorb(torch.tensor([0]), keys, values, positions.int(), valid)
    wide.absorb(torch.tensor([0]), keys, values, positions, valid)
    assert all(torch.equal(tensor, state_of(wide)[name]) for name, tensor in state_of(narrow).items())


def test_a_bank_filled_in_inference_mode_goes_on_outside_of_it():
    with torch.inference_mode():
        bank = filled()
    keys, values, positions, valid = block(2, 2, 8, seed=3)
    bank.observe(states(2, 2, 3, 4, 16), None)
    bank.absorb(torch.arange(2), keys.requires_grad_(), values, positions, valid)
    assert not any(tensor.requires_grad for tensor in state_of(bank).values())


@pytest.mark.usefixtures("as_users_run_it")
def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        BoundedBank(0, batch=1, rope=None)
    with pytest.raises(ValueError, match=r"\(2, 16, 12\).*\(1, 16, 12\).*one bank for each layer"):
        filled().absorb(torch.arange(2), *block(2, 1, 3))
