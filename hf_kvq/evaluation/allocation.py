"""Bits for each layer's keys and values: more where a model is sensitive, under a given average.

Each layer's keys, and its values, are coded alone at a few bits, and the divergence of the model's predictions from its exact ones is measured on a
short text. Divergences of parts are about additive, and fall with the bits as the squared error of the codec does, so the best bits under an average are found by
giving the next bit to whatever gains most for it (the greedy choice is optimal, since each part gains less with every bit: Fox, Oper. Res. 14 (1966)).
Departs from what is done for weights (HAWQ, arXiv:1905.03696): no gradients and no Hessian, the loss itself is measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_kvq.caches import QuantizedCache
from hf_kvq.caches.memory import layer_memory
from hf_kvq.codecs import make_codec
from hf_kvq.codecs.rotated import grid_for
from hf_kvq.config import CodecConfig, IdentityConfig, LayerQuant, QuantConfig, RotatedConfig
from hf_kvq.evaluation.divergence import compare_logits
from hf_kvq.evaluation.protocols import teacher_forced

__all__ = ["LADDER", "Sensitivity", "allocate", "assign_bits", "sensitivities"]

LADDER: dict[int, float] = {2: 0.105, 3: 0.0285, 4: 0.0072, 5: 0.00195, 6: 0.00055, 8: 0.000033}
"""Bits that a part may get, and the squared error of the codec at them, as a share of the variance: `RotatedCodec` on normal numbers at head_dim 64."""

KEY_TIERS: dict[int, int | tuple[int, ...]] = {2: (4, 2, 1, 1), 3: (4, 3, 3, 2), 4: (6, 4, 3, 3)}
"""How keys spend few bits."""

PROBE_BITS = 3


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What coding one layer's keys or values costs.

    Attributes:
        layer: Index of the layer.
        part: `"keys"` or `"values"`.
        kl: Mean KL divergence from the exact predictions, in nats, with this part at `PROBE_BITS` bits and all else exact.
    """

    layer: int
    part: str
    kl: float


