"""Training step and update of the sharded optimizer against the libraries that offer the nearest thing.

`python -m ci.bench.sharded_optimizer` trains one BERT-like model with every library in the same processes, a few steps
in turn, so that a slow spell of the machine meets all of them. Every library clips to the same norm, computes the same
update on the same samples, and the losses are compared at the end: a row that computed something else is an error.

"update" is a step's time beyond forward and backward alone: the update and all communication that is not hidden.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ci.bench.optimizer_peers import BASELINE, PEERS, Contender, Shape
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
    loss: float


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
        rows = measure(case, options.rounds or case.rounds)
        print_table(case, rows)
        spread = max(row.loss for row in rows) / min(row.loss for row in rows) - 1
        if not spread <= LOSS_TOLERANCE:
            print(f"the losses differ by {spread:.1e}, more than {LOSS_TOLERANCE}: not the same work", file=sys.stderr)
            agreed = False
        results.append({**asdict(case), "rows": [asdict(row) for row in rows]})
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if agreed else 1


def measure(case: Case, rounds: int) -> list[Row]:
    """Runs a case in processes of its own, so that memory of the one before is gone."""
    pool = RankPool(case.ranks)
    try:
        per_rank = pool.run(case.ranks, race, case, rounds, timeout_s=1200.0)
    finally:
        pool.close()
    names = list(per_rank[0][0])
    # A step is over when its slowest rank is done.
    times = {name: [max(r) for r in zip(*(ranks[0][name] for ranks in per_rank), strict=True)] for name in names}
    losses = per_rank[0][1]
    ours = next(name for name in names if name.startswith("ours"))
    alone = times[BASELINE]
    updates = {name: [step - a for step, a in zip(times[name], alone, strict=True)] for name in names}
    return [
        Row(
            name=name,
            step=statistics.median(times[name]),
            update=statistics.median(updates[name]),
            step_ratio=_median_ratio(times[name], times[ours]),
            update_ratio=statistics.median(updates[name]) / statistics.median(updates[ours]),
            loss=losses[name],
        )
        for name in names
        if name != BASELINE
    ]


def race(runtime: Runtime, case: Case, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """On one rank: seconds of a step, by library and round, and each library's last loss summed over ranks."""
    shape = SHAPES[case.shape]
    contenders: dict[str, Contender] = {}
    for name, make in PEERS[case.rule].items():
        torch.manual_seed(0)
        contenders[name] = make(runtime, shape)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):  # the first warms up
        for name in _rotated(list(contenders), turn):
            seconds, losses[name] = take_turn(contenders[name], runtime, shape, case.tokens, turn)
            if turn:
                times[name].append(seconds)
    total = torch.tensor([losses[name] for name in contenders], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return times, dict(zip(contenders, total.tolist(), strict=True))


def take_turn(
    contender: Contender, runtime: Runtime, shape: Shape, tokens: int, turn: int, steps: int = 2
) -> tuple[float, float]:
    """Seconds a step of `steps` steps that follow one another, and the last loss.

    One step before them is not timed: what it leaves under way (new parameters on their way) is waited for in the first
    timed one, as in a long run; what the last one leaves ends before the next library's turn.
    """
    start, loss = 0.0, 0.0
    runtime.barrier()
    for step in range(steps + 1):
        if step == 1:
            runtime.barrier()
            start = time.perf_counter()
        loss = contender.step(shape.samples(tokens, seed=(turn * 10 + step) * 64 + runtime.rank))
    seconds = (time.perf_counter() - start) / steps
    contender.settle()
    return seconds, loss


def print_table(case: Case, rows: Sequence[Row]) -> None:
    """The rows of one case; the first of ours is the 1.00 that ratios are against."""
    shape = SHAPES[case.shape]
    print(
        f"\n{case.rule}, {case.ranks} ranks, {case.shape} ({shape.layers} x {shape.hidden}, {shape.millions():.0f} M "
        f"parameters), {case.tokens} tokens a rank and step; median over rounds, slowest rank"
    )
    print(f"{'':>42} {'step, s':>9} {'over ours':>10} {'update + comm., s':>18} {'over ours':>10} {'ours/it':>8}")
    for row in rows:
        print(
            f"{row.name:>42} {row.step:9.3f} {row.step_ratio:10.2f} {row.update:18.3f} {row.update_ratio:10.2f} "
            f"{1 / row.update_ratio:8.2f}",
            flush=True,
        )


def _median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def _rotated(names: list[Any], turn: int) -> list[Any]:
    """Another one goes first each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


if __name__ == "__main__":
    raise SystemExit(main())
