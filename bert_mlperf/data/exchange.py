"""Length exchange: ranks read different shards, deal the samples of each step by cost, and send them where they belong.

The samples of a step are fixed by the seed (`common.data.SampleOrder`); dealing changes who computes a sample, never
which samples make a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from bert_mlperf.data.shard_set import ShardSet
from bert_mlperf.data.shards import Samples
from bert_mlperf.data.wire import exchange_samples
from common.balance import Costs, PolynomialCost, deal_in_order, deal_longest_first, deal_sorted, imbalance, loads
from common.config import ConfigError
from common.data import DataError, SampleOrder, Window, on_every_rank
from common.runtime import Runtime

Balance = Literal["none", "sorted", "lpt"]

T = TypeVar("T")

ENTRY = np.dtype([("reader", np.int32), ("slot", np.int64), ("length", np.int32), ("masked", np.int32)])
"""What every rank knows of a sample: the rank that read it, its place among what that rank holds, its numbers of tokens
and of masked positions."""


@dataclass(frozen=True)
class StepPlan:
    """How the samples of a step are cut and dealt."""

    global_batch: int
    """Samples in a step, over all ranks."""
    cost: PolynomialCost
    """Of a sequence, by its tokens."""
    micro_batches: int = 1
    """Parts of a rank's share of a step."""
    balance: Balance = "lpt"
    """`none`: as they come; `sorted`: by length, like cards; `lpt`: by longest processing time."""
    steps_at_once: int = 32
    """Most steps in one exchange: how far ahead samples are dealt, and how much of them a rank holds."""

    def check(self, world_size: int) -> None:
        """Raises ConfigError where the samples of a step cannot be cut evenly, or a value is not known."""
        parts = world_size * self.micro_batches
        if self.global_batch < 1 or self.micro_batches < 1 or self.global_batch % parts:
            raise ConfigError(
                f"global_batch={self.global_batch} is not divisible by {world_size} ranks x {self.micro_batches} "
                f"micro-batches; use a multiple of {max(parts, 1)}"
            )
        if self.balance not in get_args(Balance):
            raise ConfigError(f"balance={self.balance!r} is not known; use one of {', '.join(get_args(Balance))}")
        if self.steps_at_once < 1:
            raise ConfigError(f"steps_at_once={self.steps_at_once} is below 1; 32 is a good number")

    def deal(self, costs: Costs, bins: int) -> NDArray[np.int64]:
        """The bin of each item, [..., items], the same number in each."""
        deals = {"none": deal_in_order, "sorted": deal_sorted, "lpt": deal_longest_first}
        return deals[self.balance](costs, bins)


@dataclass
class WindowRead:
    """The shards of one window that one rank read."""

    window: Window
    samples: Samples
    counts: dict[int, int]
    """Samples of each shard, by its number, in the order in which they lie in `samples`."""
    bad: dict[int, str]


@dataclass
class Delivery:
    """The samples of some steps that this rank computes, ordered by step, then micro-batch, all of the same size."""

    samples: Samples
    sample_ids: NDArray[np.int64]
    """Position of each sample in the stream."""
    first: int
    """Position in the stream of the first sample of the first step."""
    steps: int
    micro_batches: int
    tokens: NDArray[np.int64]
    """Tokens of each step on all ranks together, [steps]."""
    masked: NDArray[np.int64]
    """Masked positions of each step on all ranks together, [steps]."""
    token_imbalance: NDArray[np.float64]
    """Most tokens of a rank over their mean, [steps]."""
    cost_imbalance: NDArray[np.float64]
    """Largest modelled cost of a rank over the mean, [steps]."""


def read_windows(
    shards: ShardSet, order: SampleOrder, first: Window, rank: int, world_size: int, stop: threading.Event
) -> Iterator[WindowRead]:
    """Reads this rank's shards of `first` and every later window: number `rank`, `rank + world_size`, ... of each.

    Where a window has fewer shards than there are ranks, the ranks beyond read nothing and still compute. Ends soon
    after `stop` is set.
    """
    for window in order.windows_from(first):
        mine = [shard for shard in window.shards[rank::world_size] if order.count(shard, window.epoch)]
        counts: dict[int, int] = {}
        bad: dict[int, str] = {}
        parts = []
        for samples in shards.read_each(mine, counts, bad):
            parts.append(samples)
            if stop.is_set():
                return
        if stop.is_set():
            return
        yield WindowRead(window, Samples.concat(parts), counts, bad)


