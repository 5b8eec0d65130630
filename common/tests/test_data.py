"""The order of samples, prefetch and its errors, work done on every rank, reading once per node."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch

from common.data import DataError, Prefetcher, SampleOrder, on_every_rank, read_once_per_node


def stream(order: SampleOrder, epochs: int) -> list[tuple[int, int, int]]:
    """(epoch, shard, sample of the shard) of every place, by the definition."""
    places = []
    for epoch in range(epochs):
        for window in order.windows(epoch):
            samples = [(epoch, shard, i) for shard in window.shards for i in range(order.count(shard, epoch))]
            places += [samples[i] for i in order.shuffle(window, len(samples))]
    return places


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_comes_once_in_every_epoch(seed):
    draw = np.random.default_rng(seed)
    counts = [*draw.integers(0, 9, size=int(draw.integers(1, 12))).tolist(), 1]
    order = SampleOrder(counts, window=int(draw.integers(1, 6)), seed=seed)
    places = stream(order, epochs=3)
    assert len(set(places)) == len(places) == 3 * sum(counts)
    assert set(places) == {(e, s, i) for e in range(3) for s, n in enumerate(counts) for i in range(n)}


@pytest.mark.parametrize("seed", range(8))
def test_any_position_is_found_again(seed):
    counts = [*np.random.default_rng(seed).integers(0, 6, size=7).tolist(), 2]
    order = SampleOrder(counts, window=3, seed=seed)
    order.lose(2, 1)
    order.lose(5, 2)
    whole = stream(order, epochs=5)
    for position in range(0, len(whole), 3):
        window, before = order.locate(position)
        rest = []
        for later in itertools.islice(order.windows_from(window), 4):
            samples = [
                (later.epoch, shard, i) for shard in later.shards for i in range(order.count(shard, later.epoch))
            ]
            rest += [samples[i] for i in order.shuffle(later, len(samples))]
        rest = rest[before:][: len(whole) - position]
        assert rest
        assert rest == whole[position : position + len(rest)]


def test_order_changes_with_seed_and_epoch_and_is_shuffled():
    def sequence(seed: int, epoch: int) -> list[tuple[int, int]]:
        return [(shard, i) for e, shard, i in stream(SampleOrder([40] * 6, window=2, seed=seed), 2) if e == epoch]

    orders = [sequence(1, 0), sequence(1, 1), sequence(2, 0)]
    for one, other in itertools.combinations([*orders, sorted(orders[0])], 2):
        agreeing = sum(a == b for a, b in zip(one, other, strict=True))
        assert agreeing < 24  # of 240; one in 240 agrees by chance


def test_order_is_pinned():
    """The same in every version, so that a run resumed after an upgrade sees the same samples."""
    assert [window.shards for window in SampleOrder([3] * 5, window=2, seed=7).windows(1)] == PINNED_WINDOWS
    order = SampleOrder([3] * 5, window=2, seed=7)
    assert order.shuffle(order.windows(0)[0], 6).tolist() == PINNED_SHUFFLE


PINNED_WINDOWS = [(2, 4), (1, 0), (3,)]
PINNED_SHUFFLE = [4, 0, 5, 1, 3, 2]


def test_far_position_is_found_at_once():
    order = SampleOrder([1, 2], window=1, seed=0)
    order.lose(0, 3)
    start = time.perf_counter()
    window, before = order.locate(3 * 3 + 2 * 10**12 + 1)
    assert time.perf_counter() - start < 1
    assert window.epoch == 3 + 10**12 and before == 1


@pytest.mark.parametrize(
    "counts, window, seed, message",
    [
        ([], 1, 0, "0 shards hold no sample"),
        ([0, 0], 1, 0, "2 shards hold no sample"),
        ([1], 0, 0, "window=0"),
        ([1], 1, -1, "seed=-1"),
    ],
)
def test_bad_orders_are_refused(counts, window, seed, message):
    with pytest.raises(ValueError, match=message):
        SampleOrder(counts, window=window, seed=seed)


def test_positions_that_cannot_be_are_refused():
    order = SampleOrder([2], window=1, seed=0)
    with pytest.raises(ValueError, match="position=-1"):
        order.locate(-1)
    order.lose(0, 1)
    with pytest.raises(DataError, match="no shard is left in epoch 1"):
        order.locate(2)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_keeps_the_order_and_ends(depth):
    ahead = Prefetcher(iter(range(20)), stop=threading.Event(), depth=depth)
    assert list(ahead) == list(range(20))
    assert list(ahead) == []


def test_prefetch_draws_just_so_far_ahead():
    drawn = []

    def source():
        for number in itertools.count():
            drawn.append(number)
            yield number
            if stop.is_set():
                return

    stop = threading.Event()
    ahead = Prefetcher(source(), stop=stop, depth=2)
    for number in range(3):
        assert next(ahead) == number
    deadline = time.monotonic() + 5
    while len(drawn) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert drawn == [0, 1, 2, 3, 4]
    ahead.close()
    assert not ahead._thread.is_alive()


def test_prefetch_hides_the_time_of_its_source():
    def slow():
        for number in range(6):
            time.sleep(0.05)
            yield number

    waited = {}
    for depth in (0, 1):
        ahead = Prefetcher(slow(), stop=threading.Event(), depth=depth)
        for _ in ahead:
            time.sleep(0.15)
        waited[depth] = ahead.waited
    assert waited[0] > 0.29
    assert waited[1] < 0.6 * waited[0]


@pytest.mark.parametrize("depth", [0, 2])
def test_errors_of_the_source_reach_the_caller_with_their_traceback(depth):
    def broken_source():
        yield 1
        raise OSError("disk gone")

    ahead = Prefetcher(broken_source(), stop=threading.Event(), depth=depth)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk gone") as caught:
        next(ahead)
    assert any(entry.name == "broken_source" for entry in caught.traceback)
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)


def test_bad_depth_is_refused():
    with pytest.raises(ValueError, match="depth=-1"):
        Prefetcher(iter([]), stop=threading.Event(), depth=-1)


def gathered(runtime):
    return on_every_rank(lambda: runtime.rank * 10, runtime.group())


def failing_work(runtime, bad_ranks):
    def work():
        if runtime.rank in bad_ranks:
            raise OSError(f"cannot read shard_{runtime.rank}")

    with pytest.raises(DataError) as caught:
        on_every_rank(work, runtime.group())
    after = on_every_rank(lambda: "still together", runtime.group())
    return str(caught.value), isinstance(caught.value.__cause__, OSError), after


def test_work_on_every_rank_is_known_to_all(ranks):
    assert ranks.run(3, gathered) == [[0, 10, 20]] * 3


def test_an_error_on_some_ranks_is_raised_on_all_and_none_hangs(ranks):
    for rank, (text, caused, after) in enumerate(ranks.run(4, failing_work, (1, 3))):
        assert "rank 1: OSError: cannot read shard_1" in text and "rank 3: OSError: cannot read shard_3" in text
        assert "in work" in text  # the traceback of the other rank
        assert caused == (rank in (1, 3))
        assert after == ["still together"] * 4


def failing_plainly(runtime):
    def work():
        if runtime.rank != 1:
            raise DataError("the folder is empty")

    with pytest.raises(DataError) as caught:
        on_every_rank(work, runtime.group())
    return str(caught.value)


def test_what_is_wrong_with_the_data_is_said_once_and_without_traceback(ranks):
    assert ranks.run(3, failing_plainly) == ["the folder is empty"] * 3


def some_tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randn(33, 7, generator=draw),
        "double": torch.randn(5, dtype=torch.float64, generator=draw),
        "half": torch.randn(3, 3, generator=draw).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "step": torch.tensor(12),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(6, 8, generator=draw).t(),
        "large": torch.randn(70_000, generator=draw),
    }


def spread(runtime, ranks_per_node, bucket_mb):
    runtime.local_world_size = ranks_per_node
    runtime.local_rank = runtime.rank % ranks_per_node
    reads = []

    def read():
        reads.append(runtime.rank)
        return some_tensors()

    return read_once_per_node(read, runtime, bucket_mb=bucket_mb), reads


@pytest.mark.parametrize(
    "world_size, ranks_per_node, bucket_mb", [(1, 1, 64.0), (4, 2, 0.001), (4, 4, 0.1), (3, 2, 64.0)]
)
def test_tensors_are_read_once_per_node_and_arrive_bit_for_bit(ranks, world_size, ranks_per_node, bucket_mb):
    wanted = some_tensors()
    results = ranks.run(world_size, spread, ranks_per_node, bucket_mb)
    for rank, (tensors, reads) in enumerate(results):
        assert reads == ([rank] if rank % ranks_per_node == 0 else [])
        assert list(tensors) == list(wanted)
        for name, tensor in tensors.items():
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name


def unreadable(runtime):
    def read():
        raise FileNotFoundError("model.ckpt-28252.index")

    with pytest.raises(DataError) as caught:
        read_once_per_node(read, runtime)
    return str(caught.value)


def test_what_cannot_be_read_is_an_error_on_every_rank(ranks):
    for text in ranks.run(3, unreadable):
        assert "rank 0: FileNotFoundError: model.ckpt-28252.index" in text
