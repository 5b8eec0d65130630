"""What a person sees while a run goes on: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.telemetry.format import duration, number, rate

SHOWN_METRICS = 4
REFRESH_PER_S = 2  # drawing takes milliseconds of a core that the training may need


class ProgressDisplay:
    """Progress of one run on standard output.

    title: shown in front. total_steps: None where the end is not known. first_step: steps done before this launch.
    every_s: seconds between lines where standard output is no terminal.
    """

    def __init__(self, title: str, total_steps: int | None, first_step: int, every_s: float) -> None:
        self._title = title
        self._total = total_steps
        self._every_s = every_s
        self._started = time.monotonic()
        self._printed = -math.inf
        self._first_step = self._step = first_step
        self._pending: Mapping[str, Any] | None = None
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stdout),
                refresh_per_second=REFRESH_PER_S,
                expand=True,
            )
            self._task = self._bar.add_task(title, total=total_steps, completed=first_step, numbers="")
            self._bar.start()

    def resume_at(self, step: int) -> None:
        """Says which step was the last before this launch."""
        self._first_step = self._step = step
        if self._bar is not None:
            self._bar.reset(self._task, completed=step)

    def advance(self, step: int) -> None:
        """`step` is done."""
        self._step = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, record: Mapping[str, Any]) -> None:
        """The numbers of a step, a record of the log."""
        now = time.monotonic()
        if self._bar is not None:
            if now - self._printed > 1 / (2 * REFRESH_PER_S):
                self._printed = now
                self._bar.update(self._task, numbers="  ".join(_numbers(record)))
            return
        self._pending = record
        if now - self._printed >= self._every_s or record["step"] == self._total:
            self._print_pending(now)

    def message(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def event(self, name: str, step: int, data: Mapping[str, Any]) -> None:
        """Prints that something happened, with its numbers."""
        numbers = "  ".join(f"{key} {number(value)}" for key, value in data.items())
        self.message(f"{self._title}  {name} after step {step:,}  {numbers}")

    def stop(self) -> None:
        """Leaves the terminal as it was found; prints the last step if it has not been."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._pending is not None:
            self._print_pending(time.monotonic())

    def _print_pending(self, now: float) -> None:
        record, self._pending = self._pending, None
        if record is None:
            return
        self._printed = now
        parts = [f"{self._title}  step {record['step']:,}" + (f"/{self._total:,}" if self._total else "")]
        parts += _numbers(record)
        elapsed = now - self._started
        parts.append(f"elapsed {duration(elapsed)}")
        done = record["step"] - self._first_step
        if self._total and done > 0 and record["step"] < self._total:
            parts.append(f"left {duration(elapsed / done * (self._total - record['step']))}")
        print("  ".join(parts), flush=True)


def _numbers(record: Mapping[str, Any]) -> list[str]:
    parts = [f"{name} {number(value)}" for name, value in list(record["metrics"].items())[:SHOWN_METRICS]]
    if record["tokens"]:
        parts.append(rate(record["tokens_per_s"], "tokens/s"))
    else:
        parts.append(rate(record["samples_per_s"], "samples/s"))
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f} %")
    return parts


@contextlib.contextmanager
def steps_shown(title: str, total: int, done: int = 0, every_s: float = 10.0) -> Iterator[Callable[[], None]]:
    """Progress of work in `total` equal parts, `done` of which are; call what it gives after each further part.

    A bar on a terminal, elsewhere a line at least `every_s` seconds after the last one, and one at the end.
    """
    count, printed = done, time.monotonic()
    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=not sys.stdout.isatty(), expand=True) as bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance() -> None:
            nonlocal count, printed
            count += 1
            bar.update(task, completed=count)
            if bar.disable and (count == total or time.monotonic() - printed >= every_s):
                printed = time.monotonic()
                print(f"{title}  {count:,}/{total:,}", flush=True)

        yield advance
