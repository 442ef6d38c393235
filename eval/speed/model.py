"""A decode step of a real model on real text, with everything that a step takes."""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache

from eval.speed.caches import (
    BOUNDS,
    CHECKED,
    CONTENDERS,
    DYNAMIC,
    STATIC,
    attend_with,
    built,
    difference,
    mode_difference,
    require_equal,
    step,
)
from eval.speed.timing import WARM_UP, in_turns, ratio_spread, spread
from hf_kvq import QuantizedCache
from hf_kvq.evaluation import load_model, load_text
from hf_kvq.evaluation.data import tokenize
from hf_kvq.evaluation.models import cache_argument

__all__ = ["add_options", "add_sources", "measure", "sources"]

CHUNK = 512
"""Tokens of one forward of the prefill."""


def add_options(parser: ArgumentParser) -> None:
    add_sources(parser)
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 16384], help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")


def add_sources(parser: ArgumentParser) -> None:
    """The options that `sources` reads."""
    parser.add_argument("--model", help="a hub id or a local folder in place of the embedded default")
    parser.add_argument("--text", help="a local UTF-8 text file in place of the wikitext test split")


def sources(given: Namespace, tokens: int) -> tuple[Any, Tensor, dict[str, Any]]:
    """The model, the first `tokens` tokens of the text, and what identifies both.

    Raises:
        ValueError: If the text has fewer.
    """
    loaded, text = load_model(given.model), load_text(given.text)
    ids = tokenize(text, loaded.tokenizer)
    if len(ids) < tokens:
        raise ValueError(f"{text.name} has {len(ids)} tokens, {tokens} are needed; try fewer tokens or another --text")
    identity = {"model": loaded.title, "weights_sha256": loaded.weights_sha256, "text": text.name}
    return loaded.model, ids[:tokens], identity


@torch.inference_mode()
def measure(given: Namespace) -> dict[str, Any]:
    """The record's own part."""
    rounds = WARM_UP + given.steps
    model, ids, identity = sources(given, max(given.context) + rounds + CHECKED)
    runs = [_run(model, ids[: context + rounds + CHECKED], context, given.steps) for context in given.context]
    return {**identity, "runs": runs}


def _run(model: Any, ids: Tensor, context: int, steps: int) -> dict[str, Any]:
    rounds = WARM_UP + steps
    caches, missing = _filled(model, ids[:context], len(ids))
    tokens = ids[context:].view(-1, 1, 1)
    differences = dict.fromkeys(caches, 0.0)

    def check(logits: dict[str, Tensor]) -> None:
        for name, got in logits.items():
            differences[name] = max(differences[name], difference(got, logits[DYNAMIC]))

    times = in_turns(
        list(caches),
        steps,
        prepare=lambda name: attend_with(model, name),
        run=lambda name, number: step(model, tokens[number], caches[name]),
        check=check,
    )
    require_equal(f"{STATIC} against {DYNAMIC}", differences[STATIC], BOUNDS["float32"])
    modes = {}
    for name, cache in caches.items():
        if isinstance(cache, QuantizedCache):
            modes[name] = mode_difference(model, tokens[rounds:], cache)
            require_equal(f"{name} against its other mode", modes[name], BOUNDS["float32"])
    return {
        "context": context,
        "steps": steps,
        "equality": {"bound": BOUNDS["float32"], STATIC: differences[STATIC], **modes},
        **_figures(times, differences),
        "skipped": missing,
    }


def _filled(model: Any, ids: Tensor, length: int) -> tuple[dict[str, Cache], dict[str, str]]:
    """All caches with the states of one prefill, and those that could not be built."""
    source = DynamicCache(config=model.config)
    attend_with(model, DYNAMIC)
    for part in tqdm(ids.split(CHUNK), desc="prefill", leave=False, file=sys.stderr):
        model(part[None], **{cache_argument(model): source}, logits_to_keep=1)
    caches, missing = built(CONTENDERS, model.config, length)
    for name, cache in caches.items():
        attend_with(model, name)
        for index, layer in enumerate(source.layers):
            cache.update(layer.keys, layer.values, index)
    return caches, missing


def _figures(times: dict[str, list[float]], differences: dict[str, float]) -> dict[str, Any]:
    """Times of each cache, and its speed (1.5: half as many tokens more a second) as a ratio to transformers' own."""

    def quickest(group: str) -> str:
        names = [name for name in times if CONTENDERS[name].group == group]
        return min(names, key=lambda name: statistics.median(times[name]))

    exact, quantized = quickest("exact"), quickest("quantized")
    caches = {}
    for name, taken in times.items():
        milliseconds = spread(taken)
        caches[name] = {
            "ms_per_token": milliseconds.pop("median"),
            **milliseconds,
            "tokens_per_second": 1000 / statistics.median(taken),
            "ratio": statistics.median([mine / its for mine, its in zip(taken, times[DYNAMIC], strict=True)]),
            "speed_to_dynamic": ratio_spread(times[DYNAMIC], taken),
            "speed_to_exact": ratio_spread(times[exact], taken),
            "speed_to_quantized": ratio_spread(times[quantized], taken),
            "difference": differences[name],
        }
    return {"quickest_exact": exact, "quickest_quantized": quantized, "caches": caches}
