"""Carries what the ranks recorded to rank 0, one small collective per log interval, without making anybody wait.

Each rank's numbers of an interval are one float64 block [log_every, columns]. It is sent with an asynchronous gather on
a group of its own (gloo, host memory) and looked for at later steps, so the training never waits for it; on CUDA it is
sent only once the device has passed the interval, which is looked up, not waited for.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from common.telemetry.timeline import KINDS, MATCHED_WAITS, RecordedStep, StepTimes, pack_waits

COLUMNS = ("step", "seconds", *KINDS, "outside", "samples", "tokens", "flops", "rss_peak", "cuda_peak")
WAIT_COLUMNS = slice(len(COLUMNS), len(COLUMNS) + MATCHED_WAITS)
FIRST_AVERAGE = len(COLUMNS) + MATCHED_WAITS
OUTSTANDING = 8
"""Intervals that may be on their way before the oldest is waited for."""

Number = float | int | torch.Tensor


class PendingGather(Protocol):
    """A gather under way."""

    def done(self) -> bool:
        """Whether `result` would not wait."""

    def result(self) -> list[torch.Tensor]:
        """The blocks of all ranks, by rank, on rank 0; empty elsewhere."""


class _Immediate:
    def __init__(self, blocks: list[torch.Tensor]) -> None:
        self._blocks = blocks

    def done(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._blocks


class _GroupGather:
    def __init__(self, work: dist.Work, blocks: list[torch.Tensor], sent: torch.Tensor) -> None:
        self._work = work
        self._blocks = blocks
        self._sent = sent  # must live until the work is done

    def done(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        self._work.wait()
        return self._blocks


def gather_over(group: dist.ProcessGroup | None, rank: int, world_size: int) -> Callable[[torch.Tensor], PendingGather]:
    """An asynchronous gather of equally shaped host tensors to rank 0 over `group`; None for one rank alone."""

    def gather(block: torch.Tensor) -> PendingGather:
        if group is None:
            return _Immediate([block])
        blocks = [torch.empty_like(block) for _ in range(world_size)] if rank == 0 else []
        work = dist.gather(block, blocks or None, dst=0, group=group, async_op=True)
        return _GroupGather(work, blocks, block)

    return gather


class DeferredValues:
    """Numbers that may still lie on a device; they come to the host together, without the host waiting for them."""

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self._arrived: Any = None
        self._host: torch.Tensor | None = None

    def add(self, name: str, value: Number) -> int:
        """Takes a number and returns where to `read` it. Raises ValueError unless it is one real number."""
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ValueError(f"metric {name!r} has shape {tuple(value.shape)}; give one real number")
            if value.device.type == "cpu":
                value = value.item()
            else:
                # A copy: the training may write the next step's value into the same tensor.
                kept = value.detach().reshape(()).to(torch.float64, copy=True)
                self._tensors.append((len(self._numbers), kept))
                value = math.nan
        elif isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise ValueError(f"metric {name!r}={value!r} is not a number")
        self._numbers.append(float(value))
        return len(self._numbers) - 1

    def seal(self) -> None:
        """Starts the copy to the host; no more numbers after this."""
        if not self._tensors:
            return
        stacked = torch.stack([tensor for _, tensor in self._tensors])
        if stacked.device.type != "cuda":
            self._host = stacked.cpu()
            return
        self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        self._host.copy_(stacked, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def ready(self) -> bool:
        """Whether the copy has arrived."""
        return self._arrived is None or self._arrived.query()

    def numbers(self) -> list[float]:
        """All numbers, in order of `add`; waits for the copy where it is still under way."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._host is not None:
            for (index, _), number in zip(self._tensors, self._host.tolist(), strict=True):
                self._numbers[index] = number
            self._tensors, self._host, self._arrived = [], None, None
        return self._numbers


@dataclass
class StepRow:
    """One step of this rank. metrics: name -> place among the interval's values; averages: two places, (sum, count)."""

    step: int
    time: float
    recorded: RecordedStep
    samples: int
    tokens: int
    flops: float
    metrics: dict[str, int]
    averages: dict[str, tuple[int, int]]


@dataclass
class GatheredStep:
    """One step as rank 0 knows it. table: [ranks][columns], rows of NaN for ranks that sent nothing."""

    step: int
    time: float
    metrics: dict[str, float]
    averages: list[str]
    table: list[list[float]]

    def column(self, name: str) -> list[float]:
        """One of COLUMNS, [ranks]."""
        return [row[COLUMNS.index(name)] for row in self.table]


@dataclass
class _Interval:
    rows: list[StepRow]
    values: DeferredValues
    block: torch.Tensor | None = None
    gather: PendingGather | None = None


