"""Bases: exact algebra whatever they are made of, and what the first tokens teach."""

from __future__ import annotations

import math

import oracles_rotated as oracle
import pytest
import torch
from oracles import states

from hf_kvq.basis import PlacedBasis, fit_basis, hadamard
from hf_kvq.codecs.rotated import encode_grid, grid_for
from hf_kvq.packing import BEST_SCALES, SCALE_ONE, Grid
from hf_kvq.rope import Rope

DIMS = [40, 64, 80, 128, 256]
CPU = torch.device("cpu")
EXACT = 1e-10


def wide(*shape: int, seed: int = 0) -> torch.Tensor:
    return states(*shape, seed=seed).double()


def own_places(tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 5000, (2, 3, tokens), generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= EXACT * expected.abs().max().clamp(min=1))


def all_places(positions: int | torch.Tensor, tokens: int) -> torch.Tensor:
    if isinstance(positions, int):
        return torch.arange(positions, positions + tokens).expand(2, 3, -1)
    return positions


PLACES = {
    "from 0": (0, 1),
    "within a block": (3, 37),
    "across blocks": (63, 129),
    "from a block's end": (127, 2),
    "from a block's start": (128, 64),
    "far away": (100_001, 70),
    "of each head's own": (None, 37),
}


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def places(request) -> tuple[int | torch.Tensor, int]:
    first, tokens = request.param
    return (own_places(tokens) if first is None else first), tokens


# Algebra


