"""Records of `eval.bounded` as the tables of the README."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.bounded import retrieve, speed
from eval.bounded.policies import FULL, KINDS

__all__ = ["bounded_tables", "quality_table", "retrieval_table", "stream_table"]

_SAME = ("model", "text", "window", "windows", "scored_from", "chunk")


def bounded_tables(path: Path) -> str:
    """All tables, of the newest record of each kind; quality is joined from all records of the same windows.

    Raises:
        ValueError: If there is no such file, or nothing in it.
    """
    if not path.is_file():
        raise ValueError(f"no results file {path.name}; run: python -m eval.bounded quality")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    of_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("quality", "stream", "retrieve", "speed")}
    parts = []
    firsts = sorted({record["first"] for record in of_kind["quality"]}, reverse=True)
    for first in firsts:
        parts.append(quality_table([r for r in of_kind["quality"] if r["first"] == first]))
    if of_kind["stream"]:
        parts.append(stream_table(of_kind["stream"][-1]))
    if of_kind["retrieve"]:
        parts.append(retrieval_table(of_kind["retrieve"]))
    if of_kind["speed"]:
        newest = of_kind["speed"][-1]
        parts.append(
            f"A decode step with and without a far field, {newest['model']}, {newest['context']:,} tokens read before, all in one run.\n\n{speed.table(newest)}"
        )
    if not parts:
        raise ValueError(f"{path.name} has no record; run: python -m eval.bounded quality")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def quality_table(records: Sequence[dict[str, Any]]) -> str:
    """One line a budget, one column a policy; newer rows take the place of older ones.

    Raises:
        ValueError: If the records are not of the same windows.
    """
    newest = records[-1]
    for name in _SAME:
        if any(record[name] != newest[name] for record in records):
            raise ValueError(f"records of quality differ in {name}: {[record[name] for record in records]}")
    rows = {
        (row["budget"], row["kind"], row["label"], row["scheme"]): row for record in records for row in record["rows"]
    }
    full = next((row for row in rows.values() if row["kind"] == FULL), None)
    last = newest["first"] + newest["windows"] - 1
    lines = [
        f"Perplexity at equal bytes, {newest['model']} on {newest['text']}, windows {newest['first']} to {last} of {newest['window']:,} tokens, positions from "
        f"{newest['scored_from']:,} scored"
        + ("" if full is None else f"; full attention {full['perplexity']:.2f}")
        + ". In brackets the difference to sinks + window in nats, with its standard error over windows. W: window, M: heavy hitters, C: clusters; int8 codes where no scheme is named.",
        "",
        "| budget, int8 tokens of a head | " + " | ".join(KINDS) + " |",
        "| ---: |" + " ---: |" * len(KINDS),
    ]
    for budget in sorted({row["budget"] for row in rows.values() if row["budget"]}):
        of_budget = [row for row in rows.values() if row["budget"] == budget]
        plain = next((row for row in of_budget if row["kind"] == KINDS[0] and row["scheme"] == "int8"), None)
        cells = []
        for kind in KINDS:
            found = sorted(
                (row for row in of_budget if row["kind"] == kind),
                key=lambda row: (row["scheme"] != "int8", row["label"]),
            )
            cells.append("<br>".join(_cell(row, plain) for row in found) or "-")
        lines.append(f"| {budget:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def retrieval_table(records: Sequence[dict[str, Any]]) -> str:
    """All policies of the records that ask the same as the newest."""
    newest = records[-1]
    same = ("model", "text", "trials", "seed", "distances")
    joined: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        if all(record[name] == newest[name] for name in same):
            joined |= {(row["budget"], row["kind"], row["label"], row["distance"]): row for row in record["rows"]}
    order = [FULL, *KINDS]
    rows = sorted(joined.values(), key=lambda row: (row["budget"], order.index(row["kind"]), row["distance"]))
    return (
        f"Retrieval, {newest['model']}: digits of a passkey that come back (of {5 * newest['trials']}), and nats a token of a passage of 64 tokens that is "
        "repeated, by how far back the first one stands. Where a policy falls behind full attention, its memory ends.\n\n"
        + retrieve.table(newest | {"rows": rows})
    )


def _cell(row: dict[str, Any], plain: dict[str, Any] | None) -> str:
    scheme = "" if row["scheme"] in (None, "int8") else f"{row['scheme']} "
    text = f"{row['perplexity']:.2f} {scheme}{row['label']}"
    if plain is None or plain is row:
        return text
    difference = np.asarray(row["nll"]) - np.asarray(plain["nll"])
    error = difference.std(ddof=1) / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return f"{text} ({difference.mean():+.3f} ± {error:.3f})"


def stream_table(record: dict[str, Any]) -> str:
    """Perplexity and bytes of the whole cache by position, a few stretches of the stream together."""
    stretches = [row["stretches"] for row in record["rows"]]
    ends = [stretch["end"] for stretch in stretches[0]]
    marks = [end for end in ends if end % 8192 == 0] or ends[-1:]
    lines = [
        f"A stream of {ends[-1]:,} tokens of {record['text']}, {record['model']}: perplexity of the tokens since the mark before, and MiB of the cache there.",
        "",
        "| policy | " + " | ".join(f"to {mark:,}" for mark in marks) + " |",
        "| --- |" + " ---: |" * len(marks),
    ]
    for row in record["rows"]:
        cells, begin = [], 0
        for mark in marks:
            some = [stretch for stretch in row["stretches"] if begin < stretch["end"] <= mark]
            measured = [stretch for stretch in some if stretch["nll"] is not None]
            text = "-"
            if measured:
                text = f"{math.exp(sum(stretch['nll'] for stretch in measured) / len(measured)):.1f}"
            if 0 < len(measured) < len(some):
                text += f" (as far as {measured[-1]['end']:,})"
            cells.append(f"{text}, {some[-1]['nbytes'] / 2**20:.1f} MiB")
            begin = mark
        name = row["kind"] if row["kind"] == FULL else f"{row['kind']} {row['label']}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
