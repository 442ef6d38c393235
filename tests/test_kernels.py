"""Every kernel against attention in float64 over the same codes, and against what decoding first would have cost."""

from __future__ import annotations

import pytest
import torch
from oracles import attention, states
from torch.nn.functional import scaled_dot_product_attention

from hf_kvq.codecs import make_codec
from hf_kvq.codecs.rotated import encode_grid
from hf_kvq.config import AffineConfig, IdentityConfig, RotatedConfig
from hf_kvq.kernels import (
    Kernel,
    Operand,
    Partial,
    Scoring,
    TiledKernel,
    Visibility,
    attend_exact,
    encoder_for,
    kernels_for,
    merge,
    zero_logit,
)
from hf_kvq.kernels import tiled as tiled_module

CODECS = {
    "int8": AffineConfig(mode="int8"),
    "fp8": AffineConfig(mode="fp8"),
    "int4": AffineConfig(mode="int4"),
    "seed_int8": AffineConfig(mode="int8", granularity="per_update"),
    "states": IdentityConfig(),
}
GRIDS = {
    "grid 8": RotatedConfig(bits=8),
    "grid 6": RotatedConfig(bits=6),
    "grid 5": RotatedConfig(bits=5),
    "grid 4": RotatedConfig(bits=4),
    "grid 3": RotatedConfig(bits=3),
    "grid 2": RotatedConfig(bits=2),
    "grid 6 4 3 3": RotatedConfig(bits=(6, 4, 3, 3)),
    "grid 4 2 1 1": RotatedConfig(bits=(4, 2, 1, 1)),
    "path 6": RotatedConfig(bits=6, trellis=True),
    "path 4": RotatedConfig(bits=4, trellis=True),
    "path 4 3 3 2": RotatedConfig(bits=(4, 3, 3, 2), trellis=True),
    "path 2 1 1 1": RotatedConfig(bits=(2, 1, 1, 1), trellis=True),
}
SHAPES = [
    # batch, kv_heads, groups, tokens, head_dim
    (1, 1, 1, 1, 40),
    (1, 2, 3, 37, 64),
    (3, 1, 4, 128, 80),
    (1, 8, 1, 129, 128),
    (2, 2, 5, 300, 256),
    (1, 3, 3, 1100, 64),
]
CLOSE = 5e-5
"""Values reach 10 and logits 50, and float32 rounds a logit of 50 by 4e-6."""

KERNELS = [pytest.param(kernel, id=kernel.name) for kernel in kernels_for("cpu")]


def operand(name: str, x: torch.Tensor) -> Operand:
    """Codes as a store has them: a piece of a longer buffer. Grids take the states as they are, as if in a basis."""
    codec = make_codec((CODECS | GRIDS)[name])
    grid = codec.grid_of(x.shape[3])
    parts = {}
    if grid is None:
        encoded = codec.encode(x)
    else:
        encoded = dict(zip(("codes", "scale"), encode_grid(x.double(), grid), strict=True))
    for label, part in encoded.items():
        room = torch.zeros(*part.shape[:2], part.shape[2] + 9, part.shape[3], dtype=part.dtype)
        room[:, :, 4:-5] = part
        parts[label] = room[:, :, 4:-5]
    return Operand(codec.layout, parts, x.shape[3], codec.decode_into, grid)


