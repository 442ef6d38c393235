"""The seed's functions and the per-token codecs."""

from __future__ import annotations

import pytest
import torch
from oracles import ODD_SHAPES, e4m3_grid, int8_per_token, states

import hf_kvq
from hf_kvq.codecs.affine import (
    AffineQuantized,
    PerTokenAffineCodec,
    PerUpdateAffineCodec,
    dequantize_kv_cache,
    quantization_error_per_token,
    quantize_kv_cache,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 37, 40)])
def test_seed_int8_is_max_abs_over_127_and_within_half_a_step(shape, dtype):
    x = states(*shape, dtype=dtype)
    q = quantize_kv_cache(x)
    assert isinstance(q, AffineQuantized)
    assert (q.mode, q.codes.dtype, q.codes.shape) == ("int8", torch.int8, x.shape)
    assert q.scale == pytest.approx(float(x.float().abs().max()) / 127, rel=1e-6)
    assert int(q.codes.abs().max()) == 127
    error = (dequantize_kv_cache(q).double() - x.double()).abs().max()
    assert error <= q.scale / 2 * (1 + 1e-5)


def test_seed_fp8_is_the_nearest_number_of_the_grid_with_scale_one():
    x = states(4, 50, 16)
    q = quantize_kv_cache(x, mode="fp8")
    assert (q.scale, q.codes.dtype) == (1.0, torch.float8_e4m3fn)
    nearest = (x.double()[..., None] - e4m3_grid()).abs().amin(dim=-1)
    assert torch.equal((dequantize_kv_cache(q).double() - x.double()).abs(), nearest)


def test_seed_fp8_scales_what_lies_beyond_448_instead_of_losing_it():
    x = torch.tensor([1000.0, -3.0, 0.5])
    q = quantize_kv_cache(x, mode="fp8")
    assert q.scale == pytest.approx(1000 / 448)
    assert torch.isfinite(dequantize_kv_cache(q)).all()
    assert dequantize_kv_cache(q)[0] == pytest.approx(1000)


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_zeros_and_empty_tensors_survive(mode):
    assert torch.equal(dequantize_kv_cache(quantize_kv_cache(torch.zeros(3, 4), mode=mode)), torch.zeros(3, 4))
    assert dequantize_kv_cache(quantize_kv_cache(torch.zeros(0, 4), mode=mode)).shape == (0, 4)


@pytest.mark.parametrize("mode", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_seed_refuses_what_is_not_finite_and_names_it(mode, bad):
    x = torch.ones(3)
    x[1] = bad
    with pytest.raises(ValueError, match="must be finite"):
        quantize_kv_cache(x, mode=mode)


@pytest.mark.usefixtures("as_users_run_it")
def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match="'int4'"):
        quantize_kv_cache(torch.ones(3), mode="int4")


def test_fp8_raises_where_torch_has_none(monkeypatch):
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(RuntimeError, match="float8_e4m3fn"):
        quantize_kv_cache(torch.ones(3), mode="fp8")
    assert quantize_kv_cache(torch.ones(3), mode="int8").codes.dtype == torch.int8


def test_error_per_token_is_the_mean_of_each_token():
    x = states(5, 3, 8)
    decoded = dequantize_kv_cache(quantize_kv_cache(x))
    expected = torch.stack([(decoded[t] - x[t]).abs().mean() for t in range(5)])
    torch.testing.assert_close(quantization_error_per_token(x), expected)
    with pytest.raises(ValueError, match="leading axis"):
        quantization_error_per_token(torch.tensor(1.0))


@pytest.mark.parametrize("shape", ODD_SHAPES[:3])
def test_per_token_int8_matches_the_oracle(shape):
    x = states(*shape)
    codec = PerTokenAffineCodec("int8")
    torch.testing.assert_close(
        codec.decode(codec.encode(x), head_dim=shape[-1]).double(), int8_per_token(x), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_per_token_int8_error_is_at_most_half_a_scale(shape, dtype):
    x = states(*shape, dtype=dtype)
    codec = PerTokenAffineCodec("int8")
    codes = codec.encode(x)
    error = (codec.decode(codes, head_dim=shape[-1]).double() - x.double()).abs()
    assert (error <= codes["scale"].double() / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_every_finite_e4m3_code_widens_as_torch_widens_it(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = every[torch.isfinite(every.float())].view(1, 1, -1, 1)
    unit = torch.ones(1, 1, codes.shape[2], 1, dtype=torch.bfloat16)
    widened = PerTokenAffineCodec("fp8").decode({"codes": codes, "scale": unit}, head_dim=1, dtype=dtype)
    assert torch.equal(widened, codes.to(dtype))
    assert codes.shape[2] == 254


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_per_token_fp8_is_nearest_on_its_scaled_grid(shape):
    x = states(*shape)
    codec = PerTokenAffineCodec("fp8")
    codes = codec.encode(x)
    scale = codes["scale"].double()
    error = (codec.decode(codes, head_dim=shape[-1]).double() - x.double()).abs() / scale
    # Half a step of the grid: 2^-4 relative for normal numbers, 2^-10 below 2^-6; the bfloat16 scale may cut 2^-9 off the largest.
    bound = torch.maximum((x.double() / scale).abs() * 2.0**-4, torch.tensor(2.0**-10))
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_per_token_codes_hold_any_magnitude(mode, magnitude):
    x = states(1, 1, 5, 16) * magnitude
    codec = PerTokenAffineCodec(mode)
    decoded = codec.decode(codec.encode(x), head_dim=16)
    assert ((decoded - x).abs().amax() / x.abs().amax()) < 0.07


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [PerTokenAffineCodec("int8"), PerTokenAffineCodec("fp8")])
def test_decoding_into_a_dtype_rounds_once(codec, dtype):
    codes = codec.encode(states(2, 2, 9, 16))
    exact = codec.decode(codes, head_dim=16, dtype=torch.float32)
    assert torch.equal(codec.decode(codes, head_dim=16, dtype=dtype), exact.to(dtype))


@pytest.mark.parametrize("codec", [PerTokenAffineCodec("int8"), PerTokenAffineCodec("fp8")])
def test_codes_of_a_token_depend_on_it_alone(codec):
    x = states(2, 2, 9, 16)
    together = codec.encode(x)
    for token in range(9):
        alone = codec.encode(x[:, :, token : token + 1])
        for name, part in alone.items():
            assert torch.equal(part.float(), together[name][:, :, token : token + 1].float())


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_seed_scheme_is_the_seed_function_row_by_row(mode):
    x = states(3, 2, 9, 16) * torch.tensor([1.0, 5.0, 900.0])[:, None, None, None]
    codec = PerUpdateAffineCodec(mode)
    decoded = codec.decode(codec.encode(x), head_dim=16)
    for row in range(3):
        assert torch.equal(decoded[row], dequantize_kv_cache(quantize_kv_cache(x[row], mode=mode)))


def test_the_seeds_user_finds_the_functions_at_the_top():
    for name in ("AffineQuantized", "quantize_kv_cache", "dequantize_kv_cache", "quantization_error_per_token"):
        assert getattr(hf_kvq, name) is globals()[name]
