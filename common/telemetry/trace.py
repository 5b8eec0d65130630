"""Chrome traces of a few steps: one JSON file per rank, for chrome://tracing or Perfetto.

The spans of telemetry always; what torch's own profiler sees (every operator and kernel) on request, in a second file.

torch's profiler crashes the process where an asynchronous collective that it saw begin on gloo ends after the profiler
(seen with torch 2.13: the record of the collective writes into the profiler's freed memory). So before it is stopped,
all that is under way is waited for: telemetry's own gathers, and what `settle` waits for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.telemetry.timeline import StepTimes


def parse_steps(text: str | None) -> range:
    """Steps named as in a Python slice: "10:13" is 10, 11 and 12; "10" is 10; None or "" is none.

    Raises ValueError where it is neither, empty or negative.
    """
    if not text:
        return range(0)
    parts = text.split(":")
    try:
        first = int(parts[0])
        stop = int(parts[1]) if len(parts) == 2 else first + 1
    except ValueError:
        first = stop = -1
    if len(parts) > 2 or first < 0 or stop <= first:
        raise ValueError(f'trace_steps={text!r} names no steps; write "10:13" for steps 10, 11 and 12, or "10"')
    return range(first, stop)


class Tracer:
    """Keeps the spans of the wanted steps and writes them when the last one is in.

    folder: where `rank_00003.json` (and `rank_00003_torch.json` with `kernels`) go. steps: from `parse_steps`.
    settle: returns True once no asynchronous collective that was started under the profiler is under way.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        steps: range,
        *,
        kernels: bool,
        device: torch.device,
        settle: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._steps = steps
        self._kernels = kernels
        self._device = device
        self._settle = settle
        self._warn = warn
        self._events: list[dict[str, Any]] = []
        self._threads: dict[int, int] = {}
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Called when `step` is about to run: starts torch's profiler if it is wanted."""
        if self._kernels and self._profiler is None and step in self._steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        """Called when `step` has run: stops the profiler after the last wanted step and writes its file."""
        if self._profiler is not None and step >= self._steps[-1]:
            self._stop_profiler()

    def add(self, step: int, times: StepTimes) -> None:
        """Takes the spans of a step; writes the file with the last one."""
        if step not in self._steps:
            return
        start = times.start_ns / 1e3
        self._add(f"step {step}", start, times.elapsed * 1e6, 0)
        for span in times.spans:
            self._add(span.name, start + span.start * 1e6, span.seconds * 1e6, 0)
        for name, first_ns, last_ns, thread in times.beside:
            number = self._threads.setdefault(thread, len(self._threads) + 1)
            self._add(name, first_ns / 1e3, (last_ns - first_ns) / 1e3, number)
        if step == self._steps[-1]:
            self.write()

    def write(self) -> None:
        """Writes the spans collected so far, if any."""
        if not self._events:
            return
        names = [self._name("process_name", 0, f"rank {self._rank}"), self._name("thread_name", 0, "training")]
        names += [self._name("thread_name", number, f"thread {number}") for number in self._threads.values()]
        content = json.dumps({"traceEvents": names + self._events, "displayTimeUnit": "ms"})
        self._events = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank_{self._rank:05d}.json").write_text(content)
        except OSError as error:
            self._warn(f"the trace under {self._folder} cannot be written ({error}); training goes on without it")

    def close(self, clean: bool) -> None:
        """Writes what is there of a range the run did not finish. clean: nothing failed, other ranks are there."""
        if self._profiler is not None and clean:
            self._stop_profiler()
        self.write()

    def _stop_profiler(self) -> None:
        if not self._settle():
            return  # tried again after the next step
        profiler, self._profiler = self._profiler, None
        self._kernels = False
        profiler.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"rank_{self._rank:05d}_torch.json"))
        except (OSError, RuntimeError) as error:
            self._warn(f"torch's trace under {self._folder} cannot be written ({error}); training goes on without it")

    def _add(self, name: str, start_us: float, length_us: float, thread: int) -> None:
        place = {"pid": self._rank, "tid": thread}
        self._events.append({"name": name, "ph": "X", "ts": start_us, "dur": length_us, **place})

    def _name(self, what: str, thread: int, name: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": self._rank, "tid": thread, "args": {"name": name}}