def decoded(coded: Operand, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    codes = coded.parts["codes"]
    out = torch.empty(*codes.shape[:3], coded.dim, dtype=dtype)
    coded.decode_into(out)
    return out


def problem(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, queries: int = 1):
    batch, kv_heads, groups, tokens, dim = shape
    query = states(batch, kv_heads, groups, queries, dim, seed=1).to(dtype)
    keys, values = (states(batch, kv_heads, tokens, dim, seed=seed).to(dtype) for seed in (2, 3))
    return query, operand(name, keys), operand(name, values)


def run(
    kernel: Kernel, query, keys, values, visibility=None, softcap=None, first_column: int = 0, logits=None, bias=None
) -> Partial:
    visibility = visibility or Visibility(first_column + keys.tokens - query.shape[3], query.shape[3])
    if not kernel.supports(query, keys, values, visibility):
        pytest.skip(f"{kernel.name} leaves this to the next kernel")
    scoring = Scoring(query.shape[-1] ** -0.5, softcap)
    return kernel.attend(query, keys, values, first_column, visibility, scoring, logits, bias)


def assert_as_exact_as_decoding_first(kernel: Kernel, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, keys, values = problem(name, shape, dtype)
    exact, exact_lse = attention(query, decoded(keys), decoded(values), scaling=shape[-1] ** -0.5)
    output, lse = run(kernel, query, keys, values)
    dense = scaled_dot_product_attention(query[:, :, :, 0], decoded(keys, dtype), decoded(values, dtype))
    # One rounding of the largest output: where decoding first happens to hit the exact number, nobody can be twice as good.
    floor = torch.finfo(torch.float32).eps * exact.abs().max().item()
    assert error(output, exact) <= 2 * error(dense[:, :, :, None], exact) + 2 * floor
    assert output.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact).abs().max().item()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_the_error_is_at_most_twice_that_of_decoding_first(kernel, name, shape, dtype):
    assert_as_exact_as_decoding_first(kernel, name, shape, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "shape", [(1, 2, 3, 37, 64), (3, 1, 2, 33, 80), (1, 2, 1, 129, 128), (1, 1, 2, 37, 256)], ids=str
)
@pytest.mark.parametrize("name", GRIDS)
def test_low_bits_are_read_as_exactly(kernel, name, shape):
    assert_as_exact_as_decoding_first(kernel, name, shape, torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "names", [("grid 6 4 3 3", "grid 4"), ("grid 2", "int8"), ("int4", "grid 8"), ("path 4 3 3 2", "path 6")], ids=str
)
def test_every_kernel_takes_low_bits(kernel, names):
    keys, values = (operand(name, states(1, 1, 5, 64)) for name in names)
    assert kernel.supports(states(1, 1, 2, 1, 64), keys, values, Visibility(4, 1))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "grid 4", "grid 6 4 3 3"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_is_added_to_the_dot_products(kernel, name, softcap):
    query, keys, values = problem(name, (3, 2, 3, 300, 64))
    bias, logits = states(3, 2, 3, 1, 300, seed=5), torch.empty(3, 2, 3, 1, 300)
    real = torch.rand(3, 300, generator=torch.Generator().manual_seed(0)) < 0.7
    visible = real[:, None, None, None]
    # The bias of each query head as a channel of its own, which no other query head reads.
    wide_keys = torch.cat((decoded(keys), bias[:, :, :, 0].transpose(2, 3).double()), dim=-1)
    wide_query = torch.cat((query, torch.eye(3).expand(3, 2, 3, 3)[:, :, :, None]), dim=-1)
    exact, exact_lse = attention(
        wide_query, wide_keys, decoded(values), scaling=0.125, visible=visible, softcap=softcap
    )
    output, lse = run(
        kernel, query, keys, values, Visibility(299, 1, real=real), softcap=softcap, logits=logits, bias=bias
    )
    assert error(output, exact) < CLOSE
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    weights = (logits - lse[..., None]).exp()
    assert not weights.masked_fill(visible, 0).any()
    assert error(torch.einsum("bhgqt,bhtc->bhgqc", weights.double(), decoded(values)), exact) < CLOSE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_many_tokens_are_summed_in_float32(kernel, name):
    shape = (1, 1, 2, 131_072, 64)
    query, keys, values = problem(name, shape)
    exact, _ = attention(query, decoded(keys), decoded(values), scaling=0.125)
    output, _ = run(kernel, query, keys, values)
    assert error(output, exact) <= 1e-4 * exact.abs().max().item()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "grid 6 4 3 3"])
