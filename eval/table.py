"""`python -m eval.table [--check]`: write the README's tables from the newest complete runs in `eval/results`.

A table stands between `<!-- results:SUITE -->` and `<!-- /results -->`; those of `speed`, `bits`, `bounded` and `profile_rate` come from the newest
records of `eval.speed`, `eval.bits`, `eval.bounded` and `eval.profile_rate`. `--check` writes nothing, and exits with 1 and a diff where
the README is not what the results say.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from eval import profile_rate
from eval.bits.tables import bits_tables
from eval.bounded.tables import bounded_tables
from eval.speed.records import newest
from eval.speed.tables import compact_table
from hf_kvq.evaluation import Receipt, heading, table

__all__ = ["main", "newest_run", "render"]

ROOT = Path(__file__).parent.parent
SPEED = "speed"
_BLOCK = re.compile(r"(<!-- results:(?P<suite>\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.table", description="Write the README's tables from results."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 and a diff where it is stale")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "eval" / "results")
    given = parser.parse_args(arguments)
    try:
        old = given.readme.read_text(encoding="utf-8")
        new = render(old, given.results)
    except (OSError, ValueError) as error:
        print(f"eval.table: {error}", file=sys.stderr)
        return 2
    if given.check:
        diff = list(
            difflib.unified_diff(old.splitlines(), new.splitlines(), "README.md", "from eval/results", lineterm="")
        )
        if diff:
            print(*diff, "README.md is stale; run: python -m eval.table", sep="\n", file=sys.stderr)
        return int(bool(diff))
    given.readme.write_text(new, encoding="utf-8")
    return 0


def render(readme: str, results: Path) -> str:
    """The README with every block written anew.

    Raises:
        ValueError: If it has no block, or a block's suite has no complete run.
    """
    if not _BLOCK.search(readme):
        raise ValueError("README has no block; put <!-- results:SUITE --> and <!-- /results --> on lines of their own")

    def block(match: re.Match[str]) -> str:
        path = results / f"{match['suite']}.jsonl"
        content = _TABLES.get(match["suite"], _suite)(path)
        return f"{match[1]}\n{content}\n{match[3]}"

    return _BLOCK.sub(block, readme)


def _suite(path: Path) -> str:
    receipts = newest_run(path)
    notes = "".join(f"- {line}\n" for line in heading(receipts).splitlines())
    return f"{table(receipts)}\n\n{notes}"


def _speed(path: Path) -> str:
    return "\n\n".join(compact_table(record) for record in newest(path).values()) + "\n"


_TABLES: Mapping[str, Callable[[Path], str]] = MappingProxyType(
    {SPEED: _speed, "bits": bits_tables, "bounded": bounded_tables, "profile_rate": profile_rate.newest_table}
)


def newest_run(path: Path) -> list[Receipt]:
    """The receipts of the last run in a results file that has all its schemes, in the run's order.

    Raises:
        ValueError: If there is none.
    """
    if not path.is_file():
        raise ValueError(f"no results file {path.name}; run: python -m eval.run {path.stem}")
    runs: dict[str, dict[str, Receipt]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            receipt = Receipt.from_json(line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
        runs.setdefault(receipt.run, {})[receipt.name] = receipt
    for found in reversed(runs.values()):
        schemes = next(iter(found.values())).settings.schemes
        if set(schemes) <= set(found):
            return [found[scheme] for scheme in schemes]
    raise ValueError(f"{path.name} has no complete run; run: python -m eval.run {path.stem}")


if __name__ == "__main__":
    sys.exit(main())
