"""int8 codes of a few tokens, compiled by numba and written where they stay."""

from __future__ import annotations

from typing import no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from hf_kvq.kernels.numba_memory import memory

__all__ = ["encode_int8"]

_SMALLEST = np.float32(torch.finfo(torch.bfloat16).tiny)


@numba.njit(cache=True)
@no_type_check
def _encode_int8(states_at, steps, is_bits, codes_at, code_steps, scales_at, scale_steps, sizes):
    batch, kv_heads, tokens, dim = sizes
    codes, scales = memory(codes_at, np.int8), memory(scales_at, np.int16)
    row_of = np.empty(dim, np.float32)
    bits = row_of.view(np.int32)
    one = np.empty(1, np.float32)
    one_bits = one.view(np.int32)
    for row in range(batch):
        for head in range(kv_heads):
            for token in range(tokens):
                start = row * steps[0] + head * steps[1] + token * steps[2]
                if is_bits:
                    halves = memory(states_at, np.int16)
                    for c in range(dim):
                        bits[c] = np.int32(halves[start + c]) << 16
                else:
                    floats = memory(states_at, np.float32)
                    for c in range(dim):
                        row_of[c] = floats[start + c]
                largest = np.float32(0)
                for c in range(dim):
                    largest = max(largest, abs(row_of[c]))
                # To the nearest bfloat16, ties to even, as torch casts.
                one[0] = max(largest / np.float32(127), _SMALLEST)
                rounded = (one_bits[0] + 0x7FFF + ((one_bits[0] >> 16) & 1)) >> 16
                scales[row * scale_steps[0] + head * scale_steps[1] + token * scale_steps[2]] = np.int16(rounded)
                one_bits[0] = np.int32(rounded) << 16
                scale = one[0]
                target = row * code_steps[0] + head * code_steps[1] + token * code_steps[2]
                for c in range(dim):
                    code = np.rint(row_of[c] / scale)
                    codes[target + c] = np.int8(min(max(code, np.float32(-127)), np.float32(127)))


def encode_int8(states: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write the codes and the scale of a few tokens where they stay, bit for bit what the codec's own tensors would hold.

    Args:
        states: `[batch, kv_heads, tokens, head_dim]`, float32 or bfloat16, channels next to each other.
        codes: Likewise, int8; written.
        scale: `[batch, kv_heads, tokens, 1]`, bfloat16; written.
    """
    _encode_int8(
        states.data_ptr(), states.stride(), states.dtype == torch.bfloat16, codes.data_ptr(), codes.stride(),
        scale.data_ptr(), scale.stride(), tuple(states.shape),
    )  # fmt: skip
