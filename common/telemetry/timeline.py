"""Where the time of a step goes: spans, their exclusive times, and what of a blocking collective was waiting.

Kinds of time
    compute       forward and backward
    exposed_comm  the training waits for communication that no computation hides, once everybody is there
    idle          the training waits in a blocking collective for a rank that has not come yet
    input         the training waits for a batch
    optimizer     the update
    other         the rest of the step
    outside       evaluation and checkpoints: not part of a training step, taken out of its seconds

Exposed communication against idle
    A blocking collective ends on all ranks at about the same time, so the rank that came last waited for the transfer
    alone, and that is the shortest wait of any rank. With d[r, k] the length of the k-th "exposed_comm" span of the
    step on rank r:  transfer[k] = min over r of d[r, k],  idle[r] = sum over k of d[r, k] - transfer[k],  and what
    remains of rank r's exposed_comm is the transfer. For a step with one blocking collective this is the wait at that
    collective beyond its transfer. No clocks are compared across ranks. It holds for collectives that end together
    (all-reduce, all-gather, all-to-all, reduce-scatter), not for sends and broadcasts; a wait that some rank does not
    share by position (different numbers of spans) stays exposed_comm. The shortest of several noisy transfers is taken
    for the transfer, so on a machine whose cores are contended idle is overstated by that noise.

On CUDA a span lies between two events on the current stream: it is the time the device spent between them, which for
"exposed_comm" around `work.wait()` is exactly what the stream waited, and for "input" what the device missed. Elsewhere
a span is host time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

KINDS = ("compute", "exposed_comm", "input", "optimizer")
"""Kinds that spans are counted under; `idle` and `other` follow from them, `outside` is taken out of the step."""

SPAN_KINDS: Mapping[str, str] = {
    "compute": "compute",
    "forward": "compute",
    "backward": "compute",
    "forward_backward": "compute",
    "exposed_comm": "exposed_comm",
    "input": "input",
    "optimizer": "optimizer",
    "evaluation": "outside",
    "checkpoint": "outside",
}
"""Span name -> kind. A span of another name is `other`, unless the caller of Timeline says more."""

MATCHED_WAITS = 8
"""Blocking collectives of a step that are matched across ranks one by one; later ones are matched as one sum."""


class Clock(Protocol):
    """Takes stamps now and turns them into times once they have passed. immediate: they have at once."""

    immediate: bool

    def stamp(self) -> Any:
        """A mark of this moment of the training."""

    def passed(self, stamp: Any) -> bool:
        """True once the marked moment lies behind, so that `seconds` does not wait."""

    def seconds(self, first: Any, last: Any) -> float:
        """Time from one stamp to a later one."""

    def epoch_ns(self, stamp: Any) -> int:
        """Nanoseconds since 1970 of a stamp; stamps are asked for in the order they were taken."""

    def wait(self, stamp: Any) -> None:
        """Returns once the marked moment lies behind."""


class HostClock:
    """Clock of the host: stamps are nanoseconds."""

    immediate = True

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()
        self.stamp = time.perf_counter_ns

    def passed(self, stamp: int) -> bool:
        """Always: host code is where its clock is."""
        return True

    def seconds(self, first: int, last: int) -> float:
        """Seconds from one stamp to another."""
        return (last - first) * 1e-9

    def epoch_ns(self, stamp: int) -> int:
        """Nanoseconds since 1970."""
        return stamp + self._offset

    def wait(self, stamp: int) -> None:
        """Nothing to wait for."""


class CudaClock:
    """Clock of a CUDA device: stamps are events on the current stream, so taking one waits for nothing."""

    immediate = False

    def __init__(self) -> None:
        self._anchor = self.stamp()
        self._anchor.synchronize()
        self._anchor_ns = time.time_ns()

    def stamp(self) -> torch.cuda.Event:
        """An event recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, stamp: torch.cuda.Event) -> bool:
        """Whether the device has reached the event."""
        return stamp.query()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Device seconds between two events that have passed."""
        return first.elapsed_time(last) * 1e-3

    def epoch_ns(self, stamp: torch.cuda.Event) -> int:
        """Nanoseconds since 1970. The anchor moves along: elapsed_time is a float32, too coarse over hours."""
        self._anchor_ns += int(self._anchor.elapsed_time(stamp) * 1e6)
        self._anchor = stamp
        return self._anchor_ns

    def wait(self, stamp: torch.cuda.Event) -> None:
        """Blocks the host until the device has reached the event."""
        stamp.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock that measures training on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass
class OpenSpan:
    """A span as recorded: stamps not yet turned into times. `parent` is its index among the step's spans, or -1."""

    name: str
    start: Any
    end: Any = None
    parent: int = -1
    charged: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class RecordedStep:
    """What one step left behind: stamps of its spans, and the spans of other threads (host nanoseconds, 1970)."""

    start: Any
    end: Any = None
    spans: list[OpenSpan] = field(default_factory=list)
    beside: list[tuple[str, int, int, int]] = field(default_factory=list)
    charged: list[tuple[str, float]] = field(default_factory=list)


