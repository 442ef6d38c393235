"""The largest extra memory that a decode step of one attention layer holds: `update` of the cache, then attention.

torch's profiler reports every block that the CPU allocator hands out and takes back, temporaries inside of operations included, which
counting the outputs of operations would miss. It knows the size of a returned block only if it saw it handed out, so the cache is
filled under the profiler as well, and the running sum starts with the step. What numba's kernel keeps on its stack (a scratch of 32
tokens a thread) is outside of the allocator.

The step is one in which a store does not grow; it grows by a quarter at a time, and holds both copies while it does.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eval.speed.caches import BOUNDS, difference, require_equal
from eval.speed.layers import random_llama
from hf_kvq import QuantizedCache
from hf_kvq.attention import ATTENTION, attention_over_codes
from hf_kvq.kernels import Kernel, Scoring, Visibility, kernels_for, merge
from hf_kvq.kernels.tiled import TILE

__all__ = ["add_options", "measure", "peak_of_step"]

Attend = Callable[[Any, Tensor, Any, Any], Tensor]
MARK = "eval.speed step"


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", default="9x3x64", help="query heads x kv heads x head_dim")
    parser.add_argument("--context", nargs="+", type=int, default=[4096, 16384, 32768], help="tokens")


@torch.inference_mode()
def measure(given: Namespace) -> dict[str, Any]:
    """The record's own part."""
    model = random_llama(given.shape, dtype=torch.float32, layers=1)
    rows = []
    for context in given.context:
        peaks, outputs = {}, {}
        for name, (attention, build, attend) in _contenders().items():
            model.set_attn_implementation(attention)
            peaks[name], outputs[name] = peak_of_step(model, build(model.config), context, attend)
        dense = outputs[_DENSE]
        for name, output in outputs.items():
            if name != _DYNAMIC:
                require_equal(
                    f"{name} against {_DENSE}, {context} tokens", difference(output, dense), BOUNDS["float32"]
                )
        rows.append({"context": context, "bytes": peaks})
    return {"shape": given.shape, "dtype": "float32", "tile_bytes": 4 * TILE, "contexts": rows}


def peak_of_step(model: Any, cache: Cache, context: int, attend: Attend) -> tuple[int, Tensor]:
    """Bytes that the second step holds at most beyond what was held before it, and its output."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    module = model.model.layers[0].self_attn

    def states(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, config.head_dim, generator=generator)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        cache.update(*(states(config.num_key_value_heads, context) for _ in range(2)), 0)
        for number in range(2):  # the first one grows a store, and compiles
            query = states(config.num_attention_heads, 1)
            new = [states(config.num_key_value_heads, 1) for _ in range(2)]
            with record_function(f"{MARK} {number}"):
                output = attend(module, query, *cache.update(*new, 0))
    return _largest_sum(profiler, f"{MARK} 1"), output


def _largest_sum(profiler: profile, mark: str) -> int:
    """The peak of the running sum of blocks handed out and taken back inside of a mark."""
    events = profiler.profiler.kineto_results.events()
    (step,) = (event for event in events if event.name() == mark)
    start, end = step.start_ns(), step.start_ns() + step.duration_ns()
    blocks = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and start <= event.start_ns() <= end
    )
    held = largest = 0
    for _, size in blocks:
        held += size
        largest = max(largest, held)
    return largest


_DYNAMIC, _DENSE = "DynamicCache, sdpa", "int8 dense, sdpa"


def _contenders() -> dict[str, tuple[str, Callable[[Any], Cache], Attend]]:
    """Each with its attention, how its cache is built, and what it does with what `update` returns."""
    kernels = kernels_for("cpu")
    return {
        _DYNAMIC: ("sdpa", lambda config: DynamicCache(config=config), _by_sdpa),
        _DENSE: ("sdpa", _int8, _by_sdpa),
        f"int8 fused, {kernels[-1].name} tiles": (ATTENTION, _int8, _by_kernel(kernels[-1])),
        f"int8 fused, {kernels[0].name} as installed": (ATTENTION, _int8, _as_installed),
    }


def _int8(config: Any) -> Cache:
    return QuantizedCache(config, "int8")


def _by_sdpa(module: Any, query: Tensor, keys: Any, values: Any) -> Tensor:
    return sdpa_attention_forward(module, query, keys, values, None, scaling=module.scaling)[0]


def _as_installed(module: Any, query: Tensor, keys: Any, values: Any) -> Tensor:
    return attention_over_codes(module, query, keys, values, None, scaling=module.scaling)[0]


def _by_kernel(kernel: Kernel) -> Attend:
    """The attention of this kernel alone."""

    def attend(module: Any, query: Tensor, keys: Any, values: Any) -> Tensor:
        view, heads = keys.view, module.config.num_key_value_heads
        grouped = query.reshape(query.shape[0], heads, -1, *query.shape[2:])
        visibility = Visibility(view.end - query.shape[2], query.shape[2])
        parts = [
            kernel.attend(grouped, part.keys, part.values, part.first, visibility, Scoring(module.scaling))
            for part in view.segments
        ]
        return merge(parts).output.reshape(query.shape).transpose(1, 2).contiguous()

    return attend
