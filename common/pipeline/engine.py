"""Pipeline: carries a schedule out, each rank its own part of it.

Why not `torch.distributed.pipelining` (2.13): it refuses what layouts need (1F1B with fewer micro-batches than stages;
interleaving on 2 ranks with 5, 7, 9 or 11 micro-batches); its split backward goes through `autograd.grad`, so that
hooks on parameters never see half of the gradients (24 of 48 in the benchmark) and the sharded optimizer would lose
them; and a layer that is one autograd function, as cut layers are, computes its weight gradient in both halves. Its
own cost is no reason either way: 1F1B with 8 micro-batches on stages that take next to nothing, 2 ranks on a busy
2-core machine, takes 8 to 12 ms a step with either. `python -m ci.bench.pipeline` measures and shows all of these.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from common.collectives import all_gather_object, all_reduce
from common.config import ConfigError
from common.pipeline.messages import Channels, Mailbox
from common.pipeline.schedule import Action, Interval, Schedule, ScheduleName, Timeline, check, make_schedule
from common.runtime import Runtime
from common.weight_gradients import Task, WeightGradients, defer_weight_gradients, run_tasks

LOOKAHEAD = 1
"""Actions ahead whose receives are posted, so that messages travel while the present one computes."""


class Pipeline:
    """Runs training steps over the stages of all ranks of `pp`.

    stages: this rank's stages by number (rank, rank + pp, ...; `Schedule.stages_of`). Stage 0 is called as
        `stage(None, micro_batch)`, the others as `stage(x, micro_batch)` with x what the stage before returned; the
        last returns a loss, [], summed over what it counts, all others one tensor. A single stage is both.
    shape_of: micro-batch -> shape of what goes from stage to stage; may differ between micro-batches. dtype: its type.
    accumulating: entered around every backward but those that finish a stage's gradients
        (`ShardedOptimizer.accumulating`), so that their reduction can start while the pipeline drains.

    Every rank is given all micro-batches: the first stage reads their inputs, the last their labels, and positions or
    dropout keys may be needed anywhere. Made by all ranks together.

    Raises ConfigError where the stages are not those that the schedule puts on this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        runtime: Runtime,
        *,
        schedule: ScheduleName,
        shape_of: Callable[[Any], Sequence[int]],
        dtype: torch.dtype,
        virtual: int = 1,
        accumulating: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        axis: str = "pp",
    ) -> None:
        self._stages, self._runtime, self._axis = dict(stages), runtime, axis
        self._name: ScheduleName = schedule
        self._virtual, self._shape_of, self._dtype = virtual, shape_of, dtype
        self._accumulating = accumulating
        self.rank, self.pp = runtime.axis_rank(axis), runtime.axis_size(axis)
        self._schedules: dict[int, Schedule] = {}
        expected = self.schedule(1).stages_of(self.rank)
        if sorted(stages) != expected:
            raise ConfigError(
                f"rank {self.rank} of pp={self.pp}, virtual={virtual} was given stages {sorted(stages)}; "
                f"it runs {', '.join(map(str, expected))}"
            )
        self._queues: dict[int, WeightGradients] = {}
        if schedule == "zero_bubble":
            self._queues = {number: defer_weight_gradients(stage) for number, stage in stages.items()}
        self._channels = Channels(runtime, virtual=virtual, axis=axis)
        self._group = runtime.group(axis)
        self._measured: list[tuple[Action, float, float]] | None = None

    def schedule(self, micro_batches: int) -> Schedule:
        """The schedule for that many micro-batches; made and checked once."""
        if micro_batches not in self._schedules:
            made = make_schedule(self._name, pp=self.pp, micro_batches=micro_batches, virtual=self._virtual)
            check(made)
            self._schedules[micro_batches] = made
        return self._schedules[micro_batches]

    def step(self, micro_batches: Sequence[Any], *, scale: float | Tensor = 1.0) -> Tensor:
        """Forward and backward of all micro-batches; returns the sum of their losses, [] float64, on every rank.

        scale: what each loss is multiplied by in backward: 1 / (labels that count in the whole step, over all
        micro-batches and data-parallel ranks) makes the gradient that of the exact mean, however unevenly they are
        spread. Gradients are added to the parameters'.

        Raises ValueError where there is no micro-batch, or a stage makes a shape that was not announced.
        """
        run = _Run(self, micro_batches, self.schedule(len(micro_batches)), scale)
        return run.carry_out(run.schedule.orders[self.rank])

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """The sum of the losses of all micro-batches without backward, [] float64, on every rank."""
        schedule = self.schedule(len(micro_batches))
        return _Run(self, micro_batches, schedule, None).carry_out(
            [action for action in schedule.orders[self.rank] if action.kind == "F"]
        )

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Callable[[], Timeline]]:
        """Measures the one step inside; the result, called by all ranks, gives every rank's intervals.

        Ranks of different machines are aligned by the barrier at the start.
        """
        dist.barrier(self._group)
        origin = _now(self._runtime.device)
        marks: list[tuple[Action, float, float]] = []
        self._measured = marks

        def timeline() -> Timeline:
            mine = tuple(Interval(action, start - origin, end - origin) for action, start, end in marks)
            return Timeline(tuple(all_gather_object(mine, self._group)))

        try:
            yield timeline
        finally:
            self._measured = None


