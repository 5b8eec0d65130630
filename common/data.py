"""Deterministic, resumable order of samples; prefetch in a thread; reading once and feeding many ranks."""

from __future__ import annotations

import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common.collectives import all_gather_object, broadcast
from common.runtime import Runtime

T = TypeVar("T")


class DataError(RuntimeError):
    """Data cannot be used, or some rank failed to provide it. Raised by all ranks of a group together."""


@dataclass(frozen=True)
class Window:
    """Consecutive shards of an epoch that are read and shuffled together."""

    epoch: int
    index: int
    """Number of the window inside its epoch."""
    shards: tuple[int, ...]
    """Numbers of the shards, in the order in which their samples are laid side by side before the shuffle."""


class SampleOrder:
    """The endless stream of samples: a function of the shards, the window and the seed, never of the ranks.

    Every epoch permutes the shards, cuts them into windows of `window` shards and shuffles the samples inside each
    window; the stream is the windows one after another, epoch after epoch. Step s takes samples [s * batch, (s + 1) *
    batch) of it: what a window or an epoch leaves over begins the next step, and nothing is dropped. A position in the
    stream is therefore all that a resume needs, on any number of ranks.

    Permutations sort raw 64-bit draws of PCG64, which numpy keeps the same from version to version (NEP 19); its
    `permutation` it may change.
    """

    def __init__(self, counts: Sequence[int], *, window: int, seed: int) -> None:
        """counts: samples in each shard. Raises ValueError where there is no sample or `window` or `seed` is bad."""
        if window < 1 or seed < 0:
            raise ValueError(f"window={window}, seed={seed}: a window holds at least one shard, a seed is not negative")
        if sum(counts) < 1:
            raise ValueError(f"{len(counts)} shards hold no sample")
        self.counts = list(counts)
        self.window = window
        self.seed = seed
        self._lost: dict[int, int] = {}

    def lose(self, shard: int, epoch: int) -> None:
        """From `epoch` on, `shard` is known not to be readable and gives no samples."""
        self._lost.setdefault(shard, epoch)

    @property
    def lost(self) -> dict[int, int]:
        """Shards that gave no samples any more, with the first epoch of that."""
        return dict(self._lost)

    def count(self, shard: int, epoch: int) -> int:
        """Samples that `shard` gives in `epoch`."""
        return 0 if self._lost.get(shard, epoch + 1) <= epoch else self.counts[shard]

    def epoch_samples(self, epoch: int) -> int:
        """Samples in `epoch`."""
        return sum(self.counts) - sum(self.counts[shard] for shard, since in self._lost.items() if since <= epoch)

    def windows(self, epoch: int) -> list[Window]:
        """The windows of an epoch, in order; the last one may hold fewer shards."""
        shards = self._permutation(len(self.counts), epoch).tolist()
        return [
            Window(epoch, index, tuple(shards[first : first + self.window]))
            for index, first in enumerate(range(0, len(shards), self.window))
        ]

    def shuffle(self, window: Window, samples: int) -> NDArray[np.int64]:
        """The place in stream order -> number of the sample among those of the window, [samples]."""
        return self._permutation(samples, window.epoch, window.index)

    def locate(self, position: int) -> tuple[Window, int]:
        """The window that holds stream position `position`, and the samples of that window before it."""
        if position < 0:
            raise ValueError(f"position={position} in the stream of samples is negative")
        last_change = max(self._lost.values(), default=-1) + 1
        epoch = 0
        while position >= (samples := self.epoch_samples(epoch)):
            if samples == 0:
                raise DataError(f"no shard is left in epoch {epoch}")
            # Once no more shards are lost all epochs are alike.
            passed = position // samples if epoch >= last_change else 1
            epoch, position = epoch + passed, position - passed * samples
        for window in self.windows(epoch):
            samples = sum(self.count(shard, epoch) for shard in window.shards)
            if position < samples:
                return window, position
            position -= samples
        raise AssertionError("an epoch is the sum of its windows")

    def windows_from(self, window: Window) -> Iterator[Window]:
        """`window` and all after it, without end."""
        epoch, index = window.epoch, window.index
        while True:
            yield from self.windows(epoch)[index:]
            epoch, index = epoch + 1, 0

    def _permutation(self, n: int, *key: int) -> NDArray[np.int64]:
        # The length of the key is part of the key: (seed, epoch) and (seed, epoch, 0) must differ.
        draws = np.random.PCG64(np.random.SeedSequence([self.seed, len(key), *key])).random_raw(n)
        return np.argsort(draws, kind="stable")


