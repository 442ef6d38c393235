"""One query over codes of one layer: every kernel that runs on a CPU, on the same codes, in turns."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from torch import Tensor

from eval.speed.caches import require_equal
from eval.speed.timing import in_turns, ratio_spread, spread
from hf_kvq.codecs import Codec, Codes, make_codec
from hf_kvq.codecs.rotated import encode_grid
from hf_kvq.config import AffineConfig, RotatedConfig
from hf_kvq.kernels import Kernel, Operand, Scoring, Visibility, grid_encoder_for, kernels_for
from hf_kvq.packing import TRIALS

__all__ = ["add_options", "measure"]

CLOSE = 1e-4
"""Largest difference between kernels, in standard deviations of the output, which is small: a mean of thousands of random values."""

MODES: dict[str, AffineConfig | RotatedConfig] = {
    **{mode: AffineConfig(mode=mode) for mode in ("int8", "fp8", "int4")},
    "8 bits": RotatedConfig(bits=8),
    "4 bits": RotatedConfig(bits=4),
    **{f"{bits} bits on a trellis": RotatedConfig(bits=bits, trellis=True) for bits in (6, 4, 3, 2)},
}
"""Codes that are read; those of a basis as they are in it."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", default="9x3x64", help="query heads x kv heads x head_dim")
    parser.add_argument("--context", nargs="+", type=int, default=[4096, 16384, 32768], help="tokens")
    parser.add_argument("--steps", type=int, default=40, help="timed calls")


@torch.inference_mode()
def measure(given: Namespace) -> dict[str, Any]:
    """The record's own part."""
    rows = [
        {"context": context, "codes": mode, "kernels": _compared(given, context, mode)}
        for context in given.context
        for mode in MODES
    ]
    return {"shape": given.shape, "dtype": "float32", "steps": given.steps, "rows": rows}


def _compared(given: Namespace, context: int, mode: str) -> dict[str, dict[str, Any]]:
    heads, kv_heads, dim = (int(size) for size in given.shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    codec = make_codec(MODES[mode])
    query = torch.randn(1, kv_heads, heads // kv_heads, 1, dim, generator=generator)
    keys, values = (
        Operand(
            codec.layout,
            _codes(codec, torch.randn(1, kv_heads, context, dim, generator=generator)),
            dim,
            codec.decode_into,
            codec.grid_of(dim),
        )
        for _ in range(2)
    )
    kernels = {kernel.name: kernel for kernel in kernels_for("cpu")}

    def run(name: str, number: int) -> Tensor:
        return _attend(kernels[name], query, keys, values)

    def check(outputs: dict[str, Tensor]) -> None:
        reference = outputs["torch"]
        for name, output in outputs.items():
            found = ((output - reference).abs().max() / reference.std()).item()
            require_equal(f"{name} against torch, {mode}, {context} tokens", found, CLOSE)

    taken = in_turns(list(kernels), given.steps, prepare=lambda name: None, run=run, check=check)
    return {
        name: {"ms": spread(times), "torch_over_it": ratio_spread(taken["torch"], times)}
        for name, times in taken.items()
    }


def _codes(codec: Codec, states: Tensor) -> Codes:
    grid = codec.grid_of(states.shape[3])
    if grid is None:
        return codec.encode(states)
    encode = grid_encoder_for("cpu") or encode_grid
    no_aims = states.new_zeros(*states.shape[:2], 0, states.shape[3], dtype=torch.float64)
    codes, scale = encode(states.double(), grid, no_aims, TRIALS, 0)
    return {"codes": codes, "scale": scale}


def _attend(kernel: Kernel, query: Tensor, keys: Operand, values: Operand) -> Tensor:
    tokens, dim = keys.tokens, query.shape[-1]
    return kernel.attend(query, keys, values, 0, Visibility(tokens - 1, 1), Scoring(dim**-0.5)).output
