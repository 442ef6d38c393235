"""The mask of a forward, in the form that it came: a padding mask and a rule, not a tensor of queries x columns.

transformers asks for one mask a forward and kind of layer, before it is known whether a layer will read codes or tensors. So the answer
keeps the question: attention over codes reads the padding mask from it, and whatever needs a tensor gets the one that sdpa would have got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hf_kvq.kernels import Visibility

__all__ = ["CompactMask", "compact_mask"]


class CompactMask:
    """A mask that is built when it is looked at. Used as a tensor, it is sdpa's mask of the same forward."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._dense: Tensor | None = None
        self._is_built = False
        self._rule: Tensor | None = None
        self._padding: Tensor | None = None
        self._padding_is_known = False

    def dense(self) -> Tensor | None:
        """What sdpa gets: `[batch, 1, queries, columns]`, or None where order alone says all."""
        if not self._is_built:
            self._dense, self._is_built = sdpa_mask(**self._arguments), True
        return self._dense

    def visibility(self, first: int, end: int, queries: int, window: int | None) -> Visibility:
        """The same for attention over columns `first` to `end`, of which the last `queries` are the queries' own."""
        position = end - queries
        if self._is_order(window):
            return Visibility(position, queries, window, self._real_columns())
        if self._rule is None:
            # Always a tensor here: None would stand for a rule that sdpa knows by name and we do not.
            skip: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._rule = sdpa_mask(**(self._arguments | skip))
        return Visibility(position, queries, mask=self._rule, mask_from=first)

    def padding(self) -> Bool[Tensor, "batch columns"] | None:
        """True where a column is a token of its row, from column 0 on; None where all are, or nobody said."""
        if not self._padding_is_known:
            mask = self._arguments.get("attention_mask")
            self._padding = None if mask is None or bool(mask.all()) else mask.bool()
            self._padding_is_known = True
        return self._padding

    def _real_columns(self) -> Bool[Tensor, "batch columns"] | None:
        """`padding`, with the columns that the mask does not reach hidden, as sdpa's mask has them."""
        given, padding = self._arguments.get("attention_mask"), self.padding()
        if given is None:
            return None
        missing = self._arguments["kv_length"] + self._arguments.get("kv_offset", 0) - given.shape[-1]
        if missing <= 0:
            return padding
        return torch.nn.functional.pad(given.bool(), (0, missing), value=False)

    def _is_order(self, window: int | None) -> bool:
        """Whether this is the padding mask, the order of the tokens, and this window, and nothing else."""
        arguments = self._arguments
        if window is None:
            return arguments.get("mask_function") is causal_mask_function
        # A caller that adds to the rule forbids the shortcut; the window itself comes as `local_size`.
        return arguments.get("local_size") == window and arguments.get("allow_is_causal_skip") is True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Any:
        dense = self.dense()
        return None if dense is None else dense[index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(_dense(x) for x in args), **{name: _dense(x) for name, x in (kwargs or {}).items()})


def compact_mask(*args: Any, **kwargs: Any) -> CompactMask:
    """The mask function registered under "hf_kvq"; takes what `sdpa_mask` takes."""
    names = (
        "batch_size",
        "q_length",
        "kv_length",
        "q_offset",
        "kv_offset",
        "mask_function",
        "attention_mask",
        "local_size",
    )
    arguments = dict(zip(names, args, strict=False)) | kwargs
    for name in ("q_offset", "kv_offset"):
        # A static cache counts in a tensor, and will have counted on when somebody looks.
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = arguments[name].clone()
    return CompactMask(arguments)


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, CompactMask) else value
