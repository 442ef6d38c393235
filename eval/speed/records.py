"""Records of `eval.speed`: one JSON line each, appended, never changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "append", "newest"]

KINDS = ("model", "layers", "prefill", "peak", "kernels", "encode")


def append(record: dict[str, Any], path: Path) -> None:
    """Add a record to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def newest(path: Path) -> dict[str, dict[str, Any]]:
    """The newest record of each kind, in the order of `KINDS`; a record without a kind is of `"model"`.

    Raises:
        ValueError: If there is none, or a line is no record.
    """
    if not path.is_file():
        raise ValueError(f"no results file {path.name}; run: python -m eval.speed model")
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
        kind = record.setdefault("kind", "model") if isinstance(record, dict) else None
        if kind not in KINDS:
            raise ValueError(f"{path.name}, line {number}: a record's kind must be one of {KINDS}, got {kind!r}")
        found[kind] = record
    if not found:
        raise ValueError(f"{path.name} has no record; run: python -m eval.speed model")
    return {kind: found[kind] for kind in KINDS if kind in found}
