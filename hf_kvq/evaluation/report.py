"""Receipts for readers: a table and a heading as text, a picture of quality against size, and a rerun beside its receipt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_kvq.evaluation.config import EXACT
from hf_kvq.evaluation.receipts import Receipt

__all__ = ["compare", "heading", "plot", "table"]

_MIB = 2**20
_WIDE_PERCENT = 10.0
_LABEL_WIDTH, _LABEL_HEIGHT = 115.0, 22.0  # pixels at 150 dpi
_COLUMNS = (
    "scheme",
    "bits/element",
    "perplexity",
    "delta % ± se",
    "KL mean e-3",
    "KL 99 % e-3",
    "same top-1 %",
    "cache MiB",
    "of exact",
    "tokens coded",
    "ms/token",
    "of exact",
)


def heading(receipts: Sequence[Receipt]) -> str:
    """What was measured, in a few plain lines: model, text, protocol, noise floor, machine.

    Raises:
        ValueError: If there is no receipt, or they come from different runs.
    """
    receipt = _one_run(receipts)
    model, text, settings, environment = receipt.model, receipt.text, receipt.settings, receipt.environment
    if settings.protocol == "windows":
        how = "one teacher-forced pass each, every token read as codes"
    else:
        how = f"fed {_count(settings.chunk or settings.window, 'token')} at a time, prefill {settings.prefill}"
    how += ", attention over codes" if settings.attention == "fused" else ""
    bos = "" if settings.bos == "none" else ", BOS before each"
    lines = [
        f"Model: {model.title}, {model.dtype} ({model.source}).",
        f"Text: {text.name}, {text.join}, {text.tokens:,} tokens ({text.source}).",
        f"Protocol {settings.protocol}: {_count(settings.count, 'window')} of {settings.window:,} tokens{bos}, {how}.",
    ]
    if floor := receipt.results.noise_floor:
        lines.append(
            f"Noise floor, exact in one pass against token by token on {floor.tokens:,} tokens: KL "
            f"{floor.kl_mean:.1e}, largest logit difference {floor.max_logit_difference:.2g}."
        )
    lines.append(
        f"Machine: {environment.cpu}, {_count(environment.threads, 'thread')}, {environment.device}; torch {environment.torch}, "
        f"transformers {environment.transformers}, hf_kvq {environment.hf_kvq}."
    )
    return "\n".join(lines)


def table(receipts: Sequence[Receipt]) -> str:
    """The results as an aligned markdown table, one row a receipt, which reads well as plain text too.

    Raises:
        ValueError: If there is no receipt, or they come from different runs.
    """
    _one_run(receipts)
    return _markdown([_COLUMNS, *(_row(receipt) for receipt in receipts)])


def compare(recorded: Receipt, found: Receipt) -> str:
    """A rerun beside the receipt that it repeats, as an aligned markdown table."""
    old, new = recorded.results, found.results
    rows: list[tuple[str, ...]] = [("figure", "receipt", "rerun")]
    for name, digits in (
        ("perplexity", 6),
        ("exact_perplexity", 6),
        ("delta_percent", 5),
        ("kl_mean", 4),
        ("kl_max", 4),
        ("same_top1", 6),
        ("bits_per_element", 5),
        ("nbytes", 12),
        ("tokens_coded", 12),
        ("ms_per_token", 3),
        ("ms_per_token_ratio", 3),
    ):
        values = (getattr(old, name), getattr(new, name))
        rows.append((name, *("-" if value is None else f"{value:.{digits}g}" for value in values)))
    return _markdown(rows)


def plot(receipts: Sequence[Receipt], path: str | Path) -> None:
    """Save a picture of perplexity delta (percent, with its standard error) against bits per element.

    Raises:
        ValueError: If there is no receipt of a coded cache, or they come from different runs.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    first = _one_run(receipts)
    points = [
        (
            receipt.name,
            receipt.results.bits_per_element,
            receipt.results.delta_percent,
            receipt.results.delta_percent_se,
        )
        for receipt in receipts
        if receipt.name != EXACT
    ]
    if not points:
        raise ValueError("a plot needs a receipt of at least one quantized cache, got only the exact one")
    # The object interface draws without pyplot, and so without a display or global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(0, color="0.5", linewidth=1, zorder=1)
    axes.grid(color="0.92", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    for index, (_, bits, delta, error) in enumerate(points):
        axes.errorbar(bits, delta, yerr=error, fmt="o", color=f"C{index % 10}", capsize=3, zorder=3)
    bits_seen = [bits for _, bits, _, _ in points]
    # At least two bits wide: a tenth of a bit between 8-bit schemes must not look like a gulf.
    spare = max(0.25 * (max(bits_seen) - min(bits_seen)), 1.0)
    axes.set_xlim(min(bits_seen) - spare, max(bits_seen) + spare)
    _scale_percent(axes, [delta for _, _, delta, _ in points])
    axes.set_xlabel("bits per element of the cache, everything counted")
    axes.set_ylabel("perplexity against the exact cache, %")
    settings = first.settings
    axes.set_title(
        f"{first.model.title}, {first.text.name}\nprotocol {settings.protocol}, {_count(settings.count, 'window')} of "
        f"{settings.window:,} tokens; bars: one standard error over windows",
        fontsize=9,
    )
    figure.draw_without_rendering()  # settles the layout: labels are placed in pixels
    _label(axes, [(name, bits, delta) for name, bits, delta, _ in points])
    figure.savefig(path)


def _scale_percent(axes: Any, deltas: list[float]) -> None:
    """Linear, or logarithmic from 1 % on where 8 and 2 bits, three orders of magnitude apart, share a picture."""
    axes.margins(y=0.15)
    if max(deltas) <= _WIDE_PERCENT:
        return
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(min(0.0, *deltas) - 0.5, 2 * max(deltas))
    axes.set_yticks([tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick < 2 * max(deltas)])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _label(axes: Any, points: list[tuple[str, float, float]]) -> None:
    """Write every name to the right of its point, in its colour, moved up where it would cover the name below."""
    placed: list[tuple[float, float]] = []
    for index, (name, bits, delta) in sorted(enumerate(points), key=lambda point: point[1][2]):
        x, y = axes.transData.transform((bits, delta))
        label_y = y
        for other_x, other_y in sorted(placed, key=lambda other: other[1]):
            if abs(x - other_x) < _LABEL_WIDTH and abs(label_y - other_y) < _LABEL_HEIGHT:
                label_y = other_y + _LABEL_HEIGHT
        placed.append((x, label_y))
        axes.annotate(
            name,
            (bits, delta),
            xytext=(8, (label_y - y) * 72 / axes.figure.dpi),
            textcoords="offset points",
            va="center",
            color=f"C{index % 10}",
            fontsize=9,
        )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, the first one the header: text columns left, figures right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        for cells in rows
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def _row(receipt: Receipt) -> tuple[str, ...]:
    result = receipt.results
    return (
        receipt.name,
        f"{result.bits_per_element:.2f}",
        f"{result.perplexity:.3f}",
        _delta(receipt),
        f"{1000 * result.kl_mean:.3f}",
        f"{1000 * result.kl_p99:.2f}",
        f"{100 * result.same_top1:.2f}",
        f"{result.nbytes / _MIB:.2f}",
        f"{result.nbytes / result.exact_nbytes:.2f}x",
        f"{result.tokens_coded:,}",
        "-" if result.ms_per_token is None else f"{result.ms_per_token:.1f}",
        "-" if result.ms_per_token_ratio is None else f"{result.ms_per_token_ratio:.2f}x",
    )


def _delta(receipt: Receipt) -> str:
    result = receipt.results
    if receipt.name == EXACT:
        return "0"
    error = "" if result.delta_percent_se is None else f" ± {result.delta_percent_se:.3f}"
    return f"{result.delta_percent:+.3f}{error}"


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def _one_run(receipts: Sequence[Receipt]) -> Receipt:
    if not receipts:
        raise ValueError("there is no receipt to report on")
    if len(runs := sorted({receipt.run for receipt in receipts})) > 1:
        raise ValueError(
            f"the receipts come from {len(runs)} runs ({', '.join(runs)}); their rows compare within one run only"
        )
    return receipts[0]
