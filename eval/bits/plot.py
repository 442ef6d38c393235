"""The picture of `eval.bits`: perplexity against the exact cache by bits an element, a panel for each protocol and model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.bits.records import Group
from eval.bits.tables import is_stock

__all__ = ["Box", "place", "plot"]

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""

_LINEAR = 0.1  # percent: below it the axis is linear, since a delta may be negative
_TICKS = (-0.1, 0, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
_WAYS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
_NEAR, _STEP, _RINGS = 7.0, 9.0, 12  # points: how far a label may stand from its mark
_TITLES = {"windows": "one pass, every token read as codes", "decode": "token by token"}
_FAMILIES = {
    "rotated": ("hf_kvq, learned basis", "o", "C0"),
    "affine": ("hf_kvq, 8 bits", "s", "C2"),
    "kivi": ("hf_kvq, kivi", "D", "C1"),
    "stock": ("transformers' own", "^", "C3"),
}


def plot(groups: Sequence[Group], path: str | Path) -> None:
    """Save a picture: protocols from top to bottom, models from left to right. Rows that are not finite are left out.

    Raises:
        ValueError: If there is nothing to draw.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    drawn = [group for group in groups if group.kind in _TITLES and _points(group)]
    if not drawn:
        raise ValueError("there is no record of windows or decode to draw; run: python -m eval.bits windows")
    # The object interface draws without pyplot, and so without a display or global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = [kind for kind in _TITLES if any(group.kind == kind for group in drawn)]
    # The newest group of a kind and model is the last one.
    panels = {(group.kind, group.newest["model"]): group for group in drawn}
    models = list(dict.fromkeys(model for _, model in panels))
    figure = Figure(figsize=(1 + 5.5 * len(models), 4.6 * len(kinds)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(kinds), len(models), squeeze=False)
    for at, kind in enumerate(kinds):
        for number, model in enumerate(models):
            if (kind, model) in panels:
                _draw(grid[at][number], panels[kind, model])
            else:
                grid[at][number].set_axis_off()
    _legend(figure, list(panels.values()))
    figure.draw_without_rendering()  # settles the layout: labels are placed in pixels
    for axes in grid.flat:
        if axes.axison:
            _label(axes)
    figure.savefig(path)


def place(anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], bounds: Box) -> list[Box]:
    """Where labels go, beside their marks: no two overlap and none covers a mark, as long as there is room.

    Args:
        anchors: The marks, in points of 1/72 inch.
        sizes: Widths and heights of the labels.
        bounds: What they must stay within.
    """
    marks = [(x - 4, y - 4, x + 4, y + 4) for x, y in anchors]
    placed: list[Box] = []
    for (x, y), (width, height) in zip(anchors, sizes, strict=True):
        tried = [_beside(x, y, width, height, way, _NEAR + ring * _STEP) for ring in range(_RINGS) for way in _WAYS]
        placed.append(min(tried, key=lambda box: _trouble(box, [*placed, *marks], bounds)))
    return placed


def _beside(x: float, y: float, width: float, height: float, way: tuple[int, int], distance: float) -> Box:
    centre_x, centre_y = x + way[0] * (distance + width / 2), y + way[1] * (distance + height / 2)
    return centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2


def _trouble(box: Box, others: Sequence[Box], bounds: Box) -> float:
    """Area that it covers of others, and that sticks out."""
    outside = _area(box) - _shared(box, bounds)
    return outside + sum(_shared(box, other) for other in others)


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def _shared(box: Box, other: Box) -> float:
    return _area((max(box[0], other[0]), max(box[1], other[1]), min(box[2], other[2]), min(box[3], other[3])))


def _points(group: Group) -> list[dict[str, Any]]:
    return [row for row in group.rows if row["delta_percent"] is not None]


def _family(row: dict[str, Any]) -> str:
    return "stock" if is_stock(row) else row["config"]["keys"]["kind"]


