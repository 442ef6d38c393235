"""The Triton kernel against tiles, with grids and biases against float64; interpreted on the CPU, and compiled for a GPU that need not be there.

Triton decides when it is first imported whether it interprets kernels. Where another test module had it imported before, all of this
runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read at the first import, and again at the first launch
triton = pytest.importorskip("triton", reason="Triton is not installed")

from oracles import attention, states  # noqa: E402 - transformers imports triton

from hf_kvq.basis import fit_basis  # noqa: E402
from hf_kvq.codecs import make_codec  # noqa: E402
from hf_kvq.codecs.rotated import encode_grid  # noqa: E402
from hf_kvq.config import AffineConfig  # noqa: E402
from hf_kvq.kernels import Operand, Partial, Scoring, TiledKernel, Visibility, kernels_for  # noqa: E402
from hf_kvq.kernels import triton_decode as module  # noqa: E402
from hf_kvq.kernels.triton_decode import TritonDecodeKernel  # noqa: E402
from hf_kvq.packing import Grid  # noqa: E402

INTERPRETED = not isinstance(triton.language.sum, triton.JITFunction)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")

CODECS = {
    "int8": AffineConfig(mode="int8"),
    "e4m3": AffineConfig(mode="fp8"),
    "int4": AffineConfig(mode="int4"),
    "int8 of an update": AffineConfig(mode="int8", granularity="per_update"),
    "e4m3 of an update": AffineConfig(mode="fp8", granularity="per_update"),
}
GRIDS = {
    "q8": (8,), "q6": (6,), "q5": (5,), "q4": (4,), "q3": (3,), "q2": (2,), "q1": (1,),
    "q4t": (6, 4, 3, 3), "q3t": (4, 3, 3, 2), "q2t": (4, 2, 1, 1),
    "path6": (6,), "path5": (5,), "path4": (4,), "path3": (4, 3, 3, 2), "path1": (1,),
}  # fmt: skip
ON_A_TRELLIS = [name for name in GRIDS if name.startswith("path")]
CLOSE = 3e-6
"""Of the largest output, and of a logit: float32 rounds each of the two results by some of its 6e-8."""


def with_room(part: torch.Tensor) -> torch.Tensor:
    """As a store has it: a slice of a buffer with room for more, here with a bad number in every place that is not held."""
    room = (*part.shape[:2], part.shape[2] + 9, part.shape[3])
    bad = part.new_full(room, torch.nan) if part.dtype.is_floating_point else part.new_full(room, 99)
    bad[:, :, 4:-5] = part
    return bad[:, :, 4:-5]


def operand(name: str, x: torch.Tensor) -> Operand:
    if name in GRIDS:
        grid = Grid(x.shape[3], GRIDS[name], trellis=name in ON_A_TRELLIS)
        codes, scale = (with_room(part) for part in encode_grid(x.double(), grid))

        def decoder(parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
            grid.decode_into(parts["codes"], parts["scale"], out)

        return Operand("grid", {"codes": codes, "scale": scale}, x.shape[3], decoder, grid)
    codec = make_codec(CODECS[name])
    parts = {part_name: with_room(part) for part_name, part in codec.encode(x).items()}
    return Operand(codec.layout, parts, x.shape[3], codec.decode_into)


def problem(
    keys: str = "int8", values: str | None = None, *, batch: int = 1, kv_heads: int = 2, groups: int = 3, tokens: int = 129,
    dim: int = 64, value_dim: int | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Operand, Operand]:  # fmt: skip
    query = states(batch, kv_heads, groups, 1, dim, seed=1).to(dtype)
    key_states = states(batch, kv_heads, tokens, dim, seed=2)
    value_states = states(batch, kv_heads, tokens, value_dim or dim, seed=3)
    # Far apart in size, as the values of the first token often are.
    value_states[:, :, 0] *= 0.01
    return (
        query,
        operand(keys, key_states),
        operand(values or keys, value_states),
    )


def assert_exact(
    query: torch.Tensor, keys: Operand, values: Operand, *,
    real: torch.Tensor | None = None, softcap: float | None = None, bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The kernel against attention in float64 over the states that the codes stand for. There a bias is a channel of each query head's own."""
    batch, kv_heads, groups, _, dim = query.shape
    visibility, scoring = Visibility(keys.tokens - 1, 1, real=real), Scoring(dim**-0.5, softcap)
    kernel = TritonDecodeKernel("cpu")
    assert kernel.supports(query, keys, values, visibility)
    got = kernel.attend(query, keys, values, 0, visibility, scoring, bias=bias)
    more = torch.zeros(batch, kv_heads, groups, 1, keys.tokens) if bias is None else bias
    own = torch.eye(groups).expand(batch, kv_heads, groups, groups)[:, :, :, None]
    output, lse = attention(
        torch.cat((query, own), dim=-1),
        torch.cat((keys.decode(torch.float64), more[:, :, :, 0].transpose(2, 3).double()), dim=-1),
        values.decode(torch.float64),
        scaling=scoring.scaling,
        softcap=softcap,
        visible=None if real is None else real[:, None, None, None],
    )
    assert_agree(got, Partial(output.float(), lse.float()))


