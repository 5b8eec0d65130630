"""Scores of systems: the runs of one folder taken together, and systems against each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bert_mlperf.score.checks import Convergence, Verdict
from bert_mlperf.score.results import Run, join_resumed, read_run

RUNS_OF_A_SUBMISSION = 10
"""Runs of one system that the rules ask for (MLPerf Training v2.1, BERT)."""


@dataclass
class System:
    """The runs of one system and what they come to."""

    name: str
    folder: Path
    runs: list[Run]
    error: str = ""
    """Why there is no score; empty where there is one."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the score has to know."""
    score_s: float | None = None
    """Seconds from run_start to run_stop, olympic mean of the runs."""
    samples: float | None = None
    """Sequences to converge, olympic mean of the runs."""
    throughput: float | None = None
    """Sequences per second over all converged runs, evaluations included."""
    rank: int | None = None
    compliance: dict[Path, Verdict] = field(default_factory=dict)
    convergence: Convergence | None = None

    @property
    def converged(self) -> list[Run]:
        return [run for run in self.runs if run.converged]

    @property
    def counted(self) -> list[Run]:
        """Those that the score goes by: neither unreadable nor continued by another file."""
        return [run for run in self.runs if run.status not in ("unreadable", "continued")]

    @property
    def head(self) -> Run:
        """The run whose header stands for all."""
        return next((run for run in self.runs if run.converged), self.runs[0])

    @property
    def per_accelerator(self) -> float | None:
        """Sequences per second and accelerator."""
        count = self.head.accelerators if self.runs else None
        return self.throughput / count if self.throughput and count else None

    @property
    def contest(self) -> tuple[str, float | None]:
        """Systems are ranked against those with the same division and target."""
        return (self.head.division, self.head.target)


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest; of all where there are fewer than three.

    Source: MLPerf Training rules, section "Benchmark results". A run that did not converge counts as infinite: one of
    them is dropped as the largest, two make the mean infinite.

    Raises ValueError where there is no value.
    """
    if not values:
        raise ValueError("no value to take the mean of; give at least one")
    ordered = sorted(values)
    return statistics.fmean(ordered[1:-1] if len(ordered) >= 3 else ordered)


def score_system(name: str, folder: Path, files: Sequence[Path]) -> System:
    """Reads the runs of a system and scores them; a system without a score says why in `error`."""
    system = System(name, folder, join_resumed([read_run(path) for path in files]))
    if not system.runs:
        system.error = (
            "no result file; expected bert/result_*.txt, result_*.txt, or a .txt or .log file with MLPerf events"
            if folder.exists()
            else "no such folder"
        )
        return system
    system.error = _mixed(system)
    if not system.error:
        _score(system)
    return system


def _mixed(system: System) -> str:
    """What the runs of one system must share and do not."""
    for what, label in (
        ("benchmark", "benchmarks"),
        ("division", "divisions"),
        ("organization", "organizations"),
        ("platform", "platforms"),
        ("global_batch", "global batch sizes"),
        ("target", "target accuracies"),
    ):
        values = sorted({getattr(run, what) for run in system.counted if getattr(run, what) not in (None, "")}, key=str)
        if len(values) > 1:
            return f"several {label} in one folder: {', '.join(map(str, values))}; give each its own"
        if what == "benchmark" and values and values != ["bert"]:
            return f"results of the benchmark {values[0]!r}; this scores bert"
    return ""


def _score(system: System) -> None:
    converged = system.converged
    counted = system.counted
    failed = [run for run in counted if not run.converged]
    if unreadable := sum(run.status == "unreadable" for run in system.runs):
        system.notes.append(f"files left out because they cannot be read: {unreadable}")
    if not converged:
        last = (counted or system.runs)[-1]
        alone = len(counted or system.runs) == 1
        system.error = (
            f"the run did not converge: {last.problem}" if alone else f"none of {len(system.runs)} runs converged"
        )
        return
    system.throughput = _throughput(converged)
    # A run that did not converge took for ever; with fewer than three runs there is no slowest one to drop.
    infinite = [math.inf] * len(failed) if len(counted) >= 3 else []
    score = olympic_mean([run.seconds for run in converged if run.seconds is not None] + infinite)
    if math.isinf(score):
        system.error = f"{len(failed)} of {len(counted)} runs did not converge; the rules let one go"
        return
    system.score_s = score
    samples = [float(run.samples) for run in converged if run.samples is not None]
    system.samples = olympic_mean(samples + infinite) if samples else None
    _note(system, counted, failed)


def _note(system: System, counted: Sequence[Run], failed: Sequence[Run]) -> None:
    if len(counted) < 5:
        way = "fastest and slowest dropped" if len(counted) >= 3 else "too few to drop any"
        system.notes.append(f"only {len(counted)} of the {RUNS_OF_A_SUBMISSION} runs of a submission ({way})")
    elif len(counted) != RUNS_OF_A_SUBMISSION:
        system.notes.append(f"{len(counted)} runs; a submission has {RUNS_OF_A_SUBMISSION}")
    if failed:
        way = "dropped as the slowest" if len(counted) >= 3 else "left out"
        system.notes.append(f"1 run did not converge and is {way}")
    if resumed := [run for run in system.converged if run.resumed_samples]:
        system.notes.append(
            f"{len(resumed)} resumed run (at {resumed[0].resumed_samples:,} sequences): its time covers the rest only, "
            "so there is no rank"
        )
    seeds = [run.seed for run in counted if run.seed is not None]
    if len(set(seeds)) < len(seeds):
        system.notes.append("runs share a seed; the rules want one for each")


def _throughput(runs: Sequence[Run]) -> float | None:
    timed = [(run.samples - run.resumed_samples, run.seconds) for run in runs if run.samples and run.seconds]
    return sum(samples for samples, _ in timed) / sum(seconds for _, seconds in timed) if timed else None


def rank(systems: Sequence[System]) -> list[System]:
    """The systems, those of equal division and target together and fastest first; sets `rank` among these.

    Those without a score come last. A system with a resumed run gets no rank.
    """
    ordered = sorted(
        (system for system in systems if system.score_s is not None),
        key=lambda system: (str(system.contest), system.score_s or 0.0),
    )
    places: dict[tuple[str, float | None], int] = {}
    for system in ordered:
        if not any(run.resumed_samples for run in system.converged):
            places[system.contest] = places.get(system.contest, 0) + 1
            system.rank = places[system.contest]
    return ordered + [system for system in systems if system.score_s is None]


@dataclass(frozen=True)
class Scaling:
    """Throughput of a system per accelerator against the same submitter's smallest one."""

    smaller: System
    larger: System
    efficiency: float
    """(sequences/s/accelerator of the larger) / (the same of the smaller); 1 is linear scaling."""


def scaling(systems: Sequence[System]) -> list[Scaling]:
    """Scaling efficiency of every system against the smallest of the same organization, division and target."""
    found = []
    for system in systems:
        if system.per_accelerator is None:
            continue
        count = system.head.accelerators or 0
        peers = [
            (peer.head.accelerators or 0, -peer.per_accelerator, peer)
            for peer in systems
            if peer.per_accelerator is not None
            and peer.head.organization.lower() == system.head.organization.lower()
            and peer.contest == system.contest
            and (peer.head.accelerators or 0) < count
        ]
        if peers:
            _, speed, smallest = min(peers, key=lambda peer: peer[:2])
            found.append(Scaling(smallest, system, system.per_accelerator / -speed))
    return sorted(found, key=lambda item: item.larger.head.accelerators or 0)
