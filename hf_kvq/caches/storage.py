"""A filled cache in a file, and back.

The file is safetensors: codes and scales as they are held, without a round trip, and a JSON header of a stated version that says what
they are. Nothing is unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_kvq.layers import QuantizedLayer, RowPadding
from hf_kvq.states import StateShape

if TYPE_CHECKING:
    from hf_kvq.caches.quantized import QuantizedCache

__all__ = ["fill_cache", "read_header", "save_cache"]

KEY = "hf_kvq"
VERSION = 2


def save_cache(cache: QuantizedCache, path: str | Path) -> None:
    """Write a cache; a file that is there already is replaced once the new one is complete.

    Raises:
        ValueError: If a layer of transformers' own holds something that this format has no place for.
    """
    tensors: dict[str, Tensor] = {}
    layers = [_dump(layer, f"{index}.", tensors) for index, layer in enumerate(cache.layers)]
    header = {
        "version": VERSION,
        "scheme": cache.scheme.to_dict(),
        "prefill": cache.prefill,
        "layer_types": cache.layer_types,
        "skipped": [i for i, layer in enumerate(cache.layers) if not isinstance(layer, QuantizedLayer)],
        "layers": layers,
    }
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={KEY: json.dumps(header)})
    partial.replace(path)


def read_header(path: str | Path) -> dict[str, Any]:
    """What a file says of itself.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no cache of this package, is cut off, or is of a version that is not known here.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(KEY)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); save the cache again") from error
    if header is None:
        raise ValueError(
            f"{path} is a safetensors file, but no cache saved by hf_kvq; give a file that cache.save wrote"
        )
    found = json.loads(header)
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {found.get('version')}, this hf_kvq reads {VERSION}; save it again with this version"
        )
    return found


def fill_cache(cache: QuantizedCache, path: str | Path, header: dict[str, Any], device: torch.device) -> None:
    """Put what a file holds into an empty cache of the same layers."""
    with safetensors.safe_open(path, "pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safetensors file is no mapping
    for index, (layer, saved) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        if saved is not None:
            _fill(layer, saved, _below(tensors, f"{index}."))


def _dump(layer: object, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """Add a layer's tensors and return what else it takes to fill one."""
    if isinstance(layer, QuantizedLayer):
        store = layer.held
        if store is None:
            return None
        for label, region in (("coded", store.coded), ("residual", store.residual)):
            for name, part in region.buffer.view().items():
                tensors[f"{prefix}{label}.{name}"] = part.contiguous()
        for label, codec in (("keys", store.coded.key_codec), ("values", store.coded.value_codec)):
            for name, part in codec.tensors.items():
                tensors[f"{prefix}learned.{label}.{name}"] = part.contiguous()
        if store.statistics.queries is not None:
            tensors[f"{prefix}queries"] = store.statistics.queries.contiguous()
        if store.sinks is not None and store.sinks.tensors is not None:
            tensors[f"{prefix}sinks.keys"], tensors[f"{prefix}sinks.values"] = store.sinks.tensors
        if layer.padding is not None:
            tensors[f"{prefix}padding"] = layer.padding.real.contiguous()
        shape = store.shape
        return {
            "shape": [
                shape.batch,
                shape.kv_heads,
                shape.key_dim,
                shape.value_dim,
                str(shape.dtype).removeprefix("torch."),
            ],
            "seen": store.seen,
            "coded": [store.coded.first, store.coded.end],
            "residual": [store.residual.first, store.residual.end],
            "first_tokens": store.sinks.first if store.sinks else None,
            "learns_from": store.statistics.first,
        }
    if isinstance(layer, DynamicLayer) and type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        if not layer.is_initialized or layer.keys is None or layer.values is None:
            return None
        tensors[f"{prefix}keys"], tensors[f"{prefix}values"] = layer.keys.contiguous(), layer.values.contiguous()
        return {"seen": layer.get_seq_length()}
    if type(layer).__name__ == "DummyLayer":  # transformers has the class from 5.23 on
        return None
    raise ValueError(
        f"a {type(layer).__name__} can not be saved yet; save caches whose other layers are full or sliding attention"
    )


def _fill(layer: Any, saved: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if not isinstance(layer, QuantizedLayer):
        layer.update(tensors["keys"], tensors["values"])
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = saved["seen"]
        return
    batch, kv_heads, key_dim, value_dim, dtype = saved["shape"]
    shape = StateShape(batch, kv_heads, key_dim, value_dim, getattr(torch, dtype))
    if "padding" in tensors:
        layer.padding = RowPadding.from_mask(tensors["padding"])
    layer.start(shape, next(iter(tensors.values())).device)
    store = layer.store
    assert store is not None
    for label, region in (("coded", store.coded), ("residual", store.residual)):
        region.restart_at(saved[label][0])
        if parts := _below(tensors, f"{label}."):
            region.buffer.append(parts)
        assert region.end == saved[label][1]
    store.coded.key_codec, store.coded.value_codec = (
        codec.with_tensors(_below(tensors, f"learned.{label}."))
        for label, codec in (("keys", store.coded.key_codec), ("values", store.coded.value_codec))
    )
    store.statistics.first = list(saved["learns_from"])
    store.statistics.queries = tensors.get("queries")
    if store.sinks is not None:
        store.sinks.first = list(saved["first_tokens"])
        if "sinks.keys" in tensors:
            store.sinks.tensors = tensors["sinks.keys"], tensors["sinks.values"]
    store.seen = saved["seen"]


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
