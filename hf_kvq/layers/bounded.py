"""One full-attention layer in bounded memory.

Under attention over codes an update only announces its tokens: they are stored when their queries come, a few at a time, since what the far field
keeps depends on what attention looks at. With a model's own attention an update stores them at once and returns sinks and window as tensors; there
is no far field then, and tokens of one forward see each other whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hf_kvq.config import LayerQuant
from hf_kvq.far_field import EvictedBlock
from hf_kvq.kernels import Scoring, Visibility
from hf_kvq.layers.checks import check_states
from hf_kvq.layers.coded import CodedLayer
from hf_kvq.layers.live import LiveConfig
from hf_kvq.layers.padding import RowPadding
from hf_kvq.states import ATTENTION, Asked, BoundedSnapshot, BoundedStore, Bounds, CodedStates, StateShape

__all__ = ["BoundedLayer", "BoundedView"]


class BoundedView:
    """Tokens that were announced, and the layer that takes them when their queries come. Good for one forward.

    Attributes:
        first: The oldest column that the mask of this forward is asked about.
        end: The column after the newest.
        window: None: which columns a query sees is the layer's own business.
        layer: Index of the layer, for errors.
    """

    def __init__(self, layer: BoundedLayer, keys: Tensor, values: Tensor) -> None:
        self._layer = layer
        self.keys = keys
        self.values = values
        self.layer = layer.index
        self.first = layer.seen
        self.end = layer.seen + keys.shape[2]
        self.window: int | None = None

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values cannot be had as tensors here."""
        raise TypeError(
            f"layer {self.layer}: a bounded cache gives tensors only where the model reads them: call model.set_attn_implementation('sdpa')"
        )

    def attend(
        self,
        query: Float[Tensor, "batch heads queries key_dim"],
        visibility: Visibility,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Store the tokens and answer their queries, in the query's dtype; see `StoreView.attend`.

        Raises:
            ValueError: If the mask says more than the order of the tokens and a padding at the left of the first forward.
            HookError: If a chunk hook raises.
        """
        if visibility.mask is not None:
            raise ValueError(
                f"layer {self.layer}: a bounded cache knows the order of tokens and padding, and this model or call gives a mask of its own; "
                "use QuantizedCache for it"
            )
        self._layer.check_padding(visibility.real, self.first, self.end)
        batch, heads, queries, _ = query.shape
        kv_heads = self.keys.shape[1]
        asked = Asked(
            query.reshape(batch, kv_heads, heads // kv_heads, queries, -1),
            self.first,
            Scoring(scaling, softcap),
            None if sink_logits is None else sink_logits.view(kv_heads, -1),
        )
        output = self._layer.answer(self, asked)
        return output.reshape(batch, heads, queries, -1).to(query.dtype)


class BoundedLayer(CodedLayer):
    """Sinks, a window of codes, and a far field.

    Args:
        quant: Codecs of keys and values.
        bounds: What is kept; for the shape of the states, which the first update shows.
        index: Index of the layer, for errors.
        sinks: First real tokens of every row that stay exact.
        residual: Newest tokens that stay exact.
        prefill: What tokens of one forward see of each other.
        model: The model's config, which says how it attends; None for a model that reads tensors.
        hooks: What is shown each block of tokens that leaves the window.
    """

    is_sliding = False

    def __init__(
        self,
        quant: LayerQuant,
        bounds: Callable[[StateShape], Bounds],
        *,
        index: int = 0,
        sinks: int = 0,
        residual: int = 0,
        prefill: Literal["exact", "coded"] = "exact",
        model: LiveConfig | None = None,
        hooks: Mapping[int, Callable[[EvictedBlock], object]] | None = None,
    ) -> None:
        super().__init__(quant, index=index, sinks=sinks, residual=residual, prefill=prefill, model=model)
        self.bounds = bounds
        self.hooks = {} if hooks is None else hooks
        self.store: BoundedStore | None = None
        self._announced: BoundedView | None = None
        self._before: BoundedSnapshot | Literal["empty"] | None = None

    @property
    def held(self) -> BoundedStore | None:
        self._settle()
        return self.store

    @property
    def seen(self) -> int:
        if self._announced is not None:
            return self._announced.end
        return self.store.seen if self.store else 0

    @property
    def is_croppable(self) -> bool:
        """Whether a crop gives back what was there before: not once a token left, unless the past is recorded."""
        return self.record_past or self.held is None or all(step <= 0 for step in self.held.rows.steps)

    @property
    def tokens_coded(self) -> int:
        if self.held is None:
            return 0
        return len(self.held.tokens.coded) + (self.held.far.kept.most if self.held.far.kept else 0)

    @property
    def tokens_encoded(self) -> int:
        return self.held.tokens.coded.tokens_encoded if self.held else 0

    @property
    def elements(self) -> int:
        """Elements of the tokens that are held one by one: sinks, window and kept ones."""
        if self.held is None:
            return 0
        counts, shape = self.held.accounting(), self.held.shape
        tokens = sum(int(counts[place].sum()) for place in ("sinks", "window", "kept"))
        return tokens * (shape.key_dim + shape.value_dim)

    def start(self, shape: StateShape, device: torch.device) -> None:
        if self.padding is not None:
            self.padding = self.padding.for_batch(shape.batch)
            self._check_padded_left(self.padding)
        self.dtype, self.device = shape.dtype, device
        self.store = BoundedStore(
            self.quant,
            shape,
            self.bounds(shape),
            device=device,
            residual=self.residual,
            first_tokens=self.padding.first if self.padding else [0] * shape.batch,
            layer=self.index,
            hooks=self.hooks,
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor] | tuple[CodedStates, CodedStates]:
        """Store the states of new tokens and return those that attention reads now; see `QuantizedLayer.update`.

        Raises:
            TypeError: If the states are not floating point tensors.
            ValueError: If shape or dtype do not fit what is held, there is no token, or a state is not finite; or if there is a far field and the
                model's attention reads tensors. Nothing is stored then.
        """
        self._settle()
        check_states(key_states, value_states, self.index, self.store.shape if self.store else None)
        padding_matters = self.store is None and self.padding is None
        keys, values = self._prepared(key_states, value_states)
        empty = self.store is None
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        if not self.attends_codes and self.store.bounds.has_far_field:
            if empty:
                self._forget()
            raise ValueError(
                f"layer {self.index}: a far field needs attention over codes: call model.set_attn_implementation({ATTENTION!r}), or make the "
                "cache with far_field=None"
            )
        self._before = "empty" if empty else self.store.snapshot()
        if not self.attends_codes:
            return self._take_dense(key_states, value_states, keys, values)
        self._announced = BoundedView(self, keys, values)
        learn = partial(self._announce_anew, key_states, value_states) if padding_matters else None
        handle = CodedStates(self._announced, learn, self.undo_update)
        return handle, handle

    def answer(self, view: BoundedView, asked: Asked) -> Tensor:
        """Take the tokens that were announced, and answer their queries."""
        if view is not self._announced:
            raise ValueError(
                f"layer {self.index}: these states were stored already; a forward can attend to a bounded cache once: run the forward again"
            )
        assert self.store is not None
        self._announced = None
        output = self.store.take(
            view.keys,
            view.values,
            exact=not self._reads_codes(view.keys.shape[2]),
            recording=self.record_past,
            asked=asked,
        )
        assert output is not None
        return output

    def undo_update(self) -> bool:
        before, self._before, self._announced = self._before, None, None
        if before is None or self.store is None:
            return False
        if before == "empty":
            self._forget()
        else:
            self.store.go_back_to(before)
        return True

    def check_padding(self, real: Bool[Tensor, "batch columns"] | None, first: int, end: int) -> None:
        """Refuse a mask that hides columns which were stored as tokens, or are to be.

        Raises:
            ValueError: If it does.
        """
        if real is None:
            return
        known = max(self.padding.first) if self.padding else 0
        begin = max(first, known)
        if begin < min(end, real.shape[1]) and not bool(real[:, begin:end].all()):
            raise ValueError(
                f"layer {self.index}: the attention mask hides columns behind the first {known}; a bounded cache takes padding at the left of the "
                "first forward only: pad at the left, and feed later turns without padding, or row by row"
            )

    def set_padding(self, padding: RowPadding) -> None:
        self._check_padded_left(padding)
        super().set_padding(padding)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self._dense_columns(self.seen)
        return past + query_length, self.seen - past

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` tokens; what was coded stays coded, bit for bit.

        Raises:
            ValueError: If the number is positive, or more than are held.
            RuntimeError: If tokens left the window that the queries before them saw.
        """
        store = self.held
        length = self._checked_length(tokens_to_remove)
        if store is None:
            return
        if not store.rows.can_go_back_to(length):
            raise RuntimeError(
                f"layer {self.index}: tokens have left the window for good since token {length}, so a crop to {length} tokens can not bring back what was; call "
                "activate_past_recording() before the forward that is to be undone (up to 128 tokens), or reset()"
            )
        self._drop_mark()
        store.crop(length)

    def _dense_columns(self, seen: int) -> int:
        """Columns of the past that a model's own attention gets as tensors."""
        if self.store is None or seen == 0:
            return 0
        bounds, oldest = self.store.bounds, min(self.store.rows.first)
        return min(max(seen - oldest, 0), bounds.sinks + bounds.window - 1)

    def _take_dense(
        self, key_states: Tensor, value_states: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        store, tokens = self.store, keys.shape[2]
        assert store is not None
        past = self._dense_columns(store.seen)
        if self._reads_codes(tokens) and tokens < store.bounds.window:
            store.take(keys, values, exact=False, recording=self.record_past)
            return store.dense(past + tokens)
        current = store.tokens.round_trip(keys, values) if self._reads_codes(tokens) else (key_states, value_states)
        if past:
            current = tuple(torch.cat(pair, dim=2) for pair in zip(store.dense(past), current, strict=True))
        store.take(keys, values, exact=True, recording=self.record_past)
        return current[0], current[1]

    def _reads_codes(self, tokens: int) -> bool:
        return (
            tokens == 1
            or self.prefill == "coded"
            or (self.record_past and self.store is not None and self.store.seen > 0)
        )

    def _announce_anew(
        self, key_states: Tensor, value_states: Tensor, real: Bool[Tensor, "batch columns"]
    ) -> BoundedView:
        """The first forward's tokens again, now that it is known which of them are padding."""
        self._forget()
        self.padding = RowPadding.from_mask(real)
        keys, values = self._prepared(key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        self._before = "empty"
        self._announced = BoundedView(self, keys, values)
        return self._announced

    def _check_padded_left(self, padding: RowPadding) -> None:
        columns = torch.arange(padding.real.shape[1], device=padding.real.device)
        first = torch.tensor(padding.first, device=columns.device)[:, None]
        if bool((padding.real != (columns >= first)).any()):
            raise ValueError(
                f"layer {self.index}: a bounded cache takes padding at the left only; set tokenizer.padding_side = 'left'"
            )

    def _settle(self) -> None:
        """Store what was announced and never asked about."""
        view, self._announced = self._announced, None
        if view is not None and self.store is not None:
            self.store.take(view.keys, view.values, exact=False, recording=self.record_past)

    def _forget(self) -> None:
        self.store = self._announced = self._before = self._witness = None
        self.is_initialized = False

    def _drop_mark(self) -> None:
        self._before = None
