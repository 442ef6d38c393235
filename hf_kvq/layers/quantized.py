"""One attention layer of a cache, held as codes.

The contract is transformers' `CacheLayerMixin`. A layer owns its regions: sinks (exact), coded tokens, and the residual (newest
tokens, exact); `update` stores what comes and returns the states that the model's attention reads. Tokens are counted in columns
of the batch, padding included, so that the column count of `update` is what `get_mask_sizes` announced.

What a forward sees: with `prefill="exact"` the tokens of a forward of several tokens see each other as they are and all earlier ones
as codes; with `"coded"`, and in every forward of one token, all of them are seen as they are stored. While the past is recorded
(assisted decoding) forwards after the first read codes too, so that verifying a draft gives what decoding token by token gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_kvq.codecs import make_codec
from hf_kvq.config import IdentityConfig, LayerQuant
from hf_kvq.layers.checks import LayerShape, check_finite, check_states, finite_witness
from hf_kvq.layers.padding import RowPadding
from hf_kvq.states import Region, SinkStore
from hf_kvq.states.buffer import BufferMark

__all__ = ["ROLLBACK", "QuantizedLayer"]

ROLLBACK = 128
"""Exact tokens that are kept behind the residual while the past is recorded, so that a crop by as many is exact."""

Keys = Float[Tensor, "batch kv_heads tokens key_dim"]
Values = Float[Tensor, "batch kv_heads tokens value_dim"]


class _Mark(NamedTuple):
    seen: int
    coded: BufferMark
    residual: BufferMark


class QuantizedLayer(CacheLayerMixin):
    """Keys and values of one layer as codes.

    Args:
        quant: Codecs of keys and values.
        index: Index of the layer, for errors.
        window: The model's own sliding window, of which `window - 1` tokens are kept; None for full attention.
        sinks: First real tokens of every row that stay exact.
        residual: Newest tokens that stay exact.
        prefill: What tokens of one forward see of each other.
    """

    is_compileable = False
    supports_early_init = True

    def __init__(
        self,
        quant: LayerQuant,
        *,
        index: int = 0,
        window: int | None = None,
        sinks: int = 0,
        residual: int = 0,
        prefill: Literal["exact", "coded"] = "exact",
    ) -> None:
        super().__init__()
        self.quant = quant
        self.index = index
        self.window = window
        self.sink_count = sinks
        self.residual_size = residual
        self.prefill: Literal["exact", "coded"] = prefill
        self.record_past = False
        self.padding: RowPadding | None = None
        self._forget()

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
        return len(self.coded)

    @property
    def tokens_encoded(self) -> int:
        """Tokens ever encoded: a step adds the new ones and no more."""
        return self.coded.tokens_encoded

    @property
    def tokens_held(self) -> int:
        """Columns that can still be read."""
        return self.seen - self._oldest

    @property
    def elements(self) -> int:
        """Elements of keys and values that the layer stands for."""
        shape = self.shape
        return self.tokens_held * shape.batch * shape.kv_heads * (shape.key_dim + shape.value_dim) if shape else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, room for later tokens included."""
        return self.coded.buffer.nbytes + self.residual.buffer.nbytes + (self.sinks.nbytes if self.sinks else 0)

    @property
    def nbytes_used(self) -> int:
        """Bytes of the tokens that are kept, scales included."""
        return (
            self.coded.buffer.nbytes_used + self.residual.buffer.nbytes_used + (self.sinks.nbytes if self.sinks else 0)
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.padding is not None:
            self.padding = self.padding.for_batch(key_states.shape[0])
        self.shape = LayerShape.of(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.sink_count:
            first = self.padding.first if self.padding else [0] * self.shape.batch
            self.sinks = SinkStore(self.sink_count, list(first))
            self.coded.restart_at(self.sinks.start)
            self.residual.restart_at(self.sinks.start)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the states of new tokens and return those that attention reads now.

        Args:
            key_states: `[batch, kv_heads, tokens, head_dim]`, after RoPE.
            value_states: The same for values, whose head_dim may differ.
            args: What transformers' versions pass beside; not used.
            kwargs: Likewise.

        Returns:
            Keys and values of as many columns as `get_mask_sizes` announced, in the model's dtype. Codes carry no gradient.

        Raises:
            TypeError: If the states are not floating point tensors.
            ValueError: If shape or dtype do not fit what is held, there is no token, or a state is not finite. Nothing is stored then.
        """
        check_states(key_states, value_states, self.index, self.shape)
        keys, values = key_states.detach(), value_states.detach()
        if self.padding is not None:
            self.padding = self.padding.for_batch(keys.shape[0])
            keys, values = (self.padding.zeroed(x, self.seen) for x in (keys, values))
        self._check_finite(keys, values)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._mark = _Mark(self.seen, self.coded.mark(), self.residual.mark())
        tokens, visible = keys.shape[2], self._visible_from(self.seen)
        outlasts_window = self.window is not None and not self.record_past and tokens >= self.window
        reads_codes = tokens == 1 or self.prefill == "coded" or (self.record_past and self.seen > 0)
        if reads_codes and not outlasts_window:
            self._store(keys, values)
            states = self._dense(visible)
        else:
            current = self._round_trip(keys, values) if reads_codes else (key_states, value_states)
            states = self._dense(visible, current) if self.seen > visible else current
            if outlasts_window:
                keys, values = self._skip_past_of_window(keys, values)
            self._store(keys, values)
        self._trim()
        return states

    def undo_update(self) -> bool:
        """Take the last update back, if nothing it dropped was overwritten; returns whether that was so."""
        mark, self._mark = self._mark, None
        if mark is None:
            return False
        if mark.seen == 0:
            self._forget()
            return True
        self.coded.restore(mark.coded)
        self.residual.restore(mark.residual)
        self.seen = mark.seen
        return True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        visible = self._visible_from(self.seen)
        return self.seen - visible + query_length, visible

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def activate_past_recording(self) -> None:
        """Keep what a coming `crop` may need until it comes."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens; what was coded stays coded, bit for bit.

        With a residual, tokens that left it stay coded, except for the last `ROLLBACK` ones while the past is recorded.

        Raises:
            ValueError: If the number is positive, or more than are held.
            RuntimeError: If a sliding layer has dropped tokens that the shorter window needs.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the negative number of tokens to remove, got {tokens_to_remove}; for a length L call crop(L - cache.get_seq_length())"
            )
        length = self.seen + tokens_to_remove
        if length < 0:
            raise ValueError(
                f"layer {self.index} holds {self.seen} tokens and can not remove {-tokens_to_remove}; call reset() to empty it"
            )
        if self._visible_from(length) < self._oldest:
            raise RuntimeError(
                f"layer {self.index} keeps {self.tokens_held} tokens of its window of {self.window} and can not go back by {-tokens_to_remove}; "
                "call activate_past_recording() before the forward that is to be undone"
            )
        self._mark = None
        coded_end = min(self.coded.end, max(length - self.residual_size, self.residual.first, self.coded.first))
        self.coded.buffer.drop_from(min(coded_end, length))
        if length < self.residual.first:
            self.residual.restart_at(max(length, self.coded.end))
        else:
            self.residual.buffer.drop_from(length)
        self.seen = length
        self._trim(recording=False)

    def reset(self) -> None:
        """Forget everything, the batch size and the padding too."""
        self.padding = None
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.shape is not None:
            self._select_rows(torch.arange(self.shape.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` names, by number or by a mask."""
        if self.shape is not None:
            self._select_rows(torch.arange(self.shape.batch)[torch.as_tensor(indices, device="cpu")])

    def offload(self) -> None:
        """Move codes, scales and exact tokens to the CPU."""
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move them back to where the states came from."""
        if self.is_initialized:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def set_padding(self, padding: RowPadding) -> None:
        """Say which columns are padding, before the first update."""
        if self.seen:
            raise RuntimeError(
                f"layer {self.index} holds {self.seen} tokens already; call set_padding before the first forward, or reset() first"
            )
        self.padding = padding

    def raise_if_not_finite(self) -> None:
        """Raise for states that were not finite and came on a device that is not waited for at every step."""
        if self._witness is not None:
            check_finite(self._witness, self.index)

    @property
    def _oldest(self) -> int:
        return 0 if self.window is None else self.coded.first

    def _forget(self) -> None:
        codecs = (make_codec(self.quant.keys), make_codec(self.quant.values))
        exact = (make_codec(IdentityConfig()), make_codec(IdentityConfig()))
        self.coded = Region(*codecs)
        self.residual = Region(*exact)
        self.sinks: SinkStore | None = None
        self.seen = 0
        self.shape: LayerShape | None = None
        self.is_initialized = False
        self._mark: _Mark | None = None
        self._witness: Tensor | None = None

    def _check_finite(self, keys: Tensor, values: Tensor) -> None:
        witness = finite_witness(keys, values)
        if keys.device.type == "cpu":
            check_finite(witness, self.index)
        else:
            # Reading it would wait for the device at every step; it is read when bytes are counted.
            self._witness = witness if self._witness is None else self._witness + witness

    def _visible_from(self, seen: int) -> int:
        """The oldest column that the next query sees when `seen` are there."""
        return 0 if self.window is None else max(seen - self.window + 1, 0)

    def _store(self, keys: Tensor, values: Tensor) -> None:
        if self.sinks is not None:
            self.sinks.write(keys, values, self.seen)
            only_sinks = min(max(self.sinks.start - self.seen, 0), keys.shape[2])
            self.seen += only_sinks
            keys, values = (self.sinks.zeroed(x[:, :, only_sinks:], self.seen) for x in (keys, values))
        tokens = keys.shape[2]
        if tokens == 0:
            return
        start, self.seen = self.seen, self.seen + tokens
        if self.residual_size == 0:
            self.coded.append(keys, values)
            self.residual.restart_at(self.seen)
            return
        leaving = self.seen - self.residual_size - self.coded.end
        if leaving > 0:
            # What was in the residual leaves first, then what came now.
            held = (
                self.residual.states(self.coded.end, min(self.coded.end + leaving, start))
                if start > self.coded.end
                else None
            )
            direct = max(leaving - (start - self.coded.end), 0)
            self.coded.append(*(_joined(held and held[i], x[:, :, :direct]) for i, x in enumerate((keys, values))))
        kept_from = max(self.coded.end - (ROLLBACK if self.record_past else 0), self.residual.first)
        if kept_from > start:
            # All of the residual left, and tokens that came now went past it: an exact copy of them is never made.
            self.residual.restart_at(kept_from)
            self._drop_mark()
            keys, values = (x[:, :, kept_from - start :] for x in (keys, values))
        self.residual.append(keys, values)

    def _trim(self, *, recording: bool | None = None) -> None:
        """Drop what no later forward reads; while the past is recorded, only `crop` does."""
        if recording is None:
            recording = self.record_past
        if self.window is not None and not recording:
            self.coded.buffer.drop_before(self._visible_from(self.seen))
        self.residual.buffer.drop_before(self.coded.end - (ROLLBACK if recording else 0))

    def _drop_mark(self) -> None:
        """What the mark points to is overwritten; an update into an empty layer can be undone all the same."""
        if self._mark is not None and self._mark.seen > 0:
            self._mark = None

    def _skip_past_of_window(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Cut states that outlast the window to its last `window - 1` tokens, which are all that a later forward reads."""
        assert self.window is not None
        kept = self.window - 1
        self.seen += keys.shape[2] - kept
        self._drop_mark()
        for region in (self.coded, self.residual):
            region.restart_at(self.seen)
        return keys[:, :, -kept:], values[:, :, -kept:]

    def _dense(self, first: int, current: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Decoded states of columns `first` and on, with `current` behind them."""
        assert self.shape is not None
        if current is None and self._is_plain(first):
            return self.coded.states(first, self.seen)
        shape, held = self.shape, self.seen - first
        columns = held + (current[0].shape[2] if current else 0)
        keys, values = (
            torch.empty(shape.batch, shape.kv_heads, columns, dim, dtype=shape.dtype, device=self.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        if current is not None:
            keys[:, :, held:], values[:, :, held:] = current
        coded_first = max(first, self.coded.first)
        for region, begin, end in (
            (self.coded, coded_first, self.coded.end),
            (self.residual, max(first, self.coded.end), self.residual.end),
        ):
            if begin < end:
                region.write_dense(
                    keys[:, :, begin - first : end - first], values[:, :, begin - first : end - first], begin, end
                )
        if self.sinks is not None:
            before_codes = min(coded_first, held)
            keys[:, :, :before_codes], values[:, :, :before_codes] = 0, 0
            self.sinks.write_dense(keys[:, :, :held], values[:, :, :held])
        return keys, values

    def _is_plain(self, first: int) -> bool:
        """Whether the coded region alone holds the columns from `first` on, as they are."""
        identity = isinstance(self.quant.keys, IdentityConfig) and isinstance(self.quant.values, IdentityConfig)
        return identity and self.coded.first <= first and self.coded.end == self.seen

    def _round_trip(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The states as attention reads them after they were stored: codes, with the newest exact."""
        region = Region(self.coded.key_codec, self.coded.value_codec)
        region.append(keys, values)
        decoded = torch.empty_like(keys), torch.empty_like(values)
        region.write_dense(*decoded, 0, len(region))
        if self.residual_size:
            for states, exact in zip(decoded, (keys, values), strict=True):
                states[:, :, -self.residual_size :] = exact[:, :, -self.residual_size :]
        return decoded

    def _select_rows(self, rows: Tensor) -> None:
        if self.shape is None:
            return
        self._mark = None
        self._map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))
        self.shape = LayerShape(**{**vars(self.shape), "batch": len(rows)})
        if self.padding is not None:
            self.padding = self.padding.select_rows(rows)
        if self.sinks is not None:
            self.sinks.select_rows(rows.tolist())

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        self.coded.map(move)
        self.residual.map(move)
        if self.sinks is not None:
            self.sinks.map(move)


def _joined(held: Tensor | None, states: Tensor) -> Tensor:
    if held is None:
        return states
    return torch.cat([held, states], dim=2) if states.shape[2] else held
