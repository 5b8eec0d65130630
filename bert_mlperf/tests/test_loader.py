"""The loader: the same samples in the same steps whatever the ranks and the dealing, through resumes and bad shards."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_mlperf.data.batches import pack
from bert_mlperf.data.exchange import StepPlan
from bert_mlperf.data.heldout import load_heldout
from bert_mlperf.data.loader import TrainingLoader, sequence_cost
from bert_mlperf.data.shard_set import ShardSet
from bert_mlperf.data.shards import Samples, write_shard
from bert_mlperf.data.wire import from_bytes, to_bytes
from bert_mlperf.model import BertConfig, BertForPreTraining
from common.balance import PolynomialCost
from common.collectives import all_reduce
from common.config import ConfigError
from common.data import DataError
from common.dropout import DropoutKey

VOCAB = 1000
COST = PolynomialCost(600, 1)


def make_samples(count: int, seed: int, first: int = 0, longest: int = 128) -> Samples:
    """Samples whose tokens name them: a sample begins with its number in base 500; lengths are BERT-like."""
    draw = np.random.default_rng(seed)
    lengths = np.where(draw.random(count) < 0.25, longest, draw.integers(8, longest, size=count)).astype(np.int32)
    masked_counts = np.maximum(1, lengths * 15 // 100).astype(np.int32)
    tokens = draw.integers(500, VOCAB, size=lengths.sum()).astype(np.int32)
    starts = np.cumsum(lengths) - lengths
    tokens[starts], tokens[starts + 1] = divmod(np.arange(first, first + count), 500)
    spans = zip(lengths, masked_counts, strict=True)
    positions = [np.sort(draw.choice(np.arange(2, n), m, replace=False)) for n, m in spans]
    return Samples(
        tokens=tokens,
        segments=draw.integers(0, 2, size=lengths.sum()).astype(np.uint8),
        lengths=lengths,
        masked_positions=np.concatenate([np.empty(0, int), *positions]).astype(np.int32),
        masked_ids=draw.integers(0, VOCAB, size=masked_counts.sum()).astype(np.int32),
        masked_counts=masked_counts,
        next_sentence=draw.integers(0, 2, size=count).astype(np.uint8),
    )


def make_folder(folder: Path, counts: list[int], **options) -> Path:
    """Shards of these sizes; samples are numbered through all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        write_shard(folder / f"part_{number:03d}.hdf5", make_samples(count, number, sum(counts[:number]), **options))
    return folder


def names_of(batch) -> list[int]:
    """The number each sample of a batch begins with."""
    starts = batch.cu_seqlens[:-1].long()
    return (batch.input_ids[starts] * 500 + batch.input_ids[starts + 1]).tolist()


def open_loader(runtime, folder, batch, *, state=None, on_bad="fatal", window=3, seed=5, prefetch=True, **plan):
    shards = ShardSet.open(folder, runtime, vocab_size=VOCAB, max_positions=128, on_bad=on_bad)
    plan = StepPlan(batch, COST, **plan)
    return TrainingLoader(shards, runtime, plan, window_shards=window, seed=seed, state=state, prefetch=prefetch)


def ledger(runtime, folder, batch, steps, **options):
    """Per step: [(sample id, name, micro-batch)] of this rank; the facts of the step; the state at the end."""
    with open_loader(runtime, folder, batch, **options) as loader:
        kept = []
        for _ in range(steps):
            step = next(loader)
            rows = [
                (sample, name, number)
                for number, batch_ in enumerate(step.micro_batches)
                for sample, name in zip(batch_.sample_ids.tolist(), names_of(batch_), strict=True)
            ]
            tokens = sum(len(b.input_ids) for b in step.micro_batches)
            masked = sum(len(b.masked_index) for b in step.micro_batches)
            kept.append((rows, step, tokens, masked))
        return [(rows, (s.first_sample, s.tokens, s.masked, s.token_imbalance, s.cost_imbalance), t, m)
                for rows, s, t, m in kept], loader.state_dict()  # fmt: skip


