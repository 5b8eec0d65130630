"""TensorBoard: the same numbers as in the log, for those who watch several runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FLUSH_S = 10.0
"""Seconds between writes. Written together, steps cost a fraction of what they cost alone; the log has each at once."""


def load_board() -> None:
    """Imports what a Board needs: a second that only the rank with a board spends, and not within its first step."""
    import torch.utils.tensorboard  # noqa: F401


class Board:
    """Writes scalars under `folder`. Where that fails (a full disk) it warns once and stops, and the run goes on.

    first_step: scalars that an earlier launch wrote at this step or later are hidden.
    """

    def __init__(self, folder: Path, first_step: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._writer: Any = None
        self._kept: list[tuple[int, float, Callable[[], Mapping[str, float]]]] = []
        self._flushed = time.monotonic()
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=3600)
        except Exception as error:
            self._give_up(error)

    def add(self, step: int, scalars: Callable[[], Mapping[str, float]]) -> None:
        """Takes the scalars of one step; the function that names them is called when they are written."""
        if self._writer is None:
            return
        self._kept.append((step, time.time(), scalars))
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def close(self) -> None:
        """Writes what is left and ends the writer's thread."""
        if self._writer is None:
            return
        self._flush()
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            self._give_up(error)
        self._writer = None

    def _flush(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        kept, self._kept = self._kept, []
        self._flushed = time.monotonic()
        try:
            for step, moment, scalars in kept:
                # What is not finite is left out: TensorBoard cannot draw it.
                finite = {name: value for name, value in scalars().items() if math.isfinite(value)}
                values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
                self._writer.file_writer.add_summary(Summary(value=values), step, moment)
            self._writer.flush()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        self._kept = []
        self._warn(f"TensorBoard under {self._folder} cannot be written ({error}); training goes on without it")
