"""`python -m ci.bench.bert`: real tokens a second, share of the matmul peak and weak scaling of BERT's training step.

Three questions, each answered in one run of interleaved rounds on the same samples:

peak     one rank, one thread: useful FLOPs of a step over its time, as a share of the matmul rate measured beside it
padded   two ranks: our step against transformers' BertForPreTraining, padded to 512, under DDP with the same update
scaling  our step on two ranks against one, the same work for each rank

All ranks get sequences of the same lengths, of different word pieces: what dealing them out costs is measured by
`ci.bench.balance`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bert_mlperf.config import BertTrainConfig
from bert_mlperf.data.batches import pack
from bert_mlperf.data.shards import Samples, list_shards, read_shard
from bert_mlperf.model import BertConfig, BertForPreTraining, DropoutKey, flops_per_step
from bert_mlperf.parallel import keeps_its_scale, shard
from ci.bench.optimizer_peers import ForeachLamb
from common.collectives import all_gather_object
from common.optimizers import LAMB
from common.runtime import Runtime
from common.sharded_optimizer import ShardedOptimizer
from common.telemetry import measure_matmul_peak
from common.testing import RankPool

SHAPES = {
    "4x256": BertConfig(layers=4, hidden=256, heads=4, ffn=1024),
    "bert_base": BertConfig(layers=12, hidden=768, heads=12, ffn=3072),
}
SEQUENCES = 4
"""Of a rank in a step."""
PADDED_LENGTH = 512


def lengths_of(options: argparse.Namespace, steps: int) -> np.ndarray[Any, Any]:
    """Sequence lengths of each rank, [steps, SEQUENCES]: of real shards, else drawn like the corpus'.

    That is a quarter at 512 and the mean at 0.55 of it, measured on Wikipedia prepared as MLPerf does.
    """
    generator = np.random.default_rng(1)
    shape = (steps, SEQUENCES)
    if options.shards:
        pool = np.concatenate([read_shard(path, 2**31 - 1).lengths for path in list_shards(options.shards)])
        return generator.choice(pool, shape)
    short = 20 + 491 * generator.random(shape) ** 1.657
    return np.where(generator.random(shape) < 0.25, 512, short).astype(np.int64)


def make_samples(lengths: np.ndarray[Any, Any], vocab_size: int, seed: int) -> Samples:
    """Random word pieces for sequences of these lengths; 15 % masked, at most 76 a sequence."""
    generator = np.random.default_rng(seed)
    counts = np.minimum(np.maximum(1, np.round(0.15 * lengths)), 76).astype(np.int32)
    places = [np.sort(1 + generator.permutation(n - 2)[:k]) for n, k in zip(lengths, counts, strict=True)]
    return Samples(
        generator.integers(1000, vocab_size, lengths.sum()).astype(np.int32),
        (generator.random(lengths.sum()) < 0.5).astype(np.uint8),
        lengths.astype(np.int32),
        np.concatenate(places).astype(np.int32),
        generator.integers(1000, vocab_size, counts.sum()).astype(np.int32),
        counts,
        generator.integers(0, 2, len(lengths)).astype(np.uint8),
    )


class Ours:
    """The recipe's model and optimizer."""

    def __init__(self, config: BertTrainConfig, runtime: Runtime, alone: bool = False) -> None:
        """alone: this rank trains by itself, whatever the others do."""
        self.model = BertForPreTraining(config.model)
        self.model.initialize(0)
        self.ranks = 1 if alone else runtime.world_size
        if alone:
            rule = LAMB((0.9, 0.999), 1e-6, 0.01)
            axes: dict[str, Any] = {"shard_axes": ("tp",), "replicate_axes": ("pp",)}
            self.optimizer = ShardedOptimizer(
                self.model, rule, runtime=runtime, clip_norm=1.0, exclude=keeps_its_scale, **axes
            )
        else:
            self.optimizer = shard(self.model, config, runtime)

    def step(self, samples: Samples, number: int) -> None:
        """Forward, backward, update."""
        batch = pack(samples, np.arange(len(samples)) + number * 1000)
        output = self.model(batch, DropoutKey(0, number))
        masked = self.ranks * len(samples.masked_ids)
        (output.mlm_loss_sum / masked + output.nsp_loss_sum / (self.ranks * len(samples))).backward()
        self.optimizer.step(1e-4)

    def finish(self) -> None:
        """Waits for the parameters."""
        self.optimizer.wait_parameters()


