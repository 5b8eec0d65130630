"""The report of a run: one self-contained HTML file, rebuilt from the run's log at any time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.telemetry.format import duration, number, rate, scaled, size
from common.telemetry.log import RunLog, read_log
from common.telemetry.page import render_page
from common.telemetry.sections import Area, Block, Cards, Lines, Section, Series, Stack, Table, Text, from_json, to_json

REPORT_NAME = "report.html"
SECTIONS_NAME = "report_sections.json"
SPLIT = ("compute", "optimizer", "exposed_comm", "input", "idle", "other")
"""Parts of a step's time, in the order they are drawn."""
SPEED_METRICS = ("lr", "learning_rate", "grad_norm")


def keep_sections(folder: Path, sections: Sequence[Section]) -> None:
    """Keeps a recipe's own sections in the run's folder. Raises ValueError for what is no section."""
    write_whole(folder / SECTIONS_NAME, json.dumps(to_json(sections), allow_nan=False))


def write_report(folder: Path) -> Path:
    """Builds `report.html` from the log in `folder` and returns its path. Raises ValueError where there is no log."""
    log = read_log(folder)
    path = folder / REPORT_NAME
    write_whole(path, render_page(log.title, _subtitle(log), headline(log), _sections(log), _footer(log)))
    return path


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def steady(log: RunLog) -> np.ndarray:
    """Which steps count for speeds, bool [steps]: not the first tenth (at most 10), which warms up."""
    kept = np.ones(len(log.steps), dtype=bool)
    kept[: min(10, math.ceil(len(log.steps) / 10))] = len(log.steps) < 2
    return kept


def speeds(log: RunLog) -> dict[str, float]:
    """Means over the steady steps: seconds, tokens_per_s, samples_per_s, mfu, imbalance and share of each part.

    Rates are totals over totals, so that short steps do not count more. imbalance: max / mean of tokens over ranks.
    """
    kept = steady(log)
    seconds = log.column("seconds")[kept].sum()
    flops = log.column("flops")[kept].sum()
    peak = float(log.launch.get("flops_peak") or math.nan) * int(log.launch.get("world_size") or 1)
    result = {"seconds": seconds / max(1, kept.sum())}
    for name in ("tokens", "samples"):
        result[f"{name}_per_s"] = log.column(name)[kept].sum() / seconds if seconds else math.nan
    result["mfu"] = flops / seconds / peak if seconds and flops else math.nan
    tokens = log.per_rank("tokens")[kept]
    result["imbalance"] = _mean(tokens.max(axis=1) / tokens.mean(axis=1)) if tokens.size and tokens.any() else math.nan
    all_seconds = np.nansum(log.per_rank("seconds")[kept])
    for name in SPLIT:
        result[name] = float(np.nansum(log.per_rank(name)[kept]) / all_seconds) if all_seconds else math.nan
    return {name: float(value) for name, value in result.items()}


