"""Telemetry: the one object through which a training loop says what it does."""

from __future__ import annotations

import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from common.runtime import Runtime
from common.telemetry.board import Board, load_board
from common.telemetry.environment import describe_environment, peak_memory
from common.telemetry.intervals import GatheredStep, Intervals, Number, PendingGather, StepRow, gather_over
from common.telemetry.log import LOG_NAME, SCHEMA, LogWriter, encode, read_log
from common.telemetry.peak import MatmulPeak
from common.telemetry.progress import ProgressDisplay
from common.telemetry.records import board_scalars, step_record
from common.telemetry.sections import Section
from common.telemetry.timeline import Timeline, clock_for
from common.telemetry.trace import Tracer, parse_steps

FLUSH_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for the other ranks' last numbers."""


class Telemetry:
    """Records a run: progress on rank 0, `metrics.jsonl`, TensorBoard, traces and `report.html` in the run's folder.

        with Telemetry(run_dir, runtime, config=config, total_steps=1000, flops_peak=peak) as telemetry:
            for step in range(1, 1001):
                with telemetry.span("input"):
                    batch = next(batches)
                with telemetry.span("forward_backward"):
                    ...
                telemetry.step(step=step, samples=len(batch), tokens=batch.tokens, metrics={"loss": loss})
            telemetry.write_report()

    Every rank makes one, in the same order as its process groups, and calls `step` for the same steps. What crosses
    ranks is one small asynchronous gather per `log_every` steps; lines of an interval are written when it has arrived,
    a step or so later, so a killed run loses at most the interval under way (with log_every=1, one line).

    run_dir: folder of the run; made by rank 0, shared by all ranks or not (only traces come from the others).
    config: dataclass or mapping, kept in the log and the report. title: name of the run; None: the folder's name.
    total_steps: number of the last step, if known. start_step: the last step done before this launch (resume); what
        the log holds beyond it is dropped, so no step is there twice. None: taken from the first call of `step`.
    start_samples, start_tokens: totals before this launch; None: taken from the log.
    flops_peak: FLOP/s of one rank (see measure_matmul_peak); without it there is no MFU.
    log_every: steps per interval. trace_steps: "10:13" writes spans of steps 10, 11 and 12 as a Chrome trace per rank
        under `trace/`; trace_kernels adds torch.profiler's. settle: needed with trace_kernels where collectives are
        still under way when a step ends; waits for them (e.g. ShardedOptimizer.wait_parameters; why: see trace.py).
    span_kinds: further span names -> "compute", "exposed_comm", "input", "optimizer" or "outside".
    gather: replaces the gather over a group of its own; see intervals.gather_over for what it does.
    quiet: no progress. line_every_s: seconds between progress lines where standard output is not a terminal.

    SIGTERM, where nobody else handles it, becomes SystemExit(143) while the run is inside the `with`, so that files are
    closed and the terminal is left as found. A disk that fills up costs log lines and one warning, not the run.

    Raises ValueError for values outside these rules.
    """

    def __init__(
        self,
        run_dir: str | Path,
        runtime: Runtime,
        *,
        config: Any = None,
        title: str | None = None,
        total_steps: int | None = None,
        start_step: int | None = None,
        start_samples: int | None = None,
        start_tokens: int | None = None,
        flops_peak: float | MatmulPeak | None = None,
        log_every: int = 1,
        trace_steps: str | None = None,
        trace_kernels: bool = False,
        settle: Callable[[], None] | None = None,
        span_kinds: Mapping[str, str] | None = None,
        gather: Callable[[torch.Tensor], PendingGather] | None = None,
        quiet: bool = False,
        line_every_s: float = 10.0,
    ) -> None:
        peak = None if flops_peak is None else float(flops_peak)
        _check_counts(log_every=log_every, total_steps=total_steps, start_step=start_step)
        if peak is not None and not 0 < peak < math.inf:
            raise ValueError(f"flops_peak={peak} must be positive and finite; give FLOP/s of one rank, or None")
        self.run_dir = Path(run_dir)
        self.runtime = runtime
        self.flops_peak = peak
        self._title = title or self.run_dir.resolve().name
        self._config = encode(config) if config is not None else {}
        self._total_steps = total_steps
        self._start_step = start_step
        self._totals = [start_samples, start_tokens]
        self._quiet = quiet
        self._line_every_s = line_every_s
        self._warned: set[str] = set()
        self._settle = settle
        self.timeline = Timeline(clock_for(runtime.device), span_kinds)
        self._tracer = Tracer(
            self.run_dir / "trace",
            runtime.rank,
            parse_steps(trace_steps),
            kernels=trace_kernels,
            device=runtime.device,
            settle=self._settled,
            warn=self._warn,
        )
        if gather is None:
            group = runtime.background_group() if runtime.world_size > 1 else None
            gather = gather_over(group, runtime.rank, runtime.world_size)
        self._intervals = Intervals(
            runtime.rank,
            runtime.world_size,
            log_every,
            resolve=self._resolve,
            passed=self.timeline.passed,
            gather=gather,
            memory=lambda: peak_memory(runtime.device),
            deliver=self._deliver,
        )
        self.span = self.timeline.span
        self.charge = self.timeline.charge
        self._step: int | None = None
        self._open = False
        self._log: LogWriter | None = None
        self._board: Board | None = None
        self._progress: ProgressDisplay | None = None
        self._handler: Any = None

    def __enter__(self) -> Telemetry:
        self._open = True
        self._started = time.monotonic()
        self._handle_sigterm()
        if self.runtime.is_main:
            load_board()
            self._log = LogWriter(self.run_dir / LOG_NAME, self._warn)
            if self._start_step is not None:
                self._log.drop_from(self._start_step + 1)
            self._log.append(self._launch_record())
            if not self._quiet:
                self._progress = ProgressDisplay(
                    self._title, self._total_steps, self._start_step or 0, self._line_every_s
                )
        self._tracer.before((self._start_step or 0) + 1)
        self.timeline.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
            else:
                self._intervals.abandon()
        except RuntimeError as problem:  # the device or a peer is gone; what is written stays
            self._warn(f"the last steps could not be recorded ({problem})")
        finally:
            self._close(kind is None)

    def step(
        self,
        *,
        step: int,
        samples: int,
        tokens: int = 0,
        flops: float = 0.0,
        metrics: Mapping[str, Number] | None = None,
        averages: Mapping[str, tuple[Number, Number]] | None = None,
    ) -> None:
        """Ends a step. Its time reaches from the end of the one before to here, without what is "outside".

        samples, tokens, flops: this rank's share in this step; they are summed over ranks, so a rank that repeats
            another's work (tensor or pipeline parallel) gives its part of it. flops: useful ones only, for MFU.
        metrics: name -> number or tensor of one element; rank 0's count. A tensor on a device is not waited for.
        averages: name -> (sum, count) of this rank, logged as sum over ranks / sum of counts: an exact global mean
            without a collective of its own. Same names on every rank and step.

        Raises ValueError outside the `with`, inside an open span, where steps do not increase, for negative or
        non-finite amounts and for metrics that are not single numbers.
        """
        self._check_open("step")
        if self._step is not None and step <= self._step:
            raise ValueError(f"step={step} does not come after step {self._step}; number steps upwards")
        _check_counts(step=step, samples=samples, tokens=tokens)
        if not 0 <= flops < math.inf:
            raise ValueError(f"flops={flops} must be finite and not negative")
        recorded = self.timeline.finish_step()
        self._tracer.after(step)
        if self._step is None:
            self._begin(step)
        self._step = step
        row = StepRow(step, time.time(), recorded, samples, tokens, float(flops), {}, {})
        self._intervals.add(row, metrics or {}, averages or {})
        self._tracer.before(step + 1)
        if self._progress is not None:
            self._progress.advance(step)

    def event(self, name: str, data: Mapping[str, Any] | None = None, *, show: bool = True) -> None:
        """Records what happened after the latest step, e.g. event("evaluation", {"samples": n, "accuracy": a}).

        Written by rank 0, shown as a line if `show`; other ranks do nothing. Raises ValueError outside the `with` and
        for an empty name.
        """
        self._check_open("event")
        if not name or not isinstance(name, str):
            raise ValueError(f"event name {name!r} must be a non-empty string")
        if self._log is None:
            return
        self._intervals.advance()
        step = self._step if self._step is not None else (self._start_step or 0)
        data = encode(data or {})
        self._log.append({"kind": "event", "event": name, "step": step, "time": time.time(), "data": data})
        numbers = {key: float(value) for key, value in data.items() if isinstance(value, (int, float))}
        if self._board is not None:
            self._board.add(step, lambda: {f"{name}/{key}": value for key, value in numbers.items()})
        if show and self._progress is not None:
            self._progress.event(name, step, data)

    def message(self, text: str) -> None:
        """Shows a line on rank 0 without disturbing the progress bar."""
        if self._progress is not None:
            self._progress.message(text)

    def flush(self) -> None:
        """Brings everything recorded so far into the log. Call it on every rank; it waits for them."""
        if not self._intervals.flush(FLUSH_TIMEOUT_S):
            self._warn("some ranks' numbers did not arrive; the log holds what this rank knows of these steps")

    def write_report(self, sections: Sequence[Section] = ()) -> Path | None:
        """Writes `report.html`; returns its path on rank 0. Call it on every rank, inside the `with` or after it.

        sections: the recipe's own, kept in the folder so that `python -m common.telemetry report` shows them too.
        """
        if self._open:
            self.flush()
        if not self.runtime.is_main:
            return None
        # Imported here: matplotlib takes a second that a run without a report need not spend.
        from common.telemetry.report import keep_sections, write_report

        try:
            if sections:
                keep_sections(self.run_dir, sections)
            return write_report(self.run_dir)
        except OSError as error:
            self._warn(f"the report cannot be written ({error})")
            return None

    def _begin(self, step: int) -> None:
        """What can only be done when the number of the launch's first step is known."""
        if self._log is None:
            return
        if self._start_step is None:
            self._log.drop_from(step)
            if self._progress is not None:
                self._progress.resume_at(step - 1)
        if None in self._totals:
            self._totals = [
                known if known is not None else found
                for known, found in zip(self._totals, self._earlier_totals(step), strict=True)
            ]
        self._board = Board(self.run_dir / "tensorboard", step, self._warn)

    def _earlier_totals(self, step: int) -> tuple[int, int]:
        try:
            earlier = [record for record in read_log(self.run_dir).steps if record["step"] < step]
            return (int(earlier[-1]["samples_total"]), int(earlier[-1]["tokens_total"])) if earlier else (0, 0)
        except (ValueError, KeyError, OSError):
            return 0, 0

    def _resolve(self, row: StepRow) -> Any:
        times = self.timeline.resolve(row.recorded)
        self._tracer.add(row.step, times)
        return times

    def _deliver(self, steps: list[GatheredStep]) -> None:
        for gathered in steps:
            record = step_record(gathered, self._totals, self.flops_peak)
            self._totals = [record["samples_total"], record["tokens_total"]]
            if self._log is not None:
                self._log.append(record)
            if self._board is not None:
                self._board.add(gathered.step, functools.partial(board_scalars, record))
            if self._progress is not None:
                self._progress.show(record)

    def _settled(self) -> bool:
        if self._settle is not None:
            self._settle()
        return self._intervals.settle(FLUSH_TIMEOUT_S)

    def _launch_record(self) -> dict[str, Any]:
        return {
            "kind": "launch",
            "schema": SCHEMA,
            "time": time.time(),
            "title": self._title,
            "start_step": self._start_step,
            "total_steps": self._total_steps,
            "world_size": self.runtime.world_size,
            "device": str(self.runtime.device),
            "flops_peak": self.flops_peak,
            "config": self._config,
            "environment": describe_environment(self.runtime),
        }

    def _handle_sigterm(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handler = signal.signal(signal.SIGTERM, _exit_on_sigterm)

    def _close(self, clean: bool) -> None:
        self._open = False
        self._tracer.close(clean)
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._log is not None:
            if clean:
                seconds = time.monotonic() - self._started
                end = {"step": self._step, "time": time.time(), "seconds": seconds, "lost_lines": self._log.lost}
                self._log.append({"kind": "end", **end})
            self._log.close()
            self._log = None
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise ValueError(f"telemetry.{what}() works inside `with Telemetry(...) as telemetry:` only")

    def _warn(self, text: str) -> None:
        """Says a thing once on standard error."""
        if text not in self._warned:
            self._warned.add(text)
            print(f"warning: rank {self.runtime.rank}: {text}", file=sys.stderr, flush=True)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        lowest = 1 if name in ("log_every", "total_steps") else 0
        if count is None and name in ("total_steps", "start_step"):
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < lowest:
            raise ValueError(f"{name}={count!r} must be an integer of at least {lowest}")
