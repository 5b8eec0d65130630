"""A pool of rank processes for tests and parity checks: started once, reused by every test, healed after a failure."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.layout import ParallelLayout
from common.runtime import Runtime


class RankFailure(AssertionError):
    """A rank raised, died or hung. The text holds the number of the rank and its own traceback."""


class RankPool:
    """Up to `size` processes on this machine that run functions as the ranks of a job (gloo, one thread each).

    Processes are started when first needed and stay. After a failure all of them are ended, since the survivors may sit
    in a collective that will never finish, and the next run starts new ones.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")
        self._runs = itertools.count()
        self._closed = False
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        layout: ParallelLayout | None = None,
        seed: int = 0,
        timeout_s: float = 120.0,
    ) -> list[Any]:
        """Calls `function(runtime, *arguments)` on ranks 0..world_size-1 and returns what each returned, by rank.

        function: of module level (it travels by name); arguments and results must pickle.
        layout: None puts every rank on `dp_shard`.

        Raises RankFailure where a rank raises, dies or is not done after `timeout_s` seconds; ValueError where
        `world_size` is larger than the pool.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size={world_size} does not fit a pool of {self.size} ranks")
        if self._closed:
            raise ValueError("the pool is closed; make a new one")
        self._grow(world_size)
        store = Path(self._folder.name) / f"store_{next(self._runs)}"
        job = (world_size, str(store), layout, seed, timeout_s, function, arguments)
        try:
            for _, connection in self._ranks[:world_size]:
                connection.send(job)
            return self._collect(world_size, timeout_s)
        except BaseException:
            # Whatever went wrong, no answer of this job may be taken for one of the next.
            self._end()
            raise

    def close(self) -> None:
        """Ends the processes and removes what the pool wrote."""
        self._closed = True
        self._end()
        self._folder.cleanup()

    def _grow(self, world_size: int) -> None:
        if any(not process.is_alive() for process, _ in self._ranks):
            self._end()
        context = mp.get_context("spawn")
        while len(self._ranks) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, len(self._ranks), self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, world_size: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:world_size])}
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join(5)
                    succeeded, value = False, f"the process ended with exit code {process.exitcode}"
                (results if succeeded else failures)[rank] = value
            if failures:  # the others wait for a rank that is gone; those that fail by themselves may say so
                deadline = min(deadline, time.monotonic() + 3.0)
        if failures or waiting:
            # A rank that lost its peer reports a connection error; the one that broke first says why.
            if not failures:
                failures = {
                    rank: f"not done after {timeout_s} s; it was in\n{self._where(rank)}" for rank in waiting.values()
                }
            raise RankFailure(
                "\n".join(f"--- rank {rank} of {world_size} ---\n{text}" for rank, text in failures.items())
            )
        return [results[rank] for rank in range(world_size)]

    def _where(self, rank: int) -> str:
        """The stack of a rank that hangs."""
        pid = self._ranks[rank][0].pid
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        path = Path(self._folder.name) / f"stack_{pid}"
        return path.read_text() if path.exists() else "(no stack)"

    def _end(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []


def _serve(connection: Connection, rank: int, folder: str) -> None:
    """Body of a rank process: runs jobs until the pool closes the pipe."""
    stack = (Path(folder) / f"stack_{os.getpid()}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ.pop("MASTER_ADDR", None)
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    while True:
        try:
            world_size, store, layout, seed, timeout_s, function, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            torch.manual_seed(seed)
            torch.set_default_dtype(torch.float32)  # whatever the job before left
            runtime = Runtime.start(
                layout,
                device="cpu",
                seed=seed,
                timeout_s=timeout_s,
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
            )
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
            answer = (True, function(runtime, *arguments))
            runtime.stop()
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except Exception:
            connection.send((False, traceback.format_exc()))