class Span(NamedTuple):
    """A span with its times. start: seconds since the step began; seconds: with the spans inside it."""

    name: str
    start: float
    seconds: float


@dataclass
class StepTimes:
    """The times of one step on one rank.

    start_ns: nanoseconds since 1970. seconds: length of the step without what is `outside`, at least 0.
    own: kind -> exclusive seconds, keys KINDS, "outside" and "other" (spans of other names).
    waits: lengths of the exposed_comm spans in order, s. elapsed: length of the step with what is outside, s.
    beside: spans of other threads as (name, start ns, end ns, thread number).
    """

    start_ns: int
    seconds: float
    elapsed: float
    own: dict[str, float]
    waits: list[float]
    spans: list[Span]
    beside: list[tuple[str, int, int, int]]


class _SpanContext:
    """`with timeline.span(name):` on the thread that trains."""

    __slots__ = ("_index", "_name", "_timeline")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> None:
        timeline = self._timeline
        spans = timeline._step.spans
        stack = timeline._stack
        self._index = len(spans)
        spans.append(OpenSpan(self._name, timeline.clock.stamp(), parent=stack[-1] if stack else -1))
        stack.append(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeline = self._timeline
        timeline._step.spans[self._index].end = timeline.clock.stamp()
        timeline._stack.pop()


class _BesideContext:
    """`with timeline.span(name):` on any other thread: seen in the trace, not counted in the step."""

    __slots__ = ("_name", "_start", "_timeline")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> None:
        self._start = time.time_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeline._step.beside.append((self._name, self._start, time.time_ns(), threading.get_ident()))


class Timeline:
    """Records the spans of one rank, step by step.

    clock: what stamps are taken with. span_kinds: further span names -> one of KINDS or "outside".

    Raises ValueError where a kind is unknown.
    """

    def __init__(self, clock: Clock, span_kinds: Mapping[str, str] | None = None) -> None:
        for name, kind in (span_kinds or {}).items():
            if kind not in (*KINDS, "outside"):
                raise ValueError(f"span_kinds[{name!r}]={kind!r} is no kind; use one of {', '.join(KINDS)}, outside")
        self.clock = clock
        self._kinds = {**SPAN_KINDS, **(span_kinds or {})}
        self._thread = threading.get_ident()
        self._stack: list[int] = []
        self._step = RecordedStep(clock.stamp())

    def span(self, name: str) -> _SpanContext | _BesideContext:
        """A context whose time counts under `name`; spans nest, and each counts without those inside it.

        On a thread other than the one that made the timeline the span appears in the trace only.
        """
        if threading.get_ident() != self._thread:
            return _BesideContext(self, name)
        return _SpanContext(self, name)

    def charge(self, name: str, seconds: float) -> None:
        """Counts `seconds` of the span that is open now (or of the step) under `name`: for waits measured elsewhere.

        Raises ValueError where `seconds` is negative or not finite.
        """
        if not 0.0 <= seconds < float("inf"):
            raise ValueError(f"charge({name!r}, {seconds!r}): seconds must be finite and not negative")
        owner = self._step.spans[self._stack[-1]] if self._stack else self._step
        owner.charged.append((name, seconds))

    def restart(self) -> None:
        """Begins the first step now; what was recorded before is forgotten."""
        self._stack.clear()
        self._step = RecordedStep(self.clock.stamp())

    def finish_step(self) -> RecordedStep:
        """Ends the step here and begins the next one. Raises ValueError inside an open span."""
        if self._stack:
            names = " > ".join(self._step.spans[index].name for index in self._stack)
            raise ValueError(f"a step cannot end inside a span; close {names} before telemetry.step()")
        step = self._step
        step.end = self.clock.stamp()
        self._step = RecordedStep(step.end)
        return step

    def passed(self, step: RecordedStep) -> bool:
        """Whether `resolve(step)` would not wait for the device."""
        clock = self.clock
        return clock.immediate or (clock.passed(step.end) and all(clock.passed(span.end) for span in step.spans))

    def resolve(self, step: RecordedStep) -> StepTimes:
        """Stamps into times; waits for the device where it has not come so far. Steps in order, each once."""
        clock = self.clock
        if not clock.immediate:
            for stamp in (*(span.end for span in step.spans), step.end):
                clock.wait(stamp)
        kinds = self._kinds
        spans = [Span(s.name, clock.seconds(step.start, s.start), clock.seconds(s.start, s.end)) for s in step.spans]
        rests = [
            span.seconds - sum(seconds for _, seconds in s.charged) for span, s in zip(spans, step.spans, strict=True)
        ]
        outside: list[bool] = []
        for recorded, span in zip(step.spans, spans, strict=True):
            parent = recorded.parent
            if parent >= 0:
                rests[parent] -= span.seconds
            # What runs inside an evaluation is evaluation, whatever it is called.
            outside.append(kinds.get(recorded.name) == "outside" or (parent >= 0 and outside[parent]))
        own = dict.fromkeys((*KINDS, "outside", "other"), 0.0)
        waits: list[float] = []
        for recorded, rest, within in zip(step.spans, rests, outside, strict=True):
            for name, seconds in (*recorded.charged, (recorded.name, max(0.0, rest))):
                kind = "outside" if within else kinds.get(name, "other")
                own[kind] += seconds
                if kind == "exposed_comm":
                    waits.append(seconds)
        for name, seconds in step.charged:
            own[kinds.get(name, "other")] += seconds
            if kinds.get(name) == "exposed_comm":
                waits.append(seconds)
        elapsed = clock.seconds(step.start, step.end)
        seconds = max(0.0, elapsed - own["outside"])
        return StepTimes(clock.epoch_ns(step.start), seconds, elapsed, own, waits, spans, step.beside)


def pack_waits(waits: Sequence[float]) -> list[float]:
    """The waits of a step in MATCHED_WAITS numbers, s: the last is the sum of the rest; NaN where there is none."""
    head = list(waits[: MATCHED_WAITS - 1])
    if len(waits) >= MATCHED_WAITS:
        head.append(sum(waits[MATCHED_WAITS - 1 :]))
    return head + [float("nan")] * (MATCHED_WAITS - len(head))


def idle_seconds(waits: Sequence[Sequence[float]]) -> list[float]:
    """Idle time of each rank in one step, s (definition at the top of this file). Returns [ranks].

    waits: [ranks][MATCHED_WAITS], from `pack_waits`.
    """
    idle = [0.0] * len(waits)
    for column in zip(*waits, strict=True):
        shortest = min(column)
        if all(wait == wait for wait in column):  # NaN: some rank has no such wait, so there is nothing to compare
            for rank, wait in enumerate(column):
                idle[rank] += wait - shortest
    return idle
