"""`QuantizedCache`: every token that the model may still read, as codes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedConfig

from hf_kvq.caches.coded import CODED_LAYER_TYPES, CodedCache, check_model_window, kinds, layer_types_and_kwargs
from hf_kvq.caches.storage import fill_cache, read_header, save_cache
from hf_kvq.config import QuantConfig, resolve_scheme
from hf_kvq.layers import QuantizedLayer

__all__ = ["QuantizedCache"]


class QuantizedCache(CodedCache):
    """A cache that keeps every token that the model may still read, as codes.

    Args:
        config: The model's config, `model.config`.
        scheme: A preset's name (`hf_kvq.PRESETS`) or a `QuantConfig`.
        sinks: First real tokens of every row that stay exact; None for the scheme's own number. A left-padded batch needs
            `set_padding` for it.
        residual: Newest tokens that stay exact; None for the scheme's own number.
        prefill: `"exact"`: tokens of a forward of several tokens see each other as they are, earlier ones as codes. `"coded"`: all
            are seen as codes, so that one pass equals decoding token by token where codes depend on one token alone.
        skip_layers: Layers that stay exact, by index or by layer type (`"sliding_attention"`).
        check: Compare attention over the first codes of every layer with exact attention, and warn (`CodesUnfitWarning`) where a scheme is unfit for the model.

    Example:
        ```python
        cache = QuantizedCache(model.config, "int8")
        model.generate(**inputs, past_key_values=cache, max_new_tokens=20)
        ```

    Raises:
        ValueError: If the scheme, `prefill` or `skip_layers` is unknown, or the model has no layer that could be coded.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        scheme: str | QuantConfig = "q8",
        *,
        sinks: int | None = None,
        residual: int | None = None,
        prefill: Literal["exact", "coded"] = "exact",
        skip_layers: Iterable[int | str] = (),
        check: bool = False,
    ) -> None:
        self.check = check
        scheme = resolve_scheme(scheme, sinks=sinks, residual=residual)
        super().__init__(config, scheme, prefill=prefill, skip_layers=skip_layers)

    def save(self, path: str | Path) -> None:
        """Write codes, scales and exact tokens to a safetensors file, which `load` reads.

        Raises:
            ValueError: If a layer of transformers' own holds something that the format has no place for.
        """
        self._raise_if_not_finite()
        save_cache(self, path)

    @classmethod
    def load(cls, path: str | Path, config: PreTrainedConfig, *, device: torch.device | str = "cpu") -> QuantizedCache:
        """Read a cache that `save` wrote: the next logits are those of the cache that was saved.

        Args:
            path: The file.
            config: Config of the model that the cache was filled by.
            device: Where its layers go; a model spread over several devices needs a cache of its own.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is foreign or cut off, or its layers are not those of `config`.
        """
        header = read_header(path)
        layer_types, _ = layer_types_and_kwargs(config)
        if layer_types != header["layer_types"]:
            raise ValueError(
                f"{path} holds a cache of {len(header['layer_types'])} layers ({kinds(header['layer_types'])}), the config has "
                f"{len(layer_types)} ({kinds(layer_types)}); load it with the model that filled it"
            )
        skipped = [i for i in header["skipped"] if layer_types[i] in CODED_LAYER_TYPES]
        cache = cls(config, QuantConfig.from_dict(header["scheme"]), prefill=header["prefill"], skip_layers=skipped)
        fill_cache(cache, path, header, torch.device(device))
        return cache

    @property
    def _settings(self) -> str:
        return f"sinks {self.scheme.sinks}, residual {self.scheme.residual}"

    def _coded_layer(self, index: int, *, sliding_window: int | None = None) -> QuantizedLayer:
        check_model_window(index, sliding_window)
        return QuantizedLayer(
            self.scheme.for_layer(index, len(self.layer_types)),
            index=index,
            window=sliding_window,
            # The model was trained to see its window and nothing before it.
            sinks=0 if sliding_window is not None else self.scheme.sinks,
            residual=self.scheme.residual,
            prefill=self.prefill,
            model=self._model,
            check=self.check,
        )
