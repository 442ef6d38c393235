"""`python -m eval.run SUITE [--text FILE]`: measure a suite and append its receipts to `eval/results/SUITE.jsonl`.

Results are only ever appended. They name files and folders without their path, which means nothing on another machine; the
hashes beside the names say what was in them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from eval.suites import SUITES
from hf_kvq.evaluation import Receipt, evaluate_schemes, heading, table

__all__ = ["append", "main", "without_folders"]

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.run", description="Measure a suite and append its receipts.")
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--text", help="a local UTF-8 text file in place of the wikitext test split")
    parser.add_argument(
        "--join", choices=("raw", "rows"), default="raw", help="how the file is read (default: %(default)s)"
    )
    parser.add_argument("--model", help="a hub id or a local folder in place of the embedded default")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: eval/results)")
    given = parser.parse_args(arguments)
    config = replace(SUITES[given.suite], text=given.text, join=given.join, model=given.model, threads=given.threads)
    with tqdm(leave=False, file=sys.stderr) as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar.total, bar.n = total, done
            bar.set_description(what)

        receipts = evaluate_schemes(config, progress=progress)
    path = append(receipts, given.results / f"{given.suite}.jsonl")
    print(heading(receipts), table(receipts), f"appended to {path}", sep="\n\n")
    return 0


def append(receipts: Sequence[Receipt], path: Path) -> Path:
    """Append receipts to a JSONL file, one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(without_folders(receipt).to_json(indent=None) + "\n" for receipt in receipts)
    return path


def without_folders(receipt: Receipt) -> Receipt:
    """The receipt with local files and folders reduced to their names; `rerun` takes their place again as arguments."""
    model, text = receipt.model, receipt.text
    if model.name is not None and Path(model.name).is_dir():
        model = replace(model, name=Path(model.name).resolve().name)
    if text.path is not None:
        text = replace(text, path=Path(text.path).name)
    return replace(receipt, model=model, text=text)


if __name__ == "__main__":
    sys.exit(main())
