"""`python -m eval.speed`: time of a decode step at a context length, caches side by side in one run.

Every cache gets the states of the same prefill, then all take each step in turn, in an order that rotates, so what else the machine
does meets all of them alike. Ratios are medians of per-step ratios to DynamicCache. The logits of each step are compared with
DynamicCache's, so that a cache that answers fast and wrong is seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers import QuantizedCache as StockQuantizedCache

from hf_kvq import QuantizedCache
from hf_kvq.evaluation import load_model, load_text
from hf_kvq.evaluation.data import tokenize
from hf_kvq.evaluation.environment import current_environment
from hf_kvq.evaluation.models import cache_argument, forward

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results" / "speed.jsonl"
REFERENCE = "DynamicCache"
Build = Callable[[PreTrainedConfig, int], Any]

CACHES: dict[str, Build] = {
    REFERENCE: lambda config, length: DynamicCache(config=config),
    "StaticCache": lambda config, length: StaticCache(config=config, max_cache_len=length),
    "stock fp8": lambda config, length: StockQuantizedCache("fp8", config),
    "hf_kvq int8": lambda config, length: QuantizedCache(config, "int8"),
    "hf_kvq fp8": lambda config, length: QuantizedCache(config, "fp8"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.speed", description="Time decode steps, caches side by side."
    )
    parser.add_argument("--model", help="a hub id or a local folder in place of the embedded default")
    parser.add_argument("--text", help="a local UTF-8 text file in place of the wikitext test split")
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens before the first step (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps after one warm-up (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to append to (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    loaded = load_model(given.model)
    text = load_text(given.text)
    ids = tokenize(text, loaded.tokenizer)[: given.context + given.steps + 1]
    if len(ids) < given.context + given.steps + 1:
        parser.error(
            f"{text.name} has {len(ids)} tokens, {given.context + given.steps + 1} are needed; try a smaller --context"
        )
    caches = _filled(loaded.model, ids[: given.context], len(ids))
    record = {
        "model": loaded.title,
        "weights_sha256": loaded.weights_sha256,
        "text": text.name,
        "context": given.context,
        "steps": given.steps,
        "environment": asdict(current_environment(loaded.model.device)),
        "caches": _timed(loaded.model, ids[given.context :], caches),
    }
    print(_table(record))
    given.results.parent.mkdir(parents=True, exist_ok=True)
    with given.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))
    return 0


@torch.inference_mode()
def _filled(model: Any, ids: torch.Tensor, length: int) -> dict[str, Cache]:
    """All caches with the states of one prefill."""
    source = DynamicCache(config=model.config)
    for part in tqdm(ids.split(512), desc="prefill", leave=False, file=sys.stderr):
        model(part[None], **{cache_argument(model): source}, logits_to_keep=1)
    caches = {name: build(model.config, length) for name, build in CACHES.items()}
    for cache in caches.values():
        for index, layer in enumerate(source.layers):
            cache.update(layer.keys, layer.values, index)
    return caches


@torch.inference_mode()
def _timed(model: Any, ids: torch.Tensor, caches: dict[str, Cache]) -> dict[str, dict[str, float]]:
    taken: dict[str, list[float]] = {name: [] for name in caches}
    differences = dict.fromkeys(caches, 0.0)
    order = list(caches)
    for token in tqdm(ids, desc="steps", leave=False, file=sys.stderr):
        logits = {}
        for name in order:
            start = time.perf_counter()
            logits[name] = forward(model, token.view(1, 1), caches[name])
            taken[name].append(1000 * (time.perf_counter() - start))
        for name, got in logits.items():
            differences[name] = max(differences[name], (got - logits[REFERENCE]).abs().max().item())
        order.append(order.pop(0))
    rows = {}
    for name, times in taken.items():
        timed, reference = times[1:], taken[REFERENCE][1:]  # the first step is a warm-up
        ratios = [mine / its for mine, its in zip(timed, reference, strict=True)]
        p20, _, _, p80 = statistics.quantiles(timed, n=5)
        rows[name] = {
            "ms_per_token": statistics.median(timed),
            "p20": p20,
            "p80": p80,
            "ratio": statistics.median(ratios),
            "max_logit_difference": differences[name],
        }
    return rows


def _table(record: dict[str, Any]) -> str:
    environment = record["environment"]
    lines = [
        f"{record['model']}, {record['context']} tokens of context, {record['steps']} steps, {environment['threads']} threads, {environment['cpu']}",
        "",
        "| cache | ms a token (p20 to p80) | x DynamicCache | max logit difference |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['ms_per_token']:.1f} ({row['p20']:.1f} to {row['p80']:.1f}) | {row['ratio']:.2f} | {row['max_logit_difference']:.2g} |"
        for name, row in record["caches"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
