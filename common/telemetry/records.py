"""From what the ranks sent to the record of a step, as the log, TensorBoard and the progress bar take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.telemetry.intervals import FIRST_AVERAGE, WAIT_COLUMNS, GatheredStep
from common.telemetry.timeline import KINDS, idle_seconds

RANK_TIMES = ("seconds", *KINDS, "idle", "other", "outside")
"""Per-rank times in a step's record, s. seconds = compute + exposed_comm + input + optimizer + idle + other."""


def step_record(gathered: GatheredStep, totals: Sequence[int | None], flops_peak: float | None) -> dict[str, Any]:
    """The record of a step (see log.py). totals: samples and tokens before it. flops_peak: FLOP/s of one rank, or None.

    seconds: mean over ranks. mfu: useful FLOP/s of all ranks / (ranks x peak).
    """
    ranks = _rank_columns(gathered)
    samples, tokens = (_whole(gathered.column(name)) for name in ("samples", "tokens"))
    flops = float(np.nansum(gathered.column("flops")))
    seconds = float(np.nanmean(gathered.column("seconds")))
    per_second = 1.0 / seconds if seconds > 0 else math.nan
    size = len(gathered.table)
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
        "mfu": flops * per_second / (size * flops_peak) if flops_peak and flops else None,
        "metrics": {**_averages(gathered), **gathered.metrics},
        "ranks": ranks,
    }


def board_scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step for TensorBoard: metrics, speed, and each kind of time as a mean over ranks, s."""
    scalars = {f"metrics/{name}": float(value) for name, value in record["metrics"].items()}
    for name in ("tokens_per_s", "samples_per_s", "mfu", "samples_total"):
        if record[name] is not None:
            scalars[f"speed/{name}"] = float(record[name])
    for name in RANK_TIMES:
        scalars[f"time/{name}"] = float(np.nanmean(record["ranks"][name]))
    return scalars


def _rank_columns(gathered: GatheredStep) -> dict[str, list[float]]:
    seconds = gathered.column("seconds")
    kinds = {kind: gathered.column(kind) for kind in KINDS}
    present = ~np.isnan(seconds)
    idle = np.full(len(seconds), np.nan)
    idle[present] = idle_seconds(gathered.table[present, WAIT_COLUMNS])
    other = seconds - sum(kinds.values())
    kinds["exposed_comm"] = kinds["exposed_comm"] - idle
    times = {"seconds": seconds, **kinds, "idle": idle, "other": np.maximum(other, 0.0)}
    times["outside"] = gathered.column("outside")
    columns = {name: [_rounded(value) for value in values] for name, values in times.items()}
    for name in ("samples", "tokens", "rss_peak", "cuda_peak"):
        columns[name] = [value if math.isnan(value) else int(value) for value in gathered.column(name).tolist()]
    return columns


def _averages(gathered: GatheredStep) -> dict[str, float]:
    averages: dict[str, float] = {}
    # A rank whose sum is not a number makes the mean one too; only ranks that sent nothing are left out.
    sent = ~np.isnan(gathered.column("seconds"))
    for index, name in enumerate(gathered.averages):
        first = FIRST_AVERAGE + 2 * index
        top, count = gathered.table[sent, first : first + 2].sum(axis=0)
        averages[name] = float(top / count) if count else math.nan
    return averages


def _whole(column: np.ndarray) -> int:
    return int(np.nansum(column))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
