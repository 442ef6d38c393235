"""The Triton kernel against tiles, interpreted on the CPU, and compiled for a GPU that need not be there.

Triton decides when it is first imported whether it interprets kernels. Where another test module had it imported before, all of this
runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read at the first import, and again at the first launch
triton = pytest.importorskip("triton", reason="Triton is not installed")

from oracles import states  # noqa: E402 - transformers imports triton

from hf_kvq.codecs import Codec, make_codec  # noqa: E402
from hf_kvq.config import AffineConfig  # noqa: E402
from hf_kvq.kernels import Operand, Partial, Scoring, TiledKernel, Visibility, kernels_for  # noqa: E402
from hf_kvq.kernels import triton_decode as module  # noqa: E402
from hf_kvq.kernels.triton_decode import TritonDecodeKernel  # noqa: E402

INTERPRETED = not isinstance(triton.language.sum, triton.JITFunction)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")

CODECS = {
    "int8": AffineConfig(mode="int8"),
    "e4m3": AffineConfig(mode="fp8"),
    "int4": AffineConfig(mode="int4"),
    "int8 of an update": AffineConfig(mode="int8", granularity="per_update"),
    "e4m3 of an update": AffineConfig(mode="fp8", granularity="per_update"),
}
CLOSE = 3e-6
"""Of the largest output, and of a logit: float32 rounds each of the two results by some of its 6e-8."""


def operand(codec: Codec, x: torch.Tensor) -> Operand:
    """Codes as a store has them: a slice of buffers with room for more, here with a bad number in every place that is not held."""
    parts = {}
    for name, part in codec.encode(x).items():
        room = (*part.shape[:2], part.shape[2] + 9, part.shape[3])
        bad = part.new_full(room, torch.nan) if part.dtype.is_floating_point else part.new_full(room, 99)
        bad[:, :, 4:-5] = part
        parts[name] = bad[:, :, 4:-5]
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
        operand(make_codec(CODECS[keys]), key_states),
        operand(make_codec(CODECS[values or keys]), value_states),
    )


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
@pytest.mark.parametrize("layout", ["int8", "e4m3", "int4"])
def test_the_kernel_agrees_with_tiles_whatever_the_number_of_tokens(layout, tokens):
    assert_agree(*both(*problem(layout, kv_heads=1, tokens=tokens)))


@interpreted
@pytest.mark.parametrize("groups", [1, 3, 8, 20])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (3, 1), (3, 2)])
def test_the_kernel_agrees_with_tiles_whatever_the_number_of_rows_and_heads(batch, kv_heads, groups):
    assert_agree(*both(*problem("int8", "e4m3", batch=batch, kv_heads=kv_heads, groups=groups)))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["int8", "e4m3", "int4"])
def test_a_query_of_any_dtype_counts_exactly(layout, dtype):
    assert_agree(*both(*problem(layout, dtype=dtype)))


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
def test_strides_may_be_any_but_the_last():
    query, keys, values = problem(batch=3, kv_heads=2)
    turned = {name: part.transpose(0, 2).contiguous().transpose(0, 2) for name, part in keys.parts.items()}
    keys = Operand(keys.layout, turned, keys.dim, keys.decoder)
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
    assert not kernel.supports(query, Operand("other", keys.parts, 64, keys.decoder), values, plain)
    assert not kernel.supports(query, keys, values, Visibility(128, 1, mask=torch.zeros(1, 1, 1, 129)))


def test_a_gpu_asks_the_triton_kernel_first():
    assert [kernel.name for kernel in kernels_for("cuda")] == ["triton", "torch"]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_kvq.kernels import triton_decode

def compiled(kernel, pointers, floats, **constants):
    kinds = {name: "constexpr" for name in constants} | pointers | dict.fromkeys(floats, "fp32")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

for layout, width in (("int8", 128), ("e4m3", 80), ("int4", 64)):
    codes = "*u8" if layout == "int4" else "*i8"
    pointers = {"query": "*bf16", "keys": codes, "values": codes, "key_scale": "*bf16", "value_scale": "*fp32"}
    pointers |= {"visible": "*u8", "output": "*fp32", "lse": "*fp32", "shown": "*fp32"}
    ptx = compiled(
        triton_decode._attend_split, pointers, ("before", "after"), KEYS=layout, KEY_WIDTH=width, KEY_PADDED=128, VALUES=layout,
        VALUE_WIDTH=width, VALUE_PADDED=128, GROUPS=8, BLOCK=64, EXACT_QUERY=layout == "int8", HIDES=True, CAPPED=True,
        SHOWS=layout != "e4m3",
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


def test_the_kernels_compile_for_a_gpu_with_exact_products(tmp_path):
    # The interpreter takes much that the compiler does not; compiling needs no GPU.
    done = in_its_own_process("-W", "ignore", "-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
def test_every_test_of_this_file_passes_where_triton_interprets():
    done = in_its_own_process("-m", "pytest", "-q", "-x", "-k", "not compile", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("layout", ["int8", "int4"])
def test_logits_are_those_of_the_reference(layout):
    query, keys, values = problem(layout, batch=2, kv_heads=2, groups=3, tokens=150, dim=64)
    real = torch.ones(2, 150, dtype=torch.bool)
    real[1, :20] = False
    kernels, scoring = (TritonDecodeKernel("cpu"), TiledKernel()), Scoring(0.125)
    got, expected = (torch.full((2, 2, 3, 1, 150), 7.0) for _ in kernels)
    for kernel, logits in zip(kernels, (got, expected), strict=True):
        kernel.attend(query, keys, values, 0, Visibility(149, 1, real=real), scoring, logits=logits)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
