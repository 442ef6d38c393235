"""Records of `eval.bits` as the tables of the README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.bits.bias import BIAS, NONE, PLACEMENTS
from eval.bits.records import Group, joined
from eval.bits.schemes import STOCK_RESIDUAL
from hf_kvq.codecs.rotated import STATISTICS

__all__ = ["bits_tables", "group_table", "is_stock"]

PICTURE = "bits.png"
_SEVERAL = {
    "kivi": "kivi codes keys in groups of tokens",
    "rotated": f"the learned bases (q8 to q2) come from the first {STATISTICS}",
}
_EMPTY = "Nothing is recorded yet; `python -m eval.bits windows` measures.\n"


def bits_tables(path: Path) -> str:
    """All tables, and the picture where there is one; a sentence where nothing is recorded.

    Raises:
        ValueError: If a line of the file is no record.
    """
    groups = joined(path)
    if not groups:
        return _EMPTY
    parts = [group_table(group) for group in groups]
    if path.with_name(PICTURE).is_file():
        parts.append(
            f"![Perplexity against the exact cache by bits an element, everything counted](eval/results/{PICTURE})"
        )
    return "\n\n".join(parts) + "\n"


def group_table(group: Group) -> str:
    """One kind on one model: heading, table, notes."""
    lines = _bias(group) if group.kind == "bias" else _quality(group)
    notes = [*_notes(group), f"Machine: {_machine(group)}."]
    return "\n".join([f"{_heading(group)}", "", *lines, "", *(f"- {note}" for note in notes)])


def is_stock(row: Mapping[str, Any]) -> bool:
    """Whether a row is of transformers' own cache."""
    return "backend" in row["config"]


def _heading(group: Group) -> str:
    record = group.newest
    what = {
        "windows": "One pass over each window, every token read as codes",
        "decode": "Token by token",
        "bias": f"A constant in the keys, {BIAS[0]:+g} and {BIAS[1]:+g} on two channels of every head before RoPE, one pass over each window",
    }[group.kind]
    if group.kind == "decode" and record["chunk"] > 1:
        until = record["window"] if record["single_from"] is None else record["single_from"]
        what = f"In forwards of {record['chunk']} tokens up to {until:,}, then token by token"
    last = record["first"] + record["windows"] - 1
    which = f"windows {record['first']} to {last}" if record["windows"] > 1 else f"window {record['first']}"
    bos = ", BOS before each" if record["bos"] else ""
    perplexity = next((row["exact_perplexity"] for row in group.rows if row.get("placement", NONE) == NONE), None)
    exact = "" if perplexity is None else f"; exact {perplexity:.3f}"
    return (
        f"{what}: {record['model']} on {record['text']}, {which} of {record['window']:,} tokens{bos}, attention of our caches "
        f"{record['attention']}{exact}. Perplexity against the exact cache in %, ± one standard error over windows."
    )


def _quality(group: Group) -> list[str]:
    """One line a cache: ours by bits, each mode for itself, then transformers' own."""
    decode = group.kind == "decode"
    exact = "newest tokens exact | " if decode else ""
    lines = [
        f"| cache | {exact}bits/element | delta % ± se | KL mean e-3 ± se | same top-1 % |",
        "| --- | " + ("---: | " if decode else "") + "---: | ---: | ---: | ---: |",
    ]
    modes = list(dict.fromkeys(row["mode"] for row in group.rows if not is_stock(row)))
    modes.sort(key=lambda mode: (mode != "own", mode))
    rows = sorted(
        group.rows,
        key=lambda row: (is_stock(row), 0 if is_stock(row) else modes.index(row["mode"]), -row["bits_per_element"]),
    )
    for row in rows:
        cells = [row["scheme"], *([_residual(row)] if decode else []), f"{row['bits_per_element']:.2f}"]
        cells += [_delta(row), _kl(row), _scaled(row["same_top1"], 100, 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _bias(group: Group) -> list[str]:
    """One line a cache, one column a placement."""
    found = {(row["scheme"], row["placement"]): row for row in group.rows}
    placements = [name for name in (NONE, *PLACEMENTS) if any(place == name for _, place in found)]
    exact = {
        placement: next(row["exact_perplexity"] for row in group.rows if row["placement"] == placement)
        for placement in placements
    }
    heads = [
        f"{'no constant' if name == NONE else f'{name} frequency'} (exact {_scaled(exact[name], 1, 2)})"
        for name in placements
    ]
    lines = ["| cache | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
    for scheme in dict.fromkeys(scheme for scheme, _ in found):
        cells = [
            f"{_delta(found[scheme, name])} / {_kl(found[scheme, name])}" if (scheme, name) in found else "-"
            for name in placements
        ]
        lines.append(f"| {scheme} | " + " | ".join(cells) + " |")
    return lines


def _notes(group: Group) -> list[str]:
    notes = []
    if group.kind == "bias":
        notes.append(
            "A cell: delta % / KL mean e-3. Where the constant has ruined the exact model already, neither says much."
        )
    if group.kind != "decode":
        kinds = {row["config"]["keys"]["kind"] for row in group.rows}
        several = [why for kind, why in _SEVERAL.items() if kind in kinds]
        if several:
            notes.append(
                f"One pass is not token by token for codes that need several tokens: {'; '.join(several)}. Until these are there decoding reads exact tokens, one pass codes."
            )
    if group.kind == "decode" and any(is_stock(row) for row in group.rows):
        notes.append(
            f"transformers' own caches of integers make codes of all exact tokens when there are {STOCK_RESIDUAL}, so that they hold half as many on average, and of all "
            f"older ones anew. Their first {group.newest['begin']} tokens see each other exactly. Bytes are those of all tensors that they hold."
        )
    notes += [f"{name}: not measured, {reason}." for name, reason in group.failed.items()]
    return notes


def _residual(row: Mapping[str, Any]) -> str:
    if not is_stock(row):
        return str(row["config"]["residual"])
    residual = row["config"]["residual_length"]
    return f"0 to {residual - 1}" if residual else "0"


def _delta(row: Mapping[str, Any]) -> str:
    if row["delta_percent"] is None:
        return "not finite"
    error = row["delta_percent_se"]
    digits = 3 if abs(row["delta_percent"]) < 10 else 1
    return f"{row['delta_percent']:+.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _kl(row: Mapping[str, Any]) -> str:
    if row["kl_mean"] is None:
        return "not finite"
    error = row["kl_mean_se"]
    return f"{1000 * row['kl_mean']:.3f}" + ("" if error is None else f" ± {1000 * error:.3f}")


def _scaled(figure: float | None, factor: float, digits: int) -> str:
    return "-" if figure is None else f"{factor * figure:.{digits}f}"


def _machine(group: Group) -> str:
    environment = group.newest["environment"]
    threads = environment["threads"]
    return (
        f"{environment['cpu']}, {threads} thread{'' if threads == 1 else 's'}, {environment['device']}; torch {environment['torch']}, "
        f"transformers {environment['transformers']}, hf_kvq {environment['hf_kvq']}; kernels: {', '.join(group.newest['kernels'])}"
    )
