"""Attention over codes: one interface, plain torch for everything, compiled kernels for a single query where they are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hf_kvq.basis import PlacedBasis
from hf_kvq.kernels.base import (
    HIDDEN,
    Bias,
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
from hf_kvq.packing import Grid, Layout

__all__ = [
    "FEW",
    "HIDDEN",
    "Bias",
    "Kernel",
    "Logits",
    "Operand",
    "Partial",
    "Query",
    "Scoring",
    "TiledKernel",
    "Visibility",
    "attend",
    "attend_exact",
    "attend_few",
    "compute_dtype",
    "encoder_for",
    "grid_encoder_for",
    "kernels_for",
    "merge",
    "zero_logit",
]


Enter = Callable[[Query, PlacedBasis], tuple[Query, Bias]]
Leave = Callable[[Partial, PlacedBasis], Tensor]

FEW = 8
"""Tokens up to which an encoder of `encoder_for` is quicker than tensor operations."""


@functools.cache
def encoder_for(
    layout: Layout, device_type: str
) -> Callable[[Tensor, Tensor, Tensor, PlacedBasis | None, Grid | None], None] | None:
    """What writes codes and scales of a few tokens in place, in a basis where there is one; None where the codec's own tensors are all there is."""
    if layout not in ("int8", "grid") or device_type != "cpu":
        return None
    try:
        from hf_kvq.kernels.numba_basis import encode_few
        from hf_kvq.kernels.numba_encode import encode_int8
    except ImportError:
        return None
    if layout == "int8":
        return lambda states, codes, scale, basis, grid: encode_int8(states, codes, scale)
    return encode_few


@functools.cache
def grid_encoder_for(device_type: str) -> Callable[[Tensor, Grid, Tensor, int, int], tuple[Tensor, Tensor]] | None:
    """What makes codes and scales of states in their basis; None where the codec's own tensors are all there is."""
    if device_type != "cpu":
        return None
    try:
        from hf_kvq.kernels.numba_aim import encode_aimed
    except ImportError:
        return None
    return encode_aimed


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


def attend(
    query: Query,
    keys: Operand,
    values: Operand,
    first_column: int,
    visibility: Visibility,
    scoring: Scoring,
    logits: Logits | None = None,
) -> Partial:
    """Attention over tokens as they are stored, by the first kernel that takes them; see `Kernel.attend`.

    Codes in a basis stay in it where there are few queries: each query goes into the basis, and the output comes out of it, once. Many queries share what it takes to
    bring a tile of states out.
    """
    few = query.shape[2] * query.shape[3] <= keys.dim
    if not few or (keys.basis is None and values.basis is None):
        return _ask(query, keys, values, first_column, visibility, scoring, logits, None)
    enter, leave = _basis_functions(query, keys, values)
    bias, output_basis = None, values.basis
    if keys.basis is not None:
        query, bias = enter(query, keys.basis)
    part = _ask(query, keys.in_basis(), values.in_basis(), first_column, visibility, scoring, logits, bias)
    return part if output_basis is None else part._replace(output=leave(part, output_basis))


def _ask(
    query: Query, keys: Operand, values: Operand, first_column: int, visibility: Visibility, scoring: Scoring,
    logits: Logits | None, bias: Bias | None,
) -> Partial:  # fmt: skip
    kernel = next(k for k in kernels_for(query.device.type) if k.supports(query, keys, values, visibility))
    return kernel.attend(query, keys, values, first_column, visibility, scoring, logits, bias)


def _basis_functions(query: Query, keys: Operand, values: Operand) -> tuple[Enter, Leave]:
    """What brings queries into the basis of keys, and output out of that of values: compiled for a CPU's single query, where consecutive tokens have it."""
    plain = query.device.type == "cpu" and query.shape[3] == 1 and query.dtype != torch.float64
    if plain and (keys.basis is None or isinstance(keys.basis.positions, int)):
        try:
            from hf_kvq.kernels.numba_basis import enter_basis, leave_basis
        except ImportError:
            return _enter, _leave
        if all(x.basis is None or x.basis.basis.is_plain for x in (keys, values)):
            return enter_basis, leave_basis
    return _enter, _leave


def _enter(query: Query, basis: PlacedBasis) -> tuple[Query, Bias]:
    query = query.to(compute_dtype(query.dtype))
    return basis.query(query), basis.bias(query).contiguous()


def _leave(part: Partial, basis: PlacedBasis) -> Tensor:
    # What saw nothing has no weights that sum to one, and no share in the mean.
    return basis.output(part.output).masked_fill_((part.lse == -torch.inf)[..., None], 0.0)
