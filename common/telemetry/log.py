"""The log of a run: `metrics.jsonl` in its folder, one JSON object a line, appended.

kind        fields
"launch"    one per start or resume: schema, time, title, start_step, total_steps, world_size, device, flops_peak,
            config, environment
"step"      step, time, seconds, samples, tokens, flops (sums over ranks in this step), samples_total, tokens_total,
            tokens_per_s, samples_per_s, mfu, metrics {name: number}, ranks {quantity: [one number per rank]}
"event"     event (its name), step (the last step before it), time, data
"end"       step, time, seconds, lost_lines

Every line is valid JSON: numbers that JSON has no word for are the strings "NaN", "Infinity" and "-Infinity", which
`float()` reads. Each line is written whole by one system call and nothing is buffered, so a killed process leaves at
most one torn line, which the next launch cuts off. (Only the machine itself failing can lose more: there is no fsync.)
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

LOG_NAME = "metrics.jsonl"
SCHEMA = 1
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode(value: Any) -> Any:
    """`value` as something json.dumps writes as valid JSON; NaN and infinities become strings, unknown things str()."""
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return encode(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(item) for item in value]
    return str(value)


class LogWriter:
    """Appends records to a run's log. A full or failing disk costs lines, never the run: one warning, then silence.

    path: created if absent; a torn last line of a killed run is cut off.
    warn: called once with the reason when a line cannot be written. `lost` counts such lines.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self.lost = 0
        self._warn = warn
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0
        self._earlier = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            self._cut_torn_line()
            self._earlier = self._size
        except OSError as error:
            self._complain(error)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record as one line. Never raises for a disk that fails."""
        try:
            text = _JSON.encode(record)
        except (ValueError, TypeError):  # something in it that JSON has no word for
            text = _JSON.encode(encode(record))
        line = (text + "\n").encode()
        with self._lock:
            if self._file is None:
                self.lost += 1
                return
            try:
                written = os.write(self._file, line)
                if written < len(line):
                    raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes of a line fit")
                self._size += written
            except OSError as error:
                self.lost += 1
                self._complain(error)
                self._cut_back()

    def drop_from(self, step: int) -> None:
        """Removes what earlier launches recorded at `step` and later, since it is about to be done again.

        Where nothing of them would remain (a run starts afresh in a used folder) their log is kept under another name.
        """
        with self._lock:
            if self._file is None or self._earlier == 0:
                return
            try:
                text = self.path.read_bytes()
                earlier, own = text[: self._earlier], text[self._earlier :]
                kept = [line for line in earlier.splitlines(keepends=True) if not _is_redone(line, step)]
                if not any(b'"kind":"step"' in line for line in kept) and b'"kind":"step"' in earlier:
                    self._set_aside(earlier)
                    kept = []
                if b"".join(kept) != earlier:
                    self._replace(b"".join(kept) + own)
                self._earlier = 0
            except OSError as error:
                self._complain(error)

    def close(self) -> None:
        """Closes the file; records after that are lost."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size

    def _cut_torn_line(self) -> None:
        assert self._file is not None
        position = self._size
        while position > 0:
            start = max(0, position - 65536)
            end = os.pread(self._file, position - start, start).rfind(b"\n")
            if end >= 0:
                position = start + end + 1
                break
            position = start
        if position < self._size:
            os.ftruncate(self._file, position)
            self._size = position

    def _cut_back(self) -> None:
        """Removes the part of a line that did fit, so that the next one starts on a line of its own."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            os.close(self._file)
            self._file = None

    def _set_aside(self, text: bytes) -> None:
        number = 1
        while (aside := self.path.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        aside.write_bytes(text)

    def _replace(self, text: bytes) -> None:
        beside = self.path.with_name(self.path.name + ".part")
        try:
            beside.write_bytes(text)
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        assert self._file is not None
        os.close(self._file)
        self._file = None
        self._open()

    def _complain(self, error: OSError) -> None:
        warn, self._warn = self._warn, lambda message: None
        warn(f"the log {self.path} cannot be written ({error}); training goes on, lines are lost")


def _is_redone(line: bytes, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return record.get("kind") in ("step", "event", "end") and record.get("step", -1) >= step


@dataclass
class RunLog:
    """What a run's log says. steps: by step, each once (the last word counts). unreadable: numbers of bad lines."""

    folder: Path
    launches: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)

    @property
    def launch(self) -> dict[str, Any]:
        """The latest launch; empty where the log has none."""
        return self.launches[-1] if self.launches else {}

    @property
    def title(self) -> str:
        """Name of the run."""
        return str(self.launch.get("title") or self.folder.resolve().name)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics, in order of appearance."""
        return list(dict.fromkeys(name for step in self.steps for name in step.get("metrics", {})))

    def column(self, name: str) -> np.ndarray:
        """A number of every step, float64 [steps]; `metrics.loss` looks inside; NaN where a step has none."""
        return np.array([_number(_look_up(step, name)) for step in self.steps], dtype=np.float64)

    def per_rank(self, name: str) -> np.ndarray:
        """A quantity of every step and rank, float64 [steps, ranks]; NaN where unknown."""
        rows = [step.get("ranks", {}).get(name) or [] for step in self.steps]
        width = max((len(row) for row in rows), default=0)
        table = np.full((len(rows), width), np.nan)
        for index, row in enumerate(rows):
            table[index, : len(row)] = [_number(value) for value in row]
        return table

    def events_named(self, name: str) -> list[dict[str, Any]]:
        """Events of one name in order, each step once (the last word counts)."""
        by_step = {event.get("step"): event for event in self.events if event.get("event") == name}
        return sorted(by_step.values(), key=lambda event: event.get("step") or 0)


def _look_up(record: Mapping[str, Any], name: str) -> Any:
    first, _, rest = name.partition(".")
    value = record.get(first)
    return _look_up(value, rest) if rest and isinstance(value, Mapping) else value


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read_log(folder: Path) -> RunLog:
    """Reads the log of the run in `folder`; torn or foreign lines are counted, not fatal.

    Raises ValueError where there is no log or nothing readable in it.
    """
    path = folder / LOG_NAME
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {LOG_NAME}")
    log = RunLog(folder)
    steps: dict[int, dict[str, Any]] = {}
    places = {"launch": log.launches, "event": log.events, "end": log.ends}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
            kind = record["kind"]
            if kind == "step":
                steps[int(record["step"])] = record
            else:
                places[kind].append(record)
        except (ValueError, KeyError, TypeError):
            log.unreadable.append(number)
    if not steps and not log.launches:
        raise ValueError(f"{path} holds no record of a run; {len(log.unreadable)} lines are unreadable")
    log.steps = [steps[step] for step in sorted(steps)]
    return log
