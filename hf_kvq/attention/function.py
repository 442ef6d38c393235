"""The attention function that transformers calls under the name "hf_kvq"."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_kvq.attention.mask import CompactMask
from hf_kvq.kernels import Operand, Visibility
from hf_kvq.states import ATTENTION, CodedStates, HookError, StoreView, View
from hf_kvq.states.view import Segment, copy_states

__all__ = ["attention_over_codes"]


def attention_over_codes(
    module: torch.nn.Module,
    query: Float[Tensor, "batch heads queries key_dim"],
    key: Tensor | CodedStates,
    value: Tensor | CodedStates,
    attention_mask: Tensor | CompactMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch queries heads value_dim"], None]:
    """Attention, over codes where the cache hands them over; tensors go to sdpa as they are.

    Args:
        module: The model's attention layer.
        query: After RoPE, unscaled.
        key: From `QuantizedCache`, or a tensor (cross attention, other caches, no cache).
        value: Likewise.
        attention_mask: A mask of ours, sdpa's, or `[batch or 1, heads or 1, queries, columns]` of the user's own.
        dropout: Must be 0 over codes.
        scaling: Factor of the dot products; head_dim ** -0.5 where None.
        kwargs: `softcap`, `s_aux` (a learned sink logit for each head), `sliding_window`, and what sdpa takes.

    Returns:
        The output, without gradient where codes were read, and None for the weights.

    Raises:
        HookError: If a chunk hook raises.
        ValueError: If attention weights, dropout, a position bias or a gradient in training are asked for over codes.
    """
    try:
        output = _attend(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    except (ValueError, HookError):
        if isinstance(key, CodedStates):
            key.undo()
        raise
    return output, None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | CodedStates,
    value: Tensor | CodedStates,
    attention_mask: Tensor | CompactMask | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"attention {ATTENTION!r} computes no matrix of attention weights, and output_attentions=True asks for it; "
            'call model.set_attn_implementation("eager") for that forward'
        )
    if not isinstance(key, CodedStates) and not isinstance(value, CodedStates):
        mask = attention_mask.dense() if isinstance(attention_mask, CompactMask) else attention_mask
        if kwargs.get("s_aux") is None and kwargs.get("softcap") is None:
            output, _ = sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
            )
            return output
        # sdpa knows neither a softcap nor sink logits; the tiles do.
        view, visibility = _over_tensors(query, key, value, mask)
    else:
        assert isinstance(key, CodedStates), "keys and values come from one cache"
        view, visibility = _over_codes(query, key, attention_mask)
    _refuse_what_is_not_computed(module, query, view.layer, dropout, kwargs.get("position_bias"))
    output = view.attend(
        query.detach(),
        visibility,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
    )
    return output.transpose(1, 2).contiguous()


def _over_codes(query: Tensor, handle: CodedStates, mask: Tensor | CompactMask | None) -> tuple[View, Visibility]:
    view, queries = handle.view, query.shape[2]
    if isinstance(mask, CompactMask):
        if handle.on_padding is not None and (padding := mask.padding()) is not None:
            view = handle.on_padding(padding[:, : view.end])
        return view, mask.visibility(view.first, view.end, queries, view.window)
    if mask is None:
        return view, Visibility(view.end - queries, queries, view.window)
    if mask.ndim != 4 or mask.shape[3] < view.end - view.first:
        raise ValueError(
            f"layer {view.layer}: a mask over {view.end - view.first} columns must be [batch, heads or 1, queries, columns], got shape {tuple(mask.shape)}"
        )
    return view, Visibility(view.end - queries, queries, mask=mask, mask_from=view.first)


def _over_tensors(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[StoreView, Visibility]:
    queries = query.shape[2]
    if mask is None and queries > 1:
        # As sdpa has it: without a mask, room for later tokens that a static cache shows is behind all queries.
        keys, values = keys[:, :, :queries], values[:, :, :queries]
    operands = (Operand("states", {"codes": x.detach()}, x.shape[3], copy_states) for x in (keys, values))
    tokens = keys.shape[2]
    view = StoreView((Segment(0, *operands),), None, 0, tokens, None, -1, keys.dtype)
    return view, Visibility(tokens - queries, queries, mask=mask)


def _refuse_what_is_not_computed(
    module: torch.nn.Module, query: Tensor, layer: int, dropout: float, position_bias: Tensor | None
) -> None:
    where = f"attention {ATTENTION!r}" + (f", layer {layer}" if layer >= 0 else "")
    if dropout:
        raise ValueError(
            f"{where} has no dropout, got {dropout}; call model.eval(), or set another attention for training"
        )
    if position_bias is not None:
        raise ValueError(
            f'{where} has no position bias, and this model gives one; call model.set_attn_implementation("sdpa")'
        )
    if module.training and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(
            f'{where} gives no gradient; train with model.set_attn_implementation("sdpa") or "eager", or call model.eval()'
        )
