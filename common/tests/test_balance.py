"""Assignments: counts kept, sums near equal, bounds held, the same answer for one problem and for many."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from common.balance import (
    PolynomialCost,
    deal_freely,
    deal_in_order,
    deal_longest_first,
    deal_sorted,
    imbalance,
    loads,
    lower_bound,
)

EQUAL_COUNTS = (deal_in_order, deal_sorted, deal_longest_first)


def random_lengths(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """A quarter at 512, the rest skewed to short ones: the shape of BERT's lengths."""
    draw = np.random.default_rng(seed)
    return np.where(draw.random(shape) < 0.25, 512, 20 + (491 * draw.random(shape) ** 1.657).astype(int))


@pytest.mark.parametrize("deal", EQUAL_COUNTS)
@pytest.mark.parametrize("bins, per_bin", [(1, 5), (2, 1), (3, 7), (8, 56), (64, 3)])
def test_every_bin_gets_the_same_number(deal, bins, per_bin):
    costs = random_lengths(bins, (4, bins * per_bin))
    owner = deal(costs, bins)
    assert owner.shape == costs.shape
    assert (loads(np.ones_like(costs), owner, bins) == per_bin).all()


@pytest.mark.parametrize("deal", EQUAL_COUNTS)
def test_many_problems_at_once_equal_one_by_one(deal):
    costs = random_lengths(1, (3, 5, 24))
    together = deal(costs, 4)
    for place in itertools.product(range(3), range(5)):
        np.testing.assert_array_equal(together[place], deal(costs[place], 4))


@pytest.mark.parametrize("seed", range(25))
def test_longest_first_is_never_above_sorted_nor_below_the_bound(seed):
    draw = np.random.default_rng(seed)
    bins, per_bin = int(draw.integers(2, 17)), int(draw.integers(2, 30))
    costs = PolynomialCost(600, 1)(random_lengths(seed, (6, bins * per_bin)))
    largest = loads(costs, deal_longest_first(costs, bins), bins).max(axis=-1)
    assert (largest <= loads(costs, deal_sorted(costs, bins), bins).max(axis=-1)).all()
    assert (largest >= lower_bound(costs, bins)).all()


@pytest.mark.parametrize("seed", range(10))
def test_longest_first_is_near_the_best_of_all_assignments(seed):
    costs = random_lengths(seed, (8,))
    best = min(
        max(costs[list(chosen)].sum(), costs.sum() - costs[list(chosen)].sum())
        for chosen in itertools.combinations(range(8), 4)
    )
    assert loads(costs, deal_longest_first(costs, 2), 2).max() <= 1.03 * best


@pytest.mark.parametrize("ranks, per_rank", [(8, 56), (64, 48)])
def test_published_batches_are_balanced_to_a_thousandth(ranks, per_rank):
    lengths = random_lengths(0, (16, ranks * per_rank))
    costs = PolynomialCost(614, 1)(lengths)
    owner = deal_longest_first(costs, ranks)
    assert imbalance(loads(costs, owner, ranks)).max() < 1.001
    assert imbalance(loads(lengths, owner, ranks)).max() < 1.02
    assert imbalance(loads(costs, deal_in_order(costs, ranks), ranks)).max() > 1.1


def test_swaps_mend_what_dealing_by_rounds_leaves():
    costs = np.array([8, 8, 7, 5, 5, 1])
    assert loads(costs, deal_longest_first(costs, 2, tolerance=np.inf), 2).max() == 18
    assert loads(costs, deal_longest_first(costs, 2, tolerance=0.0), 2).max() == 17  # half of the sum: none is better


@pytest.mark.parametrize("seed", range(20))
def test_free_dealing_keeps_grahams_bound(seed):
    draw = np.random.default_rng(seed)
    bins = int(draw.integers(1, 5))
    costs = draw.integers(1, 60, size=int(draw.integers(1, 9)))
    owner = deal_freely(costs, bins)
    best = (
        min(loads(costs, np.array(other), bins).max() for other in itertools.product(range(bins), repeat=len(costs)))
        if bins ** len(costs) <= 4096
        else None
    )
    largest = loads(costs, owner, bins).max()
    assert largest >= lower_bound(costs, bins)
    if best is not None:
        assert largest <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


def test_equal_costs_are_dealt_the_same_everywhere():
    costs = np.full((2, 12), 7)
    np.testing.assert_array_equal(deal_longest_first(costs, 4), deal_longest_first(costs.copy(), 4))
    assert (imbalance(loads(costs, deal_longest_first(costs, 4), 4)) == 1).all()


def test_imbalance_of_nothing_is_one():
    assert imbalance(np.zeros(4)) == 1
    assert imbalance(np.array([1.0, 3.0])) == 1.5


@pytest.mark.parametrize("deal", EQUAL_COUNTS)
def test_uneven_items_are_refused(deal):
    with pytest.raises(ValueError, match="10 items cannot be dealt evenly to 4 bins"):
        deal(np.ones(10), 4)


def test_bad_costs_are_refused():
    with pytest.raises(ValueError, match="nor both zero"):
        PolynomialCost(0, 0)
    with pytest.raises(ValueError, match="bins=0"):
        deal_freely(np.ones(3), 0)


def test_cost_is_exact_for_long_sequences():
    assert (
        PolynomialCost(614_000_000, 98_304)(np.array([512], dtype=np.int32))[0] == 614_000_000 * 512 + 98_304 * 512**2
    )
