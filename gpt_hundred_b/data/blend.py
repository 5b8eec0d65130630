"""Which set the next sample comes from: weighted, deterministic, and known at any place without counting up to it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

BITS = 48
"""Positions are below 2^48; weights are kept to 2^-48."""


class Blend:
    """Deals the positions 0, 1, 2, ... of a stream to sets in proportion to their weights.

    The bits of a position, reversed, are the van der Corput sequence, which is spread so evenly over [0, 1) that any
    stretch of N positions gives each set its share to within about log2(N) samples. How many of the first N went to a
    set has a closed form, so a stream begins anywhere at once.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ValueError where a weight is negative or none is positive."""
        total = float(sum(weights))
        if not weights or min(weights) < 0 or not 0 < total < float("inf"):
            raise ValueError(f"weights {list(weights)}: none may be negative, and one must be positive")
        self.weights = [weight / total for weight in weights]
        bounds = [0]
        reached = 0.0
        for weight in weights:
            reached += weight
            bounds.append(round(reached / total * 2**BITS))
        bounds[-1] = 2**BITS
        self._bounds = bounds

    def pick(self, position: int) -> int:
        """The set that a position goes to."""
        return bisect.bisect_right(self._bounds, _reversed(position, BITS)) - 1

    def counts(self, positions: int) -> list[int]:
        """How many of the first `positions` go to each set."""
        below = [_below(positions, bound) for bound in self._bounds]
        return [after - before for before, after in itertools.pairwise(below)]


def _reversed(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def _below(n: int, bound: int) -> int:
    """How many of 0 .. n - 1 have reversed bits below `bound`."""
    found = start = 0
    for k in range(BITS, -1, -1):
        if n >> k & 1:
            # start .. start + 2^k - 1: the low k bits take all values, the others are those of `start`.
            step, least = 1 << (BITS - k), _reversed(start, BITS) if start < 2**BITS else 0
            found += min(max(-(-(bound - least) // step), 0), 1 << k)
            start += 1 << k
    return found