def _draw(axes: Any, group: Group) -> None:
    axes.axhline(0, color="0.5", linewidth=1, zorder=1)
    axes.grid(color="0.92", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    rows = sorted(_points(group), key=lambda row: row["bits_per_element"])
    for mode in dict.fromkeys(row["mode"] for row in rows):
        line = [row for row in rows if row["mode"] == mode and _family(row) == "rotated"]
        axes.plot(*_coordinates(line), color="C0", linewidth=1, alpha=0.4, zorder=2)
    for row in rows:
        _, marker, colour = _FAMILIES.get(_family(row), ("", "o", "0.3"))
        drawn = axes.errorbar(
            row["bits_per_element"], row["delta_percent"], yerr=row["delta_percent_se"], fmt=marker, color=colour,
            markerfacecolor="white" if row["mode"].isdigit() else colour, markersize=5, capsize=2, zorder=3,
        )  # fmt: skip
        drawn.lines[0].set_gid(_name(row))  # the mark alone, not the bars' caps
    _scale(axes, rows)
    record = group.newest
    axes.set_xlabel("bits per element of the cache, everything counted")
    axes.set_ylabel("perplexity against the exact cache, %")
    axes.set_title(
        f"{record['model']}, {_TITLES[group.kind]}\n{record['text']}, {record['windows']} x {record['window']:,} tokens",
        fontsize=9,
    )


def _coordinates(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["bits_per_element"] for row in rows], [row["delta_percent"] for row in rows]


def _scale(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Logarithmic from 0.1 % on: eight and two bits lie four orders of magnitude apart."""
    bits, deltas = _coordinates(rows)
    spare = max(0.2 * (max(bits) - min(bits)), 1.0)
    axes.set_xlim(min(bits) - spare / 2, max(bits) + spare)
    low, high = min(0.0, *deltas, 0.0), max(*deltas, 2 * _LINEAR)
    axes.set_yscale("symlog", linthresh=_LINEAR)
    axes.set_ylim(2 * low - _LINEAR / 2, 3 * high)
    axes.set_yticks([tick for tick in _TICKS if 2 * low - _LINEAR / 2 <= tick <= 3 * high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _name(row: dict[str, Any]) -> str:
    return f"{row['scheme'].removeprefix('stock ')}" + (f" +{row['mode']}" if row["mode"].isdigit() else "")


def _legend(figure: Any, groups: Sequence[Group]) -> None:
    """What colours and hollow marks mean, below all panels."""
    from matplotlib.lines import Line2D

    rows = [row for group in groups for row in _points(group)]
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, label=label)
        for family, (label, marker, colour) in _FAMILIES.items()
        if any(_family(row) == family for row in rows)
    ]
    if residuals := sorted({row["mode"] for row in rows if row["mode"].isdigit()}):
        label = f"hollow, +{', +'.join(residuals)}: so many of the newest tokens exact"
        handles.append(Line2D([], [], linestyle="", marker="o", color="0.4", markerfacecolor="white", label=label))
    bars = Line2D([], [], linestyle="", label="bars: one standard error over windows")
    figure.legend(handles=[*handles, bars], loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _label(axes: Any) -> None:
    """Write every name beside its mark, with a line to it where the label is not near."""
    figure = axes.figure
    scale = 72 / figure.dpi
    marks = [line for line in axes.get_lines() if line.get_gid()]
    anchors = [tuple(scale * axes.transData.transform((mark.get_xdata()[0], mark.get_ydata()[0]))) for mark in marks]
    texts = [
        axes.annotate(mark.get_gid(), (0, 0), color=mark.get_color(), fontsize=8, annotation_clip=False)
        for mark in marks
    ]
    extents = [text.get_window_extent(figure.canvas.get_renderer()) for text in texts]
    inside = axes.get_window_extent()
    bounds = tuple(scale * edge for edge in (inside.x0, inside.y0, inside.x1, inside.y1))
    sizes = [(scale * extent.width, scale * extent.height) for extent in extents]
    for text, mark, (x, y), box in zip(texts, marks, anchors, place(anchors, sizes, bounds), strict=True):
        text.remove()
        centre = (box[0] + box[2]) / 2 - x, (box[1] + box[3]) / 2 - y
        far = max(abs(centre[0]) - (box[2] - box[0]) / 2, abs(centre[1]) - (box[3] - box[1]) / 2) > _NEAR + _STEP
        axes.annotate(
            mark.get_gid(), (mark.get_xdata()[0], mark.get_ydata()[0]), xytext=centre, textcoords="offset points",
            ha="center", va="center", color=mark.get_color(), fontsize=8, zorder=4,
            arrowprops={"arrowstyle": "-", "color": mark.get_color(), "linewidth": 0.5, "alpha": 0.6} if far else None,
        )  # fmt: skip
