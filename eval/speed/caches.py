"""The caches that are compared: how each is built, and the attention that the model is set to for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers import QuantizedCache as StockQuantizedCache

from hf_kvq import QuantizedCache
from hf_kvq.attention import ATTENTION
from hf_kvq.evaluation.models import forward

__all__ = [
    "BOUNDS",
    "CHECKED",
    "CONTENDERS",
    "DENSE",
    "DYNAMIC",
    "FP8",
    "INT8",
    "Q4",
    "Q8",
    "STATIC",
    "Contender",
    "UnequalError",
    "attend_with",
    "built",
    "difference",
    "mode_difference",
    "require_equal",
    "step",
]

DYNAMIC, STATIC = "DynamicCache", "StaticCache"
DENSE, INT8, FP8 = "hf_kvq int8 dense", "hf_kvq int8 fused", "hf_kvq fp8 fused"
Q8, Q4 = "hf_kvq q8 fused", "hf_kvq q4 fused"

BOUNDS = {"float32": 5e-3, "bfloat16": 0.15}
"""Largest difference, in standard deviations of the logits, of results that differ in the order of additions alone.

Such differences come to some 1e-5 in float32, and to 0.06 in bfloat16, which keeps 8 bits. The rest is room for a code of the newest
token that falls to the other side of a rounding edge.
"""


CHECKED = 3
"""Tokens after the timed ones on which both modes of a cache are compared."""


class UnequalError(RuntimeError):
    """Results that must be equal are not."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A cache with the attention that reads it.

    Attributes:
        build: Takes the model's config and the tokens that the cache will ever hold.
        attention: Name for `model.set_attn_implementation`.
        group: `"exact"` and `"quantized"` are transformers' own.
    """

    build: Callable[[PreTrainedConfig, int], Cache]
    attention: str = "sdpa"
    group: str = "exact"


CONTENDERS = {
    DYNAMIC: Contender(build=lambda config, length: DynamicCache(config=config)),
    STATIC: Contender(build=lambda config, length: StaticCache(config=config, max_cache_len=length)),
    "stock fp8": Contender(build=lambda config, length: StockQuantizedCache("fp8", config), group="quantized"),
    "stock hqq int4": Contender(
        build=lambda config, length: StockQuantizedCache("hqq", config, nbits=4), group="quantized"
    ),
    "stock quanto int4": Contender(
        build=lambda config, length: StockQuantizedCache("quanto", config, nbits=4), group="quantized"
    ),
    DENSE: Contender(build=lambda config, length: QuantizedCache(config, "int8"), group="hf_kvq"),
    INT8: Contender(build=lambda config, length: QuantizedCache(config, "int8"), attention=ATTENTION, group="hf_kvq"),
    FP8: Contender(build=lambda config, length: QuantizedCache(config, "fp8"), attention=ATTENTION, group="hf_kvq"),
    Q8: Contender(build=lambda config, length: QuantizedCache(config, "q8"), attention=ATTENTION, group="hf_kvq"),
    Q4: Contender(build=lambda config, length: QuantizedCache(config, "q4"), attention=ATTENTION, group="hf_kvq"),
    "hf_kvq q8 dense": Contender(build=lambda config, length: QuantizedCache(config, "q8"), group="hf_kvq"),
    "hf_kvq q4 dense": Contender(build=lambda config, length: QuantizedCache(config, "q4"), group="hf_kvq"),
}


def built(names: Iterable[str], config: PreTrainedConfig, length: int) -> tuple[dict[str, Cache], dict[str, str]]:
    """The caches of these names, empty; and for those whose package is not installed, what their import said."""
    caches, missing = {}, {}
    for name in names:
        try:
            caches[name] = CONTENDERS[name].build(config, length)
        except ImportError as error:
            missing[name] = " ".join(str(error).split())
    return caches, missing


def attend_with(model: Any, name: str) -> None:
    """Set the model to the attention of this contender."""
    attention = CONTENDERS[name].attention
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)


def step(model: Any, token: Tensor, cache: Cache) -> Tensor:
    """Logits `[batch, vocabulary]` of one token of each row."""
    return forward(model, token, cache)[:, -1]


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference in standard deviations of what was expected."""
    return ((got.float() - expected.float()).abs().max() / expected.float().std()).item()


def mode_difference(model: Any, tokens: Iterable[Tensor], cache: QuantizedCache) -> float:
    """The difference between both modes of one cache: a token read fused, and dense, over the same codes before it.

    Of several tokens the median, since a code of the token itself may round to the other side in a deep layer, which moves the rest.
    """
    found = []
    for token in tokens:
        logits = []
        for attention in (ATTENTION, "sdpa"):
            model.set_attn_implementation(attention)
            logits.append(step(model, token, cache))
            cache.crop(-1)
        found.append(difference(*logits))
    return statistics.median(found)


def require_equal(what: str, found: float, bound: float) -> None:
    """Raise where a difference is above its bound, or no number.

    Raises:
        UnequalError: If it is.
    """
    if not found <= bound:
        raise UnequalError(
            f"{what}: the results must be equal within {bound:g} standard deviations, got {found:.3g}; nothing is recorded"
        )
