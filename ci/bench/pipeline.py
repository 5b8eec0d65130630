"""The pipeline against `torch.distributed.pipelining` and against theory; tensor parallel against one rank.

`python -m ci.bench.pipeline`; pictures of predicted and measured steps go to runs/bench/.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peer

from common.layout import ParallelLayout
from common.pipeline import (
    Pipeline,
    ScheduleName,
    Timeline,
    check,
    draw_gantt,
    make_schedule,
    measured_costs,
    predict,
)
from common.runtime import Runtime
from common.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallel
from common.testing import RankPool

MICRO_BATCHES = 8
SMALL = (64, 32, 2)
"""Hidden, tokens and layers of a pipeline whose stages take next to nothing: what is left is the engine."""
LARGE = (256, 512, 8)
KINDS: tuple[tuple[ScheduleName, int], ...] = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))


class Layer(nn.Module):
    """Pre-norm MLP of a transformer: [tokens, hidden] -> same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up: nn.Module = nn.Linear(hidden, 4 * hidden)
        self.down: nn.Module = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Layers; the last stage of ours returns the loss, the peer's schedule computes it outside."""

    def __init__(self, hidden: int, layers: int, last: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(hidden) for _ in range(layers)))
        self.last = last

    def forward(self, x: Tensor | None, batch: Tensor | None = None) -> Tensor:
        x = self.layers(batch if x is None else x)
        return square(x) if self.last else x


def square(x: Tensor, target: Tensor | None = None) -> Tensor:
    """A loss that costs nothing."""
    return x.square().sum()


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench.pipeline", description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each kind (default: %(default)s)")
    steps = parser.parse_args().steps
    pool = RankPool(2)
    try:
        print_overhead(pool, steps)
        print_refused(pool)
        print_bubbles(pool, steps)
        print_tensor_parallel(pool, steps)
    finally:
        pool.close()
    return 0


def print_overhead(pool: RankPool, steps: int) -> None:
    """Time of a step on stages that take next to nothing."""
    hidden, tokens, layers = SMALL
    print(f"\n1F1B, 2 ranks, {MICRO_BATCHES} micro-batches of {tokens} x {hidden}, {layers} layers in all; ms a step")
    (alone,) = pool.run(1, time_pipeline, "1f1b", 1, SMALL, steps * 6, layout=ParallelLayout())
    ours, theirs = [], []
    for _ in range(5):  # in turn, so that both see the machine alike
        ours.append(max(pool.run(2, time_pipeline, "1f1b", 1, SMALL, steps * 6, layout=ParallelLayout(pp=2))))
        theirs.append(max(pool.run(2, time_peer, SMALL, steps * 6, layout=ParallelLayout(pp=2))))
    print(f"{'one rank':>30} {alone * 1e3:8.2f}")
    for name, times in (("common.pipeline", ours), ("torch.distributed.pipelining", theirs)):
        print(f"{name:>30} {min(times) * 1e3:8.2f}   (runs: {', '.join(f'{t * 1e3:.2f}' for t in times)})")


def print_refused(pool: RankPool) -> None:
    """What the peer's schedules cannot do."""
    refused, arrived = pool.run(2, peer_limits, layout=ParallelLayout(pp=2))[0]
    print("\ntorch.distributed.pipelining on 2 ranks; common.pipeline runs all of these")
    for name, micro_batches in refused:
        print(f"{name:>30} refuses {', '.join(map(str, micro_batches)) or 'nothing'} of 1 to 12 micro-batches")
    print(f"{'split backward':>30} gradients that hooks on parameters saw: {arrived[0]} of {arrived[1]}")


def print_bubbles(pool: RankPool, steps: int) -> None:
    """Throughput and bubble of each schedule, and the bubble that its own costs predict."""
    hidden, tokens, layers = LARGE
    (alone,) = pool.run(1, time_pipeline, "1f1b", 1, LARGE, steps, layout=ParallelLayout())
    print(
        f"\n2 ranks, {MICRO_BATCHES} micro-batches of {tokens} x {hidden}, {layers} layers in all; "
        f"one rank: {alone * 1e3:.1f} ms a step"
    )
    print(f"{'schedule':>20} {'ms a step':>10} {'speed-up':>9} {'bubble':>8} {'from its costs':>15} {'theory':>8}")
    for name, virtual in KINDS:
        results = pool.run(2, time_pipeline, name, virtual, LARGE, steps, True, layout=ParallelLayout(pp=2))
        seconds = max(seconds for seconds, _ in results)
        timeline: Timeline = results[0][1]
        schedule = make_schedule(name, pp=2, micro_batches=MICRO_BATCHES, virtual=virtual)
        check(schedule)
        expected, ideal = predict(schedule, measured_costs(schedule, timeline)), predict(schedule)
        print(
            f"{f'{name} x {virtual}':>20} {seconds * 1e3:10.1f} {alone / seconds:9.2f} {timeline.bubble:8.1%} "
            f"{expected.bubble:15.1%} {ideal.bubble:8.1%}"
        )
        picture = Path(f"runs/bench/pipeline_{name}.svg")
        draw_gantt({"predicted from measured costs": expected, "measured": timeline}, picture, pp=2)
    print("pictures: runs/bench/pipeline_*.svg")


