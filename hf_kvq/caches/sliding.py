"""`QuantizedSlidingWindowCache`: endless generation in bounded memory.

Source: StreamingLLM, arXiv:2309.17453 (sinks and a window), and H2O, arXiv:2306.14048 (heavy hitters). Departs from both: all but the sinks are codes, tokens
leave in blocks at fixed positions, and what left can stay as heavy hitters or in clusters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal

from jaxtyping import Int64
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from hf_kvq.caches.bounds import BoundsRule, check_far_field
from hf_kvq.caches.coded import CodedCache, check_model_window
from hf_kvq.config import FarField, QuantConfig, resolve_scheme
from hf_kvq.far_field import EvictedBlock
from hf_kvq.layers import BoundedLayer, CodedLayer, QuantizedLayer

__all__ = ["QuantizedSlidingWindowCache"]


class QuantizedSlidingWindowCache(CodedCache):
    """A cache whose full-attention layers keep sinks, a window, and a far field; a model's own sliding layers keep their window.

    A query sees the sinks, at least the `window` newest tokens (itself included), and the far field. Without a far field the window is exact; with one, tokens
    leave in blocks, so up to `block - 1` more are seen. Blocks begin at fixed positions of a row, so what is kept does not depend on the chunks that a
    text comes in.

    Positions: a token keeps the position that the model gave it. Where a model was trained up to L tokens, no key ever stands further from a query than
    L - 1: sinks are moved ahead together, kept tokens and clusters each by what it takes, by an exact rotation (RoPE models; others keep their own limits).
    So a stream may run past the trained length for as long as float32 tells its positions apart.

    What it is not: long memory. What left the window is gone but for a few hundred heavy hitters and the means of clusters. A passage or a passkey is found again
    as far back as the budget reaches, and not beyond.

    With a model's own attention (not "hf_kvq") there is no far field, and a forward of several tokens sees all of its own tokens.

    Args:
        config: The model's config, `model.config`.
        scheme: A preset's name (`hf_kvq.PRESETS`) or a `QuantConfig`, of window and kept tokens.
        window: Tokens that a query sees at least, itself included and sinks not.
        sinks: First real tokens of every row that stay exact.
        far_field: None, `HeavyHitters(tokens)`, `Clusters(count)`, or a pair of both: clusters then take what heavy hitters leave.
        block: Tokens that leave the window together.
        residual: Newest tokens that stay exact; None for the scheme's own number, or for none where a budget is given.
        prefill: As in `QuantizedCache`.
        skip_layers: Likewise.
        budget_bytes_per_head: In place of `window`: bytes of one kv head and row, split between window and far field as `BoundsRule` says; the numbers
            in `far_field` then do not matter. Tokens count as codes: a row's first ones, exact until a scheme's codecs have learned, may take more.

    Raises:
        ValueError: If an argument is not as described, or as `QuantizedCache` does.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        scheme: str | QuantConfig = "q8",
        *,
        window: int | None = None,
        sinks: int = 4,
        far_field: FarField | None = None,
        block: int = 32,
        residual: int | None = None,
        prefill: Literal["exact", "coded"] = "exact",
        skip_layers: Iterable[int | str] = (),
        budget_bytes_per_head: int | None = None,
    ) -> None:
        if (window is None) == (budget_bytes_per_head is None):
            raise ValueError(
                f"give either window or budget_bytes_per_head, got window={window} and budget_bytes_per_head={budget_bytes_per_head}"
            )
        if residual is None and budget_bytes_per_head is not None:
            residual = 0
        scheme = resolve_scheme(scheme, sinks=sinks, residual=residual)
        if window is not None and window < max(2, scheme.residual + 1):
            raise ValueError(
                f"window must be at least 2, and above the residual of {scheme.residual}, got {window}; give a larger window or a smaller residual"
            )
        if block < 1:
            raise ValueError(f"block must be at least 1 token, got {block}; the default is 32")
        check_far_field(far_field)
        self.window = window
        self.block = block
        self.far_field: FarField | None = far_field
        self.budget_bytes_per_head = budget_bytes_per_head
        self._hooks: OrderedDict[int, Callable[[EvictedBlock], object]] = OrderedDict()
        super().__init__(config, scheme, prefill=prefill, skip_layers=skip_layers)
        if not self.bounded_layers:
            raise ValueError(
                "no layer of this model has full attention, so nothing would be bounded; use QuantizedCache"
            )

    @property
    def bounded_layers(self) -> list[BoundedLayer]:
        """The layers with a window of this cache's own."""
        return [layer for layer in self.layers if isinstance(layer, BoundedLayer)]

    def register_chunk_hook(self, hook: Callable[[EvictedBlock], object]) -> RemovableHandle:
        """Have every block of tokens that leaves a window shown to `hook`, once for each layer.

        A batch whose rows are padded differently shows a block once for each group of rows that it leaves in at the same time. The block holds
        states of its own: what the hook does with them changes nothing here. If the hook raises, the forward ends with a `HookError` that names hook, layer and
        block, and the cache is what it was before that forward.

        Returns:
            A handle; `handle.remove()` takes the hook out.
        """
        if not callable(hook):
            raise ValueError(f"hook must be callable, got {hook!r}; it gets one hf_kvq.EvictedBlock")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def accounting(self) -> dict[int, dict[str, Int64[Tensor, "batch kv_heads"]]]:
        """Where every token of every row and kv head is, by layer.

        `seen` is the sum of `sinks`, `window`, `kept` (heavy hitters), `clusters` (their counts) and `forgotten`.
        """
        return {layer.index: layer.held.accounting() for layer in self.bounded_layers if layer.held is not None}

    def kept_positions(self) -> dict[int, list[Int64[Tensor, "kv_heads kept"]]]:
        """Positions of the heavy hitters, by layer and row: the row's own token numbers, ascending; a row's heads have as many each."""
        found = {}
        for layer in self.bounded_layers:
            kept = layer.held.far.kept if layer.held is not None else None
            if kept is not None and kept.positions is not None:
                found[layer.index] = [kept.positions[row, :, :count].long() for row, count in enumerate(kept.filled)]
        return found

    @property
    def _settings(self) -> str:
        size = f"window {self.window}" if self.window is not None else f"{self.budget_bytes_per_head:,} bytes a head"
        far = self.far_field if isinstance(self.far_field, tuple) else (self.far_field,)
        parts = " + ".join(map(str, far)) if self.far_field is not None else "none"
        return (
            f"{size}, blocks of {self.block}, sinks {self.scheme.sinks}, residual {self.scheme.residual}, far field {parts}, "
            f"hooks {len(self._hooks)}"
        )

    def _coded_layer(self, index: int, *, sliding_window: int | None = None) -> CodedLayer:
        quant = self.scheme.for_layer(index, len(self.layer_types))
        if sliding_window is not None:
            check_model_window(index, sliding_window)
            # The model was trained to see its window and nothing before it.
            return QuantizedLayer(
                quant,
                index=index,
                window=sliding_window,
                residual=self.scheme.residual,
                prefill=self.prefill,
                model=self._model,
            )
        rule = BoundsRule(
            model=self._model,
            index=index,
            quant=quant,
            sinks=self.scheme.sinks,
            residual=self.scheme.residual,
            block=self.block,
            window=self.window,
            far_field=self.far_field,
            budget_bytes_per_head=self.budget_bytes_per_head,
        )
        return BoundedLayer(
            quant,
            rule,
            index=index,
            sinks=self.scheme.sinks,
            residual=self.scheme.residual,
            prefill=self.prefill,
            model=self._model,
            hooks=self._hooks,
        )
