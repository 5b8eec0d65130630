"""Shards -> the batches each rank computes: the same samples in every step on any ranks, dealt so nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from bert_mlperf.data.batches import hand_over, pack, to_device
from bert_mlperf.data.exchange import Delivery, LengthExchange, StepPlan, read_windows
from bert_mlperf.data.shard_set import ShardSet
from bert_mlperf.model import PackedBatch
from common.balance import PolynomialCost
from common.data import DataError, Prefetcher, SampleOrder
from common.runtime import Runtime


@dataclass
class Step:
    """What this rank computes of one step, and what all ranks together do."""

    micro_batches: list[PackedBatch]
    """Equally many samples in each, on the runtime's device."""
    first_sample: int
    """Position in the stream of the step's first sample, over all ranks."""
    samples: int
    """Samples of the step on all ranks together: the global batch."""
    tokens: int
    """Tokens of the step on all ranks together."""
    masked: int
    """Masked positions of the step on all ranks together: the sum of their losses over this is the exact mean."""
    token_imbalance: float
    """Most tokens of a rank over the mean."""
    cost_imbalance: float
    """Largest modelled cost of a rank over the mean: 1.02 means that the others wait 2 % of the time."""
    copied: torch.cuda.Event | None = None
    """Recorded behind the copies to the device."""


def sequence_cost(*, layers: int, hidden: int, ffn: int, vocab_size: int, masked_share: float = 0.15) -> PolynomialCost:
    """FLOPs of BERT's forward pass for a sequence, as a function of its tokens (a multiply-add is two FLOPs).

    In each layer a token costs 8 h^2 (query, key, value, output) + 4 h f (feed-forward) and a pair of tokens 4 h
    (scores, weighted sum); in the head the share of masked tokens costs 2 h^2 + 2 h V. Backward is twice that: it
    scales all alike.
    """
    head = round(masked_share * (2 * hidden**2 + 2 * hidden * vocab_size))
    return PolynomialCost(layers * (8 * hidden**2 + 4 * hidden * ffn) + head, layers * 4 * hidden)