class _Run:
    """One step of one rank."""

    def __init__(
        self, pipeline: Pipeline, micro_batches: Sequence[Any], schedule: Schedule, scale: float | Tensor | None
    ) -> None:
        self.schedule = schedule
        self._pipeline, self._batches, self._scale = pipeline, micro_batches, scale
        self._stages, self._queues = pipeline._stages, pipeline._queues
        device = pipeline._runtime.device
        shapes = [pipeline._shape_of(batch) for batch in micro_batches]
        self._mail = Mailbox(schedule, pipeline._channels, shapes, pipeline._dtype, device)
        self._saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None, Tensor | None]] = {}
        self._tasks: dict[tuple[int, int], list[Task]] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def carry_out(self, order: Sequence[Action]) -> Tensor:
        final = {(action.kind, action.stage): action for action in order}
        for place, action in enumerate(order):
            for ahead in order[place : place + 1 + LOOKAHEAD]:
                self._mail.prepare(ahead)
            received = self._mail.take(action)
            marks = self._pipeline._measured
            start = 0.0 if marks is None else _now(self._loss.device)
            if action.kind == "F":
                self._forward(action, received)
            elif final[action.kind, action.stage] == action:
                self._backward(action, received)
            else:
                with self._pipeline._accumulating():
                    self._backward(action, received)
            if marks is not None:
                marks.append((action, start, _now(self._loss.device)))
        self._mail.finish()
        return all_reduce(self._loss, self._pipeline._group) if self._pipeline.pp > 1 else self._loss

    def _forward(self, action: Action, x: Tensor | None) -> None:
        last = action.stage + 1 == self.schedule.stages
        if x is not None and self._scale is not None:
            x.requires_grad_()
        out = self._stages[action.stage](x, self._batches[action.micro_batch])
        if self._scale is not None:
            # The edge alone: the output's memory is free as soon as it has been sent.
            edge = get_gradient_edge(out) if out.requires_grad else None
            seed = torch.as_tensor(self._scale, dtype=out.dtype, device=out.device).view_as(out) if last else None
            self._saved[action.stage, action.micro_batch] = x, edge, seed
        if last:
            self._loss += out.detach()
        else:
            self._mail.put(action, out.detach())

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        unit = action.stage, action.micro_batch
        if action.kind == "W":
            run_tasks(self._tasks.pop(unit))
            return
        x, edge, seed = self._saved.pop(unit)
        if edge is not None:
            if action.kind == "I":
                self._queues[action.stage].deferring = True
            try:
                torch.autograd.backward((edge,), (seed if grad is None else grad,))
            finally:
                if action.kind == "I":
                    self._queues[action.stage].deferring = False
        if action.kind == "I":
            self._tasks[unit] = self._queues[action.stage].take()
        if x is not None:
            self._mail.put(action, torch.zeros_like(x) if x.grad is None else x.grad)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # only while measuring: work is asynchronous otherwise
    return time.perf_counter()


def first_last_group(runtime: Runtime, axis: str = "pp") -> dist.ProcessGroup | None:
    """The group of the first and last rank of this rank's pipeline, for a weight that both stages hold; None inside.

    Called by all ranks together.
    """
    mine = None
    for ranks in runtime.layout.groups(axis):
        group = dist.new_group(sorted({ranks[0], ranks[-1]}))
        if runtime.rank in (ranks[0], ranks[-1]):
            mine = group
    return mine


def sum_tied_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Adds up the gradients of a weight that the first and the last stage hold, so that both copies stay alike.

    For optimizers that read `parameter.grad`; to be called after the step's last backward and before anything reduces
    the gradients over data-parallel ranks. Ranks in between (group None) do nothing.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        all_reduce(parameter.grad, group)
