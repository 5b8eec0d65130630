"""A folder of shards as all ranks agree on it: names, sample counts, what becomes of a shard that cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bert_mlperf.data.shards import Samples, ShardError, count_samples, list_shards, read_shard
from common.data import DataError, on_every_rank
from common.runtime import Runtime

OnBadShard = Literal["fatal", "skip"]

log = logging.getLogger(__name__)


@dataclass
class ShardSet:
    """The shards of one folder. Every rank sees the same list; each rank reads some of them.

    `paths` and `counts` go by shard number (order of the names); a shard that could not be counted has count 0.
    `bad` maps the name of a shard that was skipped to the reason.
    """

    folder: Path
    paths: list[Path]
    counts: list[int]
    vocab_size: int
    max_positions: int
    on_bad: OnBadShard = "fatal"
    warns: bool = True
    bad: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls, folder: Path, runtime: Runtime, *, vocab_size: int, max_positions: int, on_bad: OnBadShard = "fatal"
    ) -> ShardSet:
        """Lists the folder on rank 0 and counts the samples of its shards, the work shared between ranks.

        vocab_size, max_positions: what the model has; samples beyond them are errors. Called by all ranks.

        Raises DataError on all ranks where the folder holds no shard, a shard is bad and `on_bad` is "fatal", or no
        sample is left.
        """
        group = runtime.group()
        names = on_every_rank(lambda: _list(folder) if runtime.is_main else None, group)[0]
        assert names is not None
        shards = cls(folder, [folder / name for name in names], [0] * len(names), vocab_size, max_positions, on_bad)
        shards.warns = runtime.is_main

        def count() -> dict[int, int | str]:
            return {number: shards._count(number) for number in range(runtime.rank, len(names), runtime.world_size)}

        found = {number: result for part in on_every_rank(count, group) for number, result in part.items()}
        shards.report_bad({number: reason for number, reason in found.items() if isinstance(reason, str)})
        shards.counts = [result if isinstance(result := found[number], int) else 0 for number in range(len(names))]
        if not sum(shards.counts):
            raise DataError(f"{folder}: not one sample in {len(names)} shards; prepare the data again")
        return shards

    def report_bad(self, reasons: dict[int, str]) -> None:
        """Takes note of shards that cannot be read; every rank calls it with the same ones.

        Raises DataError where `on_bad` is "fatal".
        """
        if reasons and self.on_bad == "fatal":
            number, reason = min(reasons.items())
            more = f" ({len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise DataError(
                f"bad shard {self.paths[number].name}{more}: {reason}; mend or remove it, or set on_bad_shard=skip"
            )
        for number, reason in sorted(reasons.items()):
            name = self.paths[number].name
            if name not in self.bad and self.warns:
                log.warning("skipping bad shard %s (%d so far): %s", name, len(self.bad) + 1, reason)
            self.bad.setdefault(name, reason)

    def read(self, number: int) -> Samples:
        """The samples of one shard.

        Raises ShardError where the file is bad or changed since it was counted, DataError where a sequence does not fit
        the model.
        """
        path = self.paths[number]
        samples = read_shard(path, self.vocab_size)
        if len(samples) != self.counts[number]:
            raise ShardError(
                f"{path}: {len(samples)} samples, but {self.counts[number]} when the run began; shards must not change"
            )
        longest = int(samples.lengths.max(initial=0))
        if longest > self.max_positions:
            raise DataError(
                f"{path}: a sequence of {longest} tokens, but the model has max_positions={self.max_positions}; "
                f"prepare shorter sequences or use a model with at least {longest} positions"
            )
        return samples

    def read_each(self, numbers: list[int], read: dict[int, int], bad: dict[int, str]) -> Iterator[Samples]:
        """Reads these shards one by one; notes the count of each in `read`, or why it could not be read in `bad`."""
        for number in numbers:
            try:
                samples = self.read(number)
            except (ShardError, OSError) as error:
                bad[number] = f"{error}"
            else:
                read[number] = len(samples)
                yield samples

    def _count(self, number: int) -> int | str:
        try:
            return count_samples(self.paths[number])
        except (ShardError, OSError) as error:
            return f"{error}"


def _list(folder: Path) -> list[str]:
    try:
        names = [path.name for path in list_shards(folder)]
    except (ShardError, OSError) as error:
        raise DataError(f"{error}") from error
    if not names:
        raise DataError(f"{folder} holds no shard (*.hdf5, *.h5); prepare some, or correct the path")
    return names
