"""Charts as inline SVG, drawn by matplotlib without its global state."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from common.telemetry.sections import Area, Lines, Series, Stack

KIND_COLOURS = {
    "compute": "#2f6db5",
    "optimizer": "#4aa37c",
    "exposed_comm": "#d9573f",
    "input": "#e6a532",
    "idle": "#b7bec8",
    "other": "#8a78b8",
    "outside": "#5d6673",
}
COLOURS = ("#2f6db5", "#d9573f", "#4aa37c", "#e6a532", "#8a78b8", "#3aa6b9", "#b0587f", "#7a8794", "#94602b", "#5b8c2a")
INK, GRID, FAINT = "#27303b", "#e4e8ee", "#66717f"
TICKS = [1, 2, 2.5, 5, 10]
POINTS = 600
"""Points a line is drawn with at most; longer ones are averaged in groups."""
BARS = 32
"""Bars shown at most; of more, evenly spread ones."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same chart is the same text
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#c4ccd6",
    "axes.labelcolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def draw(block: Lines | Stack | Area) -> str:
    """The chart as one <svg> element that refers to nothing outside it."""
    with matplotlib.rc_context(_STYLE):
        if isinstance(block, Lines):
            figure = _lines(block)
        elif isinstance(block, Stack):
            figure = _stack(block)
        else:
            figure = _area(block)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    FigureCanvasSVG(figure)
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return embed(text.getvalue())


