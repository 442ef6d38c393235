"""All parts of a step in one call, codes in their basis among them: against attention in float64 over what all of it decodes to."""

from __future__ import annotations

import oracles_rotated as oracle
import pytest
import torch
from oracles import attention, states
from torch import Tensor

from hf_kvq.basis import Basis
from hf_kvq.kernels import Operand, Part, Partial, Scoring, TiledKernel, Visibility, attend_parts, kernels_for
from hf_kvq.packing import Grid
from hf_kvq.states.view import copy_states

CLOSE = 1e-4
"""Values reach 30 here, and logits 60."""

COMPILED = kernels_for("cpu")[0]
BATCH, KV_HEADS, GROUPS = 2, 3, 4


@pytest.fixture
def compiled():
    if not COMPILED.takes_parts:
        pytest.skip("needs numba: pip install hf-kvq[cpu]")
    return COMPILED


def exact(tokens: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 7) -> tuple[Operand, Operand]:
    both = (states(BATCH, KV_HEADS, tokens, dim, seed=seed + i).to(dtype) for i in range(2))
    keys, values = (Operand("states", {"codes": x}, dim, copy_states) for x in both)
    return keys, values


def coded(tokens: int, grid: Grid, keys: Basis, values: Basis, first: int) -> tuple[Operand, Operand]:
    """Codes of some numbers in some bases, of tokens at positions `first` and on."""
    operands = []
    for basis, seed in ((keys, 3), (values, 4)):
        parts = oracle.any_codes(BATCH, KV_HEADS, tokens, grid, seed)
        operands.append(Operand("grid", parts, grid.dim, _decode(grid), grid, basis.at(first, tokens)))
    return operands[0], operands[1]


def _decode(grid: Grid):
    return lambda parts, out: grid.decode_into(parts["codes"], parts["scale"], out)


def bases(dim: int, kind: str, tiers: int) -> tuple[Basis, Basis]:
    """Bases whose shift takes part in the scores, and does not drown the rest."""
    keys = oracle.any_basis(dim, kind, tiers=tiers, order=torch.uint8)
    return keys, oracle.any_basis(dim, "none", keys=False)


def assert_is_attention(got: Partial, query: Tensor, parts: list[Part], visible: Tensor | None = None, **scoring):
    keys, values = (
        torch.cat([operand.decode(torch.float64) for operand in operands], dim=2)
        for operands in zip(*(part[:2] for part in parts), strict=True)
    )
    output, lse = attention(query, keys, values, visible=visible, **scoring)
    assert (got.output.double() - output).abs().max() < CLOSE * output.abs().max()
    torch.testing.assert_close(got.lse.double(), lse, rtol=1e-5, atol=1e-4)


def scale_of(query: Tensor, operands: tuple[Operand, Operand]) -> float:
    """What brings the logits to some tens."""
    keys = operands[0].decode(torch.float64)
    return 30 / (query.double() @ keys.mT[:, :, None]).abs().max().item()


@pytest.mark.parametrize("kind", oracle.ROPES)
@pytest.mark.parametrize("tiers", [1, 4])
@pytest.mark.parametrize(("first", "tokens"), [(4, 1), (4, 60), (60, 9), (63, 300), (255, 2), (1000, 700)])
def test_sinks_codes_in_their_basis_and_a_residual(compiled, kind, tiers, first, tokens):
    dim = 64
    grid = Grid(dim, (6, 4, 3, 3) if tiers == 4 else (8,))
    query = states(BATCH, KV_HEADS, GROUPS, 1, dim, seed=1)
    middle = coded(tokens, grid, *bases(dim, kind, tiers), first)
    scaling = scale_of(query, middle)
    end = first + tokens
    parts = [
        Part(*operands, column, Visibility(end + 8, 1))
        for operands, column in ((exact(4, dim), 0), (middle, first), (exact(9, dim, seed=9), end))
    ]
    assert all(compiled.supports(query, part.keys, part.values, part.visibility) for part in parts)
    assert_is_attention(compiled.attend_parts(query, parts, Scoring(scaling)), query, parts, scaling=scaling)


