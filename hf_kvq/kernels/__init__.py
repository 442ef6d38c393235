"""Attention over codes: one interface, plain torch for everything, compiled kernels for a single query where they are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_kvq.basis import PlacedBasis
from hf_kvq.kernels.base import (
    HIDDEN,
    Bias,
    Kernel,
    Logits,
    Operand,
    Part,
    Partial,
    Query,
    Scoring,
    compute_dtype,
    merge,
    restorer_for,
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
    "Part",
    "Partial",
    "Query",
    "Scoring",
    "TiledKernel",
    "Visibility",
    "attend",
    "attend_exact",
    "attend_few",
    "attend_parts",
    "compute_dtype",
    "encoder_for",
    "grid_encoder_for",
    "kernels_for",
    "merge",
    "zero_logit",
]


FEW = 8
"""Tokens up to which an encoder of `encoder_for`, and one product without tiles, are quicker than what takes any number."""


@functools.cache
def encoder_for(
    layout: Layout, device_type: str
) -> Callable[[Tensor, Tensor, Tensor, PlacedBasis | None, Grid | None], None] | None:
    """What writes codes and scales of a few tokens in place, in a basis where there is one; None where the codec's own tensors are all there is."""
    if layout not in ("int8", "grid") or device_type != "cpu":
        return None
    try:
        from hf_kvq.kernels.numba_encode import encode_int8
        from hf_kvq.kernels.numba_few import encode_few
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


def attend_parts(query: Query, parts: Sequence[Part], scoring: Scoring) -> Partial:
    """Attention over all parts together; where one kernel takes them all, in one call."""
    kernel = kernels_for(query.device.type)[0]
    if kernel.takes_parts and all(kernel.supports(query, part.keys, part.values, part.visibility) for part in parts):
        return kernel.attend_parts(query, parts, scoring)
    return merge([_attend_part(query, part, scoring) for part in parts])


def _attend_part(query: Query, part: Part, scoring: Scoring) -> Partial:
    keys, values, first, visibility, logits = part
    handful = keys.layout == values.layout == "states" and keys.tokens <= FEW and query.shape[3] == 1
    if handful and logits is None and visibility.for_one_query(first, keys.tokens) == (True, None):
        return attend_few(query, keys.parts["codes"], values.parts["codes"], None, scoring)
    return attend(query, keys, values, first, visibility, scoring, logits)


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

    Codes in a basis stay in it where a kernel knows bases, or there are few queries: each query then goes into the basis, and the output comes out of it, once. Many
    queries share what it takes to bring a tile of states out, and where that is compiled it is quicker for few as well.
    """
    kernels = kernels_for(query.device.type)
    kernel, bias, output_basis = _first(kernels, query, keys, values, visibility), None, None
    if kernel is kernels[-1] and _goes_into_basis(kernels, query, keys, values, visibility):
        output_basis = values.basis
        if keys.basis is not None:
            query, bias = _enter(query, keys.basis)
        keys, values = keys.in_basis(), values.in_basis()
        kernel = _first(kernels, query, keys, values, visibility)
    part = kernel.attend(query, keys, values, first_column, visibility, scoring, logits, bias)
    return part if output_basis is None else part._replace(output=_leave(part, output_basis))


def _goes_into_basis(
    kernels: Sequence[Kernel], query: Query, keys: Operand, values: Operand, visibility: Visibility
) -> bool:
    """Whether queries that no compiled kernel takes as they are go into the basis of the codes."""
    bases = [operand.basis for operand in (keys, values) if operand.basis is not None]
    if not bases or query.shape[2] * query.shape[3] > keys.dim:
        return False
    if _first(kernels, query, keys.in_basis(), values.in_basis(), visibility) is not kernels[-1]:
        return True
    comes_out = restorer_for(query.device.type) is not None
    return not (comes_out and all(isinstance(basis.positions, int) for basis in bases))


def _first(kernels: Sequence[Kernel], query: Query, keys: Operand, values: Operand, visibility: Visibility) -> Kernel:
    return next(kernel for kernel in kernels if kernel.supports(query, keys, values, visibility))


def _enter(query: Query, basis: PlacedBasis) -> tuple[Query, Bias]:
    query = query.to(compute_dtype(query.dtype))
    return basis.query(query), basis.bias(query).contiguous()


def _leave(part: Partial, basis: PlacedBasis) -> Tensor:
    # What saw nothing has no weights that sum to one, and no share in the mean.
    return basis.output(part.output).masked_fill_((part.lse == -torch.inf)[..., None], 0.0)