def headline(log: RunLog) -> Cards:
    """The numbers that a reader wants first."""
    means = speeds(log)
    world = int(log.launch.get("world_size") or 1)
    cards: list[tuple[str, str, str]] = []
    for name in log.metric_names[:1]:
        values = log.column(f"metrics.{name}")
        last = values[-max(1, len(values) // 50) :]
        cards.append((f"final {name}", number(_mean(last)), f"mean of the last {len(last)} steps"))
    cards += _evaluation_cards(log)
    total = log.column("samples_total")
    cards.append(("samples", scaled(float(total[-1])) if len(total) else "0", f"in {len(log.steps):,} steps"))
    for unit in ("tokens", "samples"):
        if means[f"{unit}_per_s"] > 0:
            pace = means[f"{unit}_per_s"]
            cards.append((f"{unit}/s", scaled(pace), f"{scaled(pace / world)} per rank" if world > 1 else ""))
            break
    if math.isfinite(means["mfu"]):
        peak = rate(float(log.launch["flops_peak"]), "FLOP/s a rank")
        cards.append(("MFU", f"{100 * means['mfu']:.1f} %", f"of the measured matmul peak, {peak}"))
    cards.append(("step", duration(means["seconds"]), "mean, evaluation and checkpoints apart"))
    if world > 1:
        cards.append(("exposed communication", f"{100 * means['exposed_comm']:.1f} %", "of the step, mean over ranks"))
        cards.append(("idle", f"{100 * means['idle']:.1f} %", "waiting for slower ranks"))
        if math.isfinite(means["imbalance"]):
            cards.append(("token imbalance", f"{means['imbalance']:.3f}", "busiest rank over mean"))
    memory = log.per_rank("cuda_peak")
    memory = memory if np.nansum(memory) > 0 else log.per_rank("rss_peak")
    if memory.size and np.isfinite(memory).any():
        cards.append(("peak memory", size(float(np.nanmax(memory))), "of the largest rank"))
    cards.append(("time", duration(elapsed(log)), _restarts(log)))
    return Cards(cards)


def elapsed(log: RunLog) -> float:
    """Wall time from start to last record, summed over launches (without the pauses between them), s."""
    times = sorted([*(record["time"] for record in (*log.steps, *log.events, *log.ends) if "time" in record)])
    starts = sorted(float(launch["time"]) for launch in log.launches)
    total = 0.0
    for first, following in zip(starts, [*starts[1:], math.inf], strict=True):
        inside = [moment for moment in times if first <= moment < following]
        total += inside[-1] - first if inside else 0.0
    return total


def evaluations(log: RunLog) -> list[dict[str, Any]]:
    """The evaluation events: step and their data."""
    return [{"step": event["step"], **event.get("data", {})} for event in log.events_named("evaluation")]


def learning_curves(log: RunLog) -> list[Block]:
    """Metrics and evaluations against samples."""
    samples = log.column("samples_total")
    blocks: list[Block] = []
    for name in log.metric_names:
        if name not in SPEED_METRICS:
            series = [Series(name, samples, log.column(f"metrics.{name}"), smooth=True)]
            blocks.append(Lines(name, "samples", name, series))
    for name in evaluation_names(log):
        points = [(samples_of(row, log), float(row[name])) for row in evaluations(log) if name in row]
        target = log.launch.get("config", {})
        level = _find(target, f"target_{name}")
        share = "accuracy" in name
        series = [Series(name, [x for x, _ in points], [y for _, y in points], marked=True)]
        note = (float(level), f"target {number(float(level))}") if level is not None else None
        blocks.append(Lines(f"{name} on held-out data", "samples", name, series, target=note, percent=share))
    return blocks


def evaluation_names(log: RunLog) -> list[str]:
    """Numbers that evaluations report, without what places them."""
    rows = evaluations(log)
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    return [name for name in names if name not in ("step", "samples", "seconds", "tokens", "epoch")]


def time_split(log: RunLog) -> dict[str, np.ndarray]:
    """Part -> mean seconds per steady step, [ranks]."""
    kept = steady(log)
    return {name: np.nan_to_num(_mean_rows(log.per_rank(name)[kept])) for name in SPLIT}


def _sections(log: RunLog) -> list[Section]:
    sections = [Section("Learning", learning_curves(log))]
    steps = log.column("step")
    rates: list[Block] = [
        Lines(name.replace("_", " "), "step", name, [Series(name, steps, log.column(f"metrics.{name}"))])
        for name in log.metric_names
        if name in SPEED_METRICS
    ]
    sections.append(Section("Optimization", rates))
    sections.append(_speed_section(log, steps))
    if log.per_rank("seconds").size:
        sections += [_time_section(log, steps), _balance_section(log, steps)]
    sections.append(_evaluation_section(log))
    sections += _recipe_sections(log.folder)
    sections.append(_facts_section(log))
    return [section for section in sections if section.blocks]


def _speed_section(log: RunLog, steps: np.ndarray) -> Section:
    name = "tokens" if np.nansum(log.column("tokens")) > 0 else "samples"
    rates = Series(f"{name}/s", steps, log.column(f"{name}_per_s"), smooth=True)
    blocks: list[Block] = []
    if len(steps):
        blocks.append(Lines("throughput, all ranks", "step", f"{name}/s", [rates]))
    mfu = log.column("mfu")
    if np.isfinite(mfu).any():
        share = Series("MFU", steps, mfu, smooth=True)
        blocks.append(Lines("share of the measured matmul peak (MFU)", "step", "MFU", [share], percent=True))
    return Section("Speed", blocks)


def _time_section(log: RunLog, steps: np.ndarray) -> Section:
    parts = {name: [1e3 * value for value in values] for name, values in time_split(log).items()}
    labels = [f"rank {rank}" for rank in range(len(parts["compute"]))]
    over_time = {name: (1e3 * _mean_columns(log.per_rank(name))).tolist() for name in SPLIT}
    text = (
        "Idle is the wait in blocking collectives beyond the shortest wait of any rank there, that is, for a rank that "
        "had not come yet; exposed comm is what remains of the wait: transfer that no computation hid. Evaluation and "
        "checkpoints are not counted."
    )
    return Section(
        "Where the time goes",
        [
            Text(text),
            Stack("time of a step by rank (mean)", "milliseconds", labels, parts),
            Area("time of a step, mean over ranks", "step", "milliseconds", steps.tolist(), over_time),
        ],
    )


def _balance_section(log: RunLog, steps: np.ndarray) -> Section:
    tokens = log.per_rank("tokens")
    if tokens.shape[1] < 2 or not np.nansum(tokens):
        return Section("Balance")
    mean = _mean_rows(tokens)
    labels = [f"rank {rank}" for rank in range(tokens.shape[1])]
    ratio = tokens.max(axis=1) / tokens.mean(axis=1)
    reference = (float(np.nanmean(mean)), "mean")
    busiest = Series("max / mean", steps, ratio, smooth=True)
    return Section(
        "Balance",
        [
            Stack("tokens per step by rank (mean)", "tokens", labels, {"tokens": mean.tolist()}, reference=reference),
            Lines("tokens of the busiest rank over the mean", "step", "max / mean", [busiest]),
        ],
    )


def _evaluation_section(log: RunLog) -> Section:
    rows = evaluations(log)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not rows:
        return Section("Evaluation")
    return Section("Evaluation", [Table(names, [[row.get(name, "") for name in names] for row in rows])])


def _facts_section(log: RunLog) -> Section:
    config = [[name, _shown(value)] for name, value in flatten(log.launch.get("config", {})).items()]
    environment = [[name, _shown(value)] for name, value in log.launch.get("environment", {}).items()]
    tables: list[Block] = []
    if config:
        tables.append(Table(["setting", "value"], config, title="Configuration"))
    if environment:
        tables.append(Table(["", "value"], environment, title="Environment"))
    others = [event for event in log.events if event.get("event") != "evaluation"]
    if others:
        rows = [
            [event["event"], event["step"], _moment(event["time"]), _shown(event.get("data", {}))] for event in others
        ]
        tables.append(Table(["event", "after step", "time", "data"], rows, title="Events", folded=len(rows) > 12))
    return Section("Configuration and environment", tables)


def _recipe_sections(folder: Path) -> list[Section]:
    path = folder / SECTIONS_NAME
    if not path.is_file():
        return []
    try:
        return from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        return [Section("Sections of the recipe", [Text(f"{SECTIONS_NAME} cannot be read: {error}")])]


def _evaluation_cards(log: RunLog) -> list[tuple[str, str, str]]:
    cards = []
    for name in evaluation_names(log)[:2]:
        row = next(row for row in reversed(evaluations(log)) if name in row)
        value = float(row[name])
        shown = f"{100 * value:.2f} %" if "accuracy" in name else number(value)
        cards.append((name, shown, f"held-out, after step {row['step']:,}"))
    return cards


def _subtitle(log: RunLog) -> str:
    launch = log.launch
    environment = launch.get("environment", {})
    machine = environment.get("accelerator") or environment.get("processor", "")
    parts = [_moment(log.launches[0]["time"])] if log.launches else []
    return " · ".join([*parts, f"{launch.get('world_size', '?')} ranks", str(launch.get("device", "")), str(machine)])


def _footer(log: RunLog) -> str:
    lost = sum(int(end.get("lost_lines") or 0) for end in log.ends)
    notes = [f"Built {_moment(time.time())} from {log.folder.name}/metrics.jsonl."]
    if not log.ends:
        notes.append("The log has no end: the run was stopped, or is still going on.")
    if log.unreadable:
        shown = ", ".join(map(str, log.unreadable[:10]))
        notes.append(f"{len(log.unreadable)} unreadable lines were left out (line {shown}).")
    if lost:
        notes.append(f"{lost} lines could not be written.")
    return " ".join(notes)


def _restarts(log: RunLog) -> str:
    return f"in {len(log.launches)} launches" if len(log.launches) > 1 else ""


def _moment(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(moment)))


def samples_of(row: Mapping[str, Any], log: RunLog) -> float:
    if "samples" in row:
        return float(row["samples"])
    known = [step["samples_total"] for step in log.steps if step["step"] <= row["step"]]
    return float(known[-1]) if known else 0.0


def _find(config: Any, name: str) -> Any:
    """The first setting called `name` anywhere in a nested config."""
    for key, value in flatten(config).items():
        if key.rpartition(".")[2] == name and isinstance(value, (int, float)):
            return value
    return None


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    if not isinstance(config, Mapping):
        return {prefix: config}
    result: dict[str, Any] = {}
    for key, value in config.items():
        result.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return result


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    return number(value) if isinstance(value, float) else str(value)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _mean_rows(table: np.ndarray) -> np.ndarray:
    """Mean over steps of [steps, ranks], known values only; NaN for a rank without any."""
    known = np.isfinite(table)
    counts = known.sum(axis=0)
    return np.divide(
        np.where(known, table, 0).sum(axis=0), counts, out=np.full(table.shape[1], np.nan), where=counts > 0
    )


def _mean_columns(table: np.ndarray) -> np.ndarray:
    return _mean_rows(table.T)
