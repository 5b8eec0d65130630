"""`python -m gpt_hundred_b.describe`: what a preset is - parameters, FLOPs, schedule, memory per rank - before it runs.

The model is built on the meta device, so 175 billion parameters take no memory. `--ranks N` says on how many ranks;
otherwise as few as the layout needs. All other options are those of training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from common.config import ConfigError
from common.pipeline.schedule import predict
from gpt_hundred_b.config import GptTrainConfig, load
from gpt_hundred_b.memory import GIB, estimate
from gpt_hundred_b.model import Gpt
from gpt_hundred_b.schedule import steps
from gpt_hundred_b.shape import flops, parameters

PROG = "python -m gpt_hundred_b.describe"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the description; 2 where the ranks do not fit."""
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--ranks", type=int, default=0)
    chosen, rest = chooser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    config = load(rest, prog=PROG)
    try:
        show(config, chosen.ranks or config.smallest_world)
    except ConfigError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    return 0


def build_on_meta(config: GptTrainConfig) -> Gpt:
    """The whole model, without a byte of storage."""
    with torch.device("meta"):
        return Gpt(config.model)


def scaled(value: float) -> str:
    """With a prefix: 1.3 G."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:,.4g} P"


def show(config: GptTrainConfig, ranks: int) -> None:
    """Prints what the run is. Raises ConfigError where the layout does not fit the ranks."""
    layout, schedule = config.parallel_layout(ranks), config.schedule(ranks)
    model = build_on_meta(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == parameters(config.model), "the formula counts what is built"
    size, sequence = config.batch.size, config.sequence
    useful = flops(config.model, size, sequence)
    done = flops(config.model, size, sequence, with_recompute=True)
    console = Console()
    lines = [
        f"{built:,} parameters ({scaled(built)}) in {len(list(model.parameters())):,} tensors",
        f"step of {size:,} x {sequence:,} = {size * sequence:,} tokens: {scaled(useful)}FLOP of the model"
        + (f", {scaled(done)}FLOP with recompute ({config.model.recompute})" if done != useful else ""),
        f"{steps(config.batch, config.optimizer.training_samples):,} steps, "
        f"{scaled(config.optimizer.training_samples * sequence)} tokens",
        f"layout on {ranks:,} ranks: {layout}; sequence parallel {'on' if config.layout.sequence_parallel else 'off'}, "
        f"level {config.layout.level}",
        f"pipeline: {schedule.name}, {schedule.stages} stages, {schedule.micro_batches} micro-batches, "
        f"bubble {predict(schedule).bubble:.1%} with equal stages",
    ]
    for line in lines:
        console.print(line, highlight=False)
    table = Table(title=f"GiB on a rank, {config.precision}")
    names = ("weights", "gradients", "optimizer", "activations", "working", "total")
    for column in ("pp rank", "layers", "parameters", *names):
        table.add_column(column, justify="right")
    stages = config.stages()
    for rank in estimate(config, ranks):
        held = sum(len(stages[stage]) for stage in schedule.stages_of(rank.pp_rank))
        values = [f"{getattr(rank, name) / GIB:.3f}" for name in names]
        table.add_row(str(rank.pp_rank), str(held), f"{rank.parameters:,}", *values)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
