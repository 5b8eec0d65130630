"""Held-out samples for evaluation: each one on exactly one rank, all ranks with the same work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_mlperf.data.batches import pack, to_device
from bert_mlperf.data.exchange import arrived, outgoing
from bert_mlperf.data.shard_set import ShardSet
from bert_mlperf.data.shards import Samples
from bert_mlperf.data.wire import exchange_samples
from bert_mlperf.model import PackedBatch
from common.balance import PolynomialCost, deal_freely
from common.config import ConfigError
from common.data import on_every_rank
from common.runtime import Runtime


@dataclass
class Heldout:
    """What this rank evaluates, and how much all ranks together do."""

    batches: list[PackedBatch]
    """On the runtime's device, longest sequences first; sample_ids count through the held-out set. May be empty."""
    samples: int
    """Samples on all ranks together."""
    masked: int
    """Masked positions on all ranks together."""


def load_heldout(shards: ShardSet, runtime: Runtime, *, samples: int, batch: int, cost: PolynomialCost) -> Heldout:
    """Reads the first `samples` held-out samples (or all, where there are fewer) and deals them to the ranks.

    Any number of samples per rank, near-equal cost; a rank's are sorted by length and cut into batches of `batch`, the
    last one smaller. Called by all ranks.

    Raises ConfigError where a number is below 1, DataError on all ranks where a shard is bad and that is fatal.
    """
    if samples < 1 or batch < 1:
        raise ConfigError(f"{samples} held-out samples in batches of {batch}: both must be 1 or more")
    group, rank, world_size = runtime.group(), runtime.rank, runtime.world_size
    held, reports = _read(shards, runtime, samples)
    shard = np.concatenate([_repeat(counts) for counts, *_ in reports])
    reader = np.repeat(np.arange(world_size), [len(lengths) for _, _, lengths, _ in reports])
    slot = np.concatenate([np.arange(len(lengths)) for _, _, lengths, _ in reports])
    chosen = np.argsort(shard, kind="stable")[:samples]  # in the order of the shards, whoever read them
    reader, slot = reader[chosen], slot[chosen]
    lengths = np.concatenate([lengths for _, _, lengths, _ in reports])[chosen]
    masked = np.concatenate([masked for *_, masked in reports])[chosen]
    owner = deal_freely(cost(lengths), world_size)
    received = exchange_samples(outgoing(held, reader, slot, owner, rank, world_size), group, runtime.device)
    owned, ids = arrived(received, reader, owner, rank)
    falling = np.argsort(-owned.lengths, kind="stable")
    batches = [
        to_device(pack(owned.take(part), ids[part]), runtime.device)
        for part in np.split(falling, range(batch, len(falling), batch))
        if len(part)
    ]
    return Heldout(batches, samples=len(chosen), masked=int(masked.sum()))


Report = tuple[dict[int, int], dict[int, str], NDArray[np.int32], NDArray[np.int32]]
"""Samples of each shard a rank read, why others could not be, lengths and masked counts of the samples."""


def _read(shards: ShardSet, runtime: Runtime, samples: int) -> tuple[Samples, list[Report]]:
    """This rank's part of the first shards that hold `samples` samples, and what each rank read."""
    counts = list(shards.counts)
    while True:
        needed = int(np.searchsorted(np.cumsum(counts), samples)) + 1
        mine = [shard for shard in range(runtime.rank, min(needed, len(counts)), runtime.world_size) if counts[shard]]
        held: list[Samples] = []

        def read(mine: list[int] = mine, held: list[Samples] = held) -> Report:
            read: dict[int, int] = {}
            bad: dict[int, str] = {}
            held.append(Samples.concat(list(shards.read_each(mine, read, bad))))
            return read, bad, held[0].lengths, held[0].masked_counts

        reports = on_every_rank(read, runtime.group())
        lost = {shard: reason for _, bad, *_ in reports for shard, reason in bad.items()}
        shards.report_bad(lost)
        if not lost:
            return held[0], reports
        for shard in lost:  # the next shards take their place
            counts[shard] = 0


def _repeat(counts: dict[int, int]) -> NDArray[np.int64]:
    """The number of its shard for each sample."""
    return np.repeat(np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.int64))
