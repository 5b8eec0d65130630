"""Who gets which item so that nobody waits: items with costs are dealt to bins (ranks, micro-batches).

Every function works on the last dim and over any leading dims at once, so many steps are dealt in one call. Given
integer costs all arithmetic is exact and sorts are stable: every rank computes the same assignment by itself.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[Any]
"""Costs of items or sums of them: int64 (exact) or float64."""


@dataclass(frozen=True)
class PolynomialCost:
    """Cost of a sequence of n tokens: `linear * n + quadratic * n**2`, in any unit (FLOPs, picoseconds).

    The linear part is what matrix products with weights take, the quadratic part attention. Integer coefficients keep
    the costs exact.
    """

    linear: int
    quadratic: int

    def __post_init__(self) -> None:
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic == 0:
            raise ValueError(
                f"cost of {self.linear}*n + {self.quadratic}*n^2: coefficients must not be negative, nor both zero"
            )

    def __call__(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Costs of sequences of these lengths (tokens), same shape."""
        n = np.asarray(lengths).astype(np.int64)
        return n * (self.linear + self.quadratic * n)


def deal_in_order(costs: Costs, bins: int) -> NDArray[np.int64]:
    """Equal contiguous slices, whatever the costs: bin of each item, [..., items]."""
    items = _check_divides(costs, bins)
    return np.broadcast_to(np.repeat(np.arange(bins), items // bins), costs.shape)


def deal_sorted(costs: Costs, bins: int) -> NDArray[np.int64]:
    """Sorted by cost and dealt like cards: bin of each item, [..., items], the same number in each bin.

    Bin 0 gets the dearest card of every round, so the rounding of each round adds up on it.
    """
    items = _check_divides(costs, bins)
    order = np.argsort(-costs, axis=-1, kind="stable")
    dealt = np.broadcast_to(np.arange(items) % bins, costs.shape)
    return _scatter(order, dealt)


def deal_longest_first(costs: Costs, bins: int, *, tolerance: float = 1e-3) -> NDArray[np.int64]:
    """Near-equal sums with the same number of items in each bin: bin of each item, [..., items].

    Longest processing time by rounds: items go by falling cost, a round gives each bin one of the next `bins` items,
    the dearest to the bin that has least so far (Graham 1969, "Bounds on multiprocessing timing anomalies", with the
    number of items per bin fixed). While the fullest bin is more than `tolerance` above the mean, it then swaps one
    item with whichever other bin lowers the larger of the two sums most, until no swap does.
    """
    items = _check_divides(costs, bins)
    per_bin = items // bins
    order = np.argsort(-costs.reshape(-1, items), axis=-1, kind="stable")
    falling = np.take_along_axis(costs.reshape(-1, items), order, axis=-1)
    places = np.empty((len(order), per_bin, bins), dtype=np.int64)  # places in falling order of the items of a bin
    sums = np.zeros((len(order), bins), dtype=costs.dtype)
    for dealt in range(per_bin):
        lightest = np.argsort(sums, axis=-1, kind="stable")
        card = _scatter(lightest, np.broadcast_to(np.arange(bins), lightest.shape)) + dealt * bins
        places[:, dealt] = card
        sums += np.take_along_axis(falling, card, axis=-1)
    places = places.transpose(0, 2, 1)  # [problems, per_bin, bins] -> [problems, bins, per_bin]
    for problem in np.flatnonzero(imbalance(sums) > 1 + tolerance):
        _swap(falling[problem], places[problem], tolerance)
    bin_of_place = np.repeat(np.arange(bins), per_bin)
    owner = _scatter(places.reshape(-1, items), np.broadcast_to(bin_of_place, order.shape))
    return _scatter(order, owner).reshape(costs.shape)


def deal_freely(costs: Costs, bins: int) -> NDArray[np.int64]:
    """Near-equal sums, any number of items in a bin: bin of each item, [items].

    Longest processing time (Graham 1969): the maximum is at most 4/3 - 1/(3 bins) times the best possible.
    """
    if bins < 1:
        raise ValueError(f"bins={bins} is below 1")
    owner = np.empty(len(costs), dtype=np.int64)
    emptiest = [(0, number) for number in range(bins)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, number = emptiest[0]
        owner[item] = number
        heapq.heapreplace(emptiest, (load + costs[item].item(), number))
    return owner


def loads(costs: Costs, owner: NDArray[np.int64], bins: int) -> Costs:
    """Sum of the costs in each bin, [..., bins]; `owner` is the bin of each item, [..., items]."""
    sums = np.zeros((*costs.shape[:-1], bins), dtype=costs.dtype)
    flat, problems = sums.reshape(-1), np.arange(sums.size // bins).reshape(*costs.shape[:-1], 1)
    np.add.at(flat, (problems * bins + owner).reshape(-1), costs.reshape(-1))
    return sums


def imbalance(sums: Costs) -> NDArray[np.float64]:
    """Largest load over mean load, [...] from [..., bins]: 1 is perfect, 1.1 means everybody waits 10 % of the time."""
    mean = sums.mean(axis=-1)
    return np.divide(sums.max(axis=-1), mean, out=np.ones_like(mean, dtype=np.float64), where=mean > 0)


def lower_bound(costs: Costs, bins: int) -> Costs:
    """No assignment has a largest load below this, [...]: the mean load, or the dearest item."""
    return np.maximum(costs.sum(axis=-1) / bins, costs.max(axis=-1))


def _check_divides(costs: Costs, bins: int) -> int:
    items = costs.shape[-1]
    if bins < 1 or items % bins:
        raise ValueError(f"{items} items cannot be dealt evenly to {bins} bins; the number of items must be a multiple")
    return items


def _scatter(order: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Puts values[..., i] at place order[..., i]."""
    placed = np.empty(order.shape, dtype=np.int64)
    np.put_along_axis(placed, order, values, axis=-1)
    return placed


def _swap(values: Costs, held: NDArray[np.int64], tolerance: float) -> None:
    """Swaps items of the fullest bin, in place, while that lowers its sum and it is `tolerance` above the mean.

    values: [items], cost of each item; held: [bins, per_bin], the items of each bin.
    """
    bins = len(held)
    sums = values[held].sum(axis=-1)
    enough = (1 + tolerance) * sums.mean()
    # Each swap lowers the sum of squares, so this ends; the limit bounds the time a step may take.
    for _ in range(4 * bins):
        full = int(sums.argmax())
        if sums[full] <= enough:
            return
        costs = values[held]  # [bins, per_bin]
        moved = costs[full][None, :, None] - costs[:, None, :]  # [bins, out, back]: what leaves the fullest bin
        larger = np.maximum(sums[full] - moved, sums[:, None, None] + moved)
        larger[full] = sums[full]
        best = int(larger.argmin())
        if larger.reshape(-1)[best] >= sums[full]:
            return
        other, out, back = np.unravel_index(best, larger.shape)
        sums[full] -= moved[other, out, back]
        sums[other] += moved[other, out, back]
        held[full, out], held[other, back] = held[other, back], held[full, out]
