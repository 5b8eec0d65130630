"""Several runs over each other on one page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.telemetry.format import duration, number, rate
from common.telemetry.log import RunLog, read_log
from common.telemetry.page import render_page
from common.telemetry.report import (
    SPEED_METRICS,
    SPLIT,
    elapsed,
    evaluation_names,
    evaluations,
    flatten,
    samples_of,
    speeds,
    time_split,
    write_whole,
)
from common.telemetry.sections import Block, Cards, Lines, Section, Series, Stack, Table


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Writes a page that lays the runs in `folders` over each other to `path`.

    Raises ValueError for fewer than two folders or a folder without a log.
    """
    if len(folders) < 2:
        raise ValueError(f"compare needs two or more folders of runs, got {len(folders)}")
    logs = dict(zip(names_of(folders), map(read_log, folders), strict=True))
    sections = [
        Section("Runs", [_summary(logs)]),
        Section("Learning", _curves(logs)),
        Section("Speed", _speed(logs)),
        Section("Settings that differ", [_differences(logs)]),
    ]
    footer = f"Built {time.strftime('%Y-%m-%d %H:%M:%S')}."
    write_whole(path, render_page(f"{len(logs)} runs compared", " · ".join(logs), Cards([]), sections, footer))
    return path


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its last part, or as many parts as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("the same folder is given twice; name each run once")


def summary_rows(logs: dict[str, RunLog]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of runs."""
    columns = ["run", "ranks", "steps", "samples", "time", "step", "throughput", "MFU", "exposed comm", "idle"]
    measured = list(dict.fromkeys(name for log in logs.values() for name in evaluation_names(log)))
    rows = []
    for name, log in logs.items():
        means = speeds(log)
        total = log.column("samples_total")
        row = [name, str(log.launch.get("world_size", "?")), f"{len(log.steps):,}"]
        row += [f"{int(total[-1]):,}" if len(total) else "0", duration(elapsed(log)), duration(means["seconds"])]
        row.append(
            rate(means["tokens_per_s"] or means["samples_per_s"], "tokens/s" if means["tokens_per_s"] else "samples/s")
        )
        row += [_percent(means[part]) for part in ("mfu", "exposed_comm", "idle")]
        last = evaluations(log)
        row += [number(last[-1].get(key, "")) if last else "" for key in measured]
        rows.append(row)
    return columns + measured, rows


def _summary(logs: dict[str, RunLog]) -> Table:
    return Table(*summary_rows(logs))


def _curves(logs: dict[str, RunLog]) -> list[Block]:
    blocks: list[Block] = []
    for metric in dict.fromkeys(name for log in logs.values() for name in log.metric_names):
        having = {name: log for name, log in logs.items() if metric in log.metric_names}
        smooth = metric not in SPEED_METRICS
        series = [
            Series(name, log.column("samples_total"), log.column(f"metrics.{metric}"), smooth=smooth)
            for name, log in having.items()
        ]
        blocks.append(Lines(metric, "samples", metric, series))
    for measure in dict.fromkeys(name for log in logs.values() for name in evaluation_names(log)):
        for axis in ("samples", "minutes"):
            series = [_evaluation_series(name, log, measure, axis) for name, log in logs.items()]
            title = f"{measure} on held-out data" if axis == "samples" else f"{measure} against time"
            blocks.append(Lines(title, axis, measure, series, percent="accuracy" in measure))
    return blocks


def _evaluation_series(name: str, log: RunLog, measure: str, axis: str) -> Series:
    rows = [
        (event, row)
        for event, row in zip(log.events_named("evaluation"), evaluations(log), strict=True)
        if measure in row
    ]
    start = float(log.launches[0]["time"]) if log.launches else 0.0
    x = [samples_of(row, log) if axis == "samples" else (float(event["time"]) - start) / 60 for event, row in rows]
    return Series(name, x, [float(row[measure]) for _, row in rows], marked=True)


def _speed(logs: dict[str, RunLog]) -> list[Block]:
    blocks: list[Block] = []
    for quantity, label in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        series = [Series(name, log.column("step"), log.column(quantity), smooth=True) for name, log in logs.items()]
        if any(value > 0 for one in series for value in one.y):
            blocks.append(Lines("throughput, all ranks", "step", label, series))
            break
    shares = {part: [float(time_split(log)[part].mean()) * 1e3 for log in logs.values()] for part in SPLIT}
    blocks.append(Stack("time of a step, mean over ranks", "milliseconds", list(logs), shares))
    return blocks


def _differences(logs: dict[str, RunLog]) -> Table:
    settings = [
        {**flatten(log.launch.get("config", {})), "world_size": log.launch.get("world_size")} for log in logs.values()
    ]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    rows: list[list[Any]] = []
    for name in names:
        values = [str(setting.get(name, "")) for setting in settings]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return Table(["setting", *logs], rows or [["(none)", *[""] * len(logs)]])


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if value == value else ""
