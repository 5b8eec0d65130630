"""Training step and update of the sharded optimizer against the libraries that offer the nearest thing.

`python -m ci.bench.sharded_optimizer` trains one BERT-like model with every library in the same processes, a few steps
in turn, so that a slow spell of the machine meets all of them. Every library clips to the same norm, computes the same
update on the same samples, and the losses are compared at the end: a row that computed something else is an error.

"update" is a step's time beyond forward and backward alone: the update and all communication that is not hidden. It is
given in seconds of the clock and in seconds of the ranks' processors (all threads, communication's too). The latter do
not count the time that other programs take from a rank; how busy those kept the machine is printed with each table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch

from ci.bench.optimizer_peers import BASELINE, PEERS, Contender, Shape
from common.collectives import all_reduce
from common.runtime import Runtime
from common.testing import RankPool

SHAPES = {
    "small": Shape(layers=4, hidden=512, vocab_size=30_522),
    "bert_base": Shape(layers=12, hidden=768, vocab_size=30_522),
}
LOSS_TOLERANCE = 2e-3
"""Relative; fp32 sums in another order, over all steps of a run."""


@dataclass(frozen=True)
class Case:
    """One table: a model, an update rule and a number of ranks."""

    ranks: int
    rule: str
    shape: str
    rounds: int
    tokens: int


@dataclass(frozen=True)
class Row:
    """Medians over rounds of one library, on the slowest rank, in seconds."""

    name: str
    step: float
    update: float
    step_ratio: float
    """This library's step over ours, paired by round; above 1 ours is faster."""
    update_ratio: float
    """The same for the time beyond forward and backward; a ratio of medians."""
    processor: float
    """Processor seconds of a step, mean over ranks."""
    update_processor: float
    update_processor_ratio: float
    loss: float
    steps: tuple[float, ...]
    """Seconds of a step, by round."""


CASES = (
    Case(ranks=2, rule="adamw", shape="small", rounds=9, tokens=512),
    Case(ranks=4, rule="adamw", shape="small", rounds=7, tokens=256),
    Case(ranks=2, rule="lamb", shape="bert_base", rounds=7, tokens=64),
    Case(ranks=4, rule="lamb", shape="small", rounds=7, tokens=256),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table a case and writes all of them as JSON; the status is 1 where a library computed something else."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench.sharded_optimizer", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="only the cases with these numbers of ranks")
    parser.add_argument("--rule", choices=("adamw", "lamb"), help="only the cases with this update rule")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="only the cases with this model")
    parser.add_argument("--rounds", type=int, help="turns of each library (default: as the case says)")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/sharded_optimizer.json"), metavar="FILE")
    options = parser.parse_args(argv)
    cases = [
        case
        for case in CASES
        if (not options.ranks or case.ranks in options.ranks)
        and options.rule in (None, case.rule)
        and options.shape in (None, case.shape)
    ]
    if not cases:
        parser.error("no case is left; see CASES for the ranks, rules and models there are")
    results, agreed = [], True
    for case in cases:
        rows, others = measure(case, options.rounds or case.rounds)
        print_table(case, rows, others)
        trained = [row.loss for row in rows if row.name != BASELINE]
        spread = max(trained) / min(trained) - 1
        if not spread <= LOSS_TOLERANCE:
            print(f"the losses differ by {spread:.1e}, more than {LOSS_TOLERANCE}: not the same work", file=sys.stderr)
            agreed = False
        results.append({**asdict(case), "others": others, "rows": [asdict(row) for row in rows]})
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if agreed else 1


@dataclass(frozen=True)
class Times:
    """What one rank measured, by round."""

    clock: list[float]
    processor: list[float]
    loss: float
    """Summed over ranks."""


def measure(case: Case, rounds: int) -> tuple[list[Row], float]:
    """Runs a case in processes of its own; returns its rows and the share of the machine that others took meanwhile."""
    pool = RankPool(case.ranks)
    try:
        results = pool.run(case.ranks, race, case, rounds, timeout_s=1800.0)
    finally:
        pool.close()
    names = list(results[0][0])
    # A step is over when its slowest rank is done.
    clock = {n: [max(r) for r in zip(*(ranks[n].clock for ranks, _ in results), strict=True)] for n in names}
    processor = {n: [mean(r) for r in zip(*(ranks[n].processor for ranks, _ in results), strict=True)] for n in names}
    updates, update_processor = (
        {n: median(step - alone for step, alone in zip(times[n], times[BASELINE], strict=True)) for n in names}
        for times in (clock, processor)
    )
    ours = next(name for name in names if name.startswith("ours"))
    rows = [
        Row(
            name=name,
            step=median(clock[name]),
            update=updates[name],
            step_ratio=median(theirs / own for theirs, own in zip(clock[name], clock[ours], strict=True)),
            update_ratio=updates[name] / updates[ours],
            processor=median(processor[name]),
            update_processor=update_processor[name],
            update_processor_ratio=update_processor[name] / update_processor[ours],
            loss=results[0][0][name].loss,
            steps=tuple(clock[name]),
        )
        for name in names
    ]
    return rows, results[0][1]