class Intervals:
    """The queue of intervals of this rank, from the training loop to rank 0.

    resolve: turns a row into times (called once per row, in order). passed: whether that would not wait.
    gather: from `gather_over`, or any function alike. memory: the rank's peak memory now, (host, device) bytes.
    deliver: called on rank 0 with each interval's steps, in order.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        log_every: int,
        *,
        resolve: Callable[[StepRow], StepTimes],
        passed: Callable[[RecordedStep], bool],
        gather: Callable[[torch.Tensor], PendingGather],
        memory: Callable[[], tuple[float, float]],
        deliver: Callable[[list[GatheredStep]], None],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._log_every = log_every
        self._resolve = resolve
        self._passed = passed
        self._gather = gather
        self._memory = memory
        self._deliver = deliver
        self._queue: collections.deque[_Interval] = collections.deque()
        self._open = _Interval([], DeferredValues())

    def add(self, row: StepRow, metrics: Mapping[str, Number], averages: Mapping[str, tuple[Number, Number]]) -> None:
        """Takes a step of this rank, and sends the interval that it completes."""
        values = self._open.values
        if self._rank == 0:
            row.metrics = {name: values.add(name, value) for name, value in metrics.items()}
        row.averages = {
            name: (values.add(name, top), values.add(name, bottom)) for name, (top, bottom) in averages.items()
        }
        self._open.rows.append(row)
        if len(self._open.rows) >= self._log_every:
            self._seal()
        self.advance()

    def advance(self) -> None:
        """Moves on what can move without waiting."""
        for interval in self._queue:
            if interval.gather is None:
                if not (self._passed(interval.rows[-1].recorded) and interval.values.ready()):
                    break
                self._send(interval)
        while self._queue and self._queue[0].gather is not None and self._queue[0].gather.done():
            self._finish(self._queue.popleft())
        if len(self._queue) > OUTSTANDING:
            oldest = self._queue.popleft()
            if oldest.gather is None:
                self._send(oldest)
            self._finish(oldest)

    def settle(self, timeout_s: float) -> bool:
        """Waits until none of this rank's gathers is under way; False where that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        under_way = [interval.gather for interval in self._queue if interval.gather is not None]
        while not all(gather.done() for gather in under_way) and time.monotonic() < deadline:
            time.sleep(0.0005)
        return all(gather.done() for gather in under_way)

    def flush(self, timeout_s: float) -> bool:
        """Sends what there is and waits for it, at most `timeout_s` seconds: to be called on every rank.

        Returns False where some rank's numbers did not come; what is known of those steps is delivered all the same.
        """
        if self._open.rows:
            self._seal()
        deadline = time.monotonic() + timeout_s
        complete = True
        for interval in self._queue:
            if interval.gather is None:
                self._send(interval)
        while self._queue:
            interval = self._queue.popleft()
            assert interval.gather is not None
            while not interval.gather.done() and time.monotonic() < deadline:
                time.sleep(0.0005)
            complete &= self._finish(interval)
        return complete

    def abandon(self) -> None:
        """Delivers what this rank knows without asking the others: they may be gone."""
        if self._open.rows:
            self._seal()
        while self._queue:
            interval = self._queue.popleft()
            if interval.block is None:
                interval.block = self._fill(interval)
            self._finish(interval)

    def _seal(self) -> None:
        interval, self._open = self._open, _Interval([], DeferredValues())
        interval.values.seal()
        self._queue.append(interval)

    def _send(self, interval: _Interval) -> None:
        interval.block = self._fill(interval)
        interval.gather = self._gather(interval.block)

    def _fill(self, interval: _Interval) -> torch.Tensor:
        """This rank's block of the interval, float64 [log_every, columns], NaN below its steps."""
        numbers = interval.values.numbers()
        memory = self._memory()
        lines: list[list[float]] = []
        for row in interval.rows:
            times = self._resolve(row)
            own = (*(times.own[kind] for kind in KINDS), times.own["outside"])
            line = [
                row.step,
                times.seconds,
                *own,
                row.samples,
                row.tokens,
                row.flops,
                *memory,
                *pack_waits(times.waits),
            ]
            line += [numbers[index] for pair in row.averages.values() for index in pair]
            lines.append(line)
        lines += [[math.nan] * len(lines[0])] * (self._log_every - len(lines))
        return torch.tensor(lines, dtype=torch.float64)

    def _finish(self, interval: _Interval) -> bool:
        """Delivers an interval on rank 0; False where ranks are missing in it."""
        if self._rank != 0:
            return interval.gather is not None and interval.gather.done()
        blocks: Sequence[torch.Tensor] = []
        if interval.gather is not None and interval.gather.done():
            try:
                blocks = interval.gather.result()
            except RuntimeError:
                blocks = []  # a rank is gone; the training itself will say so
        complete = bool(blocks)
        assert interval.block is not None
        if not blocks:
            missing = torch.full_like(interval.block, math.nan)
            blocks = [interval.block, *[missing] * (self._world_size - 1)]
        tables = [block.tolist() for block in blocks]  # [ranks][log_every][columns]
        numbers = interval.values.numbers()
        steps = []
        for index, row in enumerate(interval.rows):
            metrics = {name: numbers[place] for name, place in row.metrics.items()}
            steps.append(
                GatheredStep(row.step, row.time, metrics, list(row.averages), [table[index] for table in tables])
            )
        self._deliver(steps)
        return complete