@pytest.mark.parametrize("kind", oracle.ROPES)
@pytest.mark.parametrize("tiers", [1, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_a_round_trip_gives_the_states_back(dim, tiers, kind):
    placed = oracle.any_basis(dim, kind, tiers=tiers).at(5, 37)
    x = wide(2, 3, 37, dim)
    assert not close(placed.code(x), x)
    assert close(placed.restore(placed.code(x)), x)


@pytest.mark.parametrize("kind", oracle.ROPES)
@pytest.mark.parametrize("tiers", [1, 4])
@pytest.mark.parametrize("dim", [40, 64])
def test_a_basis_is_the_matrix_and_the_shift_that_its_bytes_say(dim, tiers, kind, places):
    positions, tokens = places
    basis = oracle.any_basis(dim, kind, tiers=tiers)
    coded = wide(2, 3, tokens, dim, seed=4)
    expected = oracle.restored(coded, basis.tensors, tiers, basis.rope, all_places(positions, tokens))
    assert close(basis.at(positions, tokens).restore(coded), expected)


@pytest.mark.parametrize("kind", oracle.ROPES)
@pytest.mark.parametrize("tiers", [1, 4])
@pytest.mark.parametrize("dim", [40, 128])
def test_scores_in_the_basis_and_the_bias_are_the_scores(dim, tiers, kind, places):
    positions, tokens = places
    placed = oracle.any_basis(dim, kind, tiers=tiers).at(positions, tokens)
    x, query = wide(2, 3, tokens, dim), wide(2, 3, 2, 5, dim, seed=1)
    scores = placed.query(query) @ placed.code(x).mT[:, :, None] + placed.bias(query)
    assert close(scores, query @ x.mT[:, :, None])
    assert placed.bias(query).shape == (2, 3, 2, 5, tokens)


@pytest.mark.parametrize("dim", [80, 256])
def test_scores_hold_for_other_sizes_too(dim):
    placed = oracle.any_basis(dim, "full", tiers=4).at(60, 70)
    x, query = wide(2, 3, 70, dim), wide(2, 3, 1, 1, dim, seed=1)
    assert close(placed.query(query) @ placed.code(x).mT[:, :, None] + placed.bias(query), query @ x.mT[:, :, None])


def test_a_bias_in_float32_is_as_good_as_float32():
    basis = oracle.any_basis(64, "full")
    query = wide(2, 3, 2, 5, 64, seed=1)
    placed = basis.at(100_000, 200)
    size = (query.abs() @ basis.means(torch.float64).abs()[:, :, None, :, None]).max()
    assert (placed.bias(query.float()) - placed.bias(query)).abs().max() <= 1e-5 * size


@pytest.mark.parametrize("tiers", [1, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_the_weighted_mean_of_values_is_that_of_coded_ones_brought_back(dim, tiers):
    placed = oracle.any_basis(dim, "none", tiers=tiers, keys=False).at(0, 37)
    x, weights = wide(2, 3, 37, dim), wide(2, 3, 2, 5, 37, seed=1).softmax(dim=-1)
    assert close(placed.output(weights @ placed.code(x)[:, :, None]), weights @ x[:, :, None])
    assert close(placed.restore(placed.code(x)), x)


@pytest.mark.parametrize(("true", "wrong"), [("full", "llama3"), ("full", "interleaved"), ("none", "full")])
def test_a_basis_of_the_wrong_rotation_costs_quality_and_no_exactness(true, wrong):
    right, mistaken = (oracle.rope_of(64, kind) for kind in (true, wrong))
    mean = wide(1, 3, 1, 64, seed=9) * 10
    x = wide(2, 3, 128, 64) + mean
    if right is not None:
        x = right.rotate(x, torch.arange(128))
    sizes = []
    for rope in (right, mistaken):
        basis = fit_basis(x, torch.arange(128).expand(2, -1), grid=Grid(64, (4,)), rope=rope)
        placed = basis.at(0, 128)
        coded, query = placed.code(x), wide(2, 3, 1, 5, 64, seed=1)
        assert close(placed.restore(coded), x)
        assert close(placed.query(query) @ coded.mT[:, :, None] + placed.bias(query), query @ x.mT[:, :, None])
        sizes.append((basis.gains(torch.float64)[:, :, None].reciprocal() * coded.norm(dim=-1, keepdim=True)).mean())
    assert sizes[1] > 1.5 * sizes[0]


@pytest.mark.parametrize("kind", oracle.ROPES)
@pytest.mark.parametrize("tiers", [1, 4])
def test_slices_rows_and_moved_tokens_are_what_their_own_basis_gives(kind, tiers):
    basis = oracle.any_basis(64, kind, tiers=tiers)
    x, query = wide(2, 3, 100, 64), wide(2, 3, 2, 5, 64, seed=1)
    for positions in (41, own_places(100)):
        placed = basis.at(positions, 100)
        whole, bias = placed.code(x), placed.bias(query)
        part = placed.slice(30, 97)
        assert part.tokens == 67
        assert close(part.code(x[:, :, 30:97]), whole[:, :, 30:97])
        assert close(part.bias(query), bias[..., 30:97])
        twice = part.slice(5, 20)
        assert close(twice.restore(whole[:, :, 35:50]), x[:, :, 35:50])
        rows = torch.tensor([1, 0, 1])
        some = placed.of_rows(rows)
        assert close(some.code(x[rows]), whole[rows])
        assert close(some.bias(query[rows]), bias[rows])
        moved = placed.moved(all_places(positions, 100).flip(2))
        assert close(moved.code(x.flip(2)), whole.flip(2))
        assert close(moved.bias(query), bias.flip(-1))


def test_a_map_moves_every_tensor_and_bytes_are_counted():
    basis = oracle.any_basis(64, "full", tiers=4)
    rows = torch.tensor([1, 1, 0])
    mapped = basis.map(lambda tensor: tensor[rows])
    assert {name: tensor.shape[0] for name, tensor in mapped.tensors.items()} == dict.fromkeys(basis.tensors, 3)
    x = wide(2, 3, 7, 64)
    assert torch.equal(mapped.at(2, 7).code(x[rows]), PlacedBasis(basis, 2, 7).code(x)[rows])
    assert basis.nbytes == 2 * 3 * (64 + 1 + 32 + 2 * 32) + 2 * 4


@pytest.mark.parametrize("size", [1, 2, 64, 128, 256, 80, 96, 40, 10, 7])
def test_the_turn_is_orthonormal_and_spreads_one_channel_over_many(size):
    matrix = hadamard(size, torch.float64, CPU)
    assert close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    assert close(matrix, oracle.hadamard(size))
    # A power of two spreads it evenly; the cosines of an odd factor go up to sqrt 2 of that.
    assert matrix.abs().max() <= math.sqrt((1 if size & (size - 1) == 0 else 2) / size) * (1 + EXACT)


# What is learned

LEARNED = [pytest.param((4,), id="one tier"), pytest.param((6, 4, 3, 3), id="tiers")]


def taught(
    kind: str, dim: int = 64, *, rows: int = 2, offset: int = 0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Rope | None]:
    """Keys of 128 tokens with a mean far from zero, as they are cached, what they were before RoPE, their positions, and the rotation."""
    rope = oracle.rope_of(dim, kind)
    before = wide(rows, 3, 128, dim, seed=seed)
    before = before + torch.randn(1, 3, 1, dim, generator=torch.Generator().manual_seed(7)).double() * 10
    positions = torch.arange(offset, offset + 128).expand(rows, -1)
    return before if rope is None else rope.rotate(before, positions[:, None]), before, positions, rope


@pytest.mark.parametrize("kind", oracle.ROPES)
@pytest.mark.parametrize("bits", LEARNED)
def test_the_mean_before_rope_is_found_to_half_a_step(kind, bits):
    keys, before, positions, rope = taught(kind)
    basis = fit_basis(keys, positions, grid=Grid(64, bits), rope=rope)
    step = torch.tensor([oracle.scale(int(byte)) for byte in basis.mean_scale.flatten()]).view(2, 3, 1)
    off = (basis.means(torch.float64) - before.mean(dim=2)).abs() * basis.gains(torch.float64)
    assert (off <= step / 2 * (1 + 1e-9)).all()
    # The step is the smallest that a signed byte allows.
    assert (before.mean(dim=2) * basis.gains(torch.float64)).abs().amax(-1).gt(step[..., 0] * 127 / 2**0.125).all()


def test_the_mean_of_values_is_found_to_half_a_step_of_four_bits():
    x, before, positions, _ = taught("none")
    basis = fit_basis(x, positions, grid=Grid(64, (4,)), balance=False)
    assert basis.mean.dtype == torch.uint8
    assert basis.gain.shape == (2, 3, 1)
    size = before.mean(dim=2).abs().amax(dim=-1, keepdim=True)
    assert ((basis.means(torch.float64) - before.mean(dim=2)).abs() <= size / 7 / 2 * 2**0.125).all()


@pytest.mark.parametrize("dim", [41, 7])
@pytest.mark.parametrize("balance", [True, False])
def test_an_odd_head_dim_is_learned_too(dim, balance):
    x, query = wide(2, 3, 128, dim), wide(2, 3, 64, dim, seed=2)
    basis = fit_basis(
        x,
        torch.arange(128).expand(2, -1),
        grid=Grid(64, (8,)),
        queries=query if balance else None,
        balance=balance,
        aims=1,
    )
    assert basis.dim == dim
    placed = basis.at(0, 128)
    assert close(placed.restore(placed.code(x)), x)


@pytest.mark.parametrize("kind", ["full", "partial", "interleaved"])
@pytest.mark.parametrize("bits", LEARNED)
def test_a_constant_added_to_a_rows_positions_turns_its_mean_and_changes_no_gain(kind, bits):
    _, before, positions, rope = taught(kind)
    keys = rope.rotate(before, positions[:, None])
    near, far = (fit_basis(keys, positions + offset, grid=Grid(64, bits), rope=rope) for offset in (0, 1000))
    assert torch.equal(near.gain, far.gain)
    assert (near.order is None) == (len(bits) == 1)
    assert near.order is None or torch.equal(near.order, far.order)
    steps = sum(
        torch.tensor([oracle.scale(int(byte)) for byte in basis.mean_scale.flatten()]).view(2, 3, 1)
        / basis.gains(torch.float64)
        for basis in (near, far)
    )
    turned = rope.rotate(near.means(torch.float64), -1000)
    assert ((far.means(torch.float64) - turned).abs() <= steps * 2**0.5 / 2 * (1 + 1e-9)).all()


def average_size(coded: torch.Tensor, bits: tuple[int, ...]) -> torch.Tensor:
    """Root mean square of each head's numbers in the basis, by tier, as a multiple of what a scale of 1 is best for."""
    best = torch.tensor([BEST_SCALES[each] for each in bits], dtype=torch.float64)
    return coded.unflatten(-1, (len(bits), -1)).square().mean(dim=(2, 4)).sqrt() * best


@pytest.mark.parametrize(("balance", "kind"), [*((True, kind) for kind in oracle.ROPES), (False, "none")])
@pytest.mark.parametrize("bits", [(8,), (6,), (5,), (4,), (3,), (2,), (6, 4, 3, 3)], ids=str)
def test_gains_make_one_the_best_scale_of_tokens_of_average_size(kind, bits, balance):
    rope, positions = oracle.rope_of(64, kind), torch.arange(128).expand(2, -1)
    before = wide(2, 3, 128, 64)
    before = before - before.mean(dim=2, keepdim=True)
    keys = before if rope is None else rope.rotate(before, positions[:, None])
    query = wide(2, 3, 256, 64, seed=2) if balance else None
    basis = fit_basis(keys, positions, grid=Grid(64, bits), rope=rope, queries=query, balance=balance)
    coded = basis.at(0, 128).code(keys)
    size = average_size(coded, bits)
    if balance:
        # A byte rounds a gain by a sixteenth of a power of two at most; a tier's or a head's size is a mean over many.
        assert (size.log2().abs() <= 1 / 16 + 0.01).all()
    else:
        assert (size.square().mean(dim=-1).log2().abs() / 2 <= 1 / 16 + 1.0 * (len(bits) > 1)).all()
    _, scale = encode_grid(coded, grid_for(bits, 64))
    # 64 numbers reach less far than the normal distribution does, so scales are smaller where there are many levels: at 8 bits by 5 eighths of a power of two.
    assert -6 <= scale.double().mean() - SCALE_ONE <= 1


def test_channels_that_weigh_most_in_a_score_get_the_bits():
    rope = oracle.rope_of(64, "full")
    spread = torch.linspace(0.1, 4, 32, dtype=torch.float64)[
        torch.randperm(32, generator=torch.Generator().manual_seed(0))
    ]
    before = torch.randn(2, 3, 128, 64, generator=torch.Generator().manual_seed(1)).double() * spread.repeat(2)
    positions = torch.arange(128).expand(2, -1)
    basis = fit_basis(rope.rotate(before, positions[:, None]), positions, grid=Grid(64, (6, 4, 3, 3)), rope=rope)
    for first in basis.order.view(-1, 32).long():
        by_tier = spread[first].view(4, 8)
        assert (by_tier.amin(dim=1)[:-1] > by_tier.amax(dim=1)[1:] * 0.8).all()
        assert sorted(first.tolist()) == list(range(32))


def test_gains_weigh_queries_against_keys():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 4096, 64, generator=generator).double()
    query = torch.randn(1, 1, 4096, 64, generator=generator).double()
    keys[..., :32] *= 4
    query[..., 16:48] *= 9
    gains = fit_basis(keys, torch.arange(4096)[None], grid=Grid(64, (8,)), queries=query).gains(torch.float64)[0, 0]
    ratios = [float(gains[i * 16 : i * 16 + 16].log2().mean() - gains[-16:].log2().mean()) for i in range(3)]
    # sqrt(sqrt(w) / E) of rms: sqrt(1 / 4), sqrt(9 / 4), sqrt(9).
    assert ratios == pytest.approx([-1, math.log2(1.5), math.log2(3)], abs=0.15)


@pytest.mark.parametrize("bits", LEARNED)
def test_a_channel_that_was_silent_can_be_coded_once_it_speaks(bits):
    keys, _, positions, rope = taught("full")
    keys = keys.clone()
    silent = [3, 35, 7, 39]
    keys[..., silent] = 0
    basis = fit_basis(keys, positions, grid=Grid(64, bits), rope=rope, queries=wide(2, 3, 64, 64))
    assert all(torch.isfinite(tensor.double()).all() for tensor in basis.tensors.values())
    loud = keys.clone()
    loud[..., silent] = 5.0
    placed = basis.at(0, 128)
    assert close(placed.restore(placed.code(loud)), loud)
    codes, scale = encode_grid(placed.code(loud), grid_for(bits, 64))
    read = torch.empty_like(loud)
    grid_for(bits, 64).decode_into(codes, scale, read)
    assert torch.isfinite(read).all()
    assert (placed.restore(read) - loud).norm() < 0.5 * loud.norm()


def test_a_channel_that_whispered_gets_at_most_ten_times_the_gain_of_the_others():
    before = torch.randn(1, 3, 4096, 64, generator=torch.Generator().manual_seed(0)).double()
    before[..., [3, 35]] *= 1e-6
    gains = fit_basis(before, torch.arange(4096)[None], grid=Grid(64, (4,)), rope=None).gains(torch.float64)
    # Its energy counts as a ten thousandth of the mean, and a gain is the fourth root of it.
    ratio = gains[..., 3] / gains[..., [*range(3), *range(4, 35)]].mean(dim=-1)
    assert (abs(ratio.log2() - torch.tensor(10.0).log2()) <= 1 / 8).all()


@pytest.mark.parametrize("bits", LEARNED)
@pytest.mark.parametrize("balance", [True, False], ids=["keys", "values"])
def test_states_that_are_all_zero_teach_nothing_and_break_nothing(bits, balance):
    zeros = torch.zeros(2, 3, 128, 64)
    basis = fit_basis(
        zeros, torch.arange(128).expand(2, -1), grid=Grid(64, bits), rope=oracle.rope_of(64, "full") if balance else None,
        queries=torch.zeros(2, 3, 64, 64), balance=balance, aims=1,
    )  # fmt: skip
    assert not basis.means(torch.float64).any()
    placed = basis.at(0, 128)
    assert not placed.code(zeros.double()).any()
    x = wide(2, 3, 128, 64)
    assert close(placed.restore(placed.code(x)), x)


def test_a_head_without_a_state_leaves_the_other_heads_alone():
    keys, _, positions, rope = taught("full")
    keys = keys.clone()
    alone = fit_basis(keys, positions, grid=Grid(64, (4,)), rope=rope)
    keys[:, 1] = 0
    basis = fit_basis(keys, positions, grid=Grid(64, (4,)), rope=rope)
    for name, tensor in basis.tensors.items():
        if tensor.ndim > 1:
            assert torch.equal(tensor[:, ::2], alone.tensors[name][:, ::2])


@pytest.mark.parametrize("kind", ["full", "none"])
@pytest.mark.parametrize("bits", LEARNED)
def test_one_token_repeated_is_the_mean(kind, bits):
    rope, token = oracle.rope_of(64, kind), wide(2, 3, 1, 64, seed=5)
    positions = torch.arange(10, 138).expand(2, -1)
    keys = token.expand(-1, -1, 128, -1)
    keys = keys if rope is None else rope.rotate(keys, positions[:, None])
    basis = fit_basis(keys, positions, grid=Grid(64, bits), rope=rope)
    off = (basis.means(torch.float64) - token[:, :, 0]).abs() * basis.gains(torch.float64)
    size = (token[:, :, 0] * basis.gains(torch.float64)).abs().amax(dim=-1, keepdim=True)
    assert (off <= size / 127 / 2 * 2**0.125).all()


@pytest.mark.parametrize("power", [-8, 3, 8])
@pytest.mark.parametrize("balance", [True, False], ids=["keys", "values"])
def test_states_of_another_power_of_two_have_the_same_codes(power, balance):
    keys, _, positions, rope = taught("full" if balance else "none")
    query = wide(2, 3, 64, 64) if balance else None
    settings = {"grid": Grid(64, (4,)), "rope": rope, "queries": query, "balance": balance, "aims": 1}
    one, other = (fit_basis(x, positions, **settings) for x in (keys, keys * 2.0**power))
    assert torch.equal(other.gain.int(), one.gain.int() - 8 * power)
    assert torch.equal(other.mean, one.mean)
    assert torch.equal(other.at(0, 128).code(keys * 2.0**power), one.at(0, 128).code(keys))


# Aims


def test_aims_point_along_what_queries_look_for():
    keys, _, positions, rope = taught("none")
    direction = wide(2, 3, 1, 64, seed=8)
    query = wide(2, 3, 300, 64, seed=2) + 20 * torch.randn(2, 3, 300, 1).double() * direction / direction.norm()
    basis = fit_basis(keys, positions, grid=Grid(64, (4,)), rope=rope, queries=query, aims=1)
    looked = basis.at(0, 1).query(direction[:, :, None])[:, :, 0, 0]
    aim = basis.aimed(torch.float64)[:, :, 0]
    assert (torch.cosine_similarity(aim, looked, dim=-1).abs() > 0.95).all()
    # |aim|^2 is what an error along it costs more than the average of the other directions.
    covariance = basis.at(0, 1).query(query[:, :, None])[:, :, 0]
    values = torch.linalg.eigvalsh(covariance.mT @ covariance / 300)
    excess = values[..., -1] / values[..., :-1].mean(dim=-1) - 1
    assert torch.allclose(aim.square().sum(dim=-1), excess, rtol=0.15)


@pytest.mark.parametrize("queries", [None, torch.zeros(2, 3, 64, 64)], ids=["none known", "zeros"])
def test_without_queries_there_are_no_aims_and_only_keys_count(queries):
    keys, _, positions, rope = taught("full")
    basis = fit_basis(keys, positions, grid=Grid(64, (4,)), rope=rope, queries=queries, aims=1)
    assert not basis.aimed(torch.float64).any()
    flat = fit_basis(keys, positions, grid=Grid(64, (4,)), rope=rope, queries=torch.ones(2, 3, 64, 64))
    assert (basis.gain.int() - flat.gain.int()).abs().max() <= 1


def test_a_row_and_a_head_learn_what_they_would_learn_alone():
    keys, _, positions, rope = taught("full", rows=3)
    query = wide(3, 3, 64, 64, seed=2)
    basis = fit_basis(keys, positions, grid=Grid(64, (4,)), rope=rope, queries=query, aims=1)
    for row in range(3):
        one = fit_basis(
            keys[row, 1][None, None],
            positions[:1],
            grid=Grid(64, (4,)),
            rope=rope,
            queries=query[row, 1][None, None],
            aims=1,
        )
        for name, tensor in one.tensors.items():
            if tensor.ndim > 1:
                assert torch.equal(tensor[0, 0], basis.tensors[name][row, 1]), name