def on_every_rank(work: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """Calls `work` on every rank of `group` and returns what each returned (it must pickle), by rank.

    Raises DataError on every rank where `work` raises on any, so that no rank goes on alone or waits for one that is
    gone: with the message of a DataError, and with number and traceback of the rank for any other exception.
    """
    failure: Exception | None = None
    answer: tuple[T | None, str, str] = (None, "", "")
    try:
        answer = (work(), "", "")
    except DataError as error:  # says by itself what is wrong
        failure = error
        answer = (None, f"{error}", "")
    except Exception as error:
        failure = error
        answer = (None, f"{type(error).__name__}: {error}", traceback.format_exc())
    answers = all_gather_object(answer, group)
    failed = [(rank, text, trace) for rank, (_, text, trace) in enumerate(answers) if text]
    if failed:
        texts = dict.fromkeys(
            f"rank {rank}: {text}\n{trace}".rstrip() if trace else text for rank, text, trace in failed
        )
        raise DataError("\n".join(texts)) from failure
    return [value for value, *_ in answers]


class Prefetcher(Iterator[T], Generic[T]):
    """Draws from an iterator in a thread, `depth` items ahead of who asks for them.

    What the iterator raises is raised, with its traceback, by the `next` that would have returned the item, and by
    every one after it. `depth` 0 draws when asked, without a thread: the slow reference.
    """

    def __init__(self, source: Iterator[T], *, stop: threading.Event, depth: int = 1, name: str = "prefetch") -> None:
        """source: must end soon once `stop` is set; it is asked once more then, since ranks that draw together have to
        agree on ending. stop: set by `close`; several prefetchers in a row may share it.
        """
        if depth < 0:
            raise ValueError(f"depth={depth} is negative; use 0 to draw when asked")
        self.waited = 0.0
        """Seconds that callers have waited in `next` so far."""
        self._source = source
        self._stop = stop
        self._depth = depth
        self._ready: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._slots = threading.Semaphore(depth)
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._draw, name=name, daemon=True)
        if depth:
            self._thread.start()

    def __next__(self) -> T:
        if self._end is not None:
            raise self._end
        start = time.perf_counter()
        try:
            item, self._end = self._ready.get() if self._depth else self._draw_one()
        finally:
            self.waited += time.perf_counter() - start
        if self._end is not None:
            raise self._end
        self._slots.release()
        return cast(T, item)

    def close(self, *, wait: bool = True) -> None:
        """Sets `stop` and, unless told not to, waits for the thread to end."""
        self._stop.set()
        self._slots.release()
        if wait and self._thread.is_alive():
            self._thread.join()

    def _draw(self) -> None:
        ended: BaseException | None = None
        while ended is None:
            if not self._stop.is_set():
                self._slots.acquire()
            item, ended = self._draw_one()
            self._ready.put((item, ended))

    def _draw_one(self) -> tuple[T | None, BaseException | None]:
        try:
            return next(self._source), None
        except BaseException as error:  # StopIteration too: it ends the stream as any error does
            return None, error


ALIGNMENT = 16
"""Tensors begin at multiples of this many bytes in a bucket, which suits every dtype."""


def read_once_per_node(
    read: Callable[[], Mapping[str, Tensor]], runtime: Runtime, *, bucket_mb: float = 64.0
) -> dict[str, Tensor]:
    """Calls `read` on the first rank of every node and gives every rank what it returned, on `runtime.device`.

    The others get it over the links inside the node, in buckets of about `bucket_mb` MiB (a larger tensor is a bucket
    by itself). Called by all ranks.

    Raises DataError on every rank where `read` raises on one.
    """
    group = runtime.node_group()
    first = runtime.node * runtime.local_world_size
    found: dict[str, Tensor] = {}

    def describe() -> dict[str, tuple[torch.Size, torch.dtype]]:
        if runtime.rank == first:
            found.update(read())
        return {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}

    described = on_every_rank(describe, runtime.group())[first]
    received: dict[str, Tensor] = {}
    for bucket, size in _buckets(described, int(bucket_mb * 2**20)):
        flat = torch.empty(size, dtype=torch.uint8)
        if runtime.rank == first:
            for name, offset in bucket.items():
                raw = found[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                flat[offset : offset + raw.numel()] = raw
        flat = flat.to(runtime.device)
        broadcast(flat, first, group)
        for name, offset in bucket.items():
            shape, dtype = described[name]
            raw = flat[offset : offset + math.prod(shape) * dtype.itemsize]
            received[name] = raw.view(dtype).reshape(shape)
    return received


def _buckets(
    described: Mapping[str, tuple[torch.Size, torch.dtype]], limit: int
) -> Iterator[tuple[dict[str, int], int]]:
    """Names with their offsets in the bucket, and its size, both in bytes."""
    bucket: dict[str, int] = {}
    size = 0
    for name, (shape, dtype) in described.items():
        bytes_ = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if bucket and size + bytes_ > limit:
            yield bucket, size
            bucket, size = {}, 0
        bucket[name] = size
        size += bytes_
    if bucket:
        yield bucket, size