@pytest.mark.parametrize("dim", [40, 80, 128, 256])
def test_bases_of_other_sizes(compiled, dim):
    query = states(BATCH, KV_HEADS, GROUPS, 1, dim, seed=1)
    operands = coded(150, Grid(dim, (4,)), *bases(dim, "full", 1), 70)
    scaling = scale_of(query, operands)
    parts = [Part(*operands, 70, Visibility(220, 1))]
    assert_is_attention(compiled.attend_parts(query, parts, Scoring(scaling)), query, parts, scaling=scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_as_they_are_are_read_as_they_are(compiled, dtype):
    query = states(BATCH, KV_HEADS, GROUPS, 1, 64, seed=1).to(dtype)
    parts = [Part(*exact(300, 64, dtype), 0, Visibility(299, 1))]
    assert_is_attention(compiled.attend_parts(query, parts, Scoring(0.02)), query, parts, scaling=0.02)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_what_a_row_does_not_see_takes_no_weight_in_any_part(compiled, softcap):
    query = states(BATCH, KV_HEADS, GROUPS, 1, 64, seed=1)
    middle = coded(300, Grid(64, (4,), trellis=True), *bases(64, "full", 1), 4)
    scaling = scale_of(query, middle)
    real = torch.rand(BATCH, 313, generator=torch.Generator().manual_seed(0)) < 0.6
    real[1, 4:304] = False
    visibility = Visibility(312, 1, real=real)
    shown = [torch.empty(BATCH, KV_HEADS, GROUPS, 1, tokens) for tokens in (4, 300, 9)]
    given = (exact(4, 64), middle, exact(9, 64, seed=9))
    parts = [
        Part(*operands, column, visibility, logits)
        for operands, column, logits in zip(given, (0, 4, 304), shown, strict=True)
    ]
    got = compiled.attend_parts(query, parts, Scoring(scaling, softcap))
    visible = real[:, None, None, None]
    assert_is_attention(got, query, parts, visible, scaling=scaling, softcap=softcap)
    weights = (torch.cat(shown, dim=-1) - got.lse[..., None]).exp()
    assert not weights.masked_fill(visible, 0).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(got.lse))


def test_a_row_that_sees_nothing_gives_zeros_and_no_share_of_the_mean(compiled):
    query = states(BATCH, KV_HEADS, GROUPS, 1, 64, seed=1)
    real = torch.ones(BATCH, 20, dtype=torch.bool)
    real[0] = False
    operands = coded(20, Grid(64, (4,)), *bases(64, "full", 1), 0)
    parts = [Part(*operands, 0, Visibility(19, 1, real=real))] * 2
    output, lse = compiled.attend_parts(query, parts, Scoring(0.01))
    assert not output[0].any()
    assert (lse[0] == -torch.inf).all()
    assert output[1].any()


def test_threads_change_nothing_but_rounding(compiled):
    query = states(BATCH, KV_HEADS, GROUPS, 1, 64, seed=1)
    operands = coded(900, Grid(64, (4,)), *bases(64, "full", 1), 4)
    scoring = Scoring(scale_of(query, operands))
    parts = [Part(*exact(4, 64), 0, Visibility(904, 1)), Part(*operands, 4, Visibility(904, 1))]
    one = compiled.attend_parts(query, parts, scoring)
    torch.set_num_threads(2)
    try:
        two = compiled.attend_parts(query, parts, scoring)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(two.output, one.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["all", "tiles", "tensors"])
@pytest.mark.parametrize("queries", [1, 5, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_are_one_attention_whatever_kernels_take_them(monkeypatch, kernels, queries, dtype):
    if kernels != "all":
        monkeypatch.setattr("hf_kvq.kernels.kernels_for", lambda device: (TiledKernel(),))
    if kernels == "tensors":
        for module in ("hf_kvq.kernels", "hf_kvq.kernels.base"):
            monkeypatch.setattr(f"{module}.restorer_for", lambda device: None)
    query = states(BATCH, KV_HEADS, GROUPS, queries, 64, seed=1).to(dtype)
    middle = coded(100, Grid(64, (8,)), *bases(64, "partial", 1), 4)
    scaling = scale_of(query, middle)
    parts = [
        Part(*operands, column, Visibility(112, queries))
        for operands, column in ((exact(4, 64), 0), (middle, 4), (exact(9, 64, seed=9), 104))
    ]
    assert_is_attention(attend_parts(query, parts, Scoring(scaling)), query, parts, scaling=scaling)