class Padded:
    """transformers' BertForPreTraining, padded to 512, under DDP; LAMB replicated, its foreach form in few calls."""

    def __init__(self, config: BertTrainConfig, runtime: Runtime) -> None:
        import transformers

        shape = config.model
        described = transformers.BertConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.ffn,
            hidden_dropout_prob=shape.dropout,
            attention_probs_dropout_prob=shape.attention_dropout,
        )
        model = transformers.BertForPreTraining(described).train()
        self.model = DistributedDataParallel(model, process_group=runtime.group())
        self.optimizer = ForeachLamb(self.model)

    def step(self, samples: Samples, number: int) -> None:
        """Forward, backward, clip, update."""
        n = len(samples)
        ids, segments, mask, labels = (torch.zeros(n, PADDED_LENGTH, dtype=torch.int64) for _ in range(4))
        labels.fill_(-100)
        for row in range(n):
            one = samples.take([row])
            k = len(one.tokens)
            ids[row, :k] = torch.from_numpy(one.tokens)
            segments[row, :k] = torch.from_numpy(one.segments)
            mask[row, :k] = 1
            labels[row, torch.from_numpy(one.masked_positions).long()] = torch.from_numpy(one.masked_ids).long()
        loss: Tensor = self.model(
            input_ids=ids,
            token_type_ids=segments,
            attention_mask=mask,
            labels=labels,
            next_sentence_label=torch.from_numpy(samples.next_sentence).long(),
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()

    def finish(self) -> None:
        """Nothing is under way."""


def timed(runtime: Runtime, work: Ours | Padded, samples: Samples, number: int) -> float:
    """Seconds of a step on the slowest rank."""
    runtime.barrier()
    start = time.perf_counter()
    work.step(samples, number)
    work.finish()
    return max(all_gather_object(time.perf_counter() - start, runtime.group()))


def measure(runtime: Runtime, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds on this rank; every rank returns the same."""
    shape = SHAPES[options.shape]
    config = replace(BertTrainConfig(), model=shape)
    rank = runtime.rank
    lengths = lengths_of(options, options.rounds + 1)
    alone = Ours(config, runtime, alone=True) if rank == 0 else None
    runs: dict[str, Ours | Padded] = {"ours": Ours(config, runtime)}
    if not options.skip_padded:
        runs["padded"] = Padded(config, runtime)
    result: dict[str, list[float]] = {name: [] for name in ("ours", "padded", "alone", "peak", "tokens", "flops")}
    for number in range(options.rounds + 1):
        samples = make_samples(lengths[number], shape.vocab_size, number * runtime.world_size + rank)
        times = {name: timed(runtime, run, samples, number) for name, run in runs.items()}
        if alone is not None:
            peak = float(measure_matmul_peak("cpu", threads=1, seconds=0.5))
            start = time.perf_counter()
            alone.step(samples, number)
            times["alone"] = time.perf_counter() - start
            times["peak"] = max(peak, float(measure_matmul_peak("cpu", threads=1, seconds=0.5)))
            times["flops"] = flops_per_step(shape, samples.lengths.tolist(), len(samples.masked_ids))
        runtime.barrier()
        times["tokens"] = float(sum(all_gather_object(int(samples.lengths.sum()), runtime.group())))
        for name, value in times.items():
            if number:  # the first round warms up
                result[name].append(value)
    return result


def main() -> int:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench.bert", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="bert_base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=Path, help="folder of shards whose lengths to draw from")
    parser.add_argument("--skip-padded", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    pool = RankPool(2)
    try:
        rows = pool.run(2, measure, options, timeout_s=3600)[0]
    finally:
        pool.close()
    ratio = lambda a, b: median(x / y for x, y in zip(rows[a], rows[b], strict=True))  # noqa: E731
    rates = [tokens / seconds for tokens, seconds in zip(rows["tokens"], rows["ours"], strict=True)]
    shares = [f / t / p for f, t, p in zip(rows["flops"], rows["alone"], rows["peak"], strict=True)]
    scaling = [2 * alone / both for alone, both in zip(rows["alone"], rows["ours"], strict=True)]
    print(
        f"{options.shape}, {SEQUENCES} sequences and one thread a rank, medians of {options.rounds} interleaved rounds"
    )
    print(
        f"one rank: {median(shares):.0%} of the matmul rate measured beside it "
        f"({median(rows['peak']) / 1e9:.0f} GFLOP/s)"
    )
    print(f"two ranks: {median(rates):,.0f} real tokens/s, step {median(rows['ours']):.2f} s")
    if rows["padded"]:
        print(f"transformers padded to {PADDED_LENGTH} + DDP + LAMB: step {median(rows['padded']):.2f} s")
        print(f"real tokens/s, ours over padded: {ratio('padded', 'ours'):.2f}")
    print(f"weak scaling, throughput of two ranks over one: {median(scaling):.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
