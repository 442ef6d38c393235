"""Slow and obvious references that the package is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ODD_SHAPES = [
    # batch, kv_heads, tokens, head_dim
    (1, 1, 1, 40),
    (1, 2, 37, 64),
    (3, 1, 128, 80),
    (1, 8, 129, 128),
    (3, 2, 37, 256),
]


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal states, with a spread over tokens and channels as keys have it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    spread = torch.rand(shape[-1], generator=generator) * 3 + 0.1
    return (x * spread).to(dtype)


def int8_per_token(x: Tensor) -> Tensor:
    """int8 with a bfloat16 scale per token, one number at a time, in Python's float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for head in range(x.shape[1]):
            for token in range(x.shape[2]):
                numbers = [float(value) for value in x[row, head, token]]
                scale = float(torch.tensor(max(abs(value) for value in numbers) / 127).to(torch.bfloat16))
                for channel, value in enumerate(numbers):
                    code = 0 if scale == 0 else max(-127, min(127, round(value / scale)))
                    out[row, head, token, channel] = code * scale
    return out


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64 and the log of its denominator, one head and query at a time; rows that see nothing give 0 and -inf.

    Args:
        query: `[batch, kv_heads, groups, queries, dim]`.
        keys: `[batch, kv_heads, tokens, dim]`.
        values: `[batch, kv_heads, tokens, value_dim]`.
        scaling: Factor of the dot products.
        visible: Bool, or additive, of a shape that expands to `[batch, kv_heads, groups, queries, tokens]`.
        softcap: Bound of the logits.
    """
    shape = (*query.shape[:4], keys.shape[2])
    if visible is None:
        visible = torch.ones(shape, dtype=torch.bool)
    seen = visible.expand(shape)
    output = torch.zeros(*query.shape[:4], values.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:4], -torch.inf, dtype=torch.float64)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:4])).tolist():
        b, h, g, i = place
        logits = scaling * (keys[b, h].double() @ query[b, h, g, i].double())
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        rule = seen[b, h, g, i]
        logits = logits.masked_fill(~rule, -torch.inf) if rule.dtype == torch.bool else logits + rule.double()
        lse[b, h, g, i] = logits.logsumexp(0)
        if logits.max() > -torch.inf:
            output[b, h, g, i] = logits.softmax(0) @ values[b, h].double()
    return output, lse


def e4m3_grid() -> Tensor:
    """All finite numbers of float8 e4m3fn, from the format's definition: 4 exponent bits of bias 7, 3 mantissa bits, no infinity."""
    magnitudes = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    for exponent in range(1, 16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                magnitudes.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(sorted({sign * m for sign in (1, -1) for m in magnitudes}), dtype=torch.float64)


def tiny_llama(
    *, layers: int = 2, kv_heads: int = 2, head_dim: int = 16, seed: int = 0, **overrides: object
) -> LlamaForCausalLM:
    """A random Llama that runs in milliseconds."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=97,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **overrides,
    )
    return LlamaForCausalLM(config).eval()
