"""What is compared: presets of this package by name, and transformers' own quantized caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from torch import Tensor
from transformers import PreTrainedConfig
from transformers import QuantizedCache as StockQuantizedCache
from transformers.cache_utils import BaseQuantizedLayer

from hf_kvq import PRESETS, AffineConfig, QuantConfig, resolve_scheme
from hf_kvq.evaluation.candidates import CacheMemory, Candidate, Coded

__all__ = ["DEFAULTS", "INT4", "STOCK", "STOCK_RESIDUAL", "Stock", "candidates", "known", "scheme_of"]

STOCK_RESIDUAL = 128
"""Newest tokens that a stock cache of integers keeps exactly, at most: its default."""

INT4 = QuantConfig(keys=AffineConfig(mode="int4"), values=AffineConfig(mode="int4"), name="int4")
"""Plain integers with one scale a token: what a constant of the keys ruins."""

DEFAULTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "windows": ("int8", "q8", "q6", "q4", "q3", "q2", "kivi4", "kivi2", "fp8"),
        "decode": ("q8", "q6", "q4", "q3", "q2", "kivi4", "kivi2", "int8", "stock"),
        "bias": ("int8", "q8", "q6", "q4", "q3", "int4"),
    }
)


@final
@dataclass(frozen=True, kw_only=True)
class Stock(Candidate):
    """transformers' `QuantizedCache`.

    Attributes:
        label: How tables call it.
        backend: `"quanto"`, `"hqq"` or `"fp8"`.
        options: What the cache takes beside; its own defaults otherwise.
    """

    label: str
    backend: str
    options: Mapping[str, int]

    @property
    def name(self) -> str:
        """How tables call it."""
        return self.label

    @property
    def residual(self) -> int:
        """Newest tokens that it keeps exactly, at most; they become codes all at once."""
        return 0 if self.backend == "fp8" else STOCK_RESIDUAL

    def build(self, config: PreTrainedConfig) -> StockQuantizedCache:
        """An empty cache.

        Raises:
            ImportError: If the package of its backend is not installed.
            ValueError: If the model has other layers than full attention.
        """
        return StockQuantizedCache(self.backend, config, **self.options)

    def memory(self, cache: StockQuantizedCache) -> CacheMemory:
        """All tensors of all layers: codes, scales, zero points, and the exact newest tokens."""
        layers = [layer for layer in cache.layers if isinstance(layer, BaseQuantizedLayer)]
        tensors = [tensor for layer in layers for tensor in _tensors(vars(layer))]
        storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
        used, elements, coded = sum(tensor.nbytes for tensor in tensors), 0, 0
        for layer in layers:
            decoded: Any = [layer._dequantize(part) for part in (layer._quantized_keys, layer._quantized_values)]
            exact: Any = (layer.keys, layer.values)
            elements += sum(part.numel() for part in (*decoded, *exact))
            coded += decoded[0].shape[2]
        return CacheMemory(
            nbytes=sum(storages.values()),
            nbytes_used=used,
            bits_per_element=8 * used / max(elements, 1),
            tokens_coded=coded,
        )

    def to_dict(self) -> dict[str, Any]:
        """Backend and options."""
        return {"name": self.label, "backend": self.backend, **self.options, "residual_length": self.residual}


def _integers(backend: str, bits: int, axis: int) -> Stock:
    options = {"nbits": bits, "axis_key": axis, "axis_value": axis}
    return Stock(label=f"stock {backend} int{bits}", backend=backend, options=options)


# hqq's default, axis 0, groups numbers of different heads and tokens; axis 1 groups neighbours, as quanto's axis 0 does.
STOCK: Mapping[str, Stock] = MappingProxyType(
    {
        "stock-quanto4": _integers("quanto", 4, 0),
        "stock-quanto2": _integers("quanto", 2, 0),
        "stock-hqq4": _integers("hqq", 4, 1),
        "stock-hqq2": _integers("hqq", 2, 1),
        "stock-fp8": Stock(label="stock fp8", backend="fp8", options={}),
    }
)


def scheme_of(name: str) -> QuantConfig:
    """A preset, or the plain int4 that is none.

    Raises:
        ValueError: If there is no such preset.
    """
    return INT4 if name == INT4.name else resolve_scheme(name)


def known(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that there are, and those that are no preset (yet)."""
    there = {*PRESETS, *STOCK, INT4.name, "stock"}
    return [name for name in names if name in there], [name for name in names if name not in there]


def candidates(names: Sequence[str], *, residual: int | None) -> list[Candidate]:
    """The caches of these names, in their order; `"stock"` stands for all of transformers' own.

    Args:
        names: Presets, `"int4"`, and keys of `STOCK`.
        residual: Of the presets; None for each one's own.

    Raises:
        ValueError: If a name is unknown, or two caches have the same one.
    """
    found: list[Candidate] = []
    for name in names:
        if name == "stock":
            found += STOCK.values()
        elif name in STOCK:
            found.append(STOCK[name])
        else:
            config = resolve_scheme(scheme_of(name), residual=residual)
            # Every token is read as codes, however many come in one forward.
            found.append(Coded(config=config, prefill="coded"))
    labels = [candidate.name for candidate in found]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"schemes must differ, got {', '.join(repeated)} more than once; name each one once")
    return found


def _tensors(value: object) -> Iterator[Tensor]:
    """All plain tensors in attributes, dicts, tuples and tensors that are made of tensors."""
    if isinstance(value, Tensor):
        if type(value) is Tensor:
            yield value
        else:  # quanto's: codes, scales and shifts behind one face
            parts, _ = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            yield from _tensors([getattr(value, part) for part in parts])
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