def test_hidden_columns_take_no_part_and_a_row_that_sees_none_gives_zeros(kernel, name):
    query, keys, values = problem(name, (3, 2, 3, 300, 64))
    real = torch.rand(3, 300, generator=torch.Generator().manual_seed(0)) < 0.7
    real[1, :290] = False
    real[2] = False
    exact, exact_lse = attention(
        query, decoded(keys), decoded(values), scaling=0.125, visible=real[:, None, None, None]
    )
    output, lse = run(kernel, query, keys, values, Visibility(299, 1, real=real))
    assert error(output, exact) < CLOSE
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert not output[2].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_softcap_bounds_the_logits(kernel):
    query, keys, values = problem("int8", (1, 2, 3, 300, 64))
    exact, exact_lse = attention(query, decoded(keys), decoded(values), scaling=0.125, softcap=3.0)
    output, lse = run(kernel, query, keys, values, softcap=3.0)
    assert error(output, exact) < CLOSE
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "names", [("int8", "int4"), ("grid 3", "int8"), ("fp8", "grid 6"), ("grid 8", "grid 5")], ids=str
)
def test_keys_and_values_may_differ_in_codec_and_size(kernel, names):
    query = states(2, 2, 3, 1, 40, seed=1)
    keys, values = operand(names[0], states(2, 2, 70, 40)), operand(names[1], states(2, 2, 70, 24, seed=4))
    exact, _ = attention(query, decoded(keys), decoded(values), scaling=40**-0.5)
    output, _ = run(kernel, query, keys, values)
    assert error(output, exact) < CLOSE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["int8", "grid 4"])
def test_threads_change_nothing_but_rounding(kernel, name):
    query, keys, values = problem(name, (1, 3, 3, 1100, 64))
    bias = states(1, 3, 3, 1, 1100, seed=5)
    one = run(kernel, query, keys, values, bias=bias)
    torch.set_num_threads(2)
    try:
        two = run(kernel, query, keys, values, bias=bias)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(two.output, one.output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 50, 500])
@pytest.mark.parametrize("queries", [1, 37, 200])
@pytest.mark.parametrize("name", ["int8", "states"])
def test_queries_of_any_number_see_their_own_past(monkeypatch, name, queries, window):
    # Small tiles: several of them in both directions, and a ragged one at each end.
    monkeypatch.setattr(tiled_module, "TILE", 64 * 64 * 2)
    monkeypatch.setattr(tiled_module, "SCORES", 64 * 2 * 3 * 16)
    query, keys, values = problem(name, (1, 2, 3, 201, 64), queries=queries)
    visibility = Visibility(201 - queries + 5, queries, window=window)
    columns, places = torch.arange(201), torch.arange(201 - queries, 201)[:, None]
    visible = (columns <= places) & (columns > places - (window or 1000))
    exact, exact_lse = attention(query, decoded(keys), decoded(values), scaling=0.125, visible=visible)
    output, lse = run(TiledKernel(), query, keys, values, visibility, first_column=5)
    assert error(output, exact) < CLOSE
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


MASKS = {
    "bool": lambda queries: torch.rand(2, 1, queries, 90) < 0.6,
    "bool for all rows": lambda queries: torch.rand(1, 1, queries, 90) < 0.6,
    "additive": lambda queries: torch.randn(2, 1, queries, 90),
    "for each head": lambda queries: torch.randn(2, 6, queries, 90),
    "bool for each head": lambda queries: torch.rand(2, 6, queries, 90) < 0.6,
}


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kernel", [*KERNELS, pytest.param(None, id="exact")])
def test_a_mask_of_ones_own_says_all(kernel, kind, queries):
    torch.manual_seed(0)
    query, keys, values = problem("states" if kernel is None else "int8", (2, 2, 3, 90, 64), queries=queries)
    mask = MASKS[kind](queries)
    by_head = mask.view(mask.shape[0], 2, 3, queries, 90) if mask.shape[1] > 1 else mask[:, :, None]
    exact, _ = attention(query, decoded(keys), decoded(values), scaling=0.125, visible=by_head)
    visibility = Visibility(7 + 90 - queries, queries, mask=mask, mask_from=7)
    if kernel is None:
        output = attend_exact(query, keys.parts["codes"], values.parts["codes"], 7, visibility, 0.125)
    else:
        output, _ = run(kernel, query, keys, values, visibility, first_column=7)
    assert error(output, exact) < CLOSE


