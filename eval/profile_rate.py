"""`python -m eval.profile_rate --text FILE`: sorted profiles against codes per token, on keys and values of a real model.

Keys (after RoPE) and values of exact forwards are cut into groups of `--block` tokens of one layer and head. The error of a group is
its squared error over the sum of its squares; a group counts as much as any other. Bits count all bytes of each method. Rank codes are
measured without their gate; what share of the groups the gates would let pass stands beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from eval.speed.records import append
from hf_kvq.codecs.affine import PerTokenAffineCodec, PerTokenInt4Codec
from hf_kvq.codecs.base import Codec
from hf_kvq.codecs.sorted_profile import fit_sorted_profile, lilliefors_threshold, reconstruct
from hf_kvq.evaluation import load_model, load_text
from hf_kvq.evaluation.data import tokenize, windows
from hf_kvq.evaluation.environment import current_environment
from hf_kvq.evaluation.models import cache_argument

__all__ = ["main", "measure", "table"]

RESULTS = Path(__file__).parent / "results" / "profile_rate.jsonl"
RANK_BITS: dict[str, int | None] = {
    "sorted profile, exact ranks": None,
    **{f"sorted profile, rank codes of {bits} bits": bits for bits in (2, 3, 4, 8)},
}
PER_TOKEN: dict[str, Codec] = {"int8 per token": PerTokenAffineCodec("int8"), "int4 per token": PerTokenInt4Codec()}
SEED_THRESHOLD = 0.05

Group = Float[Tensor, "tokens channels"]


@torch.inference_mode()
def measure(model: PreTrainedModel, ids: Int[Tensor, "windows tokens"], *, block: int) -> dict[str, Any]:
    """Bits, errors and shares of passing groups; a tail of a window that fills no block is dropped.

    Raises:
        ValueError: If a window is shorter than a block.
    """
    if not 1 <= block <= ids.shape[1]:
        raise ValueError(f"block must be 1 to the {ids.shape[1]} tokens of a window, got {block}")
    found: dict[str, dict[str, list[Any]]] = {"keys": {}, "values": {}}
    for window in tqdm(ids, desc="windows", leave=False, file=sys.stderr):
        cache = DynamicCache(config=model.config)
        model(window[None], **{cache_argument(model): cache}, logits_to_keep=1)
        layers: Any = cache.layers
        for layer in layers:
            for name, states in (("keys", layer.keys), ("values", layer.values)):
                for group in _groups(states, block):
                    _add(found[name], group.float())
    return {
        "block": block,
        "groups": len(found["keys"]["elements"]),
        "elements": found["keys"]["elements"][0],
        "methods": {method: _figures(found, method) for method in [*RANK_BITS, *PER_TOKEN]},
        "pass": {
            gate: {name: statistics.fmean(part[gate]) for name, part in found.items()}
            for gate in ("seed", "lilliefors")
        },
    }


def table(record: dict[str, Any]) -> str:
    """The record as markdown."""
    header = [
        "method",
        "bits an element",
        "NMSE of keys",
        "NMSE of values",
        "pass seed: keys, values",
        "pass Lilliefors",
    ]
    lines = [header, ["---", *["---:"] * 5]]
    for method, row in record["methods"].items():
        shares = [
            ", ".join(f"{share:.1%}" for share in record["pass"][gate].values()) if method in RANK_BITS else "-"
            for gate in ("seed", "lilliefors")
        ]
        lines.append([method, f"{row['bits']:.3f}", f"{row['nmse_keys']:.3g}", f"{row['nmse_values']:.3g}", *shares])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def newest_table(path: Path) -> str:
    """The last record of a results file as markdown.

    Raises:
        ValueError: If there is no such file.
    """
    if not path.is_file():
        raise ValueError(f"no results file {path.name}; run: python -m eval.profile_rate")
    record = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return table(record) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        loaded, text = load_model(given.model), load_text(given.text)
        ids = windows(tokenize(text, loaded.tokenizer), given.window, count=given.windows)
        measured = measure(loaded.model, ids, block=given.block)
    except (OSError, ValueError) as error:
        print(f"eval.profile_rate: {error}", file=sys.stderr)
        return 1
    record = {
        "model": loaded.title,
        "weights_sha256": loaded.weights_sha256,
        "text": text.name,
        "window": given.window,
        "windows": given.windows,
        **measured,
        "environment": asdict(current_environment(torch.device("cpu"))),
    }
    print(table(record), end="\n\n")
    append(record, given.results)
    print(json.dumps(record))
    return 0


def _groups(states: Float[Tensor, "1 kv_heads tokens channels"], block: int) -> Iterator[Group]:
    for head in states[0]:
        yield from (group for group in head.split(block) if len(group) == block)


def _add(found: dict[str, list[Any]], group: Group) -> None:
    """Append what one group gives to the lists of `found`."""

    def note(name: str, figure: Any) -> None:
        found.setdefault(name, []).append(figure)

    note("elements", group.numel())
    statistic = fit_sorted_profile(group).ks_statistic
    note("seed", statistic <= SEED_THRESHOLD)
    note("lilliefors", statistic <= lilliefors_threshold(group.numel()))
    for method, bits in RANK_BITS.items():
        encoding = fit_sorted_profile(group, gof_threshold=1.0, rank_bits=bits)
        note(method, (encoding.bits_per_element, _nmse(group, reconstruct(encoding))))
    channels = group.shape[1]
    for method, codec in PER_TOKEN.items():
        decoded = codec.decode(codec.encode(group[None, None]), head_dim=channels)[0, 0]
        note(method, (codec.bits_per_token(1, channels, torch.float32) / channels, _nmse(group, decoded.numpy())))


def _nmse(group: Group, decoded: np.ndarray) -> float:
    """Squared error over the sum of squares; 0 for zeros, which every method keeps."""
    exact = group.numpy().astype(np.float64)
    energy = float((exact**2).sum())
    return float(((decoded - exact) ** 2).sum()) / energy if energy else 0.0


def _figures(found: dict[str, dict[str, list[Any]]], method: str) -> dict[str, float]:
    bits = [bits for part in found.values() for bits, _ in part[method]]
    errors = {f"nmse_{name}": statistics.fmean(error for _, error in part[method]) for name, part in found.items()}
    return {"bits": statistics.fmean(bits), **errors}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.profile_rate",
        description="Bits and errors of sorted profiles on keys and values.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", help="a hub id or a local folder in place of the embedded default")
    parser.add_argument("--text", help="a local UTF-8 text file in place of the wikitext test split")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=1, help="windows, from the first on")
    parser.add_argument("--block", type=int, default=128, help="tokens of a group")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
