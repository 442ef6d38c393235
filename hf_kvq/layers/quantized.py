"""One attention layer of a cache, held as codes.

The contract is transformers' `CacheLayerMixin`; what is held lives in a `TokenStore`. The layer decides what a forward sees: with
`prefill="exact"` the tokens of a forward of several tokens see each other as they are and all earlier ones as codes; with `"coded"`,
and in every forward of one token, all of them are seen as they are stored. While the past is recorded (assisted decoding), forwards
after the first read codes too, so that verifying a draft gives what decoding token by token gives.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hf_kvq.codecs import make_codec
from hf_kvq.config import LayerQuant
from hf_kvq.kernels import Visibility
from hf_kvq.layers.canary import QUERIES, attention_error, warn_if_unfit
from hf_kvq.layers.checks import check_states
from hf_kvq.layers.coded import CodedLayer
from hf_kvq.layers.live import LiveConfig
from hf_kvq.layers.padding import RowPadding
from hf_kvq.layers.rotary import rope_of_layer
from hf_kvq.states import CodedStates, StateShape, StoreMark, StoreView, TokenStore

__all__ = ["AnnouncedView", "QuantizedLayer"]


class AnnouncedView:
    """Tokens that are stored when their queries come, since codecs learn from both. Good for one forward.

    Attributes:
        first: The oldest column that a query sees.
        end: The column after the newest.
        window: Columns that a query sees, itself included; None for all.
        layer: Index of the layer, for errors.
    """

    def __init__(self, layer: QuantizedLayer, key_states: Tensor, value_states: Tensor) -> None:
        self._layer = layer
        self.states = key_states, value_states
        self.layer = layer.index
        self.end = layer.seen + key_states.shape[2]
        columns, self.first = layer.get_mask_sizes(key_states.shape[2])
        assert self.first + columns == self.end
        self.window = layer.window
        self.taken: StoreView | None = None

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values, decoded."""
        return self._layer.answer(self, None, 0.0).dense()

    def attend(
        self,
        query: Float[Tensor, "batch heads queries key_dim"],
        visibility: Visibility,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Store the tokens and answer their queries; see `StoreView.attend`."""
        view = self._layer.answer(self, query, scaling)
        return view.attend(query, visibility, scaling=scaling, softcap=softcap, sink_logits=sink_logits)


class QuantizedLayer(CodedLayer):
    """Keys and values of one layer as codes.

    Args:
        quant: Codecs of keys and values.
        index: Index of the layer, for errors.
        window: The model's own sliding window, of which `window - 1` tokens are kept; None for full attention.
        sinks: First real tokens of every row that stay exact.
        residual: Newest tokens that stay exact.
        prefill: What tokens of one forward see of each other.
        model: The model's config, which says how it attends; None for a model that reads tensors.
        check: Whether to compare attention over the first codes with exact attention, and to warn if it is far from it.
    """

    def __init__(
        self,
        quant: LayerQuant,
        *,
        index: int = 0,
        window: int | None = None,
        sinks: int = 0,
        residual: int = 0,
        prefill: Literal["exact", "coded"] = "exact",
        model: LiveConfig | None = None,
        check: bool = False,
    ) -> None:
        super().__init__(quant, index=index, sinks=sinks, residual=residual, prefill=prefill, model=model)
        self.window = window
        self.check = check
        self.store: TokenStore | None = None
        self._mark: StoreMark | None = None
        self._announced: AnnouncedView | None = None
        self._learns = max(make_codec(quant.keys).statistics, make_codec(quant.values).statistics) > 0

    @property
    def held(self) -> TokenStore | None:
        self._settle()
        return self.store

    @property
    def seen(self) -> int:
        if self._announced is not None:
            return self._announced.end
        return self.store.seen if self.store else 0

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    @property
    def is_croppable(self) -> bool:
        """Whether a crop gives back what was there before: a sliding layer must record the past once it has dropped tokens."""
        return self.window is None or self.record_past or self.seen < self.window

    @property
    def tokens_coded(self) -> int:
        """Tokens that are held as codes now."""
        return len(self.held.coded) if self.held else 0

    @property
    def tokens_encoded(self) -> int:
        """Tokens ever encoded since the layer was empty: a step adds the new ones and no more."""
        return self.held.coded.tokens_encoded if self.held else 0

    @property
    def tokens_held(self) -> int:
        """Columns that can still be read."""
        return self.seen - self._oldest

    @property
    def elements(self) -> int:
        """Elements of keys and values that the layer stands for."""
        if self.held is None:
            return 0
        shape = self.held.shape
        return self.tokens_held * shape.batch * shape.kv_heads * (shape.key_dim + shape.value_dim)

    def start(self, shape: StateShape, device: torch.device) -> None:
        """Make an empty store for states of this shape."""
        if self.padding is not None:
            self.padding = self.padding.for_batch(shape.batch)
        self.dtype, self.device = shape.dtype, device
        self.store = TokenStore(
            self.quant,
            shape,
            device=self.device,
            sinks=self.sinks,
            residual=self.residual,
            first_tokens=self.padding.first if self.padding else [0] * shape.batch,
            window=self.window,
            layer=self.index,
            rope=rope_of_layer(self.model.config, self.index, shape.key_dim) if self._learns and self.model else None,
            most_statistics=None if self.window is None else self.window - 1,
        )
        self.store.keeps_first = self.check
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor] | tuple[CodedStates, CodedStates]:
        """Store the states of new tokens and return those that attention reads now.

        Args:
            key_states: `[batch, kv_heads, tokens, head_dim]`, after RoPE.
            value_states: The same for values, whose head_dim may differ.
            args: What transformers' versions pass beside; not used.
            kwargs: Likewise.

        Returns:
            Keys and values of as many columns as `get_mask_sizes` announced, in the model's dtype; or, where the model is set to attention over
            codes, a handle that stands for both. Codes carry no gradient.

        Raises:
            TypeError: If the states are not floating point tensors.
            ValueError: If shape or dtype do not fit what is held, there is no token, or a state is not finite. Nothing is stored then.
        """
        self._settle()
        check_states(key_states, value_states, self.index, self.store.shape if self.store else None)
        padding_matters = self.store is None and self.padding is None
        attends_codes = self.attends_codes
        if attends_codes and self._waits_for_queries:
            self._check_finite(key_states.detach(), value_states.detach())
            announced = self._announce(key_states, value_states)
            learn = partial(self._announce_anew, key_states, value_states) if padding_matters else None
            handle = CodedStates(announced, learn, self.undo_update)
            return handle, handle
        view = self._take(key_states, value_states)
        if not attends_codes:
            return view.dense()
        padding_matters = padding_matters and self.store is not None and self.store.depends_on_padding
        learn = partial(self._take_anew, key_states, value_states) if padding_matters else None
        handle = CodedStates(view, learn, self.undo_update)
        return handle, handle

    def answer(
        self, view: AnnouncedView, query: Float[Tensor, "batch heads queries key_dim"] | None, scaling: float
    ) -> StoreView:
        """Take the tokens that were announced, with their queries; returns what these read."""
        if view is self._announced:
            self._announced = None
            view.taken = self._take(*view.states, query, scaling)
        if view.taken is None:
            raise ValueError(
                f"layer {self.index}: these states were taken back or stored before their queries came; run the forward again"
            )
        return view.taken

    def undo_update(self) -> bool:
        """Take the last update back, if nothing that it dropped was overwritten; returns whether that was so."""
        if self._announced is not None:
            self._announced = None
            return True
        mark, self._mark = self._mark, None
        if mark is None or self.store is None:
            return False
        if mark.seen == 0:
            self._forget()
            return True
        return self.store.restore(mark)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        visible = self._visible_from(self.seen)
        return self.seen - visible + query_length, visible

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` tokens; what was coded stays coded, bit for bit.

        With a residual, tokens that left it stay coded, except for the last `hf_kvq.states.ROLLBACK` while the past is recorded.

        Raises:
            ValueError: If the number is positive, or more than are held.
            RuntimeError: If a sliding layer has dropped tokens that the shorter window needs.
        """
        self._settle()
        length = self._checked_length(tokens_to_remove)
        if self.store is None:
            return
        if self._visible_from(length) < self._oldest:
            raise RuntimeError(
                f"layer {self.index} keeps {self.tokens_held} tokens of its window of {self.window} and can not go back by "
                f"{self.seen - length}; call activate_past_recording() before the forward that is to be undone"
            )
        self._mark = None
        self.store.crop(length)
        if self.window is not None:
            self.store.drop_before(self._visible_from(length))

    @property
    def _waits_for_queries(self) -> bool:
        """Whether tokens are stored together with their queries: codecs learn from them, or the first codes are checked by them."""
        if self.store is None:
            return self._learns or self.check
        return not self.store.is_fitted or self.store.keeps_first

    @property
    def _window(self) -> int:
        assert self.window is not None
        return self.window

    @property
    def _oldest(self) -> int:
        """The oldest column that is kept."""
        return self.store.coded.first if self.store and self.window is not None else 0

    def _visible_from(self, seen: int) -> int:
        """The oldest column that the next query sees when `seen` are there."""
        return 0 if self.window is None else max(seen - self.window + 1, 0)

    def _forget(self) -> None:
        self.store = self._mark = self._announced = self._witness = None
        self.is_initialized = False

    def _announce(self, key_states: Tensor, value_states: Tensor) -> AnnouncedView:
        self._announced = AnnouncedView(self, key_states, value_states)
        return self._announced

    def _settle(self) -> None:
        """Store what was announced and never asked about."""
        view, self._announced = self._announced, None
        if view is not None:
            self._take(*view.states)

    def _take(
        self,
        key_states: Tensor,
        value_states: Tensor,
        query: Float[Tensor, "batch heads queries key_dim"] | None = None,
        scaling: float = 0.0,
    ) -> StoreView:
        """Store new tokens; returns what attention reads in this forward."""
        keys, values = self._prepared(key_states, value_states)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        self._mark = self.store.mark()
        grouped = None if query is None else query.unflatten(1, (keys.shape[1], -1))
        self.store.learn(keys, values, self.seen, grouped, settled=self.seen if self.record_past else None)
        tokens, visible = keys.shape[2], self._visible_from(self.seen)
        outlasts_window = self.window is not None and not self.record_past and tokens >= self.window
        reads_codes = tokens == 1 or self.prefill == "coded" or (self.record_past and self.seen > 0)
        if reads_codes and not outlasts_window:
            self.store.append(keys, values, recording=self.record_past)
            view = self.store.view(visible)
        else:
            current = self.store.round_trip(keys, values) if reads_codes else (key_states, value_states)
            view = self.store.view(visible, current)
            if outlasts_window and self.store.is_fitted:
                # The last window - 1 tokens are all that a later forward reads.
                kept = min(tokens, self._window - 1)
                self.store.restart_at(self.seen + tokens - kept)
                keys, values = keys[:, :, -kept:], values[:, :, -kept:]
            self.store.append(keys, values, recording=self.record_past, in_place=False)
        if self.check and self.store.first_encoded is not None:
            self._check_codes(self.store, key_states if grouped is None else grouped, scaling)
        if self.window is not None and not self.record_past:
            self.store.drop_before(self._visible_from(self.seen))
        return view

    def _check_codes(self, store: TokenStore, query: Tensor, scaling: float) -> None:
        """Warn if attention over the first codes is far from exact. Without queries keys stand in for them."""
        assert store.first_encoded is not None
        column, keys, values = store.first_encoded
        store.first_encoded, store.keeps_first = None, False
        segment = store.coded.segment(column, column + keys.shape[2])
        read = segment.keys.decode(torch.float32), segment.values.decode(torch.float32)
        query = query[:, :, None] if query.ndim == 4 else query
        query = query[:, :, :, -QUERIES:]
        first_query = self.seen - query.shape[3]
        behind = max(column + keys.shape[2] // 2 - first_query, 0)
        query = query[:, :, :, min(behind, query.shape[3] - 1) :]
        ahead = self.seen - query.shape[3] - column
        scaling = scaling or keys.shape[3] ** -0.5
        warn_if_unfit(attention_error(query, (keys, values), read, ahead=ahead, scaling=scaling), self.index)

    def _take_anew(self, key_states: Tensor, value_states: Tensor, real: Bool[Tensor, "batch columns"]) -> StoreView:
        """Store the first forward's tokens again, now that it is known which of them are padding."""
        self._forget_for_padding(real)
        return self._take(key_states, value_states)

    def _announce_anew(
        self, key_states: Tensor, value_states: Tensor, real: Bool[Tensor, "batch columns"]
    ) -> AnnouncedView:
        """Announce the first forward's tokens again, now that it is known which of them are padding."""
        self._forget_for_padding(real)
        return self._announce(key_states, value_states)

    def _forget_for_padding(self, real: Bool[Tensor, "batch columns"]) -> None:
        self._forget()
        try:
            self.padding = RowPadding.from_mask(real)
        except ValueError as error:
            raise ValueError(
                f"layer {self.index}: {error}; or call cache.set_padding with the whole mask before the first forward"
            ) from error

    def _drop_mark(self) -> None:
        self._mark = None
