"""Result files: where they lie and what one says. Nothing here raises over a bad file: a `Run` tells what is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from mlperf_logging.compliance_checker.mlp_parser import ruleset_210 as parser

from bert_mlperf.mlperf_rules import CLOSED_TARGET, evaluation_interval, samples_at_evaluation

Status = Literal["success", "aborted", "unfinished", "continued", "unreadable"]


@dataclass(frozen=True)
class Evaluation:
    """One point of the accuracy curve."""

    seconds: float
    """Since run_start."""
    samples: int | None
    """Sequences trained so far; None where the log does not tell."""
    accuracy: float


@dataclass(frozen=True)
class Run:
    """What one result file says."""

    path: Path
    status: Status
    problem: str = ""
    """Why the run does not count as converged; empty where it does."""
    organization: str = ""
    platform: str = ""
    division: str = ""
    benchmark: str = ""
    seed: int | None = None
    global_batch: int | None = None
    accelerators: int | None = None
    target: float | None = None
    """Accuracy that ends a run; None where the log does not tell."""
    seconds: float | None = None
    """run_start to run_stop."""
    samples: int | None = None
    """Sequences trained in all."""
    resumed_samples: int = 0
    """Of these, trained before a resume, outside `seconds`."""
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def converged(self) -> bool:
        return self.status == "success" and not self.problem

    @property
    def best_accuracy(self) -> float | None:
        return max((evaluation.accuracy for evaluation in self.evaluations), default=None)

    @property
    def throughput(self) -> float | None:
        """Sequences per second of the measured time, evaluations included."""
        if not self.seconds or self.samples is None:
            return None
        return (self.samples - self.resumed_samples) / self.seconds


def find_systems(path: Path, depth: int = 3) -> dict[Path, list[Path]]:
    """System folder -> its result files, in the order of their numbers.

    A system folder holds `bert/result_*.txt`, or `result_*.txt`, or `.txt` and `.log` files with MLPerf events. Where
    `path` holds none of these itself, the folders in it are searched, `depth` levels down. A file stands for itself.
    """
    if path.is_file():
        return {path: [path]}
    if files := _result_files(path):
        return {path.parent if path.resolve().name == "bert" else path: files}
    found: dict[Path, list[Path]] = {}
    if depth > 0 and path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                found.update(find_systems(child, depth - 1))
    return found


def _result_files(folder: Path) -> list[Path]:
    for pattern in ("bert/result_*.txt", "result_*.txt"):
        if files := sorted(folder.glob(pattern), key=_by_number):
            return files
    logs = (path for path in folder.glob("*") if path.suffix in (".txt", ".log") and path.is_file())
    return sorted((path for path in logs if _holds_events(path)), key=_by_number)


def _by_number(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _holds_events(path: Path) -> bool:
    try:
        with path.open(encoding="latin-1") as lines:
            return any(parser.TOKEN in line for line in lines)
    except OSError:
        return False


class _Events:
    """The events of a file, by key."""

    def __init__(self, path: Path) -> None:
        self.bad_lines: list[int] = []
        self.all: list[Any] = []
        with path.open(encoding="latin-1") as lines:
            for number, line in enumerate(lines, start=1):
                if parser.TOKEN not in line:
                    continue
                try:
                    event = parser.string_to_logline(number, line[line.rindex(parser.TOKEN) :].strip())
                except (ValueError, KeyError, TypeError):
                    self.bad_lines.append(number)
                else:
                    if isinstance(event.value["metadata"], dict):
                        self.all.append(event)
                    else:
                        self.bad_lines.append(number)

    def of(self, key: str) -> list[Any]:
        return [event for event in self.all if event.key == key]

    def value(self, key: str) -> Any:
        """The value of the first event with this key; None where there is none."""
        return next((event.value["value"] for event in self.all if event.key == key), None)

    def number(self, key: str, least: int = 1) -> int | None:
        """The same where it is a number and not below `least`, else None."""
        value = self.value(key)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return int(value) if good and value >= least else None


def read_run(path: Path) -> Run:
    """The run that a result file describes."""
    try:
        events = _Events(path)
    except OSError as error:
        return Run(path, "unreadable", f"cannot be read: {error.strerror}")
    if not events.all:
        return Run(path, "unreadable", "not an MLPerf log: no event in it (lines with ':::MLLOG {...}')")
    division = str(events.value("submission_division") or "")
    target = events.value("target_accuracy")
    run = Run(
        path,
        "unfinished",
        organization=str(events.value("submission_org") or ""),
        platform=str(events.value("submission_platform") or ""),
        division=division,
        benchmark=str(events.value("submission_benchmark") or ""),
        seed=events.number("seed", least=0),
        global_batch=events.number("global_batch_size"),
        accelerators=_accelerators(events),
        target=target if isinstance(target, float) else CLOSED_TARGET if division == "closed" else None,
    )
    return _timed(run, events)


def join_resumed(runs: Sequence[Run]) -> list[Run]:
    """The runs of a folder in the order of their files; one that a later file resumes has status `continued`."""
    joined = list(runs)
    for number, run in enumerate(runs):
        for earlier in range(number if run.resumed_samples else 0):
            if joined[earlier].status in ("aborted", "unfinished") and joined[earlier].seed == run.seed:
                joined[earlier] = replace(joined[earlier], status="continued", problem=f"resumed by {run.path.name}")
    return joined


def _timed(run: Run, events: _Events) -> Run:
    starts, stops = events.of("run_start"), events.of("run_stop")
    for key, found in (("run_start", starts), ("run_stop", stops)):
        if len(found) > 1:
            return replace(run, status="unreadable", problem=f"{len(found)} events {key}: a file holds one run")
    if not starts:
        return replace(run, problem="no run_start: it ended while setting up")
    begin = starts[0].timestamp
    resumed = starts[0].value["metadata"].get("resumed_samples")
    samples = events.number("train_samples")
    run = replace(
        run,
        samples=samples,
        resumed_samples=resumed if isinstance(resumed, int) else 0,
        evaluations=_curve(run, events, begin, samples),
    )
    if not stops:
        bad = f"; line {events.bad_lines[0]} is cut off" if events.bad_lines else ""
        return replace(run, problem=f"no run_stop: it was stopped or is still running{bad}")
    seconds = (stops[0].timestamp - begin) / 1000
    if seconds <= 0:
        return replace(run, status="unreadable", problem=f"run_stop lies {-seconds:g} s before run_start")
    run = replace(run, seconds=seconds)
    if events.bad_lines:
        run = replace(run, problem=f"{len(events.bad_lines)} broken events, the first in line {events.bad_lines[0]}")
        return replace(run, status="unreadable")
    return _judged(run, stops[0].value["metadata"].get("status"))


def _judged(run: Run, status: Any) -> Run:
    best = run.best_accuracy
    if status != "success":
        reached = "no evaluation" if best is None else f"accuracy {best:.4f} at best"
        return replace(run, status="aborted", problem=f"run_stop says {status!r} ({reached})")
    run = replace(run, status="success")
    if best is None:
        return replace(run, problem="says success without one eval_accuracy")
    if run.target is not None and best < run.target:
        return replace(run, problem=f"says success, but its accuracy {best:.4f} is below the target {run.target:g}")
    if run.samples is None and run.evaluations[-1].samples is not None:
        run = replace(run, samples=run.evaluations[-1].samples)
    return run


def _accelerators(events: _Events) -> int | None:
    """How many ranks trained: said outright, or global batch / batch of a device as the v2.1 logs have them."""
    if (world_size := events.number("world_size")) is not None:
        return world_size
    batch, share = events.number("global_batch_size"), events.number("d_batch_size")
    return batch // share if batch and share and batch % share == 0 else None


def _curve(run: Run, events: _Events, begin: float, samples: int | None) -> tuple[Evaluation, ...]:
    points = [
        (event.timestamp, event.value["metadata"].get("epoch_num"), float(event.value["value"]))
        for event in events.of("eval_accuracy")
        if isinstance(event.value["value"], (int, float)) and math.isfinite(event.value["value"])
    ]
    counts = _samples_of([epoch for _, epoch, _ in points], run.global_batch, samples)
    return tuple(
        Evaluation((time - begin) / 1000, count, accuracy)
        for (time, _, accuracy), count in zip(points, counts, strict=True)
    )


def _samples_of(epochs: Sequence[Any], global_batch: int | None, trained: int | None) -> Sequence[int | None]:
    """Samples trained at each evaluation.

    BERT logs count epochs in samples. Some v2.1 logs say epoch 1 throughout; where the rules' interval then ends
    exactly at the samples trained in all, it tells the rest.
    """
    unknown: list[int | None] = [None] * len(epochs)
    if not epochs or global_batch is None:
        return unknown
    numbers = [int(epoch) if isinstance(epoch, (int, float)) and math.isfinite(epoch) else -1 for epoch in epochs]
    growing = all(before < after for before, after in pairwise(numbers))
    if growing and numbers[0] >= global_batch:
        return numbers
    interval = evaluation_interval(global_batch)
    ruled = [samples_at_evaluation(number, interval, global_batch) for number in range(1, len(epochs) + 1)]
    return ruled if ruled[-1] == trained else unknown
