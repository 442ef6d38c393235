"""What the caches have in common: layers from a model's config, routing, and accounts.

The layers own the data; the cache is transformers' container. What can be coded is (full attention, and sliding attention inside the
model's own window); linear, chunked, dummy and unknown layers are transformers' own, and `repr` says which.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, get_layer_types_and_kwargs

from hf_kvq.config import QuantConfig
from hf_kvq.kernels import kernels_for
from hf_kvq.layers import CodedLayer, LiveConfig, RowPadding
from hf_kvq.states import CodedStates

__all__ = ["CODED_LAYER_TYPES", "CodedCache", "check_model_window", "kinds", "layer_types_and_kwargs"]

CODED_LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_types_and_kwargs(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Types of a model's layers, and what transformers' layer of each type takes."""
    layer_types, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    shared: Any = kwargs
    if isinstance(shared, dict):  # before transformers 5.19 one dictionary stands for all layers
        window = {"sliding_window": shared["sliding_window"]} if "sliding_window" in shared else {}
        of_type = {"full_attention": {}, "sliding_attention": window}
        return layer_types, [of_type.get(layer_type, shared) for layer_type in layer_types]
    return layer_types, kwargs


class CodedCache(Cache):
    """A cache whose layers hold codes.

    Args:
        config: The model's config, `model.config`.
        scheme: How keys and values are coded.
        prefill: What tokens of one forward see of each other.
        skip_layers: Layers that stay exact, by index or by layer type.

    Raises:
        ValueError: If `prefill` or `skip_layers` is unknown, or the model has no layer that could be coded.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        scheme: QuantConfig,
        *,
        prefill: Literal["exact", "coded"],
        skip_layers: Iterable[int | str],
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(f"config must be the model's config, got {type(config).__name__}; pass model.config")
        if prefill not in ("exact", "coded"):
            raise ValueError(f"prefill must be 'exact' or 'coded', got {prefill!r}")
        self.scheme = scheme
        self.prefill: Literal["exact", "coded"] = prefill
        self._model = LiveConfig(config.get_text_config(decoder=True))
        self.layer_types, kwargs = layer_types_and_kwargs(config)
        skipped = _skipped_layers(skip_layers, self.layer_types)
        if outside := [index for index, _ in self.scheme.overrides if index >= len(self.layer_types)]:
            raise ValueError(
                f"the scheme overrides layers {outside}, the model has layers 0 to {len(self.layer_types) - 1}"
            )
        super().__init__(
            layers=[
                self._coded_layer(index, **layer_kwargs)
                if layer_type in CODED_LAYER_TYPES and index not in skipped
                else _stock_layer(layer_type, layer_kwargs)
                for index, (layer_type, layer_kwargs) in enumerate(zip(self.layer_types, kwargs, strict=True))
            ]
        )
        if not self.coded_layers:
            raise ValueError(
                f"no layer of this model would be coded (layers: {kinds(self.layer_types) or 'none'}; skipped: {sorted(skipped)}); use transformers' DynamicCache"
            )

    @property
    def coded_layers(self) -> list[CodedLayer]:
        """The layers that hold codes."""
        return [layer for layer in self.layers if isinstance(layer, CodedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages of all layers, room for later tokens included."""
        self._raise_if_not_finite()
        return sum(layer.nbytes for layer in self.coded_layers) + sum(_storages(self._stock_layers).values())

    @property
    def nbytes_used(self) -> int:
        """Bytes of the tokens that are kept, with their scales, sinks and tables; room for later tokens left out."""
        self._raise_if_not_finite()
        return sum(layer.nbytes_used for layer in self.coded_layers) + sum(
            t.nbytes for t in _tensors(self._stock_layers)
        )

    @property
    def bits_per_element(self) -> float:
        """`nbytes_used` of the coded layers x 8 / elements of keys and values that they stand for; 0.0 while they are empty."""
        elements = sum(layer.elements for layer in self.coded_layers)
        return sum(layer.nbytes_used for layer in self.coded_layers) * 8 / elements if elements else 0.0

    @property
    def tokens_coded(self) -> int:
        """Tokens that are held as codes now, summed over the coded layers; 0 means that nothing is compressed."""
        self._raise_if_not_finite()
        return sum(layer.tokens_coded for layer in self.coded_layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor] | tuple[CodedStates, CodedStates]:
        """See `CodedLayer.update`. If a layer refuses its states, the layers before it give back what they took in this forward."""
        try:
            states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if isinstance(states[0], CodedStates):
                states[0].undo = partial(self._take_back, layer_idx)
            return states
        except (TypeError, ValueError) as error:
            if stuck := self._undo_forward(layer_idx):
                hint = (
                    f"layers {stuck} have taken this forward's tokens already and can not give them back: call reset()"
                )
                raise type(error)(f"{error}; {hint}") from error
            raise

    def set_padding(self, attention_mask: Tensor) -> None:
        """Say which columns of the first forwards are padding, before the first one.

        Sinks then are each row's first real tokens, and padding enters no scale. Schemes without sinks whose codes depend on one token
        alone (int8, fp8) give the same output without it.

        Args:
            attention_mask: `[batch, columns]`, 0 for padding, as the tokenizer gives it.

        Raises:
            ValueError: If it has another shape, or a row without a token.
            RuntimeError: If the cache holds tokens already.
        """
        padding = RowPadding.from_mask(attention_mask)
        for layer in self.coded_layers:
            layer.set_padding(padding)

    def __repr__(self) -> str:
        named = list(zip(self.layers, self.layer_types, strict=True))
        coded = [kind for layer, kind in named if isinstance(layer, CodedLayer)]
        stock = [f"{kind} ({type(layer).__name__})" for layer, kind in named if not isinstance(layer, CodedLayer)]
        counts = sorted({layer.tokens_coded for layer in self.coded_layers})
        lines = [
            f"{type(self).__name__}: scheme {self.scheme.name}, {self._settings}, prefill {self.prefill}",
            f"coded: {kinds(coded)}",
            *([f"transformers' own: {kinds(stock)}"] if stock else []),
            self._attention,
            f"tokens: {max(layer.seen for layer in self.coded_layers):,} seen, {' to '.join(f'{n:,}' for n in counts[:: max(len(counts) - 1, 1)])} "
            "coded in a layer",
            f"bytes: {self.nbytes:,} allocated, {self.nbytes_used:,} used, {self.bits_per_element:.2f} bits an element",
        ]
        return "\n  ".join(lines)

    @property
    @abstractmethod
    def _settings(self) -> str:
        """What `repr` says of the arguments."""

    @abstractmethod
    def _coded_layer(self, index: int, *, sliding_window: int | None = None) -> CodedLayer:
        """A layer that holds codes."""

    @property
    def _attention(self) -> str:
        """How the model attends now, and by which kernels."""
        if not self._model.attends_codes:
            return "attention: dense, the model's own over decoded states"
        devices = sorted({layer.device.type for layer in self.coded_layers if layer.is_initialized} or {"cpu"})
        kernels = "; ".join(
            f"{', then '.join(kernel.name for kernel in kernels_for(device))} on {device}" for device in devices
        )
        return f"attention: fused, over codes by {kernels}"

    @property
    def _stock_layers(self) -> list[object]:
        return [layer for layer in self.layers if not isinstance(layer, CodedLayer)]

    def _take_back(self, layer_idx: int) -> None:
        """Undo a forward that has come to attention in `layer_idx` and cannot go on."""
        layer = self.layers[layer_idx]
        assert isinstance(layer, CodedLayer), "only these hand over codes"
        layer.undo_update()
        self._undo_forward(layer_idx)

    def _undo_forward(self, layer_idx: int) -> list[int]:
        """Give back this forward's tokens in the layers before `layer_idx`; returns those that can not."""
        refusing = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(refusing, CodedLayer):
            return []
        ahead = [layer for layer in self.coded_layers if layer.index < layer_idx and layer.seen > refusing.seen]
        return [layer.index for layer in ahead if not layer.undo_update()]

    def _raise_if_not_finite(self) -> None:
        for layer in self.coded_layers:
            layer.raise_if_not_finite()


