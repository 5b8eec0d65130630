"""Stopping together: SIGTERM reaches one rank or all of them, and all ranks leave the loop after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from common.runtime import Runtime


class StopSignal:
    """Notices SIGTERM on any rank of the job; a context manager that puts the handler before it back.

    `requested` costs no waiting: the ranks' answers to one call are read by the next one, so a job stops one step after
    the signal. It uses a gloo group of its own, beside whatever training communicates.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._group = runtime.background_group() if runtime.world_size > 1 else None
        self._noticed = False
        self._answer = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        # Only the main thread may set handlers; elsewhere (under a test) the job can be asked by `request`.
        self._main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGTERM, self._notice) if self._main else None

    def request(self) -> None:
        """Asks the job to stop, as a SIGTERM to this rank does."""
        self._noticed = True

    def requested(self) -> bool:
        """Whether some rank was told to stop before the last call; the same on all ranks, which call it together."""
        if self._group is None:
            return self._noticed
        if self._pending is not None:
            self._pending.wait()
            if self._answer.item():
                return True
        self._answer = torch.tensor([int(self._noticed)], dtype=torch.int32)
        self._pending = dist.all_reduce(self._answer, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._pending is not None:
            self._pending.wait()
        if self._main and self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True
