"""Records of `eval.bits`: one JSON line each, appended, never changed; and what they say together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "RESULTS", "Group", "joined"]

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bits.jsonl"
KINDS = ("windows", "decode", "bias")
_OF_GROUP = ("kind", "model", "attention")
_SAME = (
    "weights_sha256", "text_sha256", "window", "first", "windows", "bos", "begin", "chunk", "single_from",
)  # fmt: skip
_OF_ROW = ("scheme", "mode", "placement")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that compare: all that was measured with the settings of the newest record of a kind, model and attention.

    Attributes:
        newest: That record.
        rows: The newest row of each scheme (and mode, and placement), in the order in which they were first measured.
        failed: What kept schemes from being measured, by name.
        runs: Number of records.
    """

    newest: dict[str, Any]
    rows: list[dict[str, Any]]
    failed: dict[str, str]
    runs: int

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.newest["kind"]


def joined(path: Path) -> list[Group]:
    """The groups of a file, by kind; none where there is no file.

    Raises:
        ValueError: If a line is no record.
    """
    if not path.is_file():
        return []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
        if not isinstance(record, dict) or record.get("kind") not in KINDS:
            raise ValueError(f"{path.name}, line {number}: a record's kind must be one of {KINDS}")
        groups.setdefault(tuple(record[name] for name in _OF_GROUP), []).append(record)
    found = [_group(records) for records in groups.values()]
    return sorted(found, key=lambda group: KINDS.index(group.kind))


def _group(records: list[dict[str, Any]]) -> Group:
    newest = records[-1]
    equal = [record for record in records if all(record[name] == newest[name] for name in _SAME)]
    rows, failed = {}, {}
    for record in equal:
        for row in record["rows"]:
            rows[tuple(row.get(name) for name in _OF_ROW)] = row
            failed.pop(row["scheme"], None)
        failed |= record["failed"]
    return Group(newest=newest, rows=list(rows.values()), failed=failed, runs=len(equal))
