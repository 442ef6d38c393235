"""Eight-bit affine codes: the seed's per-tensor functions, and the per-token codecs of the cache.

Source: the document of `mixle.experimental.kv_cache_quant` for `AffineQuantized`, `quantize_kv_cache`, `dequantize_kv_cache`
and `quantization_error_per_token`: int8 with scale = max |x| / 127, fp8 by a direct cast to e4m3 with scale 1.
Departs from it: a tensor with an element beyond +-448 is scaled to fit fp8 instead of becoming NaN, and elements that are
not finite raise instead of giving a scale that is not finite.

`PerTokenAffineCodec` gives every token of every head a scale of its own, kept as bfloat16: its range is float32's, so no
state is too small or too large for it, and its rounding (2^-9 of the scale) moves the largest code by a quarter step at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.codecs.base import Codec, Codes
from hf_kvq.packing import Layout, pack_int4

__all__ = [
    "AffineQuantized",
    "PerTokenAffineCodec",
    "PerTokenInt4Codec",
    "PerUpdateAffineCodec",
    "dequantize_kv_cache",
    "quantization_error_per_token",
    "quantize_kv_cache",
]

Mode = Literal["int8", "fp8"]

INT8_MAX = 127.0
INT4_MAX = 7.0
FP8_MAX = 448.0
"""Largest finite number of e4m3 (arXiv:2209.05433)."""


@dataclass(frozen=True)
class AffineQuantized:
    """A quantized tensor: `x` is about `codes * scale`.

    Attributes:
        codes: `torch.int8` or `torch.float8_e4m3fn`, shaped as the input.
        scale: One number for the whole tensor; for fp8 1.0 unless the tensor goes beyond +-448.
        mode: The scheme that made it.
    """

    codes: Tensor
    scale: float
    mode: Mode


def quantize_kv_cache(x: Tensor, *, mode: Mode = "int8") -> AffineQuantized:
    """Quantize a tensor of any shape with one scale for all of it.

    Args:
        x: Keys or values, real and finite.
        mode: `"int8"`: `|x - decoded| <= scale / 2` for every element. `"fp8"`: relative error at most 2^-4 for
            elements of at least 2^-6 times the scale, absolute error at most 2^-10 times the scale below.

    Raises:
        ValueError: If `mode` is unknown or an element is not finite.
        RuntimeError: If `mode` is `"fp8"` and this torch has no `float8_e4m3fn`.
    """
    _check_mode(mode)
    if x.is_complex():
        raise ValueError(f"x must be real, got {x.dtype}")
    largest = float(x.detach().abs().max()) if x.numel() else 0.0
    if not math.isfinite(largest):
        raise ValueError(
            f"x must be finite to be quantized, its largest magnitude is {largest}; look for an overflow upstream"
        )
    scale = float(_scale(torch.tensor(largest, dtype=torch.float32), mode))
    codes = _round_to_codes(x.detach().float(), torch.tensor(scale, device=x.device), mode)
    return AffineQuantized(codes=codes, scale=scale, mode=mode)


def dequantize_kv_cache(q: AffineQuantized) -> Float[Tensor, "..."]:
    """The float32 tensor that `q` stands for, shaped as the input of `quantize_kv_cache`."""
    return q.codes.float() * q.scale


def quantization_error_per_token(x: Tensor, *, mode: Mode = "int8") -> Float[Tensor, " n_tokens"]:
    """Mean absolute error of a round trip of `x` through `quantize_kv_cache`, for each entry of the leading axis.

    Args:
        x: `[n_tokens, ...]`; all of it shares one scale.
        mode: As in `quantize_kv_cache`.

    Raises:
        ValueError: If `x` has no axis, or as `quantize_kv_cache` does.
    """
    if x.ndim == 0:
        raise ValueError("x must have a leading axis of tokens, got a tensor without axes")
    error = (dequantize_kv_cache(quantize_kv_cache(x, mode=mode)) - x.detach().float()).abs()
    return error.reshape(x.shape[0], -1).mean(dim=1)


_LAYOUTS: dict[Mode, Layout] = {"int8": "int8", "fp8": "e4m3"}


class PerTokenAffineCodec(Codec):
    """Eight bits an element, a bfloat16 scale per token and head. Codes depend on the token alone."""

    def __init__(self, mode: Mode) -> None:
        _check_mode(mode)
        self.mode: Mode = mode
        self.layout = _LAYOUTS[mode]

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        """`|x - decode(encode(x))| <= scale / 2` for every element in int8; relative 2^-4 in fp8, as its grid has it."""
        states = _wide(states)
        limit = INT8_MAX if self.mode == "int8" else FP8_MAX
        largest = states.abs().amax(dim=-1, keepdim=True)
        # An all-zero token would divide by zero; the smallest normal number turns it into zeros.
        scale = (largest / limit).clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        return {"codes": _round_to_codes(states, scale.float(), self.mode), "scale": scale}

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        _scale_codes(codes["codes"], codes["scale"].float(), self.mode, out)

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return kv_heads * (head_dim * 8 + 16)


class PerTokenInt4Codec(Codec):
    """Four bits an element, a bfloat16 scale per token and head: the plain baseline of the low-bit codecs, codes -7 to 7."""

    layout = "int4"

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        """`|x - decode(encode(x))| <= scale / 2 + 2^-9 |x|` for every element: the scale is rounded to bfloat16.

        Raises:
            ValueError: If head_dim is odd.
        """
        states = _wide(states)
        scale = (states.abs().amax(dim=-1, keepdim=True) / INT4_MAX).clamp(min=torch.finfo(torch.bfloat16).tiny)
        scale = scale.to(torch.bfloat16)
        codes = (states / scale.float()).round_().clamp_(-INT4_MAX, INT4_MAX).to(torch.int8)
        return {"codes": pack_int4(codes), "scale": scale}

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        half = out.shape[-1] // 2
        out[..., :half].copy_(codes["codes"] & 15)
        out[..., half:].copy_(codes["codes"] >> 4)
        out.sub_(8).mul_(codes["scale"].float())

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return kv_heads * (head_dim * 4 + 16)


class PerUpdateAffineCodec(Codec):
    """The seed's rule in a cache: one float32 scale for everything that one row stores in one update.

    The scale is kept once per token, since tokens of an update may later leave at different times.
    """

    depends_on_chunks = True

    def __init__(self, mode: Mode) -> None:
        _check_mode(mode)
        self.mode: Mode = mode
        self.layout = _LAYOUTS[mode]

    def encode(self, states: Float[Tensor, "batch kv_heads tokens head_dim"], first: int = 0) -> Codes:
        states = _wide(states)
        scale = _scale(states.abs().amax(dim=(1, 2, 3), keepdim=True).float(), self.mode)
        codes = _round_to_codes(states, scale, self.mode)
        return {"codes": codes, "scale": scale.expand(-1, 1, states.shape[2], 1)}

    def decode_into(self, codes: Codes, out: Float[Tensor, "batch kv_heads tokens head_dim"]) -> None:
        _scale_codes(codes["codes"], codes["scale"], self.mode, out)

    def bits_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return kv_heads * head_dim * 8 + 32


def _wide(states: Tensor) -> Tensor:
    """At least float32: half precision could not tell neighbouring codes apart."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _check_mode(mode: str) -> None:
    if mode not in ("int8", "fp8"):
        raise ValueError(f"mode must be 'int8' or 'fp8', got {mode!r}")
    if mode == "fp8" and not hasattr(torch, "float8_e4m3fn"):
        raise RuntimeError(
            f"fp8 needs torch.float8_e4m3fn, torch {torch.__version__} has none; use mode='int8', or torch >= 2.1"
        )


