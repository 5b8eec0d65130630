"""TensorBoard: the same numbers as in the log, for those who watch several runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FLUSH_S = 10.0
"""Seconds between writes to disk."""


class Board:
    """Writes scalars under `folder`. Where that fails (a full disk) it warns once and stops, and the run goes on.

    first_step: scalars that an earlier session wrote at this step or later are hidden.
    """

    def __init__(self, folder: Path, first_step: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._writer: Any = None
        self._flushed = time.monotonic()
        try:
            # Imported here: it takes a second that ranks without a board need not spend.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=3600)
        except Exception as error:
            self._give_up(error)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the scalars of one step (numbers that are not finite are left out: TensorBoard cannot draw them)."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if math.isfinite(value)
        ]
        try:
            self._writer.file_writer.add_summary(Summary(value=values), step)
            if time.monotonic() - self._flushed > FLUSH_S:
                self._writer.flush()
                self._flushed = time.monotonic()
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what is left and ends the writer's thread."""
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._give_up(error)
        self._writer = None

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        self._warn(f"TensorBoard under {self._folder} cannot be written ({error}); training goes on without it")
