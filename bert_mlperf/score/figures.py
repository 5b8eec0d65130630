"""The picture of a comparison: accuracy against samples and against seconds, and the times to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from bert_mlperf.score.results import Run
from bert_mlperf.score.systems import System

# Okabe and Ito's colours, told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw(systems: Sequence[System]) -> Figure:
    """Draws the systems that have a run with an evaluation; colours follow their order.

    Raises ValueError where no run has one.
    """
    drawn = [system for system in systems if any(run.evaluations for run in system.runs)]
    if not drawn:
        raise ValueError("no run has an evaluation to draw; the logs need eval_accuracy events")
    figure = Figure(figsize=(13, 6.4 + 0.4 * len(drawn)), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(5.2, 0.9 + 0.44 * len(drawn)))
    by_samples = figure.add_subplot(grid[0, 0])
    by_seconds = figure.add_subplot(grid[0, 1], sharey=by_samples)
    times = figure.add_subplot(grid[1, :])
    _curves(by_samples, drawn, against="samples")
    _curves(by_seconds, drawn, against="seconds")
    by_seconds.tick_params(labelleft=False)
    _zoom(by_samples, drawn)
    _times(times, drawn)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the picture in the format of the suffix (.png, .svg, .pdf); an older one stays until the new is whole."""
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format=path.suffix[1:], dpi=130)
    part.replace(path)


def _curves(axes: Axes, systems: Sequence[System], *, against: str) -> None:
    for number, system in enumerate(systems):
        colour = _COLOURS[number % len(_COLOURS)]
        middle = _middle(system)
        for run in system.runs:
            _curve(axes, run, against, colour, bold=run is middle)
    _targets(axes, systems)
    axes.set_ylabel("masked-LM accuracy, held out" if against == "samples" else "")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if against == "samples":
        axes.set_title("accuracy against sequences (bold: median run)", loc="left")
        _horizontal(axes, [run.evaluations[-1].samples for run in _evaluated(systems)], "sequences trained")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    else:
        axes.set_title("accuracy against time", loc="left")
        _horizontal(axes, [run.evaluations[-1].seconds for run in _evaluated(systems)], "seconds since run_start")


def _evaluated(systems: Sequence[System]) -> list[Run]:
    return [run for system in systems for run in system.runs if run.evaluations]


def _horizontal(axes: Axes, ends: Sequence[float | None], label: str) -> None:
    """From 0, or logarithmic where the shortest curve would be squeezed."""
    known = [end for end in ends if end]
    if known and max(known) > 4 * min(known):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{label} (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel(label)


def _curve(axes: Axes, run: Run, against: str, colour: str, *, bold: bool) -> None:
    points = [
        (evaluation.samples if against == "samples" else evaluation.seconds, evaluation.accuracy)
        for evaluation in run.evaluations
        if against == "seconds" or evaluation.samples is not None
    ]
    if not points:
        return
    horizontal, vertical = zip(*points, strict=True)
    axes.plot(
        horizontal,
        vertical,
        color=colour,
        linestyle="-" if run.converged else ":",
        linewidth=1.8 if bold else 0.8,
        alpha=1.0 if bold else 0.35,
        zorder=3 if bold else 2,
    )
    axes.plot(
        horizontal[-1:],
        vertical[-1:],
        color=colour,
        marker="o" if run.converged else "x",
        markersize=4,
        alpha=1.0 if bold else 0.6,
        zorder=4,
    )


def _targets(axes: Axes, systems: Sequence[System]) -> None:
    for target in sorted({system.head.target for system in systems if system.head.target is not None}):
        axes.axhline(target, color="#555555", linestyle="--", linewidth=1, zorder=1)
        axes.annotate(
            f"target {target:g}",
            (0.01, target),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=9,
            color="#555555",
        )


def _zoom(axes: Axes, systems: Sequence[System]) -> None:
    """The last stretch before the target, where most of the time goes, in a corner of the picture."""
    targets = {system.head.target for system in systems}
    reached = [run for system in systems for run in system.converged if len(run.evaluations) > 4]
    if len(targets) != 1 or None in targets or not reached:
        return
    (target,) = targets
    assert target is not None
    lowest = min(run.evaluations[len(run.evaluations) // 2].accuracy for run in reached)
    counts = [run.evaluations[len(run.evaluations) // 2].samples for run in reached]
    known = [count for count in counts if count is not None]
    ends = [run.samples for run in reached if run.samples is not None]
    highest = max(run.best_accuracy or 0.0 for run in reached)
    if not known or not ends or target - lowest > 0.15 * (target - min(run.evaluations[0].accuracy for run in reached)):
        return
    inset = axes.inset_axes((0.46, 0.1, 0.52, 0.46))
    for number, system in enumerate(systems):
        for run in system.runs:
            _curve(inset, run, "samples", _COLOURS[number % len(_COLOURS)], bold=run is _middle(system))
    inset.axhline(target, color="#555555", linestyle="--", linewidth=1)
    inset.set_xlim(min(known), max(ends) * 1.02)
    inset.set_ylim(lowest, highest + 0.1 * (highest - lowest))
    inset.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    inset.xaxis.set_major_locator(MaxNLocator(4))
    inset.tick_params(labelsize=8)
    inset.grid(alpha=0.25)
    axes.indicate_inset_zoom(inset, edgecolor="#999999")


def _times(axes: Axes, systems: Sequence[System]) -> None:
    """A bar a system with a dot a run; the bar ends at the olympic mean."""
    longest = max(
        [run.seconds for system in systems for run in system.converged if run.seconds is not None], default=1.0
    )
    for number, system in enumerate(systems):
        colour = _COLOURS[number % len(_COLOURS)]
        times = [run.seconds for run in system.converged if run.seconds is not None]
        if system.score_s is not None:
            axes.barh(number, system.score_s, color=colour, alpha=0.35, height=0.62)
        axes.plot(times, [number] * len(times), "o", color=colour, markersize=3.5, alpha=0.8, linestyle="none")
        text = f"{system.score_s:,.1f} s" if system.score_s is not None else "no score"
        if system.throughput:
            text += f"   {system.throughput:,.0f} sequences/s"
        edge = max([*times, system.score_s or 0.0])
        axes.annotate(text, (edge, number), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(systems)), [_label(system) for system in systems], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.3)
    axes.set_xlabel("seconds from run_start to run_stop: bar the olympic mean, dot a run")
    axes.set_title("time to train, in the colours of the curves", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)


def _middle(system: System) -> Run | None:
    """The run of median time, which stands for its system."""
    timed = sorted((run for run in system.converged if run.seconds is not None), key=lambda run: run.seconds or 0.0)
    return timed[len(timed) // 2] if timed else None


def _label(system: System) -> str:
    head = system.head
    parts = [head.organization] if head.organization else []
    parts += [f"{head.accelerators} accelerator{'s'[: head.accelerators > 1]}"] if head.accelerators else []
    parts += [f"batch {head.global_batch:,}"] if head.global_batch else []
    return f"{system.name}\n{', '.join(parts)}".replace("$", r"\$")


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"