def both(
    query: torch.Tensor, keys: Operand, values: Operand, visibility: Visibility | None = None, softcap: float | None = None
) -> tuple[Partial, Partial]:  # fmt: skip
    visibility = visibility or Visibility(keys.tokens - 1, 1)
    kernel, scoring = TritonDecodeKernel("cpu"), Scoring(query.shape[4] ** -0.5, softcap)
    assert kernel.supports(query, keys, values, visibility)
    return tuple(k.attend(query, keys, values, 0, visibility, scoring) for k in (kernel, TiledKernel()))


def assert_agree(got: Partial, expected: Partial) -> None:
    assert got.output.dtype == got.lse.dtype == torch.float32
    assert got.output.shape == expected.output.shape
    largest = expected.output.abs().max().item()
    torch.testing.assert_close(got.output, expected.output, rtol=0, atol=CLOSE * largest)
    torch.testing.assert_close(got.lse, expected.lse, rtol=CLOSE, atol=CLOSE)


@interpreted
@pytest.mark.parametrize("dim", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("layout", ["int8", "e4m3", "int4"])
def test_the_kernel_agrees_with_tiles_whatever_the_number_of_channels(layout, dim):
    assert_agree(*both(*problem(layout, dim=dim)))


@interpreted
@pytest.mark.parametrize("tokens", [1, 37, 128, 129, 700])
@pytest.mark.parametrize("layout", ["int8", "e4m3", "int4", "q4"])
def test_the_kernel_agrees_with_tiles_whatever_the_number_of_tokens(layout, tokens):
    assert_agree(*both(*problem(layout, kv_heads=1, tokens=tokens)))


@interpreted
@pytest.mark.parametrize("groups", [1, 3, 8, 20])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (3, 1), (3, 2)])
def test_the_kernel_agrees_with_tiles_whatever_the_number_of_rows_and_heads(batch, kv_heads, groups):
    assert_agree(*both(*problem("int8", "e4m3", batch=batch, kv_heads=kv_heads, groups=groups)))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["int8", "e4m3", "int4", "q4t"])
def test_a_query_of_any_dtype_counts_exactly(layout, dtype):
    assert_agree(*both(*problem(layout, dtype=dtype)))


@interpreted
@pytest.mark.parametrize(
    ("keys", "values", "dim"),
    [("q4", "q4", 80), ("q4t", "q8", 128), ("q6", "q3", 64), ("q2t", "q5", 128), ("q1", "q2", 64), ("int8", "q4t", 64), ("q5", "e4m3", 80), ("path4", "path3", 64), ("path1", "path6", 80)],
)  # fmt: skip
def test_a_grid_counts_as_in_float64(keys, values, dim):
    assert_exact(*problem(keys, values, dim=dim, tokens=70, groups=2))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize(("keys", "values"), zip(GRIDS, [*list(GRIDS)[1:], "q8"], strict=True))
def test_every_grid_counts_as_in_float64(keys, values, dim):
    for name in (keys, values):
        try:
            Grid(dim, GRIDS[name], trellis=name in ON_A_TRELLIS)
        except ValueError:
            pytest.skip(f"{name} does not fill whole bytes at {dim} channels")
    assert_exact(*problem(keys, values, dim=dim, tokens=150))


@interpreted
@pytest.mark.parametrize("largest", [1e-3, 30.0])
def test_tokens_of_a_grid_may_be_of_any_size_and_zero(largest):
    query = states(1, 1, 3, 1, 128, seed=1)
    sizes = largest * torch.tensor([0.0, 1e-3, 0.1, 1.0])[torch.arange(90) % 4, None]
    keys, values = (states(1, 1, 90, 128, seed=seed) * sizes for seed in (2, 3))
    values[..., 64:] *= 0.01  # the other scale of each token
    assert_exact(query / largest, operand("q4", keys), operand("q3", values))


@interpreted
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("layout", ["int8", "int4", "q4"])
def test_a_bias_is_added_before_scaling(layout, softcap):
    problem_of_20_heads = problem(layout, batch=2, groups=20, tokens=70)
    assert_exact(*problem_of_20_heads, bias=3 * states(2, 2, 20, 1, 70, seed=4), softcap=softcap)


