"""Bits for each layer's keys and values: more where a model is sensitive, under a given average.

Each layer's keys, and its values, are coded alone at a few bits, and the divergence of the model's predictions from its exact ones is measured on a
short text. Divergences of parts are about additive, and fall with the bits as the squared error of the codec does, so the best bits under an average are found by
giving the next bits to whatever gains most by each of them. Where all steps cost the same that greedy choice is optimal, since each part gains less with
every step (Fox, Oper. Res. 14 (1966)); where one step costs more than what is left, it is close to it.
Departs from what is done for weights (HAWQ, arXiv:1905.03696): no gradients and no Hessian, the loss itself is measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_kvq.caches import QuantizedCache
from hf_kvq.caches.memory import layer_memory
from hf_kvq.codecs import make_codec
from hf_kvq.codecs.rotated import grid_for
from hf_kvq.config import IdentityConfig, LayerQuant, QuantConfig, RotatedConfig
from hf_kvq.evaluation.divergence import compare_logits
from hf_kvq.evaluation.protocols import teacher_forced
from hf_kvq.evaluation.runner import Progress

__all__ = [
    "LADDER",
    "PROBE_BITS",
    "Assigned",
    "Part",
    "Sensitivity",
    "allocate",
    "assign_bits",
    "average_bits",
    "measure_and_assign",
    "scheme_of",
    "sensitivities",
    "token_ids",
]

Part = Literal["keys", "values"]

Assigned = Mapping[tuple[int, Part], int]
"""Bits of a code, by layer and part."""

LADDER: dict[int, float] = {2: 0.0827, 3: 0.0212, 4: 0.00537, 5: 0.0014, 6: 0.000369, 8: 0.0000335}
"""Bits that a part may get, and the codec's squared error at them, up to 6 on a trellis: of normal numbers at head_dim 64, as a share of their variance."""

KEY_TIERS: dict[int, tuple[int, ...]] = {2: (3, 2, 2, 1), 3: (4, 3, 3, 2)}
"""How keys spend few bits."""

PROBE_BITS = 3
"""Bits of a part whose sensitivity is measured: what they cost stands out from rounding, and is small enough to be additive."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What coding one layer's keys or values costs.

    Attributes:
        layer: Index of the layer.
        part: `"keys"` or `"values"`.
        kl: Mean KL divergence from the exact predictions, in nats, with this part at `PROBE_BITS` bits and all else exact.
        elements: Elements that a cache keeps of it, its weight in an average.
        head_dim: Channels of a head.
    """

    layer: int
    part: Part
    kl: float
    elements: int = 1
    head_dim: int = 64

    def codec(self, bits: int) -> RotatedConfig:
        """Its codec at so many bits a code."""
        return _codec(self.part, bits)

    def bits_per_element(self, bits: int) -> float:
        """What an element takes at so many bits a code, scales included."""
        codec = self.codec(bits)
        grid = grid_for(codec.tiers, self.head_dim, trellis=codec.trellis)
        return 8 * (grid.width + grid.groups) / self.head_dim


def allocate(
    model: PreTrainedModel,
    text: str | Int[Tensor, " tokens"],
    bits: float = 4.2,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tokens: int = 1024,
    sinks: int = 4,
    residual: int = 0,
    progress: Progress | None = None,
) -> QuantConfig:
    """A scheme of `bits` bits an element on average, given out by how sensitive each layer's keys and values are.

    Costs two forwards of `tokens` tokens a layer. `QuantConfig.save` keeps the result.

    Args:
        model: In evaluation mode. Set to attention over codes, it lets codecs learn from queries, as they do in use.
        text: A text of the kind that the cache is for, or its token ids.
        bits: Average over what a cache keeps of these tokens, as codes and their scales; sinks, residual and what is learned of a row come on top.
        tokenizer: The model's, where `text` is one.
        tokens: Of the text that are used, at most.
        sinks: First tokens of every row that stay exact, in the scheme.
        residual: Newest tokens that stay exact, in the scheme.
        progress: Told before every step, and once at the end.

    Raises:
        ValueError: If the text is too short, there is no tokenizer for it, `bits` is out of reach, or no layer can be coded.
    """
    ids = token_ids(text, tokenizer, tokens)
    _, assigned = measure_and_assign(model, ids, bits, sinks=sinks, progress=progress)
    return scheme_of(assigned, sinks=sinks, residual=residual, name=f"allocated-{bits:g}")


def token_ids(
    text: str | Int[Tensor, "*tokens"], tokenizer: PreTrainedTokenizerBase | None, most: int
) -> Int[Tensor, " tokens"]:
    """The first ids of a text, `most` of them at most, with the special tokens that the model begins with.

    Raises:
        ValueError: If there is no tokenizer for a text, ids are not those of one row, or none are wanted.
    """
    if most < 1:
        raise ValueError(f"tokens must be at least 1, got {most}; the default is 1024")
    if isinstance(text, Tensor):
        if text.ndim != 1:
            raise ValueError(f"token ids must be those of one row, got shape {tuple(text.shape)}; try input_ids[0]")
        return text[:most]
    if tokenizer is None:
        raise ValueError("a text needs the model's tokenizer; pass tokenizer=, or token ids in place of the text")
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"][:most], dtype=torch.long)


def measure_and_assign(
    model: PreTrainedModel,
    ids: Int[Tensor, " tokens"],
    bits: float,
    *,
    sinks: int = 4,
    progress: Progress | None = None,
) -> tuple[list[Sensitivity], Assigned]:
    """How sensitive each part is, and the bits that it gets; see `allocate`."""
    assign_bits(_parts(model.config, len(ids)), bits)  # what is out of reach is said before anything is measured
    found = sensitivities(model, ids, sinks=sinks, progress=progress)
    return found, assign_bits(found, bits)


