"""Rotation by positions, against complex numbers and by its own laws."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from oracles import states
from oracles_bounded import turned

from hf_kvq.rope import Rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rope(pairs: int, *, interleaved: bool = False, theta: float = 10_000.0) -> Rope:
    return Rope(tuple(theta ** (-j / pairs) for j in range(pairs)), interleaved)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(40, 20), (64, 32), (80, 10), (256, 128)])
def test_rotation_is_a_product_of_complex_numbers_rounded_once(head_dim, pairs, interleaved, dtype):
    x = states(3, 2, 37, head_dim, dtype=dtype)
    by = torch.arange(37) * 7 - 100
    turning = rope(pairs, interleaved=interleaved)
    rotated = turning.rotate(x, by)
    expected = turned(x, turning, by.expand(3, 2, 37))
    assert rotated.dtype == dtype
    tolerance = 1.01 * torch.finfo(dtype).eps
    if dtype == torch.float32:
        tolerance *= 2  # two products and a sum of float32, not one rounding of a wider result
    length = x.double().abs().amax(dim=-1, keepdim=True) * math.sqrt(2)
    assert ((rotated.double() - expected).abs() <= tolerance * length).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_add_up_even_past_a_million_positions(interleaved):
    x = states(2, 5, 64)
    turning = rope(32, interleaved=interleaved)
    at_start = turning.rotate(x, 3)
    far = turning.rotate(at_start, 5_000_000)
    torch.testing.assert_close(turning.rotate(far, -5_000_000), at_start, rtol=0, atol=2e-6)
    torch.testing.assert_close(far, turning.rotate(x, 5_000_003), rtol=0, atol=4e-6)


def test_positions_may_be_fractions():
    x = states(1, 4, 64)
    half = rope(32).rotate(rope(32).rotate(x, 0.5), torch.tensor(0.5))
    torch.testing.assert_close(half, rope(32).rotate(x, 1), rtol=0, atol=2e-6)


def test_scores_depend_on_the_difference_of_positions_alone():
    query, key = states(1, 64, seed=1).double(), states(1, 64, seed=2).double()
    turning = rope(32)
    near = (turning.rotate(query, 9) * turning.rotate(key, 4)).sum()
    far = (turning.rotate(query, 1009) * turning.rotate(key, 1004)).sum()
    assert float(near) == pytest.approx(float(far), rel=1e-10)
    assert float(near) != pytest.approx(float((query * key).sum()), rel=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_past_the_rotary_ones_are_never_touched(interleaved):
    x = states(2, 3, 80)
    rotated = rope(10, interleaved=interleaved).rotate(x, 123)
    assert torch.equal(rotated[..., 20:], x[..., 20:])
    assert not torch.isclose(rotated[..., :2], x[..., :2]).any()


def test_the_states_given_are_left_alone():
    x = states(1, 3, 16)
    before = x.clone()
    rope(8).rotate(x, 5)
    assert torch.equal(x, before)


def test_rotating_by_nothing_changes_no_bit():
    x = states(2, 3, 64, dtype=torch.bfloat16)
    assert torch.equal(rope(32).rotate(x, 0), x)


def test_pairs_number_the_channels_that_turn_together():
    assert rope(2).pairs(6).tolist() == [0, 1, 0, 1, -1, -1]
    assert rope(2, interleaved=True).pairs(6).tolist() == [0, 0, 1, 1, -1, -1]


@pytest.mark.parametrize("interleaved", [False, True])
def test_pooled_squares_are_the_same_before_and_after_rotation(interleaved):
    x = states(2, 3, 40).double()
    turning = rope(16, interleaved=interleaved)
    pooled = turning.pool(x.square())
    torch.testing.assert_close(pooled, turning.pool(turning.rotate(x, 77).square()))
    assert torch.equal(pooled[..., 32:], x[..., 32:].square())
    assert float(pooled.sum()) == pytest.approx(float(x.square().sum()))
    numbers = turning.pairs(40)
    for pair in range(16):
        channels = (numbers == pair).nonzero().flatten()
        mean = x.square()[..., channels].mean(dim=-1)
        assert all(torch.allclose(pooled[..., channel], mean) for channel in channels.tolist())


@pytest.mark.usefixtures("as_users_run_it")
def test_a_state_with_too_few_channels_is_named():
    with pytest.raises(ValueError, match="64 channels that are turned, got 40"):
        rope(32).rotate(torch.ones(1, 40), 1)


def test_a_copy_is_equal_and_frozen():
    turning = rope(8, interleaved=True)
    assert copy.deepcopy(turning) == turning
    assert hash(copy.deepcopy(turning)) == hash(turning)
    with pytest.raises(AttributeError):
        turning.interleaved = False  # type: ignore[misc]
    assert turning != rope(8)


def test_what_inference_mode_prepared_still_serves_training():
    turning = rope(4, theta=77.0)
    with torch.inference_mode():
        turning.rotate(torch.ones(1, 8), 1)
    x = torch.ones(1, 8, requires_grad=True)
    turning.rotate(x, 3).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, turning.rotate(torch.ones(1, 8), -3))