def embed(svg: str) -> str:
    """An SVG drawing as it can stand in a page with others: names of its own, no metadata, as wide as its place."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    mark = "c" + hashlib.sha1(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{mark}-", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", svg)
    return re.sub(r'^<svg([^>]*?) height="[^"]*"', r"<svg\1", svg)


def _axes(title: str, height: float = 3.1) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _lines(block: Lines) -> Figure:
    figure, axes = _axes(block.title)
    axes.set_xlabel(block.x_label)
    axes.set_ylabel(block.y_label)
    right: Any = None
    handles = []
    for index, series in enumerate(block.series):
        target = axes
        if series.right:
            right = right or axes.twinx()
            target = right
        handles.append(_line(target, series, COLOURS[index % len(COLOURS)]))
    if right is not None:
        right.set_ylabel(block.right_label)
        right.grid(False)
        right.set_ylim(bottom=0)
    if block.target is not None:
        axes.axhline(block.target[0], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            block.target[1], (0.01, block.target[0]), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", fontsize=8.5, color=INK,
        )  # fmt: skip
    _number_axes(axes, block)
    if len(block.series) > 1:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3, borderaxespad=0.4)
    return figure


def _number_axes(axes: Axes, block: Lines) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=TICKS, integer=block.x_label in ("step", "samples", "tokens")))
    if max(abs(value) for value in axes.get_xlim()) >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if block.log_y:
        axes.set_yscale("log")
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=TICKS))
    if block.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    else:
        limit = max(abs(value) for value in axes.get_ylim())
        if limit >= 10_000 or 0 < limit < 1e-2:
            axes.yaxis.set_major_formatter(EngFormatter(sep="") if limit >= 1 else "{x:.1e}")


def _line(axes: Axes, series: Series, colour: str) -> Any:
    x, y = np.asarray(series.x, dtype=float), np.asarray(series.y, dtype=float)
    y = np.where(np.isfinite(y), y, np.nan)
    marker = "o" if series.marked or len(x) == 1 else None
    if not series.smooth or len(x) < 20:
        x, y = thin(x, y)
        return axes.plot(x, y, color=colour, marker=marker, markersize=4, label=series.name)[0]
    axes.plot(*thin(x, y), color=colour, alpha=0.25, linewidth=1)
    return axes.plot(*thin(x, running_mean(y, max(5, len(y) // 40))), color=colour, label=series.name)[0]


def _stack(block: Stack) -> Figure:
    labels, parts = _some_bars(block)
    height = 1.5 + 0.34 * len(labels) if block.horizontal else 3.1
    figure, axes = _axes(block.title, max(2.2, height))
    places = np.arange(len(labels))
    base = np.zeros(len(labels))
    for index, (name, values) in enumerate(parts.items()):
        colour = KIND_COLOURS.get(name, COLOURS[index % len(COLOURS)])
        drawn = np.nan_to_num(np.asarray(values, dtype=float))
        name = name.replace("_", " ")
        if block.horizontal:
            axes.barh(places, drawn, left=base, color=colour, height=0.66, label=name)
        else:
            axes.bar(places, drawn, bottom=base, color=colour, width=0.66, label=name)
        base += drawn
    _bar_axes(axes, block, labels, places)
    if len(parts) > 1:
        figure.legend(loc="outside lower left", ncols=min(6, len(parts)), columnspacing=1.2, handlelength=1.1)
    return figure


def _bar_axes(axes: Axes, block: Stack, labels: list[str], places: np.ndarray) -> None:
    if block.horizontal:
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel(block.value_label)
        axes.grid(False, axis="y")
    else:
        axes.set_xticks(places, labels)
        axes.set_ylabel(block.value_label)
        axes.grid(False, axis="x")
    values = axes.xaxis if block.horizontal else axes.yaxis
    values.set_major_formatter(EngFormatter(sep=""))
    if block.reference is not None:
        line = axes.axvline if block.horizontal else axes.axhline
        line(block.reference[0], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        place = (block.reference[0], 1.0) if block.horizontal else (1.0, block.reference[0])
        coordinates = ("data", "axes fraction") if block.horizontal else ("axes fraction", "data")
        axes.annotate(
            block.reference[1], place, xycoords=coordinates, xytext=(0, 3), textcoords="offset points",
            ha="right", fontsize=8.5, color=INK,
        )  # fmt: skip


def _some_bars(block: Stack) -> tuple[list[str], dict[str, list[float]]]:
    if len(block.labels) <= BARS:
        return block.labels, block.parts
    chosen = np.unique(np.linspace(0, len(block.labels) - 1, BARS).round().astype(int)).tolist()
    return [block.labels[i] for i in chosen], {name: [row[i] for i in chosen] for name, row in block.parts.items()}


def _area(block: Area) -> Figure:
    figure, axes = _axes(block.title)
    x = np.asarray(block.x, dtype=float)
    rows = [thin(x, np.nan_to_num(np.asarray(values, dtype=float))) for values in block.parts.values()]
    names = list(block.parts)
    colours = [KIND_COLOURS.get(name, COLOURS[index % len(COLOURS)]) for index, name in enumerate(names)]
    if rows:
        labels = [name.replace("_", " ") for name in names]
        axes.stackplot(rows[0][0], *(row for _, row in rows), colors=colours, labels=labels, linewidth=0)
        total = np.sum([row for _, row in rows], axis=0)
        # One slow step (the first, a stall) would press the others flat.
        axes.set_ylim(0, 1.25 * float(np.percentile(total, 97)) or None)
    axes.set_xlabel(block.x_label)
    axes.set_ylabel(block.y_label)
    axes.margins(x=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=TICKS, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside lower left", ncols=min(6, max(1, len(names))), columnspacing=1.2, handlelength=1.1)
    return figure


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most POINTS points: means of equal groups (a group's NaN are left out; a group of NaN stays NaN)."""
    if len(x) <= POINTS:
        return x, y
    edges = np.linspace(0, len(x), POINTS + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(x)])
    known = np.isfinite(y)
    sums = np.add.reduceat(np.where(known, y, 0.0), edges)
    weights = np.add.reduceat(known.astype(float), edges)
    means = np.divide(sums, weights, out=np.full(len(edges), np.nan), where=weights > 0)
    return np.add.reduceat(x, edges) / counts, means


def running_mean(y: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Mean of the `window` values around each, fewer at the ends; NaN are left out."""
    values = np.asarray(y, dtype=float)
    known = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(float), kernel, mode="same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
