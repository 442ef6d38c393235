"""Codes on a trellis: of all paths through its states, and of all scales that are tried, those with the least error.

Source: the Viterbi algorithm over trellis-coded quantization (Marcellin and Fischer, 1990). Departs from it: paths begin in state 0 and end anywhere; and the best path
into each of the sixteen states at each of eight scales is one of 128 candidates at the end, of which an error along the direction that queries look along most
chooses: what takes moves of single codes elsewhere comes of itself.

Costs are float32, operation by operation as in `hf_kvq.kernels.numba_trellis`, so that both give the same codes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from hf_kvq.packing import MEMORY, OFFSETS, Grid, quarter_of, quarters, scale_bytes, scale_of

__all__ = ["encode_trellis"]

_NEVER = 1e30
"""The cost of a state that no path reaches."""

_SOME = 2**17
"""Numbers at a time, which take some two hundred bytes each."""


def encode_trellis(
    states: Float[Tensor, "batch kv_heads tokens dim"],
    grid: Grid,
    aims: Float[Tensor, "batch kv_heads aims dim"] | None = None,
) -> tuple[UInt8[Tensor, "batch kv_heads tokens width"], UInt8[Tensor, "batch kv_heads tokens groups"]]:
    """Codes and scales.

    Args:
        states: In float64, so that codes do not depend on how many tokens come together.
        grid: How they are to lie; on a trellis.
        aims: At most one direction u along which an error e costs `(u . e)^2` beside its `|e|^2`.

    Raises:
        ValueError: If there are more directions.
    """
    if aims is None or aims.shape[2] == 0:
        aims = states.new_zeros(*states.shape[:2], 1, states.shape[3])
    if aims.shape[2] > 1:
        raise ValueError(f"codes on a trellis are steered along one direction, got {aims.shape[2]}")
    some = max(_SOME // max(states[:, :, :1].numel(), 1), 1)
    parts = [_encode(part, grid, aims) for part in states.split(some, dim=2)]
    codes, scale = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return codes, scale


def _encode(states: Tensor, grid: Grid, aims: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scales(states, grid)
    level, error = _nearest(states, scale, grid)
    path, trial = _best_path(error, error * aims.float())
    # The trial that won, and of its four levels the one in the path's quarter.
    level = level.gather(1, trial[None, ..., None].expand(4, 1, *level.shape[2:])).squeeze(1)
    level = level.gather(0, quarter_of(path)[None].long()).squeeze(0)
    scale = scale.gather(0, trial[..., None].expand(1, *scale.shape[1:])).squeeze(0)
    return grid.pack(path | ((level.to(torch.uint8) >> 2) << 1)), scale


def _scales(
    states: Float[Tensor, "batch kv_heads tokens dim"], grid: Grid
) -> UInt8[Tensor, "trials batch kv_heads tokens groups"]:
    """The bytes that are tried, around that of the size of a group; 0 for one that is zero."""
    unit = torch.cat([torch.full((grid.tier,), grid.best_scale(bits)) for bits in grid.bits]).to(states)
    size = (states * unit).square().unflatten(-1, (grid.groups, -1)).mean(dim=-1).sqrt()
    middle = scale_bytes(size * 2.0 ** (-1 / 16)).int()
    trials = torch.stack([(middle + offset).clamp(1, 255) for offset in OFFSETS])
    return torch.where(size > 0, trials, 0).to(torch.uint8)


def _nearest(
    states: Float[Tensor, "batch kv_heads tokens dim"], scale: UInt8[Tensor, "trials batch kv_heads tokens groups"], grid: Grid
) -> tuple[Int[Tensor, "4 trials batch kv_heads tokens dim"], Float32[Tensor, "4 trials batch kv_heads tokens dim"]]:  # fmt: skip
    """The nearest level of each quarter, and its error."""
    step = scale_of(scale, torch.float32)
    # A group that is zero stays so whatever its codes.
    step = step.masked_fill(scale == 0, 1.0)
    inverse = 1 / step
    step, inverse = (x.repeat_interleave(grid.group_size, dim=-1) for x in (step, inverse))
    wanted = states.float() * inverse
    levels, errors = [], []
    for quarter in range(4):
        tiers = []
        for bits, y, s in zip(grid.bits, wanted.split(grid.tier, -1), step.split(grid.tier, -1), strict=True):
            numbers = _numbers(grid, bits, y.device)
            best = torch.full_like(y, torch.inf)
            which = torch.zeros_like(y, dtype=torch.int64)
            for level in range(quarter, len(numbers), 4):
                error = (numbers[level] - y) * s
                nearer = error.abs() < best.abs()
                best, which = torch.where(nearer, error, best), torch.where(nearer, level, which)
            tiers.append((best, which))
        errors.append(torch.cat([error for error, _ in tiers], dim=-1))
        levels.append(torch.cat([level for _, level in tiers], dim=-1))
    return torch.stack(levels), torch.stack(errors)


@lru_cache(maxsize=64)
def _numbers(grid: Grid, bits: int, device: torch.device) -> Float32[Tensor, " levels"]:
    """What the levels stand for at scale 1. Kept, as a copy from the host at every step would make an accelerator wait."""
    with torch.inference_mode(False):
        count = 2 ** (bits + 1)
        x = torch.arange(count, dtype=torch.float32) - (count - 1) / 2
        return (x * (1 + torch.tensor(grid.curve(bits)) * (x * x))).to(device)


@lru_cache(maxsize=16)
def _steps(device: torch.device) -> tuple[Int[Tensor, "2 states"], Int[Tensor, "2 states"]]:
    """From which states each state is reached, the forgotten bit being 0 or 1, and through which quarter; kept likewise."""
    with torch.inference_mode(False):
        following = torch.arange(2**MEMORY)
        window = torch.stack([following, following + 2**MEMORY])
        return (window >> 1).to(device), torch.tensor(quarters())[window].to(device)


def _best_path(
    error: Float32[Tensor, "4 trials batch kv_heads tokens dim"],
    along: Float32[Tensor, "4 trials batch kv_heads tokens dim"],
) -> tuple[UInt8[Tensor, "batch kv_heads tokens dim"], Int[Tensor, "1 batch kv_heads tokens"]]:
    """The path of the least cost, and the trial in which it has it."""
    states, device = 2**MEMORY, error.device
    before, quarter = _steps(device)
    square = error.square()
    cost = torch.full((states, *error.shape[1:-1]), _NEVER, device=device)
    cost[0] = 0
    sums = torch.zeros_like(cost)
    forgotten = []
    for channel in range(error.shape[-1]):
        costs = cost[before] + square[..., channel][quarter]
        both = sums[before] + along[..., channel][quarter]
        take = costs[1] < costs[0]
        cost, sums = torch.where(take, costs[1], costs[0]), torch.where(take, both[1], both[0])
        forgotten.append(take)
    total = (cost + sums * sums).transpose(0, 1).flatten(0, 1)
    best = total.argmin(dim=0)
    trial, state = (best // states)[None], best % states
    path = torch.empty(*error.shape[2:], dtype=torch.uint8, device=device)
    for channel in reversed(range(error.shape[-1])):
        path[..., channel] = state & 1
        taken = forgotten[channel].gather(1, trial.expand(states, 1, *state.shape)).squeeze(1)
        state = (state + states * taken.gather(0, state[None]).squeeze(0)) >> 1
    return path, trial
