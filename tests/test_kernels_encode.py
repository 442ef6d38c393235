"""The compiled encoder of low-bit codes against the codec's own tensors, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hf_kvq.codecs.rotated import TRIALS, encode_grid
from hf_kvq.kernels import grid_encoder_for
from hf_kvq.packing import BEST_SCALES, SCALE_ONE, Grid

GRIDS = [
    *(Grid(64, (bits,)) for bits in (8, 6, 5, 4, 3, 2, 1)),
    Grid(64, (6, 4, 3, 3)),
    Grid(64, (4, 2, 1, 1)),
    Grid(128, (6, 4, 3, 3)),
    Grid(256, (4, 2, 1, 1)),
    Grid(256, (8,)),
    Grid(80, (4,)),
    Grid(40, (3,)),
    Grid(96, (6, 4)),
]


@pytest.fixture
def encoder():
    pytest.importorskip("numba", reason="pip install hf-kvq[cpu]")
    from hf_kvq.kernels import numba_encode

    return numba_encode.encode_grid


def in_basis(grid: Grid, *shape: int) -> torch.Tensor:
    """Normal channels whose best scale is about 1, as a basis leaves them, of tokens of many sizes."""
    generator = torch.Generator().manual_seed(sum(shape))
    spread = torch.tensor([1 / BEST_SCALES[bits] for bits in grid.bits for _ in range(grid.tier)])
    sizes = torch.randn(*shape, 1, generator=generator).mul(2).exp()
    return (torch.randn(*shape, grid.dim, generator=generator) * spread * sizes).double()


def assert_same(encoder, states: torch.Tensor, grid: Grid) -> None:
    for got, expected in zip(encoder(states, grid, TRIALS), encode_grid(states, grid), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 37), (1, 2, 128)], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_and_scales_are_those_of_the_codecs_own_tensors(encoder, grid, shape):
    assert_same(encoder, in_basis(grid, *shape), grid)


@pytest.mark.parametrize("grid", [Grid(8, (4,)), Grid(8, (2,)), Grid(16, (2,))], ids=str)
def test_small_groups_whose_largest_number_decides_are_searched_as_far(encoder, grid):
    assert_same(encoder, in_basis(grid, 1, 1, 2000), grid)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_numbers_of_any_size_are_coded(encoder, grid):
    states = in_basis(grid, 1, 2, 121) * torch.logspace(-60, 60, 121, dtype=torch.float64)[:, None]
    states[0, 0, ::7] = 0
    states[0, 1, ::5, : grid.dim // 2] = 0
    states[0, 1, 1] = -0.0
    assert_same(encoder, states, grid)


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2, 1])
def test_a_number_on_or_beside_a_bound_between_two_levels_goes_to_the_same_side(encoder, bits):
    # One trial, and in each group the largest level: the scale is 1, and bounds are bounds to the last bit.
    grid = Grid(64, (bits,))
    levels = grid.levels(bits)
    bounds = (levels[1:] + levels[:-1]) / 2
    numbers = torch.cat([bounds, bounds.nextafter(bounds + 1), bounds.nextafter(bounds - 1), levels]).repeat(64)
    states = numbers.view(1, 1, -1, 64)
    states[..., 0] = levels[-1]
    codes, scale = encoder(states, grid, 1)
    assert (scale == SCALE_ONE).all()
    assert torch.equal(codes, encode_grid(states, grid, trials=1)[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e200])
def test_what_has_no_finite_error_is_coded_as_nothing(encoder, bad):
    grid = Grid(128, (4,))
    states = in_basis(grid, 1, 1, 3)
    states[0, 0, 1, 70] = bad
    assert_same(encoder, states, grid)
    _, scale = encoder(states, grid, TRIALS)
    assert (scale[0, 0] > 0).tolist() == [[True, True], [True, False], [True, True]]


def test_a_view_and_no_tokens_at_all_are_taken(encoder):
    grid = Grid(64, (6, 4, 3, 3))
    states = in_basis(grid, 2, 37, 3).transpose(1, 2)
    assert_same(encoder, states, grid)
    assert_same(encoder, states[:, :, :0], grid)


def test_threads_change_nothing(encoder):
    grid = Grid(64, (4,))
    states = in_basis(grid, 1, 3, 201)
    one = encoder(states, grid, TRIALS)
    torch.set_num_threads(2)
    try:
        two = encoder(states, grid, TRIALS)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, one, two))
    assert_same(encoder, states, grid)


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("grid", [Grid(64, (4,)), Grid(64, (6, 4, 3, 3)), Grid(80, (2,))], ids=str)
def test_codes_that_are_moved_for_an_aim_are_the_same_too(grid, count):
    found = grid_encoder_for("cpu")
    if found is None:
        pytest.skip("needs numba: pip install hf-kvq[cpu]")
    states = in_basis(grid, 2, 3, 37)
    aims = torch.randn(2, 3, count, grid.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes, scale = found(states, grid, aims, TRIALS, 4)
    expected, expected_scale = encode_grid(states, grid, aims, TRIALS, 4)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, encode_grid(states, grid)[0]) == (count == 0)


def test_devices_without_a_compiler_use_tensors():
    assert grid_encoder_for("meta") is None
