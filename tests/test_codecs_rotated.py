"""Low-bit codes in a basis: the nearest of all levels, of one token alone."""

from __future__ import annotations

import functools

import oracles_rotated as oracle
import pytest
import torch
from oracles import ODD_SHAPES, attention, states

from hf_kvq.codecs import make_codec
from hf_kvq.codecs.rotated import FLIPS, TRIALS, RotatedCodec, encode_grid
from hf_kvq.config import RotatedConfig
from hf_kvq.kernels import Operand, Scoring, Visibility, attend
from hf_kvq.packing import BEST_SCALES, SCALE_ONE, Grid, scale_of
from hf_kvq.rope import Rope

BITS = [8, 6, 5, 4, 3, 2]
TIERS = (6, 4, 3, 3)


def in_basis(grid: Grid, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normal channels whose best scale is about 1, as a basis leaves them, of tokens of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([1 / BEST_SCALES[bits] for bits in grid.bits for _ in range(grid.tier)])
    sizes = torch.randn(*shape, 1, generator=generator).exp()
    return (torch.randn(*shape, grid.dim, generator=generator) * spread * sizes).double()


def decoded(grid: Grid, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*codes.shape[:3], grid.dim, dtype=torch.float64)
    grid.decode_into(codes, scale, out)
    return out


def by_group(grid: Grid, numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unflatten(-1, (grid.groups, grid.group_size))


# Levels and scales

ENCODED = [
    *(Grid(64, (bits,)) for bits in (6, 4, 3, 2, 1)),
    pytest.param(Grid(40, (8,)), marks=pytest.mark.slow),
    Grid(40, (5,)),
    Grid(80, (3,)),
    Grid(64, TIERS),
    Grid(64, (4, 2, 1, 1)),
    pytest.param(Grid(256, TIERS), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("grid", ENCODED, ids=str)
def test_every_code_is_the_nearest_level_at_the_best_of_all_scales(grid):
    numbers = in_basis(grid, 1, 1, 4)
    numbers[0, 0, 1] *= 1e-3
    numbers[0, 0, 2, ::3] *= 20  # a few large ones that may be worth cutting
    numbers[0, 0, 3] *= 2.0**14  # beyond the largest scale in some group
    codes, scale = encode_grid(numbers, grid)
    for token in range(4):
        expected_codes, expected_scale = oracle.nearest(numbers[0, 0, token], grid, TRIALS)
        assert scale[0, 0, token].tolist() == expected_scale
        assert grid.unpack(codes[0, 0, token]).tolist() == expected_codes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [40, 64, 80, 128, 256])
def test_the_error_is_at_most_half_the_widest_gap_at_the_scale_that_reaches_all(bits, dim):
    grid = Grid(dim, (bits,))
    numbers = in_basis(grid, 1, 2, 37)
    error = by_group(grid, decoded(grid, *encode_grid(numbers, grid)) - numbers).square().mean(dim=-1).sqrt()
    levels = grid.levels(bits)
    reaching = by_group(grid, numbers).abs().amax(dim=-1) / levels[-1] * 2**0.125
    assert (error <= reaching * levels.diff().max() / 2).all()


@pytest.mark.parametrize("bits", BITS)
def test_normal_states_lose_no_more_than_the_best_levels_would(bits):
    grid = Grid(128, (bits,))
    numbers = in_basis(grid, 1, 2, 300)
    error = (decoded(grid, *encode_grid(numbers, grid)) - numbers).square().sum() / numbers.square().sum()
    documented = {2: 0.1175, 3: 0.0346, 4: 0.00969, 5: 0.00265, 6: 0.00072, 8: 0.000051}[bits]
    # A scale of their own for 64 numbers does better than one for all; an eighth of a power of two between scales costs little.
    assert 0.6 * documented < error < 1.02 * documented


@pytest.mark.parametrize("grid", [Grid(64, (4,)), Grid(128, TIERS), Grid(80, (3,))], ids=str)
def test_one_of_the_scales_tried_is_never_better_than_the_one_that_was_taken(grid):
    numbers = in_basis(grid, 1, 2, 37)
    codes, scale = encode_grid(numbers, grid)
    lost = by_group(grid, decoded(grid, codes, scale) - numbers).square().sum(dim=-1)
    for step in (-1, 1):
        other = (scale.int() + step).to(torch.uint8)
        step_size = scale_of(other, torch.float64).repeat_interleave(grid.group_size, dim=-1)
        parts = []
        for tier, bits in enumerate(grid.bits):
            part = slice(tier * grid.tier, (tier + 1) * grid.tier)
            gaps = (numbers[..., part] / step_size[..., part]).unsqueeze(-1) - grid.levels(bits)
            parts.append(gaps.abs().amin(dim=-1) * step_size[..., part])
        error = by_group(grid, torch.cat(parts, dim=-1)).square().sum(dim=-1)
        # Above the scale that reaches the largest number nothing is tried.
        reach = by_group(grid, torch.cat([numbers[..., t * grid.tier : (t + 1) * grid.tier].abs() / grid.levels(b)[-1] for t, b in enumerate(grid.bits)], -1)).amax(-1)  # fmt: skip
        tried = scale_of((other.int() - 1).to(torch.uint8), torch.float64) < reach
        assert (error >= lost * (1 - 1e-9))[tried].all()


@pytest.mark.parametrize("grid", [Grid(64, (4,)), Grid(128, TIERS)], ids=str)
def test_zero_numbers_have_no_scale_and_stay_zero(grid):
    numbers = in_basis(grid, 1, 1, 3)
    numbers[0, 0, 1] = 0.0
    numbers[0, 0, 2, : grid.group_size] = 0.0
    codes, scale = encode_grid(numbers, grid)
    read = decoded(grid, codes, scale)
    assert not read[0, 0, 1].any()
    assert not read[0, 0, 2, : grid.group_size].any()
    assert not scale[0, 0, 1].any()
    assert (scale[0, 0, 0] > 0).all()
    assert torch.equal(encode_grid(-numbers, grid)[1], scale)


def test_numbers_too_small_for_any_scale_have_the_smallest_one():
    grid = Grid(64, (4,))
    numbers = in_basis(grid, 1, 1, 2)
    numbers[0, 0, 0] *= 1e-12
    _, scale = encode_grid(numbers, grid)
    assert scale.flatten().tolist()[0] == 1


# Aims


def aimed(grid: Grid, count: int, size: float) -> torch.Tensor:
    direction = torch.randn(1, 2, count, grid.dim, generator=torch.Generator().manual_seed(3)).double()
    return direction / direction.norm(dim=-1, keepdim=True) * size


def cost(error: torch.Tensor, aims: torch.Tensor) -> torch.Tensor:
    return error.square().sum(dim=-1) + (error @ aims.mT).square().sum(dim=-1)


@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "grid", [Grid(64, (8,)), Grid(64, (4,)), Grid(80, (2,)), Grid(128, TIERS), Grid(64, (4, 2, 1, 1))], ids=str
)
def test_aims_never_raise_the_cost_and_lower_the_error_along_them(grid, count, size):
    numbers, aims = in_basis(grid, 1, 2, 128), aimed(grid, count, size)
    plain_codes, plain_scale = encode_grid(numbers, grid)
    codes, scale = encode_grid(numbers, grid, aims)
    assert torch.equal(scale, plain_scale)
    plain, error = (decoded(grid, each, scale) - numbers for each in (plain_codes, codes))
    assert (cost(error, aims) <= cost(plain, aims) * (1 + 1e-9)).all()
    along, plain_along = ((each @ aims.mT).square().mean() for each in (error, plain))
    assert along < (0.5 if size >= 3 and count == 1 else 1.0) * plain_along
    # At most so many codes are moved, or one as often, each time by one level.
    moves = (grid.unpack(codes).int() - grid.unpack(plain_codes).int()).abs().sum(dim=-1)
    assert 0 < moves.max() <= FLIPS


@pytest.mark.parametrize("grid", [Grid(64, (4,)), Grid(64, (6, 2))], ids=str)
def test_the_first_code_moved_is_the_one_that_gains_most(grid):
    numbers, aims = in_basis(grid, 1, 1, 5), aimed(grid, 2, 4.0)[:, :1]
    plain_codes, scale = encode_grid(numbers, grid)
    codes, _ = encode_grid(numbers, grid, aims, flips=1)
    step = scale_of(scale, torch.float64)
    for token in range(5):
        loose = grid.unpack(plain_codes[0, 0, token]).tolist()
        candidates = [loose]
        for channel, code in enumerate(loose):
            bits = grid.bits[channel // grid.tier]
            moved = [each for each in (code - 1, code + 1) if 0 <= each < 2**bits]
            candidates += [[*loose[:channel], each, *loose[channel + 1 :]] for each in moved]
        costs = []
        for candidate in candidates:
            read = torch.tensor(
                [oracle.level(grid.bits[c // grid.tier], code) for c, code in enumerate(candidate)],
                dtype=torch.float64,
            )
            costs.append(float(cost(read * step[0, 0, token] - numbers[0, 0, token], aims[0, 0])))
        best = candidates[costs.index(min(costs))]
        assert grid.unpack(codes[0, 0, token]).tolist() == best


def test_no_aims_are_the_same_as_none():
    grid = Grid(64, (4,))
    numbers = in_basis(grid, 1, 2, 37)
    plain = encode_grid(numbers, grid)
    assert all(map(torch.equal, plain, encode_grid(numbers, grid, torch.zeros(1, 2, 0, 64).double())))
    assert all(map(torch.equal, plain, encode_grid(numbers, grid, torch.zeros(1, 2, 1, 64).double())))


# The codec


@functools.cache
def fitted(
    bits: int | tuple[int, ...], kind: str, dim: int = 64, batch: int = 2, heads: int = 2, queries: bool = True
) -> tuple[RotatedCodec, torch.Tensor, Rope | None]:
    """A codec of keys (of values where `kind` is "values"), the states of 300 tokens of which it learned the first 128, and their rotation."""
    keys = kind != "values"
    rope = oracle.rope_of(dim, kind) if keys else None
    x = states(batch, heads, 300, dim) + 3 * states(1, heads, 1, dim, seed=5)
    if rope is not None:
        x = rope.rotate(x, torch.arange(300))
    asked = states(batch, heads, 256, dim, seed=1) + 4 * states(1, heads, 1, dim, seed=9)
    codec = make_codec(RotatedConfig(bits=bits), keys=keys, rope=rope)
    assert isinstance(codec, RotatedCodec)
    known = asked if keys and queries else None
    return codec.fitted(x[:, :, :128], torch.arange(128).expand(batch, -1), known), x, rope


KINDS = ["full", "partial", "interleaved", "none", "values"]
EACH = [pytest.param(8, id="8"), pytest.param(4, id="4"), pytest.param(TIERS, id="tiers")]


def read(codec: RotatedCodec, codes, dim: int, first: int = 0) -> torch.Tensor:
    coded = codec.decode(codes, head_dim=dim, dtype=torch.float64)
    return codec.basis_at(first, coded.shape[2]).restore(coded)


@pytest.mark.parametrize("chunk", [1, 37, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [pytest.param(8, id="8", marks=pytest.mark.slow), 4, pytest.param(TIERS, id="tiers")])
def test_a_token_is_coded_alone_whatever_comes_with_it(bits, kind, chunk):
    codec, x, _ = fitted(bits, kind)
    tokens = 129 if chunk > 1 else 5
    whole = codec.encode(x[:, :, :tokens], first=7)
    parts = [codec.encode(x[:, :, :tokens][:, :, i : i + chunk], first=7 + i) for i in range(0, tokens, chunk)]
    for name, part in whole.items():
        assert torch.equal(torch.cat([each[name] for each in parts], dim=2), part)


@pytest.mark.parametrize("bits", EACH)
def test_other_orders_of_tokens_rows_and_heads_are_other_orders_of_codes(bits):
    codec, x, _ = fitted(bits, "values")
    x = x[:, :, :50]
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    for name, part in codec.encode(x[:, :, order]).items():
        assert torch.equal(part, codec.encode(x)[name][:, :, order])
    codec, x, _ = fitted(bits, "full")
    x = x[:, :, :50]
    swapped = codec.map(lambda tensor: tensor.flip(0))
    for name, part in swapped.encode(x.flip(0)).items():
        assert torch.equal(part, codec.encode(x)[name].flip(0))
    alone = codec.map(lambda tensor: tensor[1:, 1:] if tensor.ndim > 1 else tensor[1:])
    for name, part in alone.encode(x[1:, 1:]).items():
        assert torch.equal(part, codec.encode(x)[name][1:, 1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", EACH)
def test_codes_and_what_was_learned_say_what_is_read(bits, kind):
    codec, x, rope = fitted(bits, kind, 40 if bits != TIERS else 64)
    x = x[:, :, :9]
    codes = codec.encode(x, first=50)
    grid = codec.grid_of(x.shape[3])
    numbers = oracle.decoded(codes["codes"], codes["scale"], grid)
    places = torch.arange(50, 59).expand(2, 2, -1)
    expected = oracle.restored(numbers, codec.tensors, len(grid.bits), rope, places)
    assert (read(codec, codes, x.shape[3], 50) - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 6])
def test_the_error_of_states_is_bounded_by_the_gaps_of_levels(bits, kind):
    codec, x, _ = fitted(bits, kind, queries=False)
    basis = codec.basis
    error = (read(codec, codec.encode(x), 64) - x) * basis.gains(torch.float64)[:, :, None]
    coded = basis.at(0, 300).code(x.double())
    levels = Grid(64, (bits,)).levels(bits)
    step = coded.abs().amax(dim=-1) / levels[-1] * 2**0.125
    # The turn keeps lengths: what holds for the numbers in the basis holds for states times their gains.
    assert (error.norm(dim=-1) <= step * levels.diff().max() / 2 * 64**0.5 * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("bits", "limit"), [(8, 0.012), (6, 0.04), (5, 0.08), (4, 0.15), (3, 0.28), (2, 0.5), (TIERS, 0.2)]
)
@pytest.mark.parametrize("kind", ["full", "none", "values"])
def test_tokens_that_come_later_are_coded_as_well_as_those_that_taught(bits, kind, limit):
    codec, x, _ = fitted(bits, kind, queries=False)
    shift = codec.basis.at(0, 300)._shift(torch.float64)
    error = (read(codec, codec.encode(x), 64) - x).square().sum(dim=-1)
    size = (x - shift).square().sum(dim=-1)
    early, late = ((error[..., part].sum() / size[..., part].sum()).sqrt() for part in (slice(128), slice(128, None)))
    assert late < limit
    assert late < 1.25 * early


@pytest.mark.parametrize("kind", ["full", "partial", "values"])
def test_a_state_at_the_mean_is_read_as_it_is(kind):
    codec, x, _ = fitted(4, kind)
    at_mean = codec.basis.at(20, 5)._shift(torch.float64).expand(2, 2, 5, 64)
    codes = codec.encode(at_mean, first=20)
    assert not codes["scale"].any()
    assert torch.equal(read(codec, codes, 64, 20), at_mean)
    assert codec.encode(x[:, :, :5], first=20)["scale"].all()


@pytest.mark.parametrize("bits", EACH)
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_zero_states_after_zero_states_are_read_as_zero(bits, keys):
    rope = oracle.rope_of(64, "full") if keys else None
    zeros = torch.zeros(2, 1, 128, 64)
    codec = make_codec(RotatedConfig(bits=bits), keys=keys, rope=rope)
    codec = codec.fitted(zeros, torch.arange(128).expand(2, -1), zeros if keys else None)
    assert not read(codec, codec.encode(zeros), 64).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["full", "values"])
def test_any_shape_and_dtype_is_coded(kind, shape, dtype):
    batch, heads, tokens, dim = shape
    rope = oracle.rope_of(dim, kind) if kind == "full" else None
    x = states(batch, heads, tokens, dim, dtype=dtype)
    codec = make_codec(RotatedConfig(bits=4), keys=kind == "full", rope=rope)
    codec = codec.fitted(x, torch.arange(tokens).expand(batch, -1), x if kind == "full" else None)
    codes = codec.encode(x)
    assert codes["codes"].shape == (batch, heads, tokens, dim // 2)
    error = (read(codec, codes, dim) - x.double()).norm() / x.double().norm()
    assert error < 0.2
    out = codec.decode(codes, head_dim=dim, dtype=dtype)
    assert out.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", EACH)
@pytest.mark.parametrize("dim", [40, 64, 80])
def test_bits_are_what_the_tensors_come_to(dim, bits, kind):
    codec, x, _ = fitted(bits, kind, dim)
    codes = codec.encode(x[:, :, :10])
    held = sum(part.nbytes for part in codes.values())
    assert codec.bits_per_token(2, dim, torch.float32) * 2 * 10 == held * 8
    assert codec.bits_per_row(2, dim) * 2 == codec.basis.nbytes * 8
    assert codec.basis.nbytes == sum(tensor.nbytes for tensor in codec.tensors.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", EACH)
def test_a_codec_is_its_tensors(bits, kind):
    codec, x, rope = fitted(bits, kind)
    x = x[:, :, :20]
    twin = make_codec(RotatedConfig(bits=bits), keys=kind != "values", rope=rope).with_tensors(codec.tensors)
    assert twin.is_fitted
    codes, again = codec.encode(x, 3), twin.encode(x, 3)
    assert all(torch.equal(codes[name], again[name]) for name in codes)
    assert torch.equal(read(twin, again, 64, 3), read(codec, codes, 64, 3))
    assert not twin.with_tensors({}).is_fitted
    assert twin.with_tensors({}).tensors == {}


def test_learning_makes_another_codec_and_leaves_the_first_as_it_is():
    codec = make_codec(RotatedConfig(bits=4), keys=True, rope=oracle.rope_of(64, "full"))
    x = states(1, 2, 128, 64)
    other = codec.fitted(x, torch.arange(128)[None], None)
    assert (codec.is_fitted, other.is_fitted) == (False, True)
    assert codec.statistics == other.statistics == 128
    with pytest.raises(AssertionError, match="a basis comes before codes"):
        codec.encode(x)


def test_a_rotation_of_more_channels_than_there_are_is_left_out():
    codec = make_codec(RotatedConfig(bits=8), keys=True, rope=oracle.rope_of(128, "full"))
    x = states(1, 2, 128, 64)
    codec = codec.fitted(x, torch.arange(128)[None], None)
    assert codec.basis.rope is None
    assert (read(codec, codec.encode(x), 64) - x).norm() < 0.012 * x.norm()


def test_a_scale_of_about_one_is_the_most_common():
    codec, x, _ = fitted(4, "full", queries=False)
    scale = codec.encode(x)["scale"]
    assert abs(scale.double().mean() - SCALE_ONE) < 4


# Attention


def operand(codec: RotatedCodec, x: torch.Tensor) -> Operand:
    dim = x.shape[3]
    placed = codec.basis_at(0, x.shape[2])
    return Operand("grid", codec.encode(x), dim, codec.decode_into, codec.grid_of(dim), placed)


def attended(queries: int, dtype: torch.dtype, visibility: Visibility):
    """The answer over 300 tokens, and that over the states that their codes stand for, in float64."""
    (key_codec, keys, _), (value_codec, values, _) = fitted(4, "full"), fitted(4, "values")
    query = states(2, 2, 3, queries, 64, seed=4).to(dtype)
    coded = operand(key_codec, keys), operand(value_codec, values)
    part = attend(query, *coded, 0, visibility, Scoring(0.125))
    seen = visibility.tile(0, queries, 0, 300, query.device)
    read_keys, read_values = (read(c, o.parts, 64) for c, o in zip((key_codec, value_codec), coded, strict=True))
    exact = attention(query, read_keys, read_values, scaling=0.125, visible=None if seen is None else seen[:, :, None])
    return part, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [1, 4, 70])
def test_codes_in_a_basis_are_attended_to_as_what_they_stand_for(queries, dtype):
    part, (output, lse) = attended(queries, dtype, Visibility(300 - queries, queries))
    assert (part.output - output).abs().max() < 2e-5 * output.abs().max()
    assert (part.lse - lse).abs().max() < 1e-4


@pytest.mark.parametrize("queries", [1, 2, 70])
def test_a_row_that_sees_nothing_of_codes_in_a_basis_gives_zeros(queries):
    real = torch.ones(2, 300, dtype=torch.bool)
    real[0] = False
    part, (output, lse) = attended(queries, torch.float32, Visibility(300 - queries, queries, real=real))
    assert (part.lse[0] == -torch.inf).all()
    assert (part.lse[1] - lse[1]).abs().max() < 1e-4
    assert (part.output[1] - output[1]).abs().max() < 2e-5 * output.abs().max()
    assert not part.output[0].any()