def race(runtime: Runtime, case: Case, rounds: int) -> tuple[dict[str, Times], float]:
    """On one rank: the times of each library, and the share of the machine's processors that other programs took."""
    shape = SHAPES[case.shape]
    contenders: dict[str, Contender] = {}
    for name, make in PEERS[case.rule].items():
        torch.manual_seed(0)
        contenders[name] = make(runtime, shape)
    clock: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    busy = Busy()
    for turn in range(rounds + 1):  # the first warms up
        for name in _rotated(list(contenders), turn):
            seconds, cpu_seconds, losses[name] = take_turn(contenders[name], runtime, shape, case.tokens, turn)
            if turn:
                clock[name].append(seconds)
                processor[name].append(cpu_seconds)
    taken = torch.tensor(busy.own_seconds(), dtype=torch.float64)
    all_reduce(taken, runtime.group())
    sums = all_reduce(torch.tensor([losses[n] for n in contenders], dtype=torch.float64), runtime.group()).tolist()
    times = {n: Times(clock[n], processor[n], loss) for n, loss in zip(contenders, sums, strict=True)}
    return times, busy.share_of_others(taken.item())


class Busy:
    """How much of the machine other programs use, from now on."""

    def __init__(self) -> None:
        self._own, self._machine, self._start = time.process_time(), self._busy(), time.perf_counter()

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return times.user + times.system + times.nice

    def own_seconds(self) -> float:
        """Processor seconds of this process."""
        return time.process_time() - self._own

    def share_of_others(self, all_ranks: float) -> float:
        """Of the machine's processors, beside the `all_ranks` seconds that the ranks took."""
        elapsed = (time.perf_counter() - self._start) * (psutil.cpu_count() or 1)
        return max(0.0, self._busy() - self._machine - all_ranks) / elapsed


def take_turn(
    contender: Contender, runtime: Runtime, shape: Shape, tokens: int, turn: int, steps: int = 2
) -> tuple[float, float, float]:
    """Seconds and processor seconds a step of `steps` steps that follow one another, and the last loss.

    One step before them is not timed: what it leaves under way (new parameters on their way) is waited for in the first
    timed one, as in a long run; what the last one leaves ends before the next library's turn.
    """
    start, cpu_start, loss = 0.0, 0.0, 0.0
    runtime.barrier()
    for step in range(steps + 1):
        if step == 1:
            runtime.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
        loss = contender.step(shape.samples(tokens, seed=(turn * 10 + step) * 64 + runtime.rank))
    seconds, cpu_seconds = (time.perf_counter() - start) / steps, (time.process_time() - cpu_start) / steps
    contender.settle()
    return seconds, cpu_seconds, loss


def print_table(case: Case, rows: Sequence[Row], others: float) -> None:
    """The rows of one case; the first of ours is what the others are measured against."""
    shape = SHAPES[case.shape]
    print(
        f"\n{case.rule}, {case.ranks} ranks, {case.shape} ({shape.layers} x {shape.hidden}, {shape.millions():.0f} M "
        f"parameters), {case.tokens} tokens a rank and step\n"
        f"medians over {len(rows[0].steps)} rounds, slowest rank; other programs took {others:.0%} of the processors"
    )
    print(f"{'':>36} {'step':>8} {'ours':>6} {'update + communication':>24} {'ours':>6} {'processor':>10} {'ours':>6}")
    print(f"{'':>36} {'s':>8} {'/ it':>6} {'s':>24} {'/ it':>6} {'s':>10} {'/ it':>6}")
    for row in rows:
        if row.name == BASELINE:
            print(f"{row.name:>36} {row.step:8.3f} {'':>31} {'':>6} {row.processor:10.3f} (whole step)")
            continue
        print(
            f"{row.name:>36} {row.step:8.3f} {1 / row.step_ratio:6.2f} {row.update:24.3f} {1 / row.update_ratio:6.2f} "
            f"{row.update_processor:10.3f} {1 / row.update_processor_ratio:6.2f}",
            flush=True,
        )


def _rotated(names: list[Any], turn: int) -> list[Any]:
    """Another one goes first each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


if __name__ == "__main__":
    raise SystemExit(main())