class TrainingLoader(Iterator[Step]):
    """The endless steps of a training run, for this rank. All ranks make it, draw from it and close it together.

    Windows are read one ahead in a thread, samples exchanged some steps ahead in a second one, batches packed and
    copied to the device two steps ahead in a third. Errors in them are raised by `next`, with the traceback of the rank
    they came from. A context manager.
    """

    def __init__(
        self,
        shards: ShardSet,
        runtime: Runtime,
        plan: StepPlan,
        *,
        window_shards: int = 8,
        seed: int = 0,
        state: dict[str, Any] | None = None,
        prefetch: bool = True,
    ) -> None:
        """window_shards: shards shuffled together; part of the data order, as `seed` is. state: of `state_dict`, to go
        on from there on any number of ranks. prefetch: False reads and exchanges when asked: the slow reference.

        Raises ConfigError where the batch does not divide, DataError where there are too few samples or `state` belongs
        to other data.
        """
        plan.check(runtime.world_size)
        self._runtime, self._plan, self._prefetch = runtime, plan, prefetch
        self.shards = shards
        self._position = 0
        self._order = self._restore(window_shards, seed, state)
        if (samples := self._order.epoch_samples(0)) < plan.global_batch:
            raise DataError(
                f"{shards.folder}: {samples} samples are fewer than global_batch={plan.global_batch}, so a step would "
                "hold some twice; use a smaller batch or prepare more data"
            )
        window, passed = self._order.locate(self._position)
        self._stop = threading.Event()
        reads = read_windows(shards, self._order, window, runtime.rank, runtime.world_size, self._stop)
        self._reads = Prefetcher(reads, stop=self._stop, depth=int(prefetch), name="read shards")
        exchange = LengthExchange(
            shards, self._order, self._reads, runtime, plan, position=self._position, passed=passed, stop=self._stop
        )
        self._deliveries: Iterator[Delivery] = exchange.deliveries()
        self._steps: Prefetcher[Step] | None = None

    @property
    def waited(self) -> float:
        """Seconds that training has waited for data so far, the first step apart."""
        return self._steps.waited if self._steps is not None else 0.0

    def __next__(self) -> Step:
        """The next step.

        Raises DataError where some rank failed to read, exchange or pack, or a bad shard is fatal.
        """
        if self._steps is None:
            self._steps = self._start()
        step = next(self._steps)
        if step.copied is not None:
            for batch in step.micro_batches:
                hand_over(batch, step.copied)
        self._position = step.first_sample + step.samples
        return step

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last step drawn, as JSON values; independent of the number of ranks."""
        names = [path.name for path in self.shards.paths]
        return {
            "position": self._position,
            "seed": self._order.seed,
            "window_shards": self._order.window,
            "shards": dict(zip(names, self._order.counts, strict=True)),
            "lost": {names[shard]: epoch for shard, epoch in self._order.lost.items()},
        }

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads, on all ranks together. Called twice, does nothing the second time.

        wait: False where this rank failed alone: the others may never come to agree on ending, so its threads are told
        to end and left to the end of the process.
        """
        self._reads.close()
        for stage in (self._deliveries, self._steps):
            if isinstance(stage, Prefetcher):
                stage.close(wait=wait)

    def __enter__(self) -> TrainingLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    def _start(self) -> Prefetcher[Step]:
        """Draws the first delivery in this thread, over the training group, and starts the threads for the rest."""
        first = next(self._deliveries, None)
        rest = self._deliveries
        if self._prefetch:
            self._deliveries = rest = Prefetcher(rest, stop=self._stop, name="exchange samples")
        steps = self._pack(first, rest)
        return Prefetcher(steps, stop=self._stop, depth=2 * self._prefetch, name="pack batches")

    def _pack(self, first: Delivery | None, rest: Iterator[Delivery]) -> Iterator[Step]:
        device = self._runtime.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        delivery = first
        while delivery is not None:
            for number in range(delivery.steps):
                if self._stop.is_set():
                    return
                with torch.cuda.stream(stream):  # of None: no change
                    step = self._step(delivery, number, stream)
                yield step
            delivery = next(rest, None)

    def _step(self, delivery: Delivery, number: int, stream: torch.cuda.Stream | None) -> Step:
        batches = []
        size = len(delivery.samples) // (delivery.steps * delivery.micro_batches)
        for part in range(number * delivery.micro_batches, (number + 1) * delivery.micro_batches):
            place = np.arange(part * size, (part + 1) * size)
            batch = pack(delivery.samples.take(place), delivery.sample_ids[place])
            batches.append(to_device(batch, self._runtime.device))
        return Step(
            micro_batches=batches,
            first_sample=delivery.first + number * self._plan.global_batch,
            samples=self._plan.global_batch,
            tokens=int(delivery.tokens[number]),
            masked=int(delivery.masked[number]),
            token_imbalance=float(delivery.token_imbalance[number]),
            cost_imbalance=float(delivery.cost_imbalance[number]),
            copied=stream.record_event() if stream is not None else None,
        )

    def _restore(self, window_shards: int, seed: int, state: dict[str, Any] | None) -> SampleOrder:
        """The order of samples, and the position where `state` left it."""
        names = [path.name for path in self.shards.paths]
        if state is None:
            return SampleOrder(self.shards.counts, window=window_shards, seed=seed)
        for key, value in (("seed", seed), ("window_shards", window_shards)):
            if state[key] != value:
                raise DataError(
                    f"{key}={value}, but the run being resumed has {key}={state[key]}; it is part of the order of "
                    f"samples: set it back, or start a new run"
                )
        before, folder = state["shards"], self.shards.folder
        if list(before) != names:
            differ = sorted(set(before) ^ set(names))[:3]
            raise DataError(
                f"{folder} holds {len(names)} shards, but the run being resumed began with {len(before)} (for example "
                f"{', '.join(differ)}); bring back the same shards, or start a new run"
            )
        for number, name in enumerate(names):
            if name not in self.shards.bad and before[name] not in (self.shards.counts[number], 0):
                raise DataError(
                    f"{folder / name} holds {self.shards.counts[number]} samples, {before[name]} when the run began; "
                    "bring back the same shards, or start a new run"
                )
        # A shard that has turned bad since keeps its count: reading finds it where its window comes.
        self.shards.counts = [before[name] for name in names]
        order = SampleOrder(self.shards.counts, window=window_shards, seed=seed)
        for name, epoch in state["lost"].items():
            order.lose(names.index(name), epoch)
        self._position = state["position"]
        return order
