"""What the context costs a decode step, on a few random layers.

Every cache is filled with the same random states twice, at the context's length and at `SHORT` tokens, and all of them take each step in
turns. The cost of a step's context is the difference of the two times: what the rest of the model takes cancels.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from eval.speed.caches import (
    BOUNDS,
    CHECKED,
    CONTENDERS,
    DENSE,
    DYNAMIC,
    FP8,
    INT8,
    STATIC,
    attend_with,
    built,
    difference,
    mode_difference,
    require_equal,
    step,
)
from eval.speed.timing import WARM_UP, in_turns, ratio_spread, spread
from hf_kvq import QuantizedCache
from hf_kvq.caches import expected_nbytes

__all__ = ["CACHES", "SHORT", "add_options", "measure", "random_llama"]

CACHES = (DYNAMIC, STATIC, INT8, FP8, DENSE)
SHORT = 64
SLACK = 8
"""Room for tokens that a StaticCache gets and never needs."""
GIB = 2**30
Place = tuple[str, int]
"""A cache's name, and the tokens that it was filled with."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape", nargs="+", default=["9x3x64", "8x2x128", "4x1x256"], help="query heads x kv heads x head_dim"
    )
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 4096, 16384, 32768], help="tokens")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="rows")
    parser.add_argument("--dtype", nargs="+", choices=sorted(BOUNDS), default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument(
        "--max-gib", type=float, default=10.0, help="memory of all caches above which a combination is skipped"
    )


def measure(given: Namespace) -> dict[str, Any]:
    """The record's own part."""
    combinations = list(product(given.shape, given.dtype, given.batch, given.context))
    return {
        "layers": given.layers,
        "steps": given.steps,
        "short": SHORT,
        "max_gib": given.max_gib,
        "combinations": [
            _combination(given, *combination)
            for combination in tqdm(combinations, desc="combinations", leave=False, file=sys.stderr)
        ],
    }


def random_llama(shape: str, *, dtype: torch.dtype, layers: int, seed: int = 0) -> Any:
    """A Llama with random weights. Its layers are as wide as their query heads.

    Raises:
        ValueError: If the shape is not three numbers.
    """
    try:
        heads, kv_heads, head_dim = (int(part) for part in shape.split("x"))
    except ValueError:
        raise ValueError(f"a shape is query heads x kv heads x head_dim, got {shape!r}; try 9x3x64") from None
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=heads * head_dim,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=1000,
        max_position_embeddings=131072,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.inference_mode()
def _combination(given: Namespace, shape: str, dtype: str, batch: int, context: int) -> dict[str, Any]:
    model = random_llama(shape, dtype=getattr(torch, dtype), layers=given.layers)
    row = {"shape": shape, "dtype": dtype, "batch": batch, "context": context}
    needed = _needed(model.config, batch, context, getattr(torch, dtype))
    if needed > given.max_gib * GIB:
        return {**row, "skipped": f"would take {needed / GIB:.1f} GiB of caches, --max-gib is {given.max_gib:g}"}
    rounds = WARM_UP + given.steps
    caches = _filled(model, batch, {SHORT, context}, rounds + SLACK)
    tokens = torch.randint(0, 1000, (rounds + CHECKED, batch, 1), generator=torch.Generator().manual_seed(1))
    differences = dict.fromkeys(caches, 0.0)

    def check(logits: dict[Place, Tensor]) -> None:
        for (name, length), got in logits.items():
            found = difference(got, logits[DYNAMIC, length])
            differences[name, length] = max(differences[name, length], found)

    times = in_turns(
        list(caches),
        given.steps,
        prepare=lambda place: attend_with(model, place[0]),
        run=lambda place, number: step(model, tokens[number], caches[place]),
        check=check,
        title=f"{shape}, {dtype}, batch {batch}, {context} tokens",
    )
    equality = _checked(model, tokens[rounds:], caches, differences, BOUNDS[dtype])
    return {**row, "skipped": None, "equality": equality, **_figures(times, differences, context)}


def _needed(config: LlamaConfig, batch: int, context: int, dtype: torch.dtype) -> int:
    """Bytes of all caches at once, with the quarter that a store grows ahead, and one layer's exact states."""
    exact = expected_nbytes(config, "exact", context, batch=batch, dtype=dtype)
    coded = sum(expected_nbytes(config, name, context, batch=batch, dtype=dtype) for name in ("int8", "fp8", "int8"))
    return 2 * exact + coded * 5 // 4 + 2 * exact // config.num_hidden_layers


def _filled(model: Any, batch: int, lengths: set[int], room: int) -> dict[Place, Cache]:
    """All caches at all lengths, with the first tokens of the same random states."""
    config, generator = model.config, torch.Generator().manual_seed(2)
    caches = {
        (name, length): cache
        for length in sorted(lengths)
        for name, cache in built(CACHES, config, length + room)[0].items()
    }
    for layer in range(config.num_hidden_layers):
        shape = (2, batch, config.num_key_value_heads, max(lengths), config.head_dim)
        keys, values = torch.randn(shape, generator=generator, dtype=model.dtype)
        for (name, length), cache in caches.items():
            attend_with(model, name)
            cache.update(keys[:, :, :length], values[:, :, :length], layer)
    return caches


def _checked(
    model: Any, tokens: Tensor, caches: dict[Place, Cache], differences: dict[Place, float], bound: float
) -> dict[str, float]:
    """The largest differences of what must be equal, at both lengths.

    Raises:
        UnequalError: If one is above the bound.
    """
    found = {"bound": bound, STATIC: max(found for (name, _), found in differences.items() if name == STATIC)}
    for (name, _), cache in caches.items():
        if isinstance(cache, QuantizedCache):
            found[name] = max(found.get(name, 0.0), mode_difference(model, tokens, cache))
    for name in CACHES[1:]:
        against = DYNAMIC if CONTENDERS[name].group == "exact" else "its other mode"
        require_equal(f"{name} against {against}", found[name], bound)
    return found


def _figures(
    times: dict[Place, list[float]], differences: dict[Place, float], context: int
) -> dict[str, dict[str, Any]]:
    costs = {
        name: [long - short for long, short in zip(times[name, context], times[name, SHORT], strict=True)]
        for name in CACHES
    }
    caches = {
        name: {
            "ms_short": spread(times[name, SHORT]),
            "ms": spread(times[name, context]),
            "cost_ms": spread(costs[name]),
            "difference": differences[name, context],
        }
        for name in CACHES
    }
    ratios = {
        "dynamic_cost_to_int8": _cost_ratio(caches, DYNAMIC),
        "static_cost_to_int8": _cost_ratio(caches, STATIC),
        "int8_to_dynamic_short": ratio_spread(times[INT8, SHORT], times[DYNAMIC, SHORT]),
        "dynamic_to_int8": ratio_spread(times[DYNAMIC, context], times[INT8, context]),
    }
    return {"caches": caches, "ratios": ratios}


def _cost_ratio(caches: dict[str, dict[str, Any]], name: str) -> float | None:
    """Of the medians, as the cost of one step may be nothing; None where int8's cost drowns in the noise."""
    cost = caches[INT8]["cost_ms"]
    return caches[name]["cost_ms"]["median"] / cost["median"] if cost["p20"] > 0 else None
