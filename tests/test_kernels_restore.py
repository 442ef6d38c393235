"""Codes out of their basis in one walk: what tensors make of the same codes, to float32's rounding."""

from __future__ import annotations

import oracles_rotated as oracle
import pytest
import torch

from hf_kvq.basis import PlacedBasis
from hf_kvq.kernels import Operand
from hf_kvq.packing import Grid

BATCH, KV_HEADS = 2, 3
GRIDS = {
    "8 bits": ((8,), False),
    "3 bits on a trellis": ((3,), True),
    "tiers": ((6, 4, 3, 3), False),
    "tiers on a trellis": ((4, 3, 3, 2), True),
}


@pytest.fixture(scope="module")
def restore_into():
    pytest.importorskip("numba", reason="pip install hf-kvq[cpu]")
    from hf_kvq.kernels.numba_restore import restore_into

    return restore_into


def coded(tokens: int, grid: Grid, placed: PlacedBasis) -> Operand:
    """Codes of some numbers, a piece of a longer buffer, read as if they were in this basis."""
    longer = oracle.any_codes(BATCH, KV_HEADS, tokens + 5, grid)
    parts = {name: part[:, :, 2:-3] for name, part in longer.items()}

    def decode(parts, out):
        grid.decode_into(parts["codes"], parts["scale"], out)

    return Operand("grid", parts, grid.dim, decode, grid, placed)


def expected(operand: Operand) -> torch.Tensor:
    assert operand.basis is not None
    wide = torch.empty(BATCH, KV_HEADS, operand.tokens, operand.dim, dtype=torch.float64)
    operand.decoder(operand.parts, wide)
    return operand.basis.restore(wide)


def assert_restored(out: torch.Tensor, operand: Operand, rounding: float) -> None:
    exact = expected(operand)
    # A channel of a basis may be much larger than another; what it is turned from are all of them.
    size = exact.abs().amax(dim=-1, keepdim=True) + exact.abs().amax()
    assert ((out.double() - exact).abs() <= rounding * size).all()


@pytest.mark.parametrize("kind", oracle.ROPES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (4, 60), (63, 300), (255, 2), (5000, 520)])
def test_states_are_those_of_tensors(restore_into, grid, kind, first, tokens):
    bits, trellis = GRIDS[grid]
    basis = oracle.any_basis(64, kind, tiers=len(bits), order=torch.uint8)
    operand = coded(tokens, Grid(64, bits, trellis), basis.at(first, tokens))
    out = torch.full((BATCH, KV_HEADS, tokens + 2, 64), torch.nan)
    assert restore_into(operand, out[:, :, 1:-1])
    assert_restored(out[:, :, 1:-1], operand, 1e-5)
    assert out[:, :, [0, -1]].isnan().all()


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("dim", [16, 40, 80, 96, 128, 256])
def test_heads_of_other_sizes(restore_into, dim, keys):
    basis = oracle.any_basis(dim, "full", keys=keys)
    operand = coded(70, Grid(dim, (4,)), basis.at(30, 70))
    out = torch.empty(BATCH, KV_HEADS, 70, dim)
    assert restore_into(operand, out)
    assert_restored(out, operand, 1e-5)


def test_bfloat16_is_rounded_as_torch_rounds(restore_into):
    operand = coded(70, Grid(64, (4,)), oracle.any_basis(64, "full").at(3, 70))
    wide, out = torch.empty(BATCH, KV_HEADS, 70, 64), torch.empty(BATCH, KV_HEADS, 70, 64, dtype=torch.bfloat16)
    assert restore_into(operand, wide)
    assert restore_into(operand, out)
    assert torch.equal(out, wide.bfloat16())


def test_threads_change_nothing(restore_into):
    operand = coded(700, Grid(64, (4,)), oracle.any_basis(64, "full").at(3, 700))
    one, two = (torch.empty(BATCH, KV_HEADS, 700, 64) for _ in range(2))
    assert restore_into(operand, one)
    torch.set_num_threads(2)
    try:
        assert restore_into(operand, two)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, two)


def test_what_is_left_to_tensors_is_not_touched(restore_into):
    basis = oracle.any_basis(64, "full")
    own = basis.at(torch.arange(7).expand(BATCH, KV_HEADS, 7), 7)
    wide_order = oracle.any_basis(64, "full", tiers=2).at(0, 7)
    out = torch.full((BATCH, KV_HEADS, 7, 64), torch.nan)
    assert not restore_into(coded(7, Grid(64, (4,)), own), out)
    assert not restore_into(coded(7, Grid(64, (4, 4)), wide_order), out)
    assert not restore_into(coded(7, Grid(64, (4,)), basis.at(0, 7)).in_basis(), out)
    assert not restore_into(coded(7, Grid(64, (4,)), basis.at(0, 7)), out.mT.contiguous().mT)
    assert not restore_into(coded(7, Grid(64, (4,)), basis.at(0, 7)), out.double())
    assert out.isnan().all()