def print_tensor_parallel(pool: RankPool, steps: int) -> None:
    """Throughput of cut layers."""
    hidden, tokens, layers = 512, 2048, 4
    print(f"\n{layers} MLP layers, hidden {hidden}, {tokens} tokens, forward and backward; ms a step")
    (alone,) = pool.run(1, time_tensor_parallel, hidden, tokens, layers, False, steps, layout=ParallelLayout())
    print(f"{'one rank':>24} {alone * 1e3:8.1f}")
    for sequence_parallel in (False, True):
        times = pool.run(
            2, time_tensor_parallel, hidden, tokens, layers, sequence_parallel, steps, layout=ParallelLayout(tp=2)
        )
        name = "tp 2, sequence parallel" if sequence_parallel else "tp 2"
        print(f"{name:>24} {max(times) * 1e3:8.1f}   {alone / max(times):.2f} times one rank")


def median_seconds(step: Callable[[], Any], steps: int) -> float:
    """Of a step, after two to warm up."""
    taken = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return sorted(taken[2:])[steps // 2]


def time_pipeline(
    runtime: Runtime, name: ScheduleName, virtual: int, size: tuple[int, int, int], steps: int, measure: bool = False
) -> Any:
    """Seconds of a step; with `measure` also the timeline of one."""
    hidden, tokens, layers = size
    pp, rank = runtime.axis_size("pp"), runtime.axis_rank("pp")
    stages = {n: Stage(hidden, layers // (pp * virtual), n == pp * virtual - 1) for n in range(rank, pp * virtual, pp)}
    pipeline = Pipeline(
        stages, runtime, schedule=name, virtual=virtual, dtype=torch.float32, shape_of=lambda batch: batch.shape
    )
    batches = [torch.randn(tokens, hidden) for _ in range(MICRO_BATCHES)]

    def step() -> None:
        pipeline.step(batches)
        for stage in stages.values():
            stage.zero_grad()

    seconds = median_seconds(step, steps)
    if not measure:
        return seconds
    with pipeline.measuring() as timeline:
        step()
    return seconds, timeline()


def time_peer(runtime: Runtime, size: tuple[int, int, int], steps: int) -> float:
    """Seconds of a step of the peer's 1F1B."""
    hidden, tokens, layers = size
    rank = runtime.axis_rank("pp")
    module = Stage(hidden, layers // 2, last=False)
    stage = PipelineStage(module, rank, 2, runtime.device, group=runtime.group("pp"))
    schedule = peer.Schedule1F1B(stage, MICRO_BATCHES, loss_fn=square, scale_grads=False)
    batch = torch.randn(MICRO_BATCHES * tokens, hidden)

    def step() -> None:
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, return_outputs=False)
        module.zero_grad()

    return median_seconds(step, steps)


def peer_limits(runtime: Runtime) -> tuple[list[tuple[str, list[int]]], tuple[int, int]]:
    """Numbers of micro-batches that the peer's schedules refuse; gradients that hooks saw of those there were."""
    logging.disable(logging.ERROR)
    rank = runtime.axis_rank("pp")
    hidden, tokens, _ = SMALL

    def stages(count: int) -> list[Any]:
        modules = [Stage(hidden, 1, last=False) for _ in range(count)]
        numbers = range(rank, 2 * count, 2)
        return [
            PipelineStage(module, number, 2 * count, runtime.device, group=runtime.group("pp"))
            for module, number in zip(modules, numbers, strict=True)
        ]

    refused = []
    kinds: list[tuple[Any, int]] = [
        (peer.Schedule1F1B, 1),
        (peer.ScheduleInterleaved1F1B, 2),
        (peer.ScheduleInterleavedZeroBubble, 2),
    ]
    for kind, count in kinds:
        mine, no = stages(count), []
        for micro_batches in range(1, 13):
            try:
                kind(mine[0] if count == 1 else mine, micro_batches, loss_fn=square)
            except ValueError:
                no.append(micro_batches)
        refused.append((kind.__name__, no))
    mine, seen = stages(2), []
    for stage in mine:
        for parameter in stage.submod.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    schedule = peer.ScheduleInterleavedZeroBubble(mine, 4, loss_fn=square, scale_grads=False)
    batch = torch.randn(4 * tokens, hidden)
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch, return_outputs=False)
    logging.disable(logging.NOTSET)
    parameters = [parameter for stage in mine for parameter in stage.submod.parameters()]
    return refused, (len(seen), 4 * sum(parameter.grad is not None for parameter in parameters))


def time_tensor_parallel(
    runtime: Runtime, hidden: int, tokens: int, layers: int, sequence_parallel: bool, steps: int
) -> float:
    """Seconds of forward and backward."""
    tp = TensorParallel(runtime, sequence_parallel=sequence_parallel)
    model = nn.Sequential(*(Layer(hidden) for _ in range(layers)))
    for layer in model:
        assert isinstance(layer, Layer) and isinstance(layer.up, nn.Linear) and isinstance(layer.down, nn.Linear)
        layer.up, layer.down = ColumnParallelLinear.cut(layer.up, tp), RowParallelLinear.cut(layer.down, tp)
    x = torch.randn(tokens, hidden)[tp.rows(tokens)]

    def step() -> None:
        model(x).square().sum().backward()
        model.zero_grad()

    return median_seconds(step, steps)


if __name__ == "__main__":
    raise SystemExit(main())