@interpreted
@pytest.mark.parametrize("keys", ["e4m3", "q4t"])
def test_a_bias_goes_with_hidden_columns_and_splits(keys):
    real = torch.rand(3, 300, generator=torch.Generator().manual_seed(0)) < 0.6
    real[0, :200] = False
    real[2] = False
    bias = states(3, 1, 3, 1, 300, seed=4).masked_fill(~real[:, None, None, None], torch.nan)
    assert_exact(*problem(keys, "q4", batch=3, kv_heads=1, tokens=300), real=real, bias=bias)


@interpreted
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4])
def test_a_query_of_any_size_counts_exactly(size):
    query, keys, values = problem(dtype=torch.float32)
    kernel, scoring = TritonDecodeKernel("cpu"), Scoring(0.125 / size)
    visibility = Visibility(keys.tokens - 1, 1)
    got, expected = (k.attend(query * size, keys, values, 0, visibility, scoring) for k in (kernel, TiledKernel()))
    assert_agree(got, expected)


@interpreted
@pytest.mark.parametrize("values", ["int8", "e4m3", "int4"])
@pytest.mark.parametrize("keys", ["int8", "e4m3", "int4"])
def test_keys_and_values_may_differ_in_layout_and_channels(keys, values):
    assert_agree(*both(*problem(keys, values, dim=80, value_dim=24)))


@interpreted
@pytest.mark.parametrize("name", ["int8 of an update", "e4m3 of an update"])
def test_one_scale_may_stand_for_all_heads(name):
    query, keys, values = problem(name, batch=3, kv_heads=2, tokens=300)
    assert keys.parts["scale"].shape[1] == 1
    assert keys.parts["scale"].dtype == torch.float32
    assert_agree(*both(query, keys, values))


@interpreted
@pytest.mark.parametrize("tokens", [37, 700])
@pytest.mark.parametrize("layout", ["int8", "e4m3", "int4"])
def test_hidden_columns_take_no_part_and_a_row_that_sees_none_gives_zeros(layout, tokens):
    real = torch.rand(3, tokens, generator=torch.Generator().manual_seed(0)) < 0.6
    real[1, : tokens - 2] = False
    real[2] = False
    got, expected = both(*problem(layout, batch=3, tokens=tokens), Visibility(tokens - 1, 1, real=real))
    assert_agree(got, expected)
    assert torch.equal(got.output[2], torch.zeros_like(got.output[2]))
    assert torch.equal(got.lse[2], torch.full_like(got.lse[2], -torch.inf))


@interpreted
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_bools_hides_columns_for_one_row_or_for_all(rows):
    mask = torch.rand(rows, 1, 1, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    assert_agree(*both(*problem(batch=3, tokens=300), Visibility(299, 1, mask=mask)))


@interpreted
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4])
@pytest.mark.parametrize("layout", ["int8", "int4"])
def test_a_softcap_bounds_the_logits(layout, softcap):
    assert_agree(*both(*problem(layout, tokens=300), softcap=softcap))