def outgoing(
    held: Samples,
    reader: NDArray[np.int64],
    slot: NDArray[np.int64],
    owner: NDArray[np.int64],
    rank: int,
    world_size: int,
) -> list[Samples]:
    """What this rank sends to each rank, in stream order."""
    mine = np.flatnonzero(reader == rank)
    mine = mine[np.argsort(owner[mine], kind="stable")]
    ends = np.cumsum(np.bincount(owner[mine], minlength=world_size))
    return [held.take(slot[part]) for part in np.split(mine, ends[:-1])]


def arrived(
    parts: list[Samples], reader: NDArray[np.int64], owner: NDArray[np.int64], rank: int
) -> tuple[Samples, NDArray[np.int64]]:
    """The samples that came from each rank, put back into stream order, and their numbers in the arrays."""
    mine = np.flatnonzero(owner == rank)
    by_reader = np.argsort(reader[mine], kind="stable")
    place = np.empty_like(by_reader)
    place[by_reader] = np.arange(len(mine))
    return Samples.concat(parts).take(place), mine


class LengthExchange:
    """Turns the windows that ranks read into what each rank computes, a few steps at a time.

    The first exchange goes over the training group, since nothing can hide it; the later ones, of the same window on,
    over a gloo group of their own, so that they may run in a thread while the accelerators train. All ranks draw
    deliveries together.
    """

    def __init__(
        self,
        shards: ShardSet,
        order: SampleOrder,
        reads: Iterator[WindowRead],
        runtime: Runtime,
        plan: StepPlan,
        *,
        position: int,
        passed: int,
        stop: threading.Event,
    ) -> None:
        """position: of the first sample of the next step; passed: samples of the first window that lie before it."""
        self._shards, self._order, self._reads, self._runtime, self._plan = shards, order, reads, runtime, plan
        self._group, self._device = runtime.group(), runtime.device
        self._background = runtime.background_group()
        self._position, self._passed = position, passed
        self._stop = stop
        self._pending = np.empty(0, dtype=ENTRY)  # samples of the stream from `position` on that wait for their step
        self._held = Samples.concat([])  # those of them, and of before, that this rank read
        self._window: Window | None = None
        self._error: Exception | None = None

    def deliveries(self) -> Iterator[Delivery]:
        """The deliveries, without end; ends on all ranks together once `stop` is set on one.

        Raises DataError on all ranks where one of them fails or a shard is bad and that is fatal.
        """
        while True:
            while len(self._pending) < self._plan.global_batch:
                if not self._admit_window():
                    return
            delivery = self._deliver()
            if self._error is not None:
                continue  # told to all ranks when they next meet
            if delivery is None:
                return
            self._group, self._device = self._background, torch.device("cpu")
            yield delivery

    def _meet(self, work: Callable[[], T]) -> list[T] | None:
        """What `work` returned on each rank; None where some rank stops. Raises DataError on all where one fails."""

        def answer() -> tuple[bool, T | None]:
            if self._error is not None:
                raise self._error
            return (True, None) if self._stop.is_set() else (False, work())

        answers = on_every_rank(answer, self._group)
        if any(stops for stops, _ in answers):
            return None
        return [value for _, value in answers]  # type: ignore[misc]

    def _admit_window(self) -> bool:
        """Appends the next window to what is pending; False where some rank stops."""
        reports = self._meet(self._read_window)
        if reports is None or any(report is None for report in reports):
            return False
        window = self._window
        assert window is not None
        for _, bad, _ in reports:  # type: ignore[misc]
            self._shards.report_bad(bad)
            for shard in bad:
                self._order.lose(shard, window.epoch)
        if self._order.epoch_samples(window.epoch) < self._plan.global_batch:
            raise DataError(
                f"{self._shards.folder}: {self._order.epoch_samples(window.epoch)} samples are left after "
                f"{len(self._shards.bad)} bad shards, fewer than global_batch={self._plan.global_batch}"
            )
        fresh = self._side_by_side(window, reports)  # type: ignore[arg-type]
        fresh = fresh[self._order.shuffle(window, len(fresh))][self._passed :]
        self._passed = 0
        self._pending = np.concatenate([self._pending, fresh])
        return True

    def _read_window(self) -> tuple[dict[int, int], dict[int, str], NDArray[np.int32]] | None:
        """Takes the next window this rank read into `_held`; counts, bad shards, [2, samples] lengths and masked."""
        read = next(self._reads, None)
        if read is None:
            return None
        rest = self._pending["slot"][self._pending["reader"] == self._runtime.rank]
        self._held = Samples.concat([self._held.take(rest), read.samples])
        self._window = read.window
        return read.counts, read.bad, np.stack([read.samples.lengths, read.samples.masked_counts])

    def _side_by_side(
        self, window: Window, reports: list[tuple[dict[int, int], dict[int, str], NDArray[np.int32]]]
    ) -> NDArray[np.void]:
        """Entries of a window's samples, its shards one after another; renumbers what is pending as it is now held."""
        readers = self._pending["reader"]
        for rank in range(len(reports)):
            held = np.flatnonzero(readers == rank)
            self._pending["slot"][held] = np.arange(len(held))
        first = np.bincount(readers, minlength=len(reports))
        by_shard = {}
        for rank, (counts, _, sizes) in enumerate(reports):
            entries = np.empty(sizes.shape[1], dtype=ENTRY)
            entries["reader"] = rank
            entries["slot"] = first[rank] + np.arange(len(entries))
            entries["length"], entries["masked"] = sizes
            for shard, count in counts.items():
                by_shard[shard], entries = entries[:count], entries[count:]
        # A shard that some rank could not read is lost to all from then on, even where another rank can read it.
        parts = [by_shard[shard] for shard in window.shards if self._order.count(shard, window.epoch)]
        return np.concatenate([np.empty(0, dtype=ENTRY), *parts])

    def _deliver(self) -> Delivery | None:
        """Deals and exchanges the next steps; None where some rank stops, or with `_error` where this one failed."""
        steps = min(len(self._pending) // self._plan.global_batch, self._plan.steps_at_once)
        entries = self._pending[: steps * self._plan.global_batch]
        world_size = self._runtime.world_size
        dealt: list[NDArray[np.int64]] = []
        parts: list[Samples] = []

        def prepare() -> bool:
            costs = self._plan.cost(entries["length"].reshape(steps, -1))
            dealt.append(self._plan.deal(costs, world_size))
            owner = dealt[0].reshape(-1)
            parts.extend(
                outgoing(self._held, entries["reader"], entries["slot"], owner, self._runtime.rank, world_size)
            )
            return True

        if self._meet(prepare) is None:
            return None
        received = exchange_samples(parts, self._group, self._device)
        try:
            delivery = self._arrange(entries, dealt[0], received)
        except Exception as error:
            self._error = error
            delivery = None
        self._pending = self._pending[len(entries) :]
        self._position += len(entries)
        return delivery

    def _arrange(self, entries: NDArray[np.void], owner: NDArray[np.int64], received: list[Samples]) -> Delivery:
        """The delivery of this rank, from what came from each rank."""
        steps, world_size = len(owner), self._runtime.world_size
        samples, mine = arrived(received, entries["reader"], owner.reshape(-1), self._runtime.rank)
        if not np.array_equal(samples.lengths, entries["length"][mine]):
            raise DataError(
                "the exchange delivered other samples than those dealt; the connection between ranks is bad"
            )
        lengths = entries["length"].reshape(steps, -1).astype(np.int64)
        group = self._plan.deal(self._plan.cost(samples.lengths.reshape(steps, -1)), self._plan.micro_batches)
        in_step = np.argsort(group, axis=-1, kind="stable")  # [steps, samples of this rank]
        place = (in_step + np.arange(steps)[:, None] * in_step.shape[1]).reshape(-1)
        return Delivery(
            samples=samples.take(place),
            sample_ids=self._position + mine[place],
            first=self._position,
            steps=steps,
            micro_batches=self._plan.micro_batches,
            tokens=lengths.sum(axis=-1),
            masked=entries["masked"].reshape(steps, -1).sum(axis=-1, dtype=np.int64),
            token_imbalance=imbalance(loads(lengths, owner, world_size)),
            cost_imbalance=imbalance(loads(self._plan.cost(lengths), owner, world_size)),
        )
