"""`python -m common.pipeline SCHEDULE --pp N --micro-batches M`: prints, checks and draws a schedule."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from common.config import ConfigError
from common.pipeline.draw import as_text, draw_gantt
from common.pipeline.schedule import Costs, ScheduleName, check, in_flight, make_schedule, predict


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 2 where the numbers do not make a schedule."""
    parser = argparse.ArgumentParser(prog="python -m common.pipeline", description=__doc__)
    parser.add_argument("schedule", choices=get_args(ScheduleName))
    parser.add_argument("--pp", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--virtual", type=int, default=1, help="stages on each rank (default: %(default)s)")
    parser.add_argument("--backward", type=float, default=2.0, help="cost of a backward, forward = 1 (default: 2)")
    parser.add_argument("--transfer", type=float, default=0.0, help="of a message between ranks (default: 0)")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="draws the schedule there (.svg, .png, .pdf)")
    options = parser.parse_args(argv)
    try:
        schedule = make_schedule(
            options.schedule, pp=options.pp, micro_batches=options.micro_batches, virtual=options.virtual
        )
    except ConfigError as error:
        print(f"python -m common.pipeline: {error}", file=sys.stderr)
        return 2
    check(schedule)
    share = 1 / options.virtual
    costs = Costs.uniform(schedule, share, options.backward * share, options.transfer)
    timeline = predict(schedule, costs)
    print(as_text(schedule))
    print(
        f"\n{schedule.micro_batches} micro-batches through {schedule.stages} stages: {timeline.length:g} times a "
        f"rank's forward, bubble {timeline.bubble:.1%}; activations held, by rank: "
        f"{', '.join(map(str, in_flight(schedule)))} (each of one stage); every dependency met, no rank waits for ever"
    )
    if options.out is not None:
        title = f"{options.schedule}, {options.pp} ranks x {options.virtual}, {options.micro_batches} micro-batches"
        print(f"drawn: {draw_gantt({title: timeline}, options.out, pp=options.pp)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