@torch.inference_mode()
def sensitivities(
    model: PreTrainedModel,
    ids: Int[Tensor, " tokens"],
    *,
    sinks: int = 4,
    progress: Progress | None = None,
) -> list[Sensitivity]:
    """What coding each layer's keys, and its values, costs alone. Layers that cannot be coded have none.

    Args:
        model: In evaluation mode.
        ids: Tokens of one window.
        sinks: First tokens that stay exact.
        progress: Told before every step, and once at the end.

    Raises:
        ValueError: If there are too few tokens for any to be coded, or no layer can be coded.
    """
    least = sinks + make_codec(RotatedConfig()).statistics + 1
    if len(ids) < least:
        raise ValueError(f"{len(ids)} tokens are too few, {least} are needed; give a longer text, or use more of it")
    told = progress or (lambda done, total, what: None)
    parts, targets = _parts(model.config, len(ids)), ids[1:].to(model.device)
    told(0, len(parts) + 1, "exact")
    exact = teacher_forced(model, ids, QuantizedCache(model.config, "identity"), chunk=None)[:-1]
    found = []
    for number, part in enumerate(parts, start=1):
        told(number, len(parts) + 1, f"{part.part} of layer {part.layer}")
        cache = QuantizedCache(model.config, _probe(part, sinks), prefill="coded")
        coded = teacher_forced(model, ids, cache, chunk=None)[:-1]
        found.append(replace(part, kl=compare_logits(exact, coded, targets).kl.mean().item()))
    told(len(parts) + 1, len(parts) + 1, "done")
    return found


def assign_bits(found: Sequence[Sensitivity], average: float) -> Assigned:
    """Bits of a code for each part, of a low expected divergence under an average.

    Args:
        found: How sensitive the parts are.
        average: Bits of an element, scales included, that the parts' mean does not go beyond.

    Raises:
        ValueError: If the average is less than the fewest bits of `LADDER` take.
    """
    rungs = sorted(LADDER)
    assigned: dict[tuple[int, Part], int] = {(part.layer, part.part): rungs[0] for part in found}
    least, elements = average_bits(found, assigned), sum(part.elements for part in found)
    if not average >= least:
        raise ValueError(
            f"bits must be at least {least:.3f}, which is {rungs[0]} for every code and what scales take, got {average:g}"
        )
    left = (average - least) * elements
    heap = [(-_gain(part, *rungs[:2]), index, 0) for index, part in enumerate(found)]
    heapq.heapify(heap)
    while heap:
        _, index, rung = heapq.heappop(heap)
        part, now, after = found[index], rungs[rung], rungs[rung + 1]
        if (cost := _cost(part, now, after)) > left + 1e-9 * elements:
            continue
        left -= cost
        assigned[part.layer, part.part] = after
        if after != rungs[-1]:
            heapq.heappush(heap, (-_gain(part, after, rungs[rung + 2]), index, rung + 1))
    return assigned


def average_bits(found: Sequence[Sensitivity], assigned: Assigned) -> float:
    """Bits of an element on average, scales included."""
    bits = sum(part.elements * part.bits_per_element(assigned[part.layer, part.part]) for part in found)
    return bits / sum(part.elements for part in found)


def scheme_of(assigned: Assigned, *, sinks: int, residual: int, name: str) -> QuantConfig:
    """The scheme in which each part has the bits that it was assigned."""
    layers = {
        layer: LayerQuant(
            keys=_codec("keys", assigned[layer, "keys"]), values=_codec("values", assigned[layer, "values"])
        )
        for layer in sorted({layer for layer, _ in assigned})
    }
    rule = next(iter(layers.values()))
    return QuantConfig(keys=rule.keys, values=rule.values, sinks=sinks, residual=residual, layers=layers, name=name)


def _parts(config: PreTrainedConfig, tokens: int) -> list[Sensitivity]:
    """Keys and values of all layers that can be coded, with nothing measured yet; a sliding layer keeps its window of the tokens."""
    memory = layer_memory(config, max(tokens, 1))
    parts = []
    for index in (layer.index for layer in QuantizedCache(config, "identity").coded_layers):
        kept = memory[index]
        for part, dim in zip(get_args(Part), (kept.key_dim, kept.value_dim), strict=True):
            elements = kept.tokens * kept.kv_heads * dim
            parts.append(Sensitivity(layer=index, part=part, kl=0.0, elements=elements, head_dim=dim))
    return parts


def _cost(part: Sensitivity, now: int, after: int) -> float:
    """Bits that all elements of a part take more."""
    return part.elements * (part.bits_per_element(after) - part.bits_per_element(now))


def _gain(part: Sensitivity, now: int, after: int) -> float:
    """Divergence that a part loses for each bit that it takes more."""
    cost = _cost(part, now, after)
    # A head_dim that few bits do not fit in whole bytes has the same codes at both.
    return part.kl * (LADDER[now] - LADDER[after]) / LADDER[PROBE_BITS] / cost if cost else torch.inf


def _probe(part: Sensitivity, sinks: int) -> QuantConfig:
    exact = IdentityConfig()
    layer = replace(LayerQuant(keys=exact, values=exact), **{part.part: part.codec(PROBE_BITS)})
    return QuantConfig(keys=exact, values=exact, sinks=sinks, layers={part.layer: layer}, name="probe")


def _codec(part: Part, bits: int) -> RotatedConfig:
    return RotatedConfig(bits=KEY_TIERS.get(bits, bits) if part == "keys" else bits, trellis=bits != 8)