def by_step(results) -> list[list[tuple[int, int]]]:
    """The (sample id, name) pairs of each step over all ranks, by id."""
    return [
        sorted((sample, name) for rows, *_ in step for sample, name, _ in rows)
        for step in zip(*(steps for steps, _ in results), strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("shards"), [17, 40, 3, 0, 29, 31, 23, 1])  # 144 samples


@pytest.fixture(scope="module")
def reference(ranks, folder):
    """Three epochs of 144 samples in steps of 24, on one rank."""
    return by_step(ranks.run(1, ledger, folder, 24, 18))


def test_every_sample_is_trained_once_an_epoch_and_ids_are_the_stream(reference):
    flat = [pair for step in reference for pair in step]
    assert [sample for sample, _ in flat] == list(range(3 * 144))
    for epoch in range(3):
        names = [name for _, name in flat[epoch * 144 : (epoch + 1) * 144]]
        assert sorted(names) == list(range(144))
        assert names != sorted(names)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_any_number_of_ranks_sees_the_same_stream(ranks, folder, reference, world_size):
    results = ranks.run(world_size, ledger, folder, 24, 18)
    assert by_step(results) == reference
    for steps, _ in results:
        assert all(len(rows) == 24 // world_size for rows, *_ in steps)


@pytest.mark.parametrize("balance", ["none", "sorted", "lpt"])
@pytest.mark.parametrize("prefetch, steps_at_once", [(False, 2), (True, 1)])
def test_dealing_changes_who_computes_never_what(ranks, folder, reference, balance, prefetch, steps_at_once):
    options = {"balance": balance, "prefetch": prefetch, "steps_at_once": steps_at_once, "micro_batches": 3}
    assert by_step(call(ranks, 4, ledger, folder, 24, 18, options)) == reference


def call(ranks, world_size, function, *arguments_and_options):
    *arguments, options = arguments_and_options
    return ranks.run(world_size, with_options, function, arguments, options)


def with_options(runtime, function, arguments, options):
    return function(runtime, *arguments, **options)


@pytest.mark.parametrize("before, after, steps", [(4, 2, 1), (2, 3, 5), (1, 8, 7), (3, 1, 16)])
def test_resume_on_other_ranks_goes_on_in_the_middle_of_a_window(ranks, folder, reference, before, after, steps):
    state = ranks.run(before, ledger, folder, 24, steps)[0][1]
    assert state["position"] == steps * 24
    resumed = call(ranks, after, ledger, folder, 24, 18 - steps, {"state": state})
    assert by_step(resumed) == reference[steps:]


def test_facts_of_a_step_are_those_of_all_ranks(ranks, folder):
    results = call(ranks, 4, ledger, folder, 24, 6, {"micro_batches": 2})
    for step in zip(*(steps for steps, _ in results), strict=True):
        tokens, masked = [t for _, _, t, _ in step], [m for *_, m in step]
        for _, (_, all_tokens, all_masked, token_imbalance, cost_imbalance), _, _ in step:
            assert all_tokens == sum(tokens) and all_masked == sum(masked)
            assert token_imbalance == pytest.approx(max(tokens) / np.mean(tokens))
            assert 1 <= cost_imbalance < 1.2


def test_dealing_evens_out_the_tokens(ranks, tmp_path):
    folder = make_folder(tmp_path, [300, 300])
    means = {}
    for balance in ("none", "sorted", "lpt"):
        steps, _ = call(ranks, 4, ledger, folder, 128, 4, {"balance": balance})[0]
        means[balance] = np.mean([facts[3] for _, facts, *_ in steps])
    assert means["lpt"] < 1.005 < means["sorted"] < means["none"]
    assert means["none"] > 1.05


def micro_batch_costs(runtime, folder):
    with open_loader(runtime, folder, 128, micro_batches=4) as loader:
        step = next(loader)
        return [COST(np.array(batch.lengths)).sum() for batch in step.micro_batches], [
            len(batch.lengths) for batch in step.micro_batches
        ]


def test_micro_batches_of_a_rank_cost_nearly_the_same(ranks, tmp_path):
    for costs, sizes in ranks.run(2, micro_batch_costs, make_folder(tmp_path, [300])):
        assert sizes == [16] * 4
        assert max(costs) / np.mean(costs) < 1.02


def test_more_ranks_than_shards_all_compute(ranks, tmp_path):
    results = ranks.run(8, ledger, make_folder(tmp_path, [50, 14]), 16, 4)
    assert all(len(rows) == 2 for steps, _ in results for rows, *_ in steps)
    assert sorted(name for step in by_step(results) for _, name in step) == list(range(64))


def test_packed_batch_has_the_contents_of_its_samples():
    samples = make_samples(5, 0)
    batch = pack(samples, np.arange(10, 15))
    assert batch.lengths == tuple(samples.lengths.tolist())
    assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens[-1] == len(batch.input_ids)
    assert batch.sample_ids.tolist() == list(range(10, 15))
    masks = np.cumsum(samples.masked_counts)
    for i, (start, length) in enumerate(zip(batch.cu_seqlens.tolist(), samples.lengths.tolist(), strict=False)):
        span = slice(start, start + length)
        one = samples.take([i])
        assert batch.input_ids[span].tolist() == one.tokens.tolist()
        assert batch.segment_ids[span].tolist() == one.segments.tolist()
        assert batch.position_ids[span].tolist() == list(range(length))
        part = slice(masks[i] - samples.masked_counts[i], masks[i])
        assert (batch.masked_index[part] - start).tolist() == one.masked_positions.tolist()
        assert batch.masked_labels[part].tolist() == one.masked_ids.tolist()
    for field in ("input_ids", "segment_ids", "position_ids", "masked_index", "masked_labels", "next_sentence"):
        assert getattr(batch, field).dtype == torch.int64
    assert batch.next_sentence.tolist() == samples.next_sentence.tolist()


def contents(runtime, folder, balance):
    """The samples of two steps, by name, as tuples of all they hold."""
    with open_loader(runtime, folder, 36, balance=balance, micro_batches=3) as loader:
        batches = [batch for step in (next(loader), next(loader)) for batch in step.micro_batches]
    kept = {}
    for batch in batches:
        cuts = batch.cu_seqlens.tolist()
        for i, name in enumerate(names_of(batch)):
            span = slice(cuts[i], cuts[i + 1])
            mine = (batch.masked_index >= cuts[i]) & (batch.masked_index < cuts[i + 1])
            kept[name] = (
                batch.input_ids[span].tolist(),
                batch.segment_ids[span].tolist(),
                (batch.masked_index[mine] - cuts[i]).tolist(),
                batch.masked_labels[mine].tolist(),
                batch.next_sentence[i].item(),
            )
    return kept


@pytest.mark.parametrize("balance", ["none", "lpt"])
def test_samples_arrive_whole(ranks, tmp_path, balance):
    folder = make_folder(tmp_path, [20, 31, 21])
    arrived = {name: sample for part in ranks.run(4, contents, folder, balance) for name, sample in part.items()}
    assert sorted(arrived) == list(range(72))
    for number, count in enumerate([20, 31, 21]):
        first = sum([20, 31, 21][:number])
        written = make_samples(count, number, first)
        for i in range(count):
            one = written.take([i])
            assert arrived[first + i] == (
                one.tokens.tolist(),
                one.segments.tolist(),
                one.masked_positions.tolist(),
                one.masked_ids.tolist(),
                int(one.next_sentence[0]),
            )


def test_bytes_give_the_samples_back():
    for samples in (make_samples(7, 1), make_samples(0, 0)):
        raw = to_bytes(samples)
        assert len(raw) % 4 == 0
        back = from_bytes(raw)
        for field in dataclasses.fields(Samples):
            written, read = getattr(samples, field.name), getattr(back, field.name)
            assert written.dtype == read.dtype
            np.testing.assert_array_equal(written, read)


def test_cost_is_the_flops_of_the_forward_pass():
    cost = sequence_cost(layers=2, hidden=8, ffn=32, vocab_size=100)
    per_token = 2 * (2 * 4 * 8 * 8 + 2 * 2 * 8 * 32) + round(0.15 * (2 * 8 * 8 + 2 * 8 * 100))
    assert cost(np.array([10]))[0] == per_token * 10 + 2 * (2 * 2 * 8) * 10**2


def loss_curve(runtime, folder, balance, micro_batches, rate=0.5):
    """Losses of four steps of plain gradient descent on a small BERT with dropout, in double precision."""
    model = BertForPreTraining(BertConfig(layers=2, hidden=16, heads=2, ffn=32, vocab_size=VOCAB, max_positions=128))
    model.initialize(0)
    model.double()
    losses = []
    with open_loader(runtime, folder, 16, balance=balance, micro_batches=micro_batches) as loader:
        for number in range(4):
            step = next(loader)
            total = torch.zeros((), dtype=torch.float64)
            for batch in step.micro_batches:
                output = model(batch, DropoutKey(1, number))
                loss = output.mlm_loss_sum / step.masked + output.nsp_loss_sum / step.samples
                loss.backward()
                total += loss.detach()
            losses.append(all_reduce(total, runtime.group()).item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= rate * all_reduce(parameter.grad, runtime.group())
                    parameter.grad = None
    return losses


@pytest.mark.parametrize("world_size, balance, micro_batches", [(2, "none", 1), (2, "lpt", 2), (4, "lpt", 1)])
def test_the_loss_curve_is_the_same_whoever_computes_what(ranks, folder, world_size, balance, micro_batches):
    alone = ranks.run(1, loss_curve, folder, "none", 1)[0]
    untrained = ranks.run(1, loss_curve, folder, "none", 1, 0.0)[0]
    assert all(abs(a - b) > 1e-3 for a, b in zip(alone[1:], untrained[1:], strict=True))  # the updates do count
    for losses in ranks.run(world_size, loss_curve, folder, balance, micro_batches):
        np.testing.assert_allclose(losses, alone, rtol=1e-10)


# ---- evaluation ----


def held_out(runtime, folder, samples, batch, on_bad="fatal"):
    shards = ShardSet.open(folder, runtime, vocab_size=VOCAB, max_positions=128, on_bad=on_bad)
    kept = load_heldout(shards, runtime, samples=samples, batch=batch, cost=COST)
    return (
        [(names_of(b), b.sample_ids.tolist(), list(b.lengths)) for b in kept.batches],
        kept.samples,
        kept.masked,
        sum(len(b.masked_index) for b in kept.batches),
    )


@pytest.mark.parametrize("world_size, samples, batch", [(1, 10_000, 63), (3, 100, 7), (8, 10_000, 5), (4, 2, 63)])
def test_every_held_out_sample_is_on_one_rank(ranks, folder, world_size, samples, batch):
    results = ranks.run(world_size, held_out, folder, samples, batch)
    wanted = min(samples, 144)
    pairs = [pair for batches, *_ in results for names, ids, _ in batches for pair in zip(names, ids, strict=True)]
    assert sorted(pairs) == [(i, i) for i in range(wanted)]
    for batches, count, masked, _ in results:
        assert count == wanted and masked == sum(result[3] for result in results)
        assert all(len(names) == batch for names, *_ in batches[:-1])
        lengths = [length for _, _, part in batches for length in part]
        assert lengths == sorted(lengths, reverse=True)
    if wanted > 100:
        costs = [sum(COST(np.array(part)).sum() for *_, part in batches) for batches, *_ in results]
        assert max(costs) / np.mean(costs) < 1.02


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_bad_held_out_shard_is_replaced_by_the_next(ranks, tmp_path, world_size):
    folder = make_folder(tmp_path, [10, 12, 10, 10])
    corrupt_later(folder / "part_001.hdf5")
    results = ranks.run(world_size, held_out, folder, 25, 4, "skip")
    names = sorted(name for batches, *_ in results for part, *_ in batches for name in part)
    assert names == [*range(10), *range(22, 37)]
    for text in ranks.run(world_size, refused_held_out, folder):
        assert "part_001.hdf5" in text and "on_bad_shard=skip" in text


def refused_held_out(runtime, folder):
    with pytest.raises(DataError) as caught:
        held_out(runtime, folder, 25, 4)
    return str(caught.value)


# ---- what goes wrong ----


def corrupt_later(path: Path) -> None:
    """A shard whose rows can be counted, but not used: a token beyond the vocabulary."""
    samples = make_samples(12, 99, 5000)
    samples.tokens[5] = VOCAB + 7
    write_shard(path, samples)


def refused(runtime, folder, batch, **options):
    with pytest.raises((DataError, ConfigError)) as caught, open_loader(runtime, folder, batch, **options) as loader:
        for _ in range(20):
            next(loader)
    return str(caught.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [cut, corrupt_later, Path.touch])
def test_a_bad_shard_is_named_on_every_rank(ranks, tmp_path, damage):
    folder = make_folder(tmp_path, [30, 30, 30])
    if damage is Path.touch:
        (folder / "part_001.hdf5").write_bytes(b"")
    else:
        damage(folder / "part_001.hdf5")
    for world_size in (1, 4):
        for text in call(ranks, world_size, refused, folder, 8, {}):
            assert "part_001.hdf5" in text and "on_bad_shard=skip" in text


def skipping(runtime, folder, batch, steps, **options):
    steps, state = ledger(runtime, folder, batch, steps, on_bad="skip", **options)
    return steps, state


def counting(runtime, folder, batch, steps):
    with open_loader(runtime, folder, batch, on_bad="skip") as loader:
        for _ in range(steps):
            next(loader)
        return dict(loader.shards.bad)


@pytest.mark.parametrize("damage", [cut, corrupt_later])
def test_bad_shards_are_skipped_and_counted_and_the_rest_goes_on(ranks, tmp_path, damage):
    folder = make_folder(tmp_path, [30, 12, 20, 22])
    damage(folder / "part_001.hdf5")
    results = {size: call(ranks, size, skipping, folder, 8, 27, {}) for size in (1, 2, 4)}  # three epochs of 72
    one = by_step(results[1])
    names = [name for step in one for _, name in step]
    good = [*range(30), *range(42, 84)]
    for epoch in range(3):
        assert sorted(names[epoch * 72 : (epoch + 1) * 72]) == good
    assert by_step(results[2]) == by_step(results[4]) == one
    for bad in ranks.run(2, counting, folder, 8, 27):
        assert list(bad) == ["part_001.hdf5"]
    state = call(ranks, 4, skipping, folder, 8, 14, {})[0][1]  # in the middle of the second epoch
    assert by_step(call(ranks, 2, skipping, folder, 8, 13, {"state": state})) == one[14:]


def test_a_shard_that_turns_bad_between_runs_is_skipped_where_its_window_comes(ranks, tmp_path):
    folder = make_folder(tmp_path, [30, 12, 20, 22, 28])
    state = call(ranks, 2, skipping, folder, 8, 3, {"window": 1})[0][1]
    cut(folder / "part_003.hdf5")
    first, second = (
        by_step(call(ranks, size, skipping, folder, 8, 40, {"state": state, "window": 1})) for size in (1, 4)
    )
    assert first == second


@pytest.fixture
def small(tmp_path) -> Path:
    return make_folder(tmp_path / "small", [30, 30])


@pytest.mark.parametrize(
    "batch, options, message",
    [
        (25, {}, "global_batch=25 is not divisible by 2 ranks x 1 micro-batches; use a multiple of 2"),
        (24, {"micro_batches": 5}, "not divisible by 2 ranks x 5 micro-batches; use a multiple of 10"),
        (64, {}, "60 samples are fewer than global_batch=64"),
        (8, {"balance": "best"}, "balance='best' is not known; use one of none, sorted, lpt"),
        (8, {"steps_at_once": 0}, "steps_at_once=0"),
    ],
)
def test_plans_that_cannot_be_are_refused(ranks, small, batch, options, message):
    for text in call(ranks, 2, refused, small, batch, options):
        assert message in text


def test_an_empty_folder_and_empty_shards_are_refused(ranks, tmp_path):
    (tmp_path / "nothing").mkdir()
    for text in call(ranks, 2, refused, tmp_path / "nothing", 2, {}):
        assert f"{tmp_path / 'nothing'}" in text and "no shard" in text
    for text in call(ranks, 2, refused, tmp_path / "absent", 2, {}):
        assert f"{tmp_path / 'absent'}" in text
    for text in call(ranks, 2, refused, make_folder(tmp_path / "hollow", [0, 0]), 2, {}):
        assert "not one sample in 2 shards" in text


def test_sequences_longer_than_the_model_are_refused(ranks, tmp_path):
    folder = make_folder(tmp_path, [20, 20], longest=160)
    for text in call(ranks, 2, refused, folder, 4, {"on_bad": "skip"}):
        assert "a sequence of 160 tokens, but the model has max_positions=128" in text


def test_a_state_of_other_data_is_refused(ranks, small, tmp_path):
    state = ranks.run(1, ledger, small, 4, 1)[0][1]
    for options, message in (
        ({"seed": 6}, "seed=6, but the run being resumed has seed=5"),
        ({"window": 2}, "window_shards=2, but the run being resumed has window_shards=3"),
    ):
        assert message in call(ranks, 1, refused, small, 4, {"state": state, **options})[0]
    more = make_folder(tmp_path / "more", [30, 30, 5])
    assert "part_002.hdf5" in call(ranks, 1, refused, more, 4, {"state": state})[0]
    other = make_folder(tmp_path / "other", [30, 31])
    assert (
        "part_001.hdf5 holds 31 samples, 30 when the run began"
        in call(ranks, 1, refused, other, 4, {"state": state})[0]
    )


def failing_thread(runtime, folder, prefetch):
    """One rank's reading breaks in a way nobody foresaw, some windows into the run."""
    loader = open_loader(runtime, folder, 8, window=2, steps_at_once=1, prefetch=prefetch)
    read, calls = loader.shards.read, []

    def read_or_break(number):
        calls.append(number)
        if runtime.rank == 1 and len(calls) > 2:
            raise MemoryError("no memory for the shard")
        return read(number)

    loader.shards.read = read_or_break
    with pytest.raises(DataError) as caught, loader:
        for _ in range(1000):
            next(loader)
    with pytest.raises(DataError):
        next(loader)
    loader.close()
    return str(caught.value), [thread.name for thread in threading.enumerate() if thread.daemon]


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_error_in_a_thread_reaches_every_rank_with_its_traceback(ranks, tmp_path, prefetch):
    folder = make_folder(tmp_path, [16] * 6)
    for text, threads in ranks.run(4, failing_thread, folder, prefetch):
        assert "rank 1: MemoryError: no memory for the shard" in text
        assert "read_or_break" in text
        assert not {"read shards", "exchange samples", "pack batches"} & set(threads)


def closing(runtime, folder, steps, delay):
    loader = open_loader(runtime, folder, 8, steps_at_once=1)
    for _ in range(steps):
        next(loader)
    time.sleep(delay * runtime.rank)
    start = time.monotonic()
    loader.close()
    loader.close()
    names = {thread.name for thread in threading.enumerate()}
    return time.monotonic() - start, names & {"read shards", "exchange samples", "pack batches"}


@pytest.mark.parametrize("steps, delay", [(0, 0.0), (1, 0.0), (3, 0.3)])
def test_closing_ends_all_threads_of_all_ranks(ranks, folder, steps, delay):
    for seconds, threads in ranks.run(4, closing, folder, steps, delay):
        assert not threads
        assert seconds < 10


def test_one_sample_is_trained_again_and_again_by_one_rank_and_refused_by_two(ranks, tmp_path):
    folder = make_folder(tmp_path, [1])
    steps = by_step(ranks.run(1, ledger, folder, 1, 3))
    assert steps == [[(0, 0)], [(1, 0)], [(2, 0)]]
    for text in call(ranks, 2, refused, folder, 2, {}):
        assert "1 samples are fewer than global_batch=2" in text
