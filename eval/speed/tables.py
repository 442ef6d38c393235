"""Records of `eval.speed` as markdown: everything for the one who measured, less of it for the README."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.speed.caches import DYNAMIC, INT8, STATIC

__all__ = ["compact_table", "full_table"]

Record = dict[str, Any]
Render = Callable[[Record], str]
MIB = 2**20


def full_table(record: Record) -> str:
    """What was measured, the table, and the machine."""
    return _shown(record, _FULL[record["kind"]])


def compact_table(record: Record) -> str:
    """The same, short."""
    return _shown(record, _COMPACT[record["kind"]])


def _shown(record: Record, render: Render) -> str:
    # A record of several runs has what they share, and each one's own.
    parts = [{**record, **run} for run in record.get("runs", [record])]
    tables = (f"{_HEADINGS[record['kind']](part)}\n\n{render(part)}" for part in parts)
    return "\n\n".join([*tables, f"- {_machine(record)}"])


def _machine(record: Record) -> str:
    environment = record["environment"]
    kernels = f"; kernels: {', '.join(record['kernels'])}" if "kernels" in record else ""
    threads = environment["threads"]
    return (
        f"Machine: {environment['cpu']}, {threads} thread{'' if threads == 1 else 's'}, {environment['device']}; torch {environment['torch']}, "
        f"transformers {environment['transformers']}, hf_kvq {environment['hf_kvq']}{kernels}."
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def _range(spread: dict[str, float], digits: int = 2) -> str:
    return f"{spread['median']:.{digits}f} ({spread['p20']:.{digits}f} to {spread['p80']:.{digits}f})"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _model_heading(record: Record) -> str:
    return (
        f"Decode step of {record['model']} on {record['text']}, {record['context']:,} tokens of context, {record['steps']} steps; speed as "
        "a ratio of tokens a second (higher is quicker), median (20th to 80th percentile) over steps."
    )


def _model(record: Record) -> str:
    header = ["cache", "ms a token", "tokens a second", f"speed to {DYNAMIC}"]
    exact, quantized = record.get("quickest_exact"), record.get("quickest_quantized")
    header += [f"to the quickest unquantized ({exact})", f"to the quickest stock quantized ({quantized})"] * bool(
        exact
    )
    rows = [[name, *_model_cells(row)] for name, row in record["caches"].items()]
    rows += [
        [name, f"skipped: {reason}", *[""] * (len(header) - 2)] for name, reason in record.get("skipped", {}).items()
    ]
    return _markdown(header, rows)


def _model_cells(row: Record) -> list[str]:
    milliseconds = {"median": row["ms_per_token"], "p20": row["p20"], "p80": row["p80"]}
    cells = [_range(milliseconds, 1), f"{1000 / row['ms_per_token']:.1f}"]
    if "speed_to_dynamic" not in row:  # a record of the time before kinds
        return [*cells, f"{1 / row['ratio']:.2f}"]
    return [*cells, *(_range(row[f"speed_to_{name}"]) for name in ("dynamic", "exact", "quantized"))]


def _layers_heading(record: Record) -> str:
    return (
        f"What the context costs a decode step: {record['layers']} random layers, time with the context less the time with "
        f"{record['short']} tokens, {record['steps']} steps."
    )


def _layers(record: Record) -> str:
    names = [INT8, DYNAMIC, STATIC, *_other_names(record)]
    header = ["query x kv heads x dim", "dtype", "batch", "context", *(f"{name}, cost ms" for name in names)]
    header += [f"{DYNAMIC} / int8", f"{STATIC} / int8", f"int8 / {DYNAMIC} at {record['short']}"]
    rows = []
    for row in record["combinations"]:
        place = [row["shape"], row["dtype"], str(row["batch"]), f"{row['context']:,}"]
        if row["skipped"]:
            rows.append([*place, f"skipped: {row['skipped']}", *[""] * (len(header) - len(place) - 1)])
            continue
        costs = [_range(row["caches"][name]["cost_ms"]) for name in names]
        ratios = row["ratios"]
        cells = [_times(ratios["dynamic_cost_to_int8"]), _times(ratios["static_cost_to_int8"])]
        rows.append([*place, *costs, *cells, _range(ratios["int8_to_dynamic_short"])])
    return _markdown(header, rows) + "\n\n" + _layers_times(record, names)


def _layers_times(record: Record, names: Sequence[str]) -> str:
    """The steps themselves."""
    header = ["query x kv heads x dim", "dtype", "batch", "context"]
    header += [f"{name}, ms at {record['short']} / at the context" for name in names]
    rows = [
        [row["shape"], row["dtype"], str(row["batch"]), f"{row['context']:,}"]
        + [f"{_range(row['caches'][name]['ms_short'])} / {_range(row['caches'][name]['ms'])}" for name in names]
        for row in record["combinations"]
        if not row["skipped"]
    ]
    return _markdown(header, rows)


def _other_names(record: Record) -> list[str]:
    """Caches besides the three that every table names, in the order of the record."""
    measured = next((row["caches"] for row in record["combinations"] if not row["skipped"]), {})
    return [name for name in measured if name not in (INT8, DYNAMIC, STATIC)]


def _layers_compact(record: Record) -> str:
    """One row a shape, dtype and batch; the cost of both unquantized caches as a multiple of int8's at each length."""
    contexts = sorted({row["context"] for row in record["combinations"]})
    header = ["query x kv heads x dim", "dtype", "batch"]
    header += [f"{context:,}" for context in contexts] + [f"int8 / {DYNAMIC} at {record['short']}"]
    groups: dict[tuple[str, str, int], dict[int, Record]] = {}
    for row in record["combinations"]:
        groups.setdefault((row["shape"], row["dtype"], row["batch"]), {})[row["context"]] = row
    rows = []
    for (shape, dtype, batch), by_context in groups.items():
        measured = [row for row in by_context.values() if not row["skipped"]]
        short = _range(measured[-1]["ratios"]["int8_to_dynamic_short"]) if measured else "-"
        rows.append([shape, dtype, str(batch), *(_both(by_context.get(context)) for context in contexts), short])
    note = f"A cell: cost of {DYNAMIC} / cost of int8 fused, and {STATIC}'s likewise (higher is better for int8); - where int8's drowns in the noise."
    return f"{_markdown(header, rows)}\n\n- {note}"