@pytest.mark.parametrize("window", [None, 30, 300])
@pytest.mark.parametrize(("first", "queries"), [(0, 1), (0, 300), (0, 257), (150, 150)])
@pytest.mark.parametrize("padded", [False, True])
def test_exact_attention_equals_the_oracle_in_blocks(first, queries, window, padded):
    query = states(2, 1, 2, queries, 40, seed=1)
    keys, values = states(2, 1, first + queries, 40), states(2, 1, first + queries, 24, seed=4)
    columns, places = torch.arange(first + queries), torch.arange(first, first + queries)[:, None]
    visible = ((columns <= places) & (columns > places - (window or 1000)))[None, None, None].repeat(2, 1, 1, 1, 1)
    real = torch.ones(2, first + queries, dtype=torch.bool)
    if padded:
        real[0, : first + queries // 2] = False
    visible &= real[:, None, None, None]
    exact, _ = attention(query, keys, values, scaling=0.2, visible=visible)
    got = attend_exact(query, keys, values, 0, Visibility(first, queries, window, real if padded else None), 0.2)
    seen = visible.any(-1).expand(2, 1, 2, queries)
    assert error(got[seen], exact[seen]) < CLOSE


def test_parts_merge_to_the_whole():
    query, keys, values = problem("int8", (2, 2, 3, 100, 64))
    whole = run(TiledKernel(), query, keys, values)
    visibility = Visibility(99, 1)
    pieces = [
        TiledKernel().attend(
            query, keys.slice(first, end), values.slice(first, end), first, visibility, Scoring(0.125)
        )
        for first, end in ((0, 1), (1, 64), (64, 100))
    ]
    nothing = Partial(torch.zeros_like(whole.output), torch.full_like(whole.lse, -torch.inf))
    merged = merge([pieces[2], nothing, pieces[0], pieces[1]])
    torch.testing.assert_close(merged.output, whole.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-6, atol=1e-6)
    assert not merge([nothing, nothing]).output.any()


def test_a_sink_logit_takes_weight_and_gives_nothing():
    query, keys, values = problem("int8", (1, 2, 3, 50, 64))
    part = run(TiledKernel(), query, keys, values)
    logits = torch.randn(2, 3)
    merged = merge([part, zero_logit(part, logits)])
    share = torch.sigmoid(part.lse - logits[None, :, :, None])
    torch.testing.assert_close(merged.output, part.output * share[..., None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 40), (3, 2, 8, 64), (1, 8, 3, 257)], ids=str)
def test_the_compiled_encoder_writes_the_codecs_own_bits(shape, dtype):
    encoder = encoder_for("int8", "cpu")
    if encoder is None:
        pytest.skip("needs numba: pip install hf-kvq[cpu]")
    x = (states(*shape) * torch.logspace(-38, 30, shape[2])[:, None]).to(dtype)
    x[0, 0, -1] = 0
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    expected = make_codec(CODECS["int8"]).encode(x)
    got = {
        name: torch.full((*part.shape[:2], part.shape[2] + 4, part.shape[3]), 1).to(part.dtype)
        for name, part in expected.items()
    }
    encoder(x, got["codes"][:, :, 2:-2], got["scale"][:, :, 2:-2], None, None)
    for name, part in expected.items():
        assert torch.equal(got[name][:, :, 2:-2], part)
        assert (got[name][:, :, :2] == 1).all()
        assert (got[name][:, :, -2:] == 1).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("layout", ["int8", "fp8", "int4", "grid 4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_and_lse_give_the_weight_of_each_token(kernel, layout, softcap):
    query, keys, values = problem(layout, (2, 2, 3, 300, 64))
    real = torch.ones(2, 300, dtype=torch.bool)
    real[1, 280:] = False
    visibility, logits = Visibility(299, 1, real=real), torch.full((2, 2, 3, 1, 300), 7.0)
    if not kernel.supports(query, keys, values, visibility):
        pytest.skip(f"{kernel.name} leaves this to the next kernel")
    part = kernel.attend(query, keys, values, 0, visibility, Scoring(0.125, softcap), logits=logits)
    weights = (logits - part.lse[..., None]).exp()
    assert error(weights.sum(-1), torch.ones(2, 2, 3, 1, dtype=torch.float64)) < 1e-5
    assert not weights[1, ..., 280:].any()
    output = torch.einsum("bhgqt,bhtc->bhgqc", weights.double(), decoded(values))
    assert error(part.output, output) < CLOSE
    plain = kernel.attend(query, keys, values, 0, visibility, Scoring(0.125, softcap))
    assert torch.equal(plain.output, part.output)
