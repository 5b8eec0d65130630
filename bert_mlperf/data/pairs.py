"""Documents of word pieces -> BERT's training samples: sentence pairs, and masked places to predict.

As published (Devlin et al. 2019, section 3.1 and appendix A.2): half of the pairs are random, sequences fill up to the
longest length (in a tenth of the passes over a document to a random shorter one), 15 % of the tokens are predicted, of
which 80 % are replaced by [MASK], 10 % by a random word piece and 10 % stay.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bert_mlperf.data.documents import Vocabulary
from bert_mlperf.data.shards import Samples

Sentence = Sequence[int]
Document = Sequence[Sentence]


@dataclass(frozen=True)
class PairOptions:
    """How samples are made from documents."""

    max_length: int = 512
    """Tokens of a sample at most, [CLS] and two [SEP] included."""
    max_predictions: int = 76
    """Masked places of a sample at most."""
    masked_share: float = 0.15
    """Share of the tokens that are predicted."""
    short_share: float = 0.1
    """Share of the passes over a document that aim at a random shorter length."""


def pairs_of(
    documents: Sequence[Document], number: int, options: PairOptions, rng: random.Random
) -> Iterator[tuple[list[int], list[int], bool]]:
    """(first, second, is random) of each pair made from `documents[number]`; unused sentences are thrown back.

    Without a second document there is no random sentence to follow, so only real pairs are made.
    """
    document = documents[number]
    room = options.max_length - 3
    target = rng.randint(2, room) if rng.random() < options.short_share else room
    chunk: list[Sentence] = []
    length = place = 0
    while place < len(document):
        chunk.append(document[place])
        length += len(document[place])
        if place == len(document) - 1 or length >= target:
            split = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
            first = [token for sentence in chunk[:split] for token in sentence]
            second: list[int] = []
            is_random = len(documents) > 1 and (len(chunk) == 1 or rng.random() < 0.5)
            if is_random:
                second = _random_second(documents, number, target - len(first), rng)
                place -= len(chunk) - split  # the sentences not used come back
            else:
                second = [token for sentence in chunk[split:] for token in sentence]
            if first and second:
                _shorten(first, second, room, rng)
                yield first, second, is_random
            chunk, length = [], 0
        place += 1


def _random_second(documents: Sequence[Document], number: int, wanted: int, rng: random.Random) -> list[int]:
    """Sentences from a random place of another document, about `wanted` tokens of them."""
    other = rng.randrange(len(documents) - 1)
    document = documents[other + (other >= number)]
    second: list[int] = []
    for sentence in document[rng.randrange(len(document)) :]:
        second += sentence
        if len(second) >= wanted:
            break
    return second


def _shorten(first: list[int], second: list[int], room: int, rng: random.Random) -> None:
    """Takes tokens from the longer one, from its front or back by chance, until both fit; in place."""
    excess = len(first) + len(second) - room
    cuts = {id(first): [0, 0], id(second): [0, 0]}
    sizes = {id(first): len(first), id(second): len(second)}
    for _ in range(max(excess, 0)):
        longer = first if sizes[id(first)] > sizes[id(second)] else second
        cuts[id(longer)][rng.random() < 0.5] += 1
        sizes[id(longer)] -= 1
    for tokens in (first, second):
        front, back = cuts[id(tokens)]
        tokens[:] = tokens[front : len(tokens) - back]


def samples_of(
    documents: Sequence[Document],
    numbers: Sequence[int],
    options: PairOptions,
    vocabulary: Vocabulary,
    rng: random.Random,
) -> Samples:
    """Samples made from the documents at `numbers`; random followers come from all of `documents`."""
    tokens: list[int] = []
    segments: list[int] = []
    lengths: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    counts: list[int] = []
    randoms: list[bool] = []
    for number in numbers:
        for first, second, is_random in pairs_of(documents, number, options, rng):
            sample = [vocabulary.cls, *first, vocabulary.sep, *second, vocabulary.sep]
            chosen = _choose(len(first), len(second), options, rng)
            labels += [sample[place] for place in chosen]
            _mask(sample, chosen, vocabulary, rng)
            tokens += sample
            segments += [0] * (len(first) + 2) + [1] * (len(second) + 1)
            lengths.append(len(sample))
            positions += chosen
            counts.append(len(chosen))
            randoms.append(is_random)
    return Samples(
        np.array(tokens, dtype=np.int32),
        np.array(segments, dtype=np.uint8),
        np.array(lengths, dtype=np.int32),
        np.array(positions, dtype=np.int32),
        np.array(labels, dtype=np.int32),
        np.array(counts, dtype=np.int32),
        np.array(randoms, dtype=np.uint8),
    )


def _choose(first: int, second: int, options: PairOptions, rng: random.Random) -> list[int]:
    """Places to predict, in order; never [CLS] or [SEP]."""
    total = first + second + 3
    count = min(options.max_predictions, first + second, max(1, round(options.masked_share * total)))
    chosen = rng.sample(range(first + second), count)
    # Place i of the tokens lies behind [CLS], and behind the first [SEP] if it is in the second part.
    return sorted(place + 1 if place < first else place + 2 for place in chosen)


def _mask(sample: list[int], chosen: Sequence[int], vocabulary: Vocabulary, rng: random.Random) -> None:
    for place in chosen:
        draw = rng.random()
        if draw < 0.8:
            sample[place] = vocabulary.mask
        elif draw < 0.9:
            sample[place] = rng.randrange(vocabulary.size)
