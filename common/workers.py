"""What long preparations in worker processes need: one at a time in a folder, and no worker left behind."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path


class BusyError(RuntimeError):
    """Another process works in the folder."""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While it is open no other process gets past this in the same folder, which must exist.

    The lock ends with the process, however that ends; a file system without locks has none.

    Raises BusyError where another process has it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"another process works in {folder}; wait for it, or give another folder") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def end_with_parent() -> None:
    """To be called in a worker: ends it when the process that started it is gone, else it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