def _both(row: Record | None) -> str:
    if row is None:
        return ""
    if row["skipped"]:
        return "skipped"
    return f"{_times(row['ratios']['dynamic_cost_to_int8'])}, {_times(row['ratios']['static_cost_to_int8'])}"


def _prefill_heading(record: Record) -> str:
    return (
        f"One forward of {record['tokens']:,} tokens of {record['text']} into an empty cache, {record['model']}, {record['repeats']} times; "
        "the peak of resident memory beyond what the process held, in a process of its own."
    )


def _prefill(record: Record) -> str:
    header = ["cache", "seconds", f"time to {DYNAMIC}", "peak MiB"]
    rows = [
        [
            name,
            _range({figure: value / 1000 for figure, value in row["ms"].items()}),
            _range(row["time_to_dynamic"]),
            f"{row['peak_bytes'] / MIB:,.0f}",
        ]
        for name, row in record["caches"].items()
    ]
    return _markdown(header, rows)


def _peak_heading(record: Record) -> str:
    return (
        f"Bytes that a decode step of one attention layer holds at most beyond the cache, {record['shape']}, {record['dtype']}; "
        f"a tile of decoded states is at most {record['tile_bytes']:,} bytes."
    )


def _peak(record: Record) -> str:
    names = list(record["contexts"][0]["bytes"])
    rows = [[f"{row['context']:,}", *(f"{row['bytes'][name]:,}" for name in names)] for row in record["contexts"]]
    return _markdown(["context", *names], rows)


def _kernels_heading(record: Record) -> str:
    return (
        f"One query over the codes of one layer, {record['shape']}, {record['dtype']}: milliseconds, and the plain torch kernel's time over each one's, "
        f"{record['steps']} calls."
    )


def _kernels(record: Record) -> str:
    rows = [
        [
            f"{row['context']:,}", row["codes"], name, _range(figures["ms"]), f"{_range(figures['torch_over_it'])}x",
        ]
        for row in record["rows"]
        for name, figures in row["kernels"].items()
    ]  # fmt: skip
    return _markdown(["context", "codes", "kernel", "ms", "torch / it"], rows)


def _encode_heading(record: Record) -> str:
    return f"Making codes of keys and values in one layer, {record['shape']}, {record['dtype']}: microseconds a token, and as a multiple of int8's, {record['steps']} turns."


def _encode(record: Record) -> str:
    one, many = record["rows"]
    header = ["scheme", "one at a time", "to int8", f"{many['at_once']:,} at once", "to int8"]
    rows = []
    for name, figures in many["schemes"].items():
        single = one["schemes"].get(name)
        cells = ["", ""] if single is None else [_range(single["us_per_token"], 1), _range(single["to_int8"])]
        rows.append([name, *cells, _range(figures["us_per_token"], 1), _range(figures["to_int8"])])
    return _markdown(header, rows)


_HEADINGS: dict[str, Render] = {
    "model": _model_heading,
    "layers": _layers_heading,
    "prefill": _prefill_heading,
    "peak": _peak_heading,
    "encode": _encode_heading,
    "kernels": _kernels_heading,
}
_FULL: dict[str, Render] = {
    "model": _model,
    "layers": _layers,
    "prefill": _prefill,
    "peak": _peak,
    "encode": _encode,
    "kernels": _kernels,
}
_COMPACT = _FULL | {"layers": _layers_compact}