def allocate(
    model: PreTrainedModel,
    text: str | Int[Tensor, " tokens"],
    bits: float = 4.2,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tokens: int = 1024,
    sinks: int = 4,
    residual: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> QuantConfig:
    """A scheme of `bits` bits an element on average, given out by how sensitive each layer's keys and values are.

    Costs two forwards of `tokens` tokens a layer. `QuantConfig.save` keeps the result.

    Args:
        model: In evaluation mode.
        text: A text of the kind that the cache is for, or its token ids.
        bits: Average over the tokens that are coded, scales included; sinks, residual and what is learned of a row come on top.
        tokenizer: The model's, where `text` is one.
        tokens: Of the text that are used, at most.
        sinks: First tokens of every row that stay exact, in the scheme.
        residual: Newest tokens that stay exact, in the scheme.
        progress: Told before every step, and once at the end: steps done, steps in all, and what comes now.

    Raises:
        ValueError: If the text is too short, there is no tokenizer for it, or `bits` is out of reach.
    """
    ids = _ids(text, tokenizer)[:tokens]
    found = sensitivities(model, ids, sinks=sinks, progress=progress)
    assigned = assign_bits(found, bits - _scale_bits(model))
    layers = {
        layer: LayerQuant(
            keys=_key_config(assigned[layer, "keys"]), values=RotatedConfig(bits=assigned[layer, "values"])
        )
        for layer in sorted({each.layer for each in found})
    }
    first = next(iter(layers.values()))
    return QuantConfig(
        keys=first.keys, values=first.values, sinks=sinks, residual=residual, layers=layers, name=f"allocated-{bits:g}"
    )


@torch.inference_mode()
def sensitivities(
    model: PreTrainedModel,
    ids: Int[Tensor, " tokens"],
    *,
    sinks: int = 4,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Sensitivity]:
    """What coding each layer's keys, and its values, costs alone.

    Args:
        model: In evaluation mode.
        ids: Tokens of one window.
        sinks: First tokens that stay exact.
        progress: As in `allocate`.

    Raises:
        ValueError: If there are too few tokens for any to be coded.
    """
    least = sinks + make_codec(RotatedConfig()).statistics + 1
    if len(ids) < least:
        raise ValueError(f"the text has {len(ids)} tokens, and at least {least} are needed; give a longer one")
    told = progress or (lambda done, total, what: None)
    layers = [layer.index for layer in QuantizedCache(model.config, "identity").coded_layers]
    total, targets = 2 * len(layers) + 1, ids[1:].to(model.device)
    told(0, total, "exact")
    exact = teacher_forced(model, ids, QuantizedCache(model.config, "identity"), chunk=None)[:-1]
    found = []
    for number, (layer, part) in enumerate(((layer, part) for layer in layers for part in ("keys", "values")), 1):
        told(number, total, f"{part} of layer {layer}")
        cache = QuantizedCache(model.config, _probe(layer, part, sinks), prefill="coded")
        coded = teacher_forced(model, ids, cache, chunk=None)[:-1]
        kl = compare_logits(exact, coded, targets).kl.mean().item()
        found.append(Sensitivity(layer=layer, part=part, kl=kl))
    told(total, total, "done")
    return found


def assign_bits(found: Sequence[Sensitivity], average: float) -> dict[tuple[int, str], int]:
    """Bits of each part, by layer and part, whose mean is at most `average` and whose expected divergence is least.

    Raises:
        ValueError: If the average is below the fewest bits of `LADDER`.
    """
    rungs = sorted(LADDER)
    if average < rungs[0]:
        raise ValueError(
            f"an average of {average:.3f} bits a code is less than the {rungs[0]} that every part takes; ask for more bits"
        )
    bits = {(each.layer, each.part): rungs[0] for each in found}
    left = average * len(found) - rungs[0] * len(found)
    heap = [(-_gain(each.kl, rungs[0], rungs[1]), each.layer, each.part, each.kl) for each in found]
    heapq.heapify(heap)
    while heap:
        _, layer, part, kl = heapq.heappop(heap)
        now = bits[layer, part]
        after = rungs[rungs.index(now) + 1]
        if after - now > left + 1e-9:
            continue
        left -= after - now
        bits[layer, part] = after
        if after != rungs[-1]:
            heapq.heappush(heap, (-_gain(kl, after, rungs[rungs.index(after) + 1]), layer, part, kl))
    return bits


def _gain(kl: float, now: int, after: int) -> float:
    """Divergence that a part loses for each bit that it gets."""
    return kl * (LADDER[now] - LADDER[after]) / LADDER[PROBE_BITS] / (after - now)


def _probe(layer: int, part: str, sinks: int) -> QuantConfig:
    exact = IdentityConfig()
    keys: CodecConfig = _key_config(PROBE_BITS) if part == "keys" else exact
    values: CodecConfig = RotatedConfig(bits=PROBE_BITS) if part == "values" else exact
    return QuantConfig(
        keys=exact, values=exact, sinks=sinks, layers={layer: LayerQuant(keys=keys, values=values)}, name="probe"
    )


def _key_config(bits: int) -> RotatedConfig:
    return RotatedConfig(bits=KEY_TIERS.get(bits, bits))


def _scale_bits(model: PreTrainedModel) -> float:
    """Bits of scales for each element that is coded."""
    layers = [layer for layer in layer_memory(model.config, 1) if layer.coded]
    scales = sum(
        layer.kv_heads * 8 * grid_for((PROBE_BITS,), dim).groups
        for layer in layers
        for dim in (layer.key_dim, layer.value_dim)
    )
    return scales / sum(layer.elements for layer in layers)


def _ids(text: str | Tensor, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    if isinstance(text, Tensor):
        return text
    if tokenizer is None:
        raise ValueError("a text needs the model's tokenizer; pass tokenizer=, or token ids in place of the text")
    return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
