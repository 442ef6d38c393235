"""What a layer accepts: errors that name the layer, what was expected, what came, and the way out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_kvq.states import StateShape

__all__ = ["check_finite", "check_states", "finite_witness"]


def check_states(key_states: Tensor, value_states: Tensor, layer: int, known: StateShape | None) -> None:
    """Refuse what could not be stored as it should be.

    Raises:
        TypeError: If the states are no tensors of floating point numbers.
        ValueError: If they have another shape or dtype than the layer holds, or no token.
    """
    for label, states in (("key_states", key_states), ("value_states", value_states)):
        if not isinstance(states, Tensor) or not states.dtype.is_floating_point or states.dtype.itemsize < 2:
            came = states.dtype if isinstance(states, Tensor) else type(states).__name__
            raise TypeError(
                f"layer {layer}: {label} must be float32, bfloat16, float16 or float64, got {came}; cast them before the update"
            )
        if states.ndim != 4:
            raise ValueError(
                f"layer {layer}: {label} must be [batch, kv_heads, tokens, head_dim], got shape {tuple(states.shape)}"
            )
    if key_states.shape[:3] != value_states.shape[:3] or key_states.dtype != value_states.dtype:
        raise ValueError(
            f"layer {layer}: keys and values must agree in batch, kv_heads, tokens and dtype, got "
            f"{tuple(key_states.shape)} {key_states.dtype} and {tuple(value_states.shape)} {value_states.dtype}"
        )
    if key_states.shape[2] == 0:
        raise ValueError(
            f"layer {layer}: an update must bring at least one token, got shape {tuple(key_states.shape)}; "
            "skip the call, or pass inputs of at least one token"
        )
    came = StateShape.of(key_states, value_states)
    if known is not None and came != known:
        raise ValueError(
            f"layer {layer} holds {known}, got {came}; call reset() before another batch, or make a cache of its own for another model or dtype"
        )


def finite_witness(key_states: Tensor, value_states: Tensor) -> Tensor:
    """One number that is not finite if an element is not; nothing is copied to the host. Huge elements may make it infinite too."""
    # Sums of half precision overflow in their own dtype.
    dtype = torch.promote_types(key_states.dtype, torch.float32)
    return key_states.sum(dtype=dtype) + value_states.sum(dtype=dtype)


def check_finite(witness: Tensor, layer: int, *states: Tensor) -> None:
    """Raise if a `finite_witness` says so; waits for the device.

    Args:
        witness: Of these states, or of more.
        layer: Index of the layer.
        states: What to look at again where the witness is not finite; without any, the witness is believed.

    Raises:
        ValueError: If an element was NaN or infinite.
    """
    if math.isfinite(witness.item()) or (states and all(bool(x.isfinite().all()) for x in states)):
        return
    raise ValueError(
        f"layer {layer}: key or value states hold NaN or infinity and were not stored; look for an overflow in the model "
        "(float16 often does: try bfloat16 or float32) or for a corrupt input"
    )
