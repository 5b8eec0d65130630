"""From what the ranks sent to the record of a step, as the log, TensorBoard and the progress bar take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.telemetry.intervals import COLUMNS, FIRST_AVERAGE, WAIT_COLUMNS, GatheredStep
from common.telemetry.timeline import KINDS, idle_seconds

RANK_TIMES = ("seconds", *KINDS, "idle", "other", "outside")
"""Per-rank times in a step's record, s. seconds = compute + exposed_comm + input + optimizer + idle + other."""


def step_record(gathered: GatheredStep, totals: Sequence[int | None], flops_peak: float | None) -> dict[str, Any]:
    """The record of a step (see log.py). totals: samples and tokens before it. flops_peak: FLOP/s of one rank, or None.

    seconds: mean over ranks. mfu: useful FLOP/s of all ranks / (ranks x peak).
    """
    ranks = _rank_columns(gathered)
    sums = np.nansum(gathered.table[:, : len(COLUMNS)], axis=0).tolist()  # one call: numpy's calls are what costs here
    samples, tokens, flops = (sums[COLUMNS.index(name)] for name in ("samples", "tokens", "flops"))
    samples, tokens = int(samples), int(tokens)
    seconds = _mean(ranks["seconds"])
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
        scalars[f"time/{name}"] = _mean(record["ranks"][name])
    return scalars


def _rank_columns(gathered: GatheredStep) -> dict[str, list[float]]:
    table = gathered.table
    idle = np.full(len(table), np.nan)
    sent = ~np.isnan(table[:, COLUMNS.index("seconds")])
    idle[sent] = idle_seconds(table[sent, WAIT_COLUMNS])
    by_name = dict(zip(COLUMNS, table[:, : len(COLUMNS)].T.tolist(), strict=True))
    by_name["idle"] = idle.tolist()
    waits = zip(by_name["exposed_comm"], by_name["idle"], strict=True)
    by_name["exposed_comm"] = [max(0.0, wait - own) for wait, own in waits]
    spans = zip(*(by_name[name] for name in (*KINDS, "idle")), strict=True)
    by_name["other"] = [max(0.0, all_ - sum(parts)) for all_, parts in zip(by_name["seconds"], spans, strict=True)]
    columns = {name: [_rounded(value) for value in by_name[name]] for name in RANK_TIMES}
    for name in ("samples", "tokens", "rss_peak", "cuda_peak"):
        columns[name] = [value if math.isnan(value) else int(value) for value in by_name[name]]
    return columns


def _averages(gathered: GatheredStep) -> dict[str, float]:
    averages: dict[str, float] = {}
    if not gathered.averages:
        return averages
    # A rank whose sum is not a number makes the mean one too; only ranks that sent nothing are left out.
    sent = ~np.isnan(gathered.table[:, 0])
    for index, name in enumerate(gathered.averages):
        first = FIRST_AVERAGE + 2 * index
        top, count = gathered.table[sent, first : first + 2].sum(axis=0)
        averages[name] = float(top / count) if count else math.nan
    return averages


def _mean(values: Sequence[float]) -> float:
    """Mean of the ranks that are known."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
