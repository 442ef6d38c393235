"""Low-bit codes in bytes, against packing bit by bit."""

from __future__ import annotations

import math

import oracles_rotated as oracle
import pytest
import torch

from hf_kvq.codecs.rotated import grid_for
from hf_kvq.packing import BEST_SCALES, PLANES, SCALE_ONE, Grid, scale_bytes, scale_of

DIMS = [40, 64, 80, 128, 256]
BITS = [8, 6, 5, 4, 3, 2, 1]
TIERS = [(6, 4, 3, 3), (4, 2, 1, 1), (8, 2), (5, 3, 2, 1)]
GRIDS = [Grid(dim, (bits,)) for dim in DIMS for bits in BITS]
GRIDS += [Grid(dim, bits) for dim in (64, 128, 256) for bits in TIERS] + [Grid(40, (4, 4)), Grid(80, (8, 4))]
BYTES = torch.arange(256, dtype=torch.uint8)


def codes(grid: Grid, *shape: int, seed: int = 0) -> torch.Tensor:
    """Every code of a tier is as likely; the first two tokens have the least and the greatest."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.tensor([2**bits for bits in grid.bits]).repeat_interleave(grid.tier)
    found = (torch.rand(*shape, grid.dim, generator=generator) * top).to(torch.uint8)
    flat = found.view(-1, grid.dim)
    flat[0], flat[-1] = 0, (top - 1).to(torch.uint8)
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_lie_in_bytes_as_packing_bit_by_bit_puts_them(grid):
    loose = codes(grid, 2, 1, 3)
    packed = grid.pack(loose)
    rows = loose.view(-1, grid.dim).tolist()
    assert packed.view(6, -1).tolist() == [oracle.packed(row, grid) for row in rows]
    assert torch.equal(grid.unpack(packed), loose)
    assert packed.shape[-1] == grid.width == sum(grid.dim // len(grid.bits) * bits for bits in grid.bits) // 8


@pytest.mark.parametrize("grid", [Grid(64, (6, 4, 3, 3)), Grid(40, (3,)), Grid(80, (5,))], ids=str)
def test_all_bytes_are_codes_of_something(grid):
    packed = torch.randint(0, 256, (3, grid.width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert grid.unpack(packed).tolist() == [oracle.unpacked(row, grid) for row in packed.tolist()]
    assert torch.equal(grid.pack(grid.unpack(packed)), packed)


@pytest.mark.parametrize(
    ("dim", "size"),
    [(40, 40), (64, 64), (80, 40), (96, 48), (128, 64), (256, 64), (8, 8), (65, 13), (67, 1), (72, 36)],
)
def test_a_scale_is_shared_by_sixty_four_channels_or_the_most_below_that_divide_them(dim, size):
    grid = Grid(dim, (8,))
    assert (grid.group_size, grid.groups) == (size, dim // size)
    assert size == oracle.group_size(dim)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "grid",
    [
        Grid(64, (8,)),
        Grid(40, (6,)),
        Grid(80, (5,)),
        Grid(128, (4,)),
        Grid(64, (3,)),
        Grid(256, (6, 4, 3, 3)),
        Grid(64, (4, 2, 1, 1)),
    ],
    ids=str,
)
def test_codes_stand_for_levels_times_scales_in_every_dtype(grid, dtype):
    packed = grid.pack(codes(grid, 1, 2, 3))
    scales = torch.randint(96, 160, (1, 2, 3, grid.groups), dtype=torch.uint8, generator=torch.Generator())
    scales[0, 0, 0, 0] = 0
    room = torch.full((1, 2, 5, grid.dim + 3), 7.0, dtype=dtype)
    out = room[:, :, 1:4, 1:-2]
    grid.decode_into(packed, scales, out)
    exact = oracle.decoded(packed, scales, grid)
    # Two roundings of a table and a cubic in float32 or float64, and one to the dtype.
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    allowed = (4 * wide + torch.finfo(dtype).eps / 2) * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((out.double() - exact).abs() <= allowed).all()
    room[:, :, 1:4, 1:-2] = 7.0
    assert (room == 7.0).all()


@pytest.mark.parametrize("bits", BITS)
def test_levels_ascend_and_are_as_far_below_zero_as_above(bits):
    levels = Grid(64, (bits,)).levels(bits)
    assert levels.tolist() == pytest.approx([oracle.level(bits, code) for code in range(2**bits)], rel=1e-14)
    assert (levels.diff() > 0).all()
    assert torch.equal(levels, -levels.flip(0))


DOCUMENTED = {2: 0.1175, 3: 0.0346, 4: 0.00969, 5: 0.00265, 6: 0.00072, 8: 0.000051}


def loss_of_normal_numbers(bits: int, scale: float) -> float:
    """Squared error of the nearest level, integrated over the normal distribution."""
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    weight = (-x.square() / 2).exp() / math.sqrt(2 * math.pi) * float(x[1] - x[0])
    levels = Grid(64, (bits,)).levels(bits) * scale
    above = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
    return float(((x - levels[above]).square() * weight).sum())


@pytest.mark.parametrize("bits", DOCUMENTED)
def test_normal_numbers_lose_what_is_said_of_them_at_the_best_scale(bits):
    best = loss_of_normal_numbers(bits, BEST_SCALES[bits])
    assert best == pytest.approx(DOCUMENTED[bits], rel=0.01)
    assert all(loss_of_normal_numbers(bits, BEST_SCALES[bits] * factor) > best for factor in (0.99, 1.01))


@pytest.mark.parametrize(
    ("dim", "bits", "message"),
    [
        (80, (6, 4, 3, 3), r"head_dim 80 in 4 tier\(s\) of 6, 4, 3, 3 bits does not fill whole bytes; try one tier"),
        (42, (6,), "head_dim 42 in 1 .* 6 bits .* or 8, 4 or 2 bits"),
        (41, (4,), "head_dim 41"),
        (64, (4, 4, 4), "head_dim 64 in 3 tier"),
        (64, (7,), r"bits must be of 1, 2, 3, 4, 5, 6, 8, got \[7\]"),
        (64, (4, 16), r"got \[16\]"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_what_does_not_fill_bytes_is_refused_with_a_way_out(dim, bits, message):
    with pytest.raises(ValueError, match=message) as caught:
        Grid(dim, bits)
    print(f"\n{caught.value}")


@pytest.mark.parametrize(
    ("bits", "dim", "expected"),
    [
        ((6, 4, 3, 3), 64, (6, 4, 3, 3)),
        ((6, 4, 3, 3), 80, (4,)),  # tiers of 20 channels have no 1-bit plane of whole bytes: their mean
        ((6, 4, 3, 3), 66, (4,)),  # no four equal tiers
        ((4, 2, 1, 1), 40, (2,)),
        ((4, 2, 1, 1), 256, (4, 2, 1, 1)),
        ((5, 4, 4), 64, (5,)),  # a mean of 13 / 3 is rounded up
        ((3,), 20, (4,)),  # the next more bits that fit
        ((6,), 42, (8,)),
        ((2,), 41, (8,)),
        ((1, 2), 7, (8,)),
        ((4,), 1, (8,)),
        *(((bits,), 128, (bits,)) for bits in BITS),
    ],
)
def test_tiers_that_do_not_fit_give_way_to_their_mean_or_to_more_bits(bits, dim, expected):
    assert grid_for(bits, dim) == Grid(dim, expected)


def test_every_head_dim_has_a_grid_of_no_fewer_bits():
    for dim in range(1, 300):
        grid = grid_for((6, 4, 3, 3), dim)
        assert grid.width * 8 >= 4 * dim
        assert set(grid.bits) <= set(PLANES)


# Scales


def test_scales_are_eighths_of_powers_of_two_and_byte_zero_is_none():
    scales = scale_of(BYTES, torch.float64)
    assert scales.tolist() == pytest.approx([oracle.scale(byte) for byte in range(256)], rel=1e-15)
    assert (scales[0], scales[SCALE_ONE], scales[SCALE_ONE + 8], scales[1]) == (0, 1, 2, 2**-15.875)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_byte_of_a_scale_is_that_of_the_smallest_that_is_not_below(dtype):
    generator = torch.Generator().manual_seed(0)
    wanted = torch.exp2(torch.rand(20_000, dtype=torch.float64, generator=generator) * 31.6 - 15.8).to(dtype)
    bytes_, table = scale_bytes(wanted), scale_of(BYTES, torch.float64)
    assert (table[bytes_.long()] >= wanted).all()
    assert (table[bytes_.long() - 1] < wanted).all()


def test_a_scale_that_has_a_byte_keeps_it_up_to_a_rounding_of_its_logarithm():
    table = scale_of(BYTES, torch.float64)
    found = scale_bytes(table)
    assert ((found.int() - BYTES.int()) * (BYTES < 255)).unique().tolist() in ([0], [0, 1])
    powers = BYTES[8::8]
    assert torch.equal(scale_bytes(table[8::8]), powers)
    assert torch.equal(scale_bytes(table[8::8] * (1 + 1e-12)), powers + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_is_byte_zero_and_what_is_out_of_range_is_cut_to_it(dtype):
    extremes = torch.tensor([0.0, 1e-30, 2**-15.9, 2**15.9, 1e30, torch.inf], dtype=dtype)
    assert scale_bytes(extremes).tolist() == [0, 1, 1, 255, 255, 255]
