"""From what the ranks sent to the record of a step, as the log, TensorBoard and the progress bar take it.

Plain lists throughout: there are few numbers, and right after a training step, when the caches hold other things, a
call into an array library costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from common.telemetry.intervals import COLUMNS, FIRST_AVERAGE, WAIT_COLUMNS, GatheredStep
from common.telemetry.timeline import KINDS, idle_seconds

RANK_TIMES = ("seconds", *KINDS, "idle", "other", "outside")
"""Per-rank times in a step's record, s. seconds = compute + exposed_comm + input + optimizer + idle + other."""


def step_record(gathered: GatheredStep, totals: Sequence[int | None], flops_peak: float | None) -> dict[str, Any]:
    """The record of a step (see log.py). totals: samples and tokens before it. flops_peak: FLOP/s of one rank, or None.

    seconds: mean over ranks. mfu: useful FLOP/s of all ranks / (ranks x peak). Sums are over the ranks that are known.
    """
    sent = [row for row in gathered.table if not math.isnan(row[0])]
    by_name = dict(zip(COLUMNS, zip(*sent, strict=True), strict=False))
    samples, tokens = int(sum(by_name["samples"])), int(sum(by_name["tokens"]))
    flops = sum(by_name["flops"])
    seconds = sum(by_name["seconds"]) / len(sent)
    per_second = 1.0 / seconds if seconds > 0 else math.nan
    return {
        "kind": "step",
        "step": gathered.step,
        "time": gathered.time,
        "seconds": seconds,
        "samples": samples,
        "tokens": tokens,
        "flops": flops,
        "samples_total": (totals[0] or 0) + samples,
        "tokens_total": (totals[1] or 0) + tokens,
        "samples_per_s": samples * per_second,
        "tokens_per_s": tokens * per_second,
        "mfu": flops * per_second / (len(gathered.table) * flops_peak) if flops_peak and flops else None,
        "metrics": {**_averages(gathered.averages, sent), **gathered.metrics},
        "ranks": _rank_columns(gathered.table, sent),
    }


def board_scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step for TensorBoard: metrics, speed, and each kind of time as a mean over ranks, s."""
    scalars = {f"metrics/{name}": float(value) for name, value in record["metrics"].items()}
    for name in ("tokens_per_s", "samples_per_s", "mfu", "samples_total"):
        if record[name] is not None:
            scalars[f"speed/{name}"] = float(record[name])
    for name in RANK_TIMES:
        known = [value for value in record["ranks"][name] if not math.isnan(value)]
        scalars[f"time/{name}"] = sum(known) / len(known)
    return scalars


def _rank_columns(table: list[list[float]], sent: list[list[float]]) -> dict[str, list[float]]:
    by_name: dict[str, Sequence[float]] = dict(zip(COLUMNS, zip(*sent, strict=True), strict=False))
    idle = idle_seconds([row[WAIT_COLUMNS] for row in sent])
    waits = by_name["exposed_comm"]
    by_name["idle"] = idle
    by_name["exposed_comm"] = [max(0.0, wait - own) for wait, own in zip(waits, idle, strict=True)]
    spans = zip(*(by_name[name] for name in (*KINDS, "idle")), strict=True)
    by_name["other"] = [max(0.0, all_ - sum(parts)) for all_, parts in zip(by_name["seconds"], spans, strict=True)]
    # Tenths of microseconds are below what a span can tell, and round numbers keep the log small.
    columns: dict[str, list[float]] = {name: [round(value, 7) for value in by_name[name]] for name in RANK_TIMES}
    for name in ("samples", "tokens", "rss_peak", "cuda_peak"):
        columns[name] = [int(value) for value in by_name[name]]
    if len(sent) == len(table):
        return columns
    known = {name: iter(values) for name, values in columns.items()}
    return {name: [math.nan if math.isnan(row[0]) else next(known[name]) for row in table] for name in columns}


def _averages(names: Sequence[str], sent: list[list[float]]) -> dict[str, float]:
    """Name -> sum over ranks / count over ranks. A rank whose sum is not a number makes the mean one too."""
    averages: dict[str, float] = {}
    for place, name in enumerate(names):
        first = FIRST_AVERAGE + 2 * place
        count = sum(row[first + 1] for row in sent)
        averages[name] = sum(row[first] for row in sent) / count if count else math.nan
    return averages
