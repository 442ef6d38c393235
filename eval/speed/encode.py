"""What it takes to make codes of a token's keys and values in one layer: one token at a time, and a prompt at once, by scheme and beside int8."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import torch

from eval.speed.timing import in_turns, ratio_spread, spread
from hf_kvq import PRESETS
from hf_kvq.codecs import Codec, make_codecs
from hf_kvq.kernels import grid_encoder_for
from hf_kvq.rope import Rope
from hf_kvq.states.region import Region

__all__ = ["add_options", "measure"]

SCHEMES = ("int8", "q8", "q6", "q4", "q3", "q2", "kivi4")
STATISTICS = 128
CALLS = 64
"""Single tokens of one timed turn."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", default="3x64", help="kv heads x head_dim")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=10, help="timed turns")


@torch.inference_mode()
def measure(given: Namespace) -> dict[str, Any]:
    """The record's own part."""
    kv_heads, dim = (int(size) for size in given.shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, kv_heads, STATISTICS + given.tokens, dim, generator=generator) for _ in range(2)]
    codecs = {name: _fitted(name, states, dim) for name in SCHEMES}
    rows = []
    for size, tokens in ((1, CALLS), (given.tokens, given.tokens)):
        # Blocks of several tokens are never encoded one by one.
        names = [name for name in SCHEMES if all(size % codec.block == 0 for codec in codecs[name])]
        parts = [tuple(x[:, :, first : first + size] for x in states) for first in range(0, tokens, size)]

        def run(name: str, _: int, parts: list[Any] = parts) -> None:
            region = Region(codecs[name], (dim, dim))
            for keys, values in parts:
                region.append(keys, values)

        taken = in_turns(names, given.steps, prepare=lambda name: None, run=run, check=lambda results: None)
        rows.append(
            {
                "at_once": size,
                "schemes": {
                    name: {
                        "us_per_token": spread([1000 * time / tokens for time in times]),
                        "to_int8": ratio_spread(times, taken["int8"]),
                    }
                    for name, times in taken.items()
                },
            }
        )
    return {"shape": given.shape, "dtype": "float32", "steps": given.steps, "rows": rows}


def _fitted(name: str, states: list[torch.Tensor], dim: int) -> tuple[Codec, Codec]:
    """The codecs that the scheme has in the middle of a model, with what they learn of the first tokens."""
    rope = Rope(tuple(10_000.0 ** (-2 * pair / dim) for pair in range(dim // 2)), interleaved=False)
    keys, values = make_codecs(PRESETS[name].for_layer(15, 30), rope, grid_encoder_for)
    positions = torch.arange(STATISTICS)[None]
    first = [x[:, :, :STATISTICS] for x in states]
    return (
        keys if keys.is_fitted else keys.fitted(first[0], positions, first[0]),
        values if values.is_fitted else values.fitted(first[1], positions, None),
    )
