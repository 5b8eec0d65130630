"""Schedules and measured steps to look at: as text and as a Gantt picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from common.pipeline.schedule import Costs, Schedule, Timeline, predict

COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#72b7b2", "W": "#e4a03a"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
SHADES = 0.55
"""How much lighter the last of a rank's stages is drawn than its first."""


def as_text(schedule: Schedule) -> str:
    """One line a rank, one column a unit of time (a forward, half a backward): F3 is forward of micro-batch 3.

    With several stages on a rank, those after its first are marked a, b, ...; dots are time in which it waits.
    """
    timeline = predict(schedule)
    width = 1 + len(str(schedule.micro_batches - 1)) + (schedule.virtual > 1)
    lines = []
    for rank, intervals in enumerate(timeline.ranks):
        cells = ["." * width] * round(timeline.length)
        for action, start, end in intervals:
            chunk = action.stage // schedule.pp
            mark = f"{action.kind}{action.micro_batch}" + ("abcdefghijklmnopqrstuvwxyz"[chunk - 1] if chunk else "")
            for place in range(round(start), round(end)):
                cells[place] = mark.ljust(width) if place == round(start) else action.kind.lower().ljust(width)
        lines.append(f"rank {rank}  " + " ".join(cells).rstrip())
    return "\n".join(lines)


def measured_costs(schedule: Schedule, timeline: Timeline) -> Costs:
    """What each stage's actions took on average in a measured step, for `predict`."""
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for intervals in timeline.ranks:
        for action, start, end in intervals:
            taken[action.kind, action.stage].append(end - start)
    mean = {key: sum(values) / len(values) for key, values in taken.items()}
    stages = range(schedule.stages)
    halves = [mean.get(("B", stage), 0.0) / 2 for stage in stages]
    return Costs(
        forward=[mean["F", stage] for stage in stages],
        input_gradient=[mean.get(("I", stage), halves[stage]) for stage in stages],
        weight_gradient=[mean.get(("W", stage), halves[stage]) for stage in stages],
    )


def draw_gantt(timelines: Mapping[str, Timeline], path: Path, *, pp: int) -> Path:
    """Draws timelines (title -> timeline) one below the other on one scale, and returns the path of the picture.

    pp: ranks, by which the stages of a rank are told apart. The suffix of `path` says the format (svg, png, pdf).
    """
    from matplotlib.figure import Figure  # slow to import, and most processes never draw

    rows = max(len(timeline.ranks) for timeline in timelines.values())
    figure = Figure(figsize=(12, len(timelines) * (1.1 + 0.38 * rows)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    longest = max(timeline.length for timeline in timelines.values())
    for axis, (title, timeline) in zip(axes, timelines.items(), strict=True):
        origin = min(i.start for rank in timeline.ranks for i in rank)
        chunks = 1 + max(i.action.stage for rank in timeline.ranks for i in rank) // pp
        for rank, intervals in enumerate(timeline.ranks):
            for action, start, end in intervals:
                fade = SHADES * (action.stage // pp) / max(1, chunks - 1)
                colour = _lighter(COLOURS[action.kind], fade)
                axis.barh(rank, end - start, left=start - origin, height=0.86, color=colour, edgecolor="white", lw=0.6)
                if end - start > longest / 70:
                    middle = (start + end) / 2 - origin
                    axis.text(middle, rank, str(action.micro_batch), ha="center", va="center", fontsize=7)
        kinds = sorted({i.action.kind for rank in timeline.ranks for i in rank})
        for kind in kinds:
            axis.barh(0, 0, color=COLOURS[kind], label=NAMES[kind])
        axis.set_title(f"{title}: bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
        axis.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
        axis.invert_yaxis()
        axis.set_xlim(0, longest)
        axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=7, ncols=len(kinds), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _lighter(colour: str, share: float) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share