def _scale(largest: Float[Tensor, "..."], mode: Mode) -> Float[Tensor, "..."]:
    """The seed's scale for a group whose largest magnitude is `largest`; an all-zero group gets 1."""
    if mode == "fp8":
        return torch.where(largest > FP8_MAX, largest / FP8_MAX, torch.ones_like(largest))
    return torch.where(
        largest > 0, (largest / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny), torch.ones_like(largest)
    )


def _round_to_codes(states: Float[Tensor, "..."], scale: Float[Tensor, "..."], mode: Mode) -> Tensor:
    scaled = states / scale
    if mode == "int8":
        return scaled.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    # The cast gives NaN past the largest number instead of saturating.
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _scale_codes(codes: Tensor, scale: Float[Tensor, "..."], mode: Mode, out: Float[Tensor, "..."]) -> None:
    """`out = codes * scale`, rounded once to `out`'s dtype."""
    # A copy and a product in place take half the time of one product of mixed types, and every code is exact in every float dtype.
    if mode == "int8":
        out.copy_(codes)
    else:
        _widen_e4m3(codes, out)
    out.mul_(scale)


_WIDER: dict[torch.dtype, tuple[torch.dtype, int, int, float]] = {
    # dtype: integer of its size, its bits, its mantissa bits less e4m3's 3, 2 to the difference of the exponents' biases
    torch.float32: (torch.int32, 32, 20, 2.0**120),
    torch.bfloat16: (torch.int16, 16, 4, 2.0**120),
    torch.float16: (torch.int16, 16, 7, 2.0**8),
}


def _widen_e4m3(codes: Tensor, out: Float[Tensor, "..."]) -> None:
    """`out = codes` for finite e4m3 codes, a tenth of the time of torch's conversion on a CPU.

    Exponent and mantissa move to where the wider type has them; what its larger bias makes too small, a power of two mends. Subnormal
    numbers come out right as well.
    """
    if out.dtype not in _WIDER:
        out.copy_(codes)
        return
    integer, width, shift, bias = _WIDER[out.dtype]
    bits = out.view(integer).copy_(codes.view(torch.int8))  # negative codes bring their sign up to the highest bit
    bits.bitwise_left_shift_(shift).bitwise_and_((0x7F << shift) - (1 << (width - 1)))
    out.mul_(bias)
