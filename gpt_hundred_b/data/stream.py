"""The endless stream of samples: a function of the sets, their weights and the seed, never of the ranks.

A set's tokens, documents end to end, are cut into samples of `sequence` tokens to predict; what is left over at the end
is a short one, its labels filled up with -100. So every token but the first is predicted once an epoch. As in GPT-3
(Brown et al. 2020, appendix B) attention crosses document borders, which the end-of-document token marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.config import check
from common.data import SampleOrder, Window
from gpt_hundred_b.data.blend import Blend
from gpt_hundred_b.data.indexed import IndexedTokens, TokenFileError
from gpt_hundred_b.loss import IGNORED
from gpt_hundred_b.model import TokenBatch

SHARD_SAMPLES = 1 << 14
"""Neighbouring samples that an epoch's order moves together ..."""
WINDOW_SHARDS = 64
"""... and how many such shards are shuffled together: about a million samples, 8 MB of order."""


class TokenSet:
    """Samples of one token file."""

    def __init__(self, prefix: Path, *, sequence: int, vocab_size: int) -> None:
        """Raises TokenFileError where it cannot be used or has no two tokens."""
        self.source = IndexedTokens(prefix)
        self.sequence, self.vocab_size = sequence, vocab_size
        tokens = len(self.source.tokens)
        if tokens < 2:
            raise TokenFileError(f"{prefix}: {tokens} tokens; a sample needs at least two")
        self.samples = -(-(tokens - 1) // sequence)

    def read(self, number: int) -> NDArray[Any]:
        """Tokens of sample `number`, up to sequence + 1: the first is never a label.

        Raises TokenFileError where one is not in the vocabulary.
        """
        first = number * self.sequence
        tokens = self.source.tokens[first : first + self.sequence + 1].astype(np.int64)
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            worst = tokens.max() if tokens.max() >= self.vocab_size else tokens.min()
            raise TokenFileError(
                f"{self.source.prefix}.bin: token {worst} near token {first:,} is not in the vocabulary of "
                f"{self.vocab_size:,}; set model.vocab_size to the tokenizer's size, or prepare the file again"
            )
        return tokens

    def batch(self, numbers: Sequence[int], sample_ids: Sequence[int]) -> TokenBatch:
        """Samples by number, on the CPU. sample_ids: what dropout goes by."""
        return _batch([self.read(number) for number in numbers], self.sequence, sample_ids)


class TokenStream:
    """Sets blended into one stream; position p of it is sample p of the run, whatever the layout."""

    def __init__(self, sets: Sequence[TokenSet], *, seed: int, weights: Sequence[float] = ()) -> None:
        """weights: share of the samples that comes from each set; none: in proportion to their sizes.

        Raises ConfigError where there is no set or the weights do not fit.
        """
        check(len(sets) > 0, "no training set; name at least one in data.train")
        check(
            len(weights) in (0, len(sets)),
            f"data.weights has {len(weights)} numbers for {len(sets)} sets; give one for each, or none",
        )
        check(
            not weights or (min(weights) >= 0 and sum(weights) > 0),
            f"data.weights={list(weights)}: none may be negative, and one must be positive",
        )
        self.sets = list(sets)
        self.blend = Blend(list(weights) or [one.samples for one in sets])
        # Each set has an order of its own, so that adding one changes nothing in the others.
        self._orders = [_Order(one.samples, seed) for one in sets]

    def batch(self, positions: Sequence[int]) -> TokenBatch:
        """The samples at these positions of the stream, on the CPU; a rising run of them is read fastest."""
        counts: list[int] = []
        rows = []
        for place, position in enumerate(positions):
            if not counts or position != positions[place - 1] + 1:
                counts = self.blend.counts(position)
            chosen = self.blend.pick(position)
            rows.append(self.sets[chosen].read(self._orders[chosen].sample(counts[chosen])))
            counts[chosen] += 1
        return _batch(rows, self.sets[0].sequence, positions)


class _Order:
    """Place in a set's own endless stream -> number of the sample in the set."""

    def __init__(self, samples: int, seed: int) -> None:
        shards = [min(SHARD_SAMPLES, samples - first) for first in range(0, samples, SHARD_SAMPLES)]
        self._order = SampleOrder(shards, window=WINDOW_SHARDS, seed=seed)
        self._first = 0
        self._window: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def sample(self, place: int) -> int:
        if not 0 <= place - self._first < len(self._window):
            window, inside = self._order.locate(place)
            self._first, self._window = place - inside, self._numbers(window)
        return int(self._window[place - self._first])

    def _numbers(self, window: Window) -> NDArray[np.int64]:
        counts = self._order.counts
        side_by_side = np.concatenate([s * SHARD_SAMPLES + np.arange(counts[s]) for s in window.shards])
        return side_by_side[self._order.shuffle(window, len(side_by_side))]


def micro_batch_positions(
    start: int, *, global_batch: int, micro_batch: int, rank: int = 0, ranks: int = 1
) -> list[range]:
    """Stream positions of each micro-batch of a data-parallel rank in the step that begins at `start`.

    Raises ConfigError where the micro-batches of all ranks do not fill the global batch.
    """
    check(
        global_batch % (micro_batch * ranks) == 0,
        f"global batch {global_batch} is no multiple of micro_batch={micro_batch} x {ranks} data-parallel ranks; "
        f"use {micro_batch * ranks} or a multiple",
    )
    rows = global_batch // (micro_batch * ranks)
    firsts = (start + (row * ranks + rank) * micro_batch for row in range(rows))
    return [range(first, first + micro_batch) for first in firsts]


def _batch(rows: Sequence[NDArray[np.int64]], sequence: int, sample_ids: Sequence[int]) -> TokenBatch:
    ids = np.zeros((len(rows), sequence), dtype=np.int64)
    labels = np.full((len(rows), sequence), IGNORED, dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row) - 1] = row[:-1]
        labels[place, : len(row) - 1] = row[1:]
    return TokenBatch(torch.from_numpy(ids), torch.from_numpy(labels), torch.tensor(list(sample_ids)))
