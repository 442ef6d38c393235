"""Attention over codes: one interface, plain torch for everything, compiled kernels for a single query where they are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from hf_kvq.kernels.base import (
    HIDDEN,
    Kernel,
    Logits,
    Operand,
    Partial,
    Query,
    Scoring,
    compute_dtype,
    merge,
    zero_logit,
)
from hf_kvq.kernels.exact import attend_exact
from hf_kvq.kernels.few import attend_few
from hf_kvq.kernels.tiled import TiledKernel
from hf_kvq.kernels.visibility import Visibility
from hf_kvq.packing import Layout

__all__ = [
    "FEW",
    "HIDDEN",
    "Kernel",
    "Logits",
    "Operand",
    "Partial",
    "Query",
    "Scoring",
    "TiledKernel",
    "Visibility",
    "attend_exact",
    "attend_few",
    "compute_dtype",
    "encoder_for",
    "kernels_for",
    "merge",
    "zero_logit",
]


FEW = 8
"""Tokens up to which an encoder of `encoder_for` is quicker than tensor operations."""


@functools.cache
def encoder_for(layout: Layout, device_type: str) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """What writes codes and scales of a few tokens in place; None where the codec's own tensors are all there is."""
    if layout != "int8" or device_type != "cpu":
        return None
    try:
        from hf_kvq.kernels.numba_encode import encode_int8
    except ImportError:
        return None
    return encode_int8


@functools.cache
def kernels_for(device_type: str) -> tuple[Kernel, ...]:
    """The kernels to ask in turn on a device of this type; the last one takes everything."""
    compiled = []
    if device_type == "cuda":
        try:
            from hf_kvq.kernels.triton_decode import TritonDecodeKernel
        except ImportError:
            pass
        else:
            compiled.append(TritonDecodeKernel())
    if device_type == "cpu":
        try:
            from hf_kvq.kernels.numba_decode import NumbaDecodeKernel
        except ImportError:
            pass
        else:
            compiled.append(NumbaDecodeKernel())
    return (*compiled, TiledKernel())