def kinds(names: list[str]) -> str:
    """Names with how often each occurs."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _skipped_layers(skip_layers: Iterable[int | str], layer_types: list[str]) -> set[int]:
    skipped: set[int] = set()
    for entry in skip_layers:
        if isinstance(entry, str):
            matching = {index for index, layer_type in enumerate(layer_types) if layer_type == entry}
            if not matching:
                raise ValueError(f"skip_layers names {entry!r}; this model has {', '.join(sorted(set(layer_types)))}")
            skipped |= matching
        elif isinstance(entry, int) and 0 <= entry < len(layer_types):
            skipped.add(entry)
        else:
            raise ValueError(
                f"skip_layers must hold layer types or indices 0 to {len(layer_types) - 1}, got {entry!r}"
            )
    return skipped


def _stock_layer(layer_type: str, kwargs: dict[str, Any]) -> Any:
    if layer_type not in DYNAMIC_LAYER_TYPE_MAPPING:
        raise ValueError(
            f"transformers knows no cache layer for layers of type {layer_type!r}; it knows {', '.join(DYNAMIC_LAYER_TYPE_MAPPING)}"
        )
    return DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**kwargs)


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors in the attributes, lists and dicts of transformers' layers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
    elif type(value).__module__.startswith("transformers."):
        yield from _tensors(vars(value))


def _storages(layers: list[object]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in _tensors(layers))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def check_model_window(index: int, sliding_window: int | None) -> None:
    """Refuse a sliding window that holds nothing.

    Raises:
        ValueError: If it is below 2.
    """
    if sliding_window is not None and sliding_window < 2:
        raise ValueError(
            f"layer {index}: a sliding window must be at least 2, got {sliding_window}; mend config.sliding_window"
        )