@interpreted
@pytest.mark.parametrize("split", [64, 128, 320, 704])
def test_the_result_does_not_depend_on_the_splits(monkeypatch, split):
    monkeypatch.setattr(module, "_split", lambda tokens, *_: (split, -(-tokens // split)))
    real = torch.ones(1, 700, dtype=torch.bool)
    real[:, 120:460] = False  # whole splits of it
    assert_agree(*both(*problem("e4m3", "int8", tokens=700), Visibility(699, 1, real=real)))


@interpreted
@pytest.mark.parametrize("layout", ["int8", "q4t"])
def test_strides_may_be_any_but_the_last(layout):
    query, keys, values = problem(layout, batch=3, kv_heads=2)
    turned = {name: part.transpose(0, 2).contiguous().transpose(0, 2) for name, part in keys.parts.items()}
    keys = replace(keys, parts=turned)
    assert_agree(*both(query.transpose(0, 4).contiguous().transpose(0, 4), keys, values))


@pytest.mark.parametrize(
    ("tokens", "heads", "splits"), [(1, 8, 1), (128, 8, 1), (16_384, 8, 43), (16_384, 64, 6), (131_072, 64, 32), (4096, 512, 1)]
)  # fmt: skip
def test_few_rows_still_fill_a_device_and_no_split_is_too_short_or_too_long(tokens, heads, splits):
    length, count = module._split(tokens, heads, 64, torch.device("cpu"))
    assert count == splits
    assert length % 64 == 0
    assert (count - 1) * length < tokens <= count * length
    assert module.FEWEST <= length <= module.MOST


def test_other_queries_layouts_and_masks_are_left_to_the_next_kernel():
    query, keys, values = problem()
    kernel, plain = TritonDecodeKernel("cpu"), Visibility(128, 1)
    assert kernel.supports(query, keys, values, plain)
    assert not TritonDecodeKernel().supports(query, keys, values, plain)
    assert not kernel.supports(query.expand(-1, -1, -1, 2, -1), keys, values, Visibility(127, 2))
    assert not kernel.supports(query.double(), keys, values, plain)
    assert not kernel.supports(query, replace(keys, layout="other"), values, plain)
    assert not kernel.supports(query, keys, values, Visibility(128, 1, mask=torch.zeros(1, 1, 1, 129)))


def test_a_grid_of_too_many_pieces_in_a_basis_or_under_an_old_triton_is_left_to_the_next_kernel(monkeypatch):
    query, keys, values = problem("q4")
    kernel, plain = TritonDecodeKernel("cpu"), Visibility(128, 1)
    assert kernel.supports(query, keys, values, plain)
    placed = fit_basis(states(1, 2, 40, 64), torch.arange(40)[None], grid=Grid(64, (4,))).at(0, 129)
    assert not kernel.supports(query, replace(keys, basis=placed), values, plain)
    assert not kernel.supports(query, keys, replace(values, basis=placed), plain)
    # Twice a prime: two channels share a scale.
    assert not kernel.supports(query, keys, replace(values, dim=134, grid=Grid(134, (8,))), plain)
    monkeypatch.setattr(module, "_READS_GRIDS", False)
    assert not kernel.supports(query, keys, values, plain)


def test_a_gpu_asks_the_triton_kernel_first():
    assert [kernel.name for kernel in kernels_for("cuda")] == ["triton", "torch"]


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_kvq.kernels import Operand, triton_decode
from hf_kvq.packing import Grid

def compiled(kernel, pointers, floats, **constants):
    kinds = {name: "constexpr" for name in constants} | pointers | dict.fromkeys(floats, "fp32")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

def constants(name, layout, dim):
    width = dim // 2 if layout == "int4" else dim
    grid = Grid(dim, (6, 4, 3, 3) if name == "KEY" else (4,), trellis=dim == 128) if layout == "grid" else None
    return triton_decode._constants(name, Operand(layout, {"codes": torch.empty(1, 1, 1, width)}, dim, None, grid))

TYPES = {"int8": ("*i8", "*bf16"), "e4m3": ("*i8", "*fp32"), "int4": ("*u8", "*bf16"), "grid": ("*u8", "*u8")}
for keys, values, dim in (("int8", "grid", 128), ("e4m3", "int4", 80), ("int4", "e4m3", 128), ("grid", "int8", 64)):
    pointers = dict(zip(("keys", "key_scale", "values", "value_scale"), TYPES[keys] + TYPES[values]))
    pointers |= {"query": "*bf16", "visible": "*u8"} | dict.fromkeys(("output", "lse", "shown", "bias"), "*fp32")
    ptx = compiled(
        triton_decode._attend_split, pointers, ("before", "after"), **constants("KEY", keys, dim),
        **constants("VALUE", values, dim), DIM=dim, GROUPS=8, BLOCK=64, EXACT_QUERY=keys == "int8", HIDES=True, CAPPED=True,
        SHOWS=keys != "e4m3", BIASED=keys != "int8",
    )
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx and "tf32" not in ptx
pointers = dict.fromkeys(("outputs", "lses", "output", "lse"), "*fp32")
compiled(triton_decode._merge_splits, pointers, (), DIM=80, PADDED=128, SPLITS=64, TILE=16)
print("compiled")
"""


def in_its_own_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_with_exact_products(tmp_path):
    # The interpreter takes much that the compiler does not; compiling needs no GPU.
    done = in_its_own_process("-W", "ignore", "-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
@pytest.mark.parametrize("tests", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_every_test_of_this_file_passes_where_triton_interprets(tests):
    chosen = ("-m", tests, "-k", "not compile", __file__)
    done = in_its_own_process("-m", "pytest", "-q", "-x", *chosen, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout


@interpreted
@pytest.mark.parametrize("layout", ["int8", "int4", "q4t"])
def test_logits_are_those_of_the_reference(layout):
    query, keys, values = problem(layout, batch=2, kv_heads=2, groups=3, tokens=150, dim=64)
    real = torch.ones(2, 150, dtype=torch.bool)
    real[1, :20] = False
    kernels, scoring = (TritonDecodeKernel("cpu"), TiledKernel()), Scoring(0.125)
    bias = states(2, 2, 3, 1, 150, seed=4)
    got, expected = (torch.full((2, 2, 3, 1, 150), 7.0) for _ in kernels)
    for kernel, logits in zip(kernels, (got, expected), strict=True):
        kernel.attend(query, keys, values, 0, Visibility(149, 1, real=real), scoring, logits=logits, bias=bias)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
