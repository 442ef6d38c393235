"""The command; see `eval.speed`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from eval.speed import encode, kernels, layers, model, peak, prefill
from eval.speed.caches import UnequalError
from eval.speed.records import append
from eval.speed.tables import full_table
from hf_kvq.evaluation.environment import current_environment
from hf_kvq.kernels import kernels_for

__all__ = ["main"]

RESULTS = Path(__file__).parents[1] / "results" / "speed.jsonl"
MEASUREMENTS = {
    "layers": (layers, "what the context costs a decode step of random layers"),
    "model": (model, "a decode step of a real model on real text"),
    "prefill": (prefill, "one forward of many tokens into an empty cache"),
    "peak": (peak, "the largest extra memory of one decode step"),
    "encode": (encode, "codes of one token, and of a prompt, by scheme"),
    "kernels": (kernels, "one query over codes, by every kernel that runs on a CPU"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    measurement, _ = MEASUREMENTS[given.kind]
    try:
        measured = measurement.measure(given)
    except (OSError, UnequalError, ValueError, subprocess.CalledProcessError) as error:
        print(f"eval.speed: {error}", file=sys.stderr)
        return 1
    record = {
        "kind": given.kind,
        **measured,
        "kernels": [kernel.name for kernel in kernels_for("cpu")],
        "environment": asdict(current_environment(torch.device("cpu"))),
    }
    print(full_table(record), end="\n\n")
    append(record, given.results)
    print(json.dumps(record))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.speed", description="Speed and memory, caches side by side.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="kind")
    for name, (measurement, summary) in MEASUREMENTS.items():
        command = kinds.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        measurement.add_options(command)
        command.add_argument("--threads", type=int, help="CPU threads; torch's choice where not given")
        command.add_argument("--results", type=Path, default=RESULTS, help="file to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
