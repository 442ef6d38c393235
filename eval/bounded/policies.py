"""What a bounded cache may keep at a budget, so that all policies of one budget have the same bytes.

A budget of N pays for N int8 tokens of each kv head (keys and values, their scales included), of which the sinks take 4 whatever they weigh: all policies have the same
ones. Other schemes pay for tokens of their own size, and for what they learn of a row. Kept tokens pay for their position and mass, tokens of the window for their mass,
clusters for all that they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig

from hf_kvq import Clusters, HeavyHitters, QuantConfig, QuantizedSlidingWindowCache, resolve_scheme
from hf_kvq.codecs import make_codecs
from hf_kvq.far_field import MASS_BYTES, POSITION_BYTES, cluster_bytes
from hf_kvq.rope import Rope

__all__ = ["BLOCK", "BUDGETS", "FULL", "KINDS", "SINKS", "Policy", "policies"]

BUDGETS = (128, 256, 512, 1024)
SINKS = 4
BLOCK = 32
FULL = "full attention"
KINDS = ("sinks + window", "clusters", "heavy hitters", "both")
LAYERS = 32
"""Of a model, for schemes that give layers bits of their own."""

SHARE_OF_CLUSTERS = 1 / 8
"""Of the bytes of the far field, where heavy hitters have the rest."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One way to spend a budget.

    Attributes:
        kind: One of `KINDS`, or `FULL`.
        budget: Int8 tokens of a kv head; 0 for full attention.
        window: Tokens that a query sees at least.
        kept: Heavy hitters of a kv head.
        clusters: Clusters of a kv head.
    """

    kind: str
    budget: int
    window: int = 0
    kept: int = 0
    clusters: int = 0

    @property
    def label(self) -> str:
        """For tables: W window, M heavy hitters, C clusters."""
        parts = (("W", self.window), ("M", self.kept), ("C", self.clusters))
        return " ".join(f"{letter}{count}" for letter, count in parts if count)

    def make(self, config: PreTrainedConfig, scheme: str = "int8") -> Cache:
        """An empty cache."""
        if self.kind == FULL:
            return DynamicCache(config=config)
        far = [
            part
            for part in (
                HeavyHitters(self.kept) if self.kept else None,
                Clusters(self.clusters) if self.clusters else None,
            )
            if part
        ]
        return QuantizedSlidingWindowCache(
            config,
            scheme,
            window=self.window,
            sinks=SINKS,
            far_field=None if not far else far[0] if len(far) == 1 else (far[0], far[1]),
            # Without a far field tokens leave one by one: none waits for its block to be complete.
            block=BLOCK if far else 1,
            prefill="coded",
            # Exact tokens would be most of a small budget.
            residual=0,
        )


def _window(budget: int) -> int:
    return min(max(round(budget / 4 / BLOCK) * BLOCK, 32), 256)


def _bytes(scheme: str | QuantConfig, head_dim: int) -> tuple[int, int]:
    """Of a token of one kv head, and of what is learned of a row; the mean of the layers, rounded up."""
    quant = resolve_scheme(scheme)
    layers = [quant.for_layer(index, LAYERS) for index in range(LAYERS)]
    pairs = [make_codecs(layer, _paired(head_dim)) for layer in layers]
    token = sum(codec.bits_per_token(1, head_dim, torch.float32) for pair in pairs for codec in pair)
    learned = sum(codec.bits_per_row(1, head_dim) for pair in pairs for codec in pair)
    return -(-token // (8 * LAYERS)), -(-learned // (8 * LAYERS))


def _paired(head_dim: int) -> Rope:
    """All channels in pairs, as most models have them."""
    return Rope((1.0,) * (head_dim // 2))


def policies(
    budget: int, head_dim: int, *, window: int | None = None, scheme: str | QuantConfig = "int8"
) -> dict[str, Policy]:
    """The policies of one budget, by kind.

    Args:
        budget: Int8 tokens of a kv head.
        head_dim: Channels of a key, and of a value.
        window: Of the policies with a far field; None for the measured rule.
        scheme: How window and kept tokens are coded.
    """
    token, learned = _bytes(scheme, head_dim)
    whole = (budget - SINKS) * _bytes("int8", head_dim)[0] - learned
    window = window or _window(SINKS + whole // token)
    weighed, cluster = token + MASS_BYTES, cluster_bytes(Clusters(2), head_dim, head_dim)
    with_mass = whole - (window + BLOCK - 1) * weighed
    # A bank's own statistics: what queries are like, as a sum and as it was last used.
    statistics = 2 * 4 * head_dim
    share = int(with_mass * SHARE_OF_CLUSTERS) // cluster
    make: Callable[..., Policy] = partial(Policy, budget=budget)
    return {
        "sinks + window": make(kind="sinks + window", window=whole // token),
        "clusters": make(
            kind="clusters", window=window, clusters=(whole - (window + BLOCK - 1) * token - statistics) // cluster
        ),
        "heavy hitters": make(kind="heavy hitters", window=window, kept=with_mass // (weighed + POSITION_BYTES)),
        "both": make(
            kind="both",
            window=window,
            kept=(with_mass - share * cluster - statistics) // (weighed + POSITION_BYTES),
            clusters=max(share, 2),
        ),
    }
