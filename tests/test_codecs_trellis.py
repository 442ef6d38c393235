"""Codes on a trellis: what they stand for bit by bit, the best of all paths by trying them all, and the compiled encoder, bit for bit."""

from __future__ import annotations

import itertools

import oracles_rotated as oracle
import pytest
import torch

from hf_kvq.codecs import make_codec
from hf_kvq.codecs.rotated import encode_grid
from hf_kvq.codecs.trellis import encode_trellis
from hf_kvq.config import RotatedConfig
from hf_kvq.kernels import grid_encoder_for
from hf_kvq.packing import OFFSETS, TRELLIS_CURVES, TRELLIS_SCALES, Grid, quarter_of, quarters

GRIDS = [
    *(Grid(64, (bits,), trellis=True) for bits in TRELLIS_CURVES),
    Grid(64, (4, 3, 3, 2), trellis=True),
    Grid(64, (3, 2, 2, 1), trellis=True),
    Grid(128, (5, 4, 4, 3), trellis=True),
    Grid(80, (4,), trellis=True),
    Grid(96, (3,), trellis=True),
    Grid(16, (2,), trellis=True),
    Grid(8, (1,), trellis=True),
]


def in_basis(grid: Grid, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normal channels whose best scale is about 1, as a basis leaves them, of tokens of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([1 / TRELLIS_SCALES[bits] for bits in grid.bits for _ in range(grid.tier)])
    sizes = torch.randn(*shape, 1, generator=generator).mul(2).exp()
    return (torch.randn(*shape, grid.dim, generator=generator) * spread * sizes).double()


def aims_of(states: torch.Tensor, size: float) -> torch.Tensor:
    aims = torch.randn(*states.shape[:2], 1, states.shape[3], generator=torch.Generator().manual_seed(7))
    return size * (aims / aims.norm(dim=-1, keepdim=True)).double()


def decoded(codes: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    out = torch.empty(*codes.shape[:3], grid.dim, dtype=torch.float64)
    grid.decode_into(codes, scale, out)
    return out


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_stand_for_what_a_walk_through_the_states_says(grid):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (1, 2, 5, grid.width), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 150, (1, 2, 5, grid.groups), dtype=torch.uint8, generator=generator)
    torch.testing.assert_close(decoded(codes, scale, grid), oracle.walked(codes, scale, grid), rtol=1e-12, atol=0)
    assert torch.equal(grid.pack(grid.unpack(codes)), codes)
    assert codes.shape[3] == sum(bits * grid.tier for bits in grid.bits) // 8


@pytest.mark.parametrize(("bits", "dim"), [(1, 8), (2, 8)])
def test_no_path_at_any_scale_that_is_tried_is_better(bits, dim):
    grid = Grid(dim, (bits,), trellis=True)
    states = in_basis(grid, 1, 2, 3)
    aims = aims_of(states, 0.0)
    codes, scale = encode_trellis(states, grid, aims)
    found = (decoded(codes, scale, grid) - states).square().sum(-1)
    every = torch.tensor(list(itertools.product(range(256), repeat=bits)), dtype=torch.uint8)
    for head, token in itertools.product(range(2), range(3)):
        size = (states[0, head, token] * TRELLIS_SCALES[bits]).square().mean().sqrt()
        least = float("inf")
        middle = next(byte for byte in range(1, 256) if oracle.scale(byte) >= size * 2 ** (-1 / 16))
        for offset in OFFSETS:
            here = torch.full((len(every), 1), middle + offset, dtype=torch.uint8)
            numbers = decoded(every[None, None], here[None, None], grid)[0, 0]
            least = min(least, float((numbers - states[0, head, token]).square().sum(-1).min()))
        assert float(found[0, head, token]) == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize("bits", TRELLIS_CURVES)
def test_a_quarter_of_the_squared_error_goes(bits, shown):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1, 2, 300, 64, generator=generator, dtype=torch.float64)
    errors = {}
    for trellis in (False, True):
        grid = Grid(64, (bits,), trellis=trellis)
        states = numbers / grid.best_scale(bits)
        errors[trellis] = (
            float((decoded(*encode_grid(states, grid), grid) - states).square().mean()) * grid.best_scale(bits) ** 2
        )
    share = errors[True] / errors[False]
    shown(
        f"{bits} bits on a trellis, vectors of 64: {share:.3f} of the squared error without it, {errors[True]:.3g} of the variance"
    )
    assert share < 0.77


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_an_error_along_the_aim_goes_for_next_to_nothing(bits):
    grid = Grid(64, (bits,), trellis=True)
    states = in_basis(grid, 1, 2, 200)
    aims = aims_of(states, 5.0)
    cost, square = {}, {}
    for name, u in (("without", 0 * aims), ("with", aims)):
        errors = decoded(*encode_trellis(states, grid, u), grid) - states
        errors = errors / states.norm(dim=-1, keepdim=True)
        cost[name] = float((errors @ aims.mT).square().mean())
        square[name] = float(errors.square().sum(-1).mean())
    assert cost["with"] < 0.1 * cost["without"]
    assert square["with"] < 1.05 * square["without"]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 37)], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_compiled_encoder_gives_the_same_bits(grid, shape):
    pytest.importorskip("numba", reason="pip install hf-kvq[cpu]")
    states = in_basis(grid, *shape)
    states[:, :, ::7] = 0
    states[..., : grid.group_size] *= 1 - (torch.arange(shape[2]) % 5 == 1).double()[:, None]
    for aims in (aims_of(states, 3.0), aims_of(states, 0.0), aims_of(states, 1.0)[:, :, :0]):
        encode = grid_encoder_for("cpu")
        assert encode is not None
        for got, expected in zip(encode(states, grid, aims, 0, 0), encode_trellis(states, grid, aims), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("compiled", [True, False])
def test_codes_do_not_depend_on_how_many_tokens_come_together(compiled):
    grid = Grid(64, (4, 3, 3, 2), trellis=True)
    states = in_basis(grid, 2, 3, 30)
    aims = aims_of(states, 3.0)
    encode = grid_encoder_for("cpu") if compiled else None
    encode = (
        (lambda x: encode_trellis(x, grid, aims)) if encode is None else lambda x, e=encode: e(x, grid, aims, 0, 0)
    )
    together = encode(states)
    for size in (1, 7):
        parts = [encode(part) for part in states.split(size, dim=2)]
        for got, expected in zip(zip(*parts, strict=True), together, strict=True):
            assert torch.equal(torch.cat(got, dim=2), expected)


def test_numbers_of_any_size_are_coded():
    grid = Grid(64, (3,), trellis=True)
    states = in_basis(grid, 1, 1, 81) * torch.logspace(-40, 40, 81, dtype=torch.float64)[:, None]
    codes, scale = encode_trellis(states, grid)
    assert torch.isfinite(decoded(codes, scale, grid)).all()
    assert set(scale.unique().tolist()) > {1, 255}


def test_each_state_is_left_by_two_quarters_that_are_two_levels_apart():
    table = quarters()
    for state in range(16):
        assert abs(table[2 * state] - table[2 * state + 1]) == 2
    path = torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.uint8)
    assert quarter_of(path).tolist() == oracle.walk(path.tolist())


def test_more_than_one_direction_is_refused():
    states = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="one direction, got 2"):
        encode_trellis(states, Grid(8, (2,), trellis=True), torch.zeros(1, 1, 2, 8, dtype=torch.float64))


def test_eight_bits_lie_on_no_trellis():
    with pytest.raises(ValueError, match="8 bits lie on no trellis"):
        RotatedConfig(bits=8, trellis=True)
    with pytest.raises(ValueError, match="bits must be of 1, 2, 3, 4, 5, 6"):
        Grid(64, (8,), trellis=True)


def test_channels_that_fill_no_byte_go_without_a_trellis():
    assert make_codec(RotatedConfig(bits=4, trellis=True)).grid_of(64) == Grid(64, (4,), trellis=True)
    assert make_codec(RotatedConfig(bits=4, trellis=True)).grid_of(12) == Grid(12, (4,))
