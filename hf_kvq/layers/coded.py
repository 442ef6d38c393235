"""What all layers of coded tokens have in common: transformers' layer contract, padding, checks, and bookkeeping.

What is held lives in a store that a kind of layer makes for itself; this class only asks it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_kvq.config import LayerQuant
from hf_kvq.layers.checks import check_finite, finite_witness
from hf_kvq.layers.live import LiveConfig
from hf_kvq.layers.padding import RowPadding
from hf_kvq.states import StateShape

__all__ = ["CodedLayer", "Store"]


@runtime_checkable
class Store(Protocol):
    """What holds the tokens of a layer."""

    @property
    def shape(self) -> StateShape:
        """Shape and dtype of the states."""
        ...

    @property
    def seen(self) -> int:
        """Columns that ever came, less those that were cropped."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        ...

    @property
    def nbytes_used(self) -> int:
        """Bytes of what is kept."""
        ...

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        ...

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move(tensor)`."""
        ...


class CodedLayer(CacheLayerMixin):
    """Keys and values of one layer as codes.

    Args:
        quant: Codecs of keys and values.
        index: Index of the layer, for errors.
        sinks: First real tokens of every row that stay exact.
        residual: Newest tokens that stay exact.
        prefill: What tokens of one forward see of each other.
        model: The model's config, which says how it attends; None for a model that reads tensors.
    """

    is_compileable = False
    supports_early_init = True

    def __init__(
        self,
        quant: LayerQuant,
        *,
        index: int,
        sinks: int,
        residual: int,
        prefill: Literal["exact", "coded"],
        model: LiveConfig | None,
    ) -> None:
        super().__init__()
        self.quant = quant
        self.index = index
        self.sinks = sinks
        self.residual = residual
        self.prefill: Literal["exact", "coded"] = prefill
        self.model = model
        self.record_past = False
        self.padding: RowPadding | None = None
        self.device = torch.device("cpu")
        self._witness: Tensor | None = None

    @property
    @abstractmethod
    def held(self) -> Store | None:
        """The layer's store; None while it is empty."""

    @property
    @abstractmethod
    def tokens_coded(self) -> int:
        """Tokens that are held as codes now."""

    @property
    @abstractmethod
    def tokens_encoded(self) -> int:
        """Tokens ever encoded since the layer was empty: a step adds the new ones and no more."""

    @property
    @abstractmethod
    def elements(self) -> int:
        """Elements of keys and values that are held."""

    @abstractmethod
    def start(self, shape: StateShape, device: torch.device) -> None:
        """Make an empty store for states of this shape."""

    @abstractmethod
    def undo_update(self) -> bool:
        """Take the last update back, if what it needs is still there; returns whether that was so."""

    @abstractmethod
    def _forget(self) -> None:
        """Hold nothing."""

    @property
    def seen(self) -> int:
        """Columns that ever came, less those that were cropped."""
        return self.held.seen if self.held else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, room for later tokens included."""
        return self.held.nbytes if self.held else 0

    @property
    def nbytes_used(self) -> int:
        """Bytes of the tokens that are kept, scales included."""
        return self.held.nbytes_used if self.held else 0

    @property
    def attends_codes(self) -> bool:
        """Whether the model is set to attention over codes."""
        return self.model is not None and self.model.attends_codes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.start(StateShape.of(key_states, value_states), key_states.device)

    def get_seq_length(self) -> int:
        return self.seen

    def activate_past_recording(self) -> None:
        """Keep what a coming `crop` may need until it comes."""
        self.record_past = True

    def reset(self) -> None:
        """Forget everything, the batch size and the padding too."""
        self.padding = None
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.held is not None:
            self._select_rows(torch.arange(self.held.shape.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` names, by number or by a mask."""
        if self.held is not None:
            self._select_rows(torch.arange(self.held.shape.batch)[torch.as_tensor(indices, device="cpu")])

    def offload(self) -> None:
        """Move codes, scales and exact tokens to the CPU."""
        if self.held is not None:
            self.held.map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move them back to where the states came from."""
        if self.held is not None:
            self.held.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def set_padding(self, padding: RowPadding) -> None:
        """Say which columns are padding, before the first update.

        Raises:
            RuntimeError: If the layer holds tokens already.
        """
        if self.seen:
            raise RuntimeError(
                f"layer {self.index} holds {self.seen} tokens already; call set_padding before the first forward, or reset() first"
            )
        self.padding = padding

    def raise_if_not_finite(self) -> None:
        """Raise for states that were not finite and came on a device that is not waited for at every step."""
        if self._witness is not None:
            check_finite(self._witness, self.index)

    def _checked_length(self, tokens_to_remove: int | Tensor) -> int:
        """The columns that a crop leaves.

        Raises:
            ValueError: If the number is positive, or more than are held.
        """
        tokens_to_remove = int(tokens_to_remove)  # early 5.x passes a tensor of one number
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the negative number of tokens to remove, got {tokens_to_remove}; "
                "for a length L call crop(L - cache.get_seq_length())"
            )
        length = self.seen + tokens_to_remove
        if length < 0:
            raise ValueError(
                f"layer {self.index} holds {self.seen} tokens and can not remove {-tokens_to_remove}; call reset() to empty it"
            )
        return length

    def _check_finite(self, keys: Tensor, values: Tensor) -> None:
        witness = finite_witness(keys, values)
        if keys.device.type == "cpu":
            check_finite(witness, self.index, keys, values)
        else:
            # Reading it would wait for the device at every step; it is read when bytes are counted.
            self._witness = witness * 0 if self._witness is None else self._witness + witness * 0

    def _prepared(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Checked states without gradient, zero where padding is."""
        keys, values = key_states.detach(), value_states.detach()
        if self.padding is not None:
            self.padding = self.padding.for_batch(keys.shape[0])
            keys, values = (self.padding.zeroed(x, self.seen) for x in (keys, values))
        self._check_finite(keys, values)
        return keys, values

    def _select_rows(self, rows: Tensor) -> None:
        if self.held is None:
            return
        self._drop_mark()
        self.held.select_rows(rows)
        if self.padding is not None:
            self.padding = self.padding.select_rows(rows)

    @abstractmethod
    def _drop_mark(self) -> None:
        """Forget how to undo the last update."""
