"""The caches that an evaluation compares, behind one interface: transformers' exact one, and a quantized one for each scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from hf_kvq.caches import QuantizedCache
from hf_kvq.config import QuantConfig
from hf_kvq.evaluation.config import EXACT, EvalConfig, Prefill

__all__ = ["CacheMemory", "Candidate", "Coded", "Exact", "candidates"]


@dataclass(frozen=True, kw_only=True)
class CacheMemory:
    """What a filled cache holds.

    Attributes:
        nbytes: Sum of all storages, buffers that are not full yet included.
        nbytes_used: The part of it that holds tokens.
        bits_per_element: All bytes in use x 8 / elements of keys and values.
        tokens_coded: Tokens held as codes, summed over the layers.
    """

    nbytes: int
    nbytes_used: int
    bits_per_element: float
    tokens_coded: int


class Candidate(ABC):
    """Something that builds empty caches and reads what a filled one holds."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How tables call it."""

    @abstractmethod
    def build(self, config: PreTrainedConfig) -> Cache:
        """An empty cache for a model with this config."""

    @abstractmethod
    def memory(self, cache: Any) -> CacheMemory:
        """What a cache that `build` made holds now.

        Raises:
            RuntimeError: If it was meant to code tokens and has coded none.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON values."""


@final
class Exact(Candidate):
    """transformers' `DynamicCache`."""

    @property
    def name(self) -> str:
        """How tables call it."""
        return EXACT

    def build(self, config: PreTrainedConfig) -> DynamicCache:
        """An empty `DynamicCache`, with the model's own sliding layers."""
        return DynamicCache(config=config)

    def memory(self, cache: DynamicCache) -> CacheMemory:
        """Bytes of the layers that hold keys and values; linear-attention states are no cache of tokens."""
        states = [
            tensor
            for layer in cache.layers
            if isinstance(layer, DynamicLayer) and layer.is_initialized
            for tensor in (layer.keys, layer.values)
            if tensor is not None
        ]
        used, elements = sum(tensor.nbytes for tensor in states), sum(tensor.numel() for tensor in states)
        return CacheMemory(
            nbytes=sum(tensor.untyped_storage().nbytes() for tensor in states),
            nbytes_used=used,
            bits_per_element=8 * used / max(elements, 1),
            tokens_coded=0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Its name is all there is."""
        return {"name": EXACT}


@final
@dataclass(frozen=True, kw_only=True)
class Coded(Candidate):
    """`QuantizedCache` with one scheme."""

    config: QuantConfig
    prefill: Prefill

    @property
    def name(self) -> str:
        """How tables call it."""
        return self.config.name

    def build(self, config: PreTrainedConfig) -> QuantizedCache:
        """An empty `QuantizedCache`."""
        return QuantizedCache(config, self.config, prefill=self.prefill)

    def memory(self, cache: QuantizedCache) -> CacheMemory:
        """The cache's own accounting, once it has coded something."""
        if cache.tokens_coded == 0:
            raise RuntimeError(
                f"scheme {self.name!r} stored no token as codes in {cache.get_seq_length()} tokens, so its difference to "
                f"the exact cache says nothing; it keeps sinks={self.config.sinks}, residual={self.config.residual} exact: "
                "try a longer window, or a model with attention layers that the cache codes (print the cache to see them)"
            )
        return CacheMemory(
            nbytes=cache.nbytes,
            nbytes_used=cache.nbytes_used,
            bits_per_element=cache.bits_per_element,
            tokens_coded=cache.tokens_coded,
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved scheme, sinks and residual included."""
        return self.config.to_dict()


def candidates(config: EvalConfig) -> tuple[Candidate, ...]:
    """The schemes of an evaluation, in its order."""
    return tuple(
        Exact() if scheme == EXACT else Coded(config=config.resolve(scheme), prefill=config.cache_prefill)
        for scheme in config.schemes
    )
