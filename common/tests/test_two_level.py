"""The two-level all-reduce equals the flat one for every size, and the choice follows what was measured."""

import pytest
import torch

from common.testing import RankFailure
from common.two_level import AlphaBeta, TwoLevelAllReduce


def _equal(runtime, ranks_per_node, dtype):
    reduce = TwoLevelAllReduce(runtime, ranks_per_node)
    for shape in ((1,), (2,), (7,), (64, 3), (5, 5), (1000,), (0,)):
        generator = torch.Generator().manual_seed(sum(shape))
        parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(runtime.world_size)]
        expected = torch.stack(parts).sum(dim=0)
        for way in (reduce, reduce.reduce_flat, reduce.reduce_two_level):
            ours = parts[runtime.rank].clone()
            assert way(ours) is ours
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    transposed = torch.arange(12, dtype=dtype).view(3, 4).T.contiguous().T
    reduce.reduce_two_level(transposed)
    torch.testing.assert_close(transposed, runtime.world_size * torch.arange(12, dtype=dtype).view(3, 4))


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (2, 2), (2, 1), (4, 2), (6, 3), (8, 2), (8, 4)])
def test_two_levels_equal_one(ranks, world_size, ranks_per_node):
    ranks.run(world_size, _equal, ranks_per_node, torch.float64)


def _chooses(runtime):
    reduce = TwoLevelAllReduce(runtime, 2)
    assert reduce.takes_two_levels(1), "unmeasured: always"
    reduce.calibrate(sizes=(1 << 12, 1 << 16), repeats=2)
    measured = reduce.flat, reduce.two_level
    assert all(fit.alpha + fit.beta > 0 for fit in measured)
    reduce.flat, reduce.two_level = AlphaBeta(1e-5, 1e-8), AlphaBeta(1e-4, 1e-9)
    assert [reduce.takes_two_levels(size) for size in (100, 9_000, 11_000, 10**9)] == [False, False, True, True]
    assert "flat: 10 us + 0.80 Gbit/s" in reduce.explain()
    return measured


def test_the_faster_way_is_chosen_for_each_size_and_alike_on_all_ranks(ranks):
    results = ranks.run(4, _chooses)
    assert results == [results[0]] * 4


def test_the_fit_recovers_a_line():
    sizes = (10, 1000, 100_000)
    fit = AlphaBeta.fit(sizes, [AlphaBeta(2e-4, 3e-9).seconds(size) for size in sizes])
    assert fit.alpha == pytest.approx(2e-4) and fit.beta == pytest.approx(3e-9)


def _uneven(runtime):
    TwoLevelAllReduce(runtime, 2)


def test_nodes_must_be_alike(ranks):
    with pytest.raises(RankFailure, match="ranks_per_node=2 does not divide 3 ranks"):
        ranks.run(3, _uneven)
