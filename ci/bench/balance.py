"""Who computes which sample: imbalance and time of each way of dealing, and what the exchange costs a training step.

`python -m ci.bench.balance --shards FOLDER` takes lengths from prepared BERT shards (default: those of the demo);
`--lengths FILE` from a list, one a line, and then leaves out the exchange, which moves real samples.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_mlperf.data.exchange import Balance, StepPlan
from bert_mlperf.data.loader import TrainingLoader, sequence_cost
from bert_mlperf.data.shard_set import ShardSet
from bert_mlperf.data.shards import ShardError, list_shards, read_shard
from common.balance import imbalance, loads, lower_bound
from common.data import SampleOrder
from common.runtime import Runtime
from common.testing import RankPool

VOCAB = 30_522
POSITIONS = 512
BERT_LARGE = sequence_cost(layers=24, hidden=1024, ffn=4096, vocab_size=VOCAB)
BATCHES = ((8, 56), (64, 48))
"""Ranks x samples of a rank: the published runs on 8 and on 64 GPUs."""
MODES: tuple[Balance, ...] = ("none", "sorted", "lpt")


def main() -> int:
    """Prints the tables; the status is 2 where there are no lengths to work on."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench.balance", description=__doc__)
    parser.add_argument("--shards", type=Path, default=Path("data/bert/kjv/train"), metavar="FOLDER")
    parser.add_argument("--lengths", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=int, default=64, help="steps dealt (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the exchange (default: %(default)s)")
    parser.add_argument(
        "--compute", type=float, default=0.17, metavar="SECONDS", help="of a training step (default: %(default)s)"
    )
    options = parser.parse_args()
    try:
        lengths = read_lengths(options.lengths, options.shards)
    except (OSError, ValueError, ShardError) as error:
        print(f"ci.bench.balance: {error}; prepare shards with `make bert-mlperf` first", file=sys.stderr)
        return 2
    low, middle, high = np.percentile(lengths, (5, 50, 95))
    print(
        f"{len(lengths)} sequences, tokens: mean {lengths.mean():.1f}, 5 % {low:.0f}, median {middle:.0f}, "
        f"95 % {high:.0f}, longest {lengths.max()}"
    )
    print_dealing(lengths, options.steps)
    if options.lengths is None:
        print_exchange(options.shards, options.ranks, options.compute)
    return 0


def read_lengths(listed: Path | None, shards: Path) -> NDArray[np.int64]:
    """Tokens of each sequence. Raises OSError, ValueError or ShardError where there are none."""
    if listed is not None:
        return np.loadtxt(listed, dtype=np.int64, ndmin=1)
    paths = list_shards(shards)
    if not paths:
        raise ValueError(f"{shards} holds no shard")
    return np.concatenate([read_shard(path, VOCAB).lengths.astype(np.int64) for path in paths])


def print_dealing(lengths: NDArray[np.int64], steps: int) -> None:
    """Imbalance of each way of dealing, and its time, on the lengths in a random order (epoch after epoch)."""
    order = SampleOrder([len(lengths)], window=1, seed=0)
    print("\nmax / mean over ranks; cost: modelled FLOPs of BERT-Large; bound: what no assignment can beat")
    print(f"{'ranks x samples':>16} {'dealt':>7} {'tokens: mean':>13} {'worst step':>11} {'cost: mean':>11} "
          f"{'worst step':>11} {'bound':>8} {'ms a step':>10} {'one alone':>10}")  # fmt: skip
    for ranks, per_rank in BATCHES:
        needed = steps * ranks * per_rank
        epochs = -(-needed // len(lengths))
        stream = np.concatenate([lengths[order.shuffle(order.windows(e)[0], len(lengths))] for e in range(epochs)])
        batches = stream[:needed].reshape(steps, -1)
        costs = BERT_LARGE(batches)
        for mode in MODES:
            plan = StepPlan(ranks * per_rank, BERT_LARGE, balance=mode)
            start = time.perf_counter()
            owner = plan.deal(costs, ranks)
            together = (time.perf_counter() - start) / steps
            start = time.perf_counter()
            plan.deal(costs[:1], ranks)
            alone = time.perf_counter() - start
            tokens, cost = imbalance(loads(batches, owner, ranks)), imbalance(loads(costs, owner, ranks))
            bound = (lower_bound(costs, ranks) * ranks / costs.sum(axis=-1)).max()
            print(f"{f'{ranks} x {per_rank}':>16} {mode:>7} {tokens.mean():13.4f} {tokens.max():11.4f} "
                  f"{cost.mean():11.4f} {cost.max():11.4f} {bound:8.4f} "
                  f"{together * 1e3:10.2f} {alone * 1e3:10.2f}")  # fmt: skip


def print_exchange(shards: Path, ranks: int, compute: float) -> None:
    """What training waits for data, with the exchange ahead in threads and at the time it is needed."""
    pool = RankPool(ranks)
    print(
        f"\n{ranks} ranks x {BATCHES[0][1]} samples, {compute} s of accelerator time a step (the host sleeps), 40 steps"
    )
    print(f"{'exchange':>14} {'first step, s':>14} {'waited, s':>10} {'longest wait, s':>16} {'share of steps':>15}")
    try:
        for name, prefetch in (("when needed", False), ("ahead", True)):
            results = pool.run(ranks, exchange_waits, shards, compute, prefetch, timeout_s=300.0)
            first = max(waits[0] for waits in results)
            rest = np.array([waits[1:] for waits in results])
            print(f"{name:>14} {first:14.3f} {rest.sum(axis=1).max():10.3f} {rest.max():16.4f} "
                  f"{rest.mean() / compute:15.2%}")  # fmt: skip
    finally:
        pool.close()


def exchange_waits(runtime: Runtime, folder: Path, compute: float, prefetch: bool, steps: int = 40) -> list[float]:
    """Seconds that this rank waited for each step."""
    shards = ShardSet.open(folder, runtime, vocab_size=VOCAB, max_positions=POSITIONS)
    plan = StepPlan(BATCHES[0][1] * runtime.world_size, BERT_LARGE, steps_at_once=8)
    waits = []
    with TrainingLoader(shards, runtime, plan, window_shards=4, prefetch=prefetch) as loader:
        for _ in range(steps):
            runtime.barrier()
            start = time.perf_counter()
            next(loader)
            waits.append(time.perf_counter() - start)
            time.sleep(compute)
    return waits


if __name__ == "__main__":
    raise SystemExit(main())
