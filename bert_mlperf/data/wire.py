"""Samples as bytes between ranks: one ragged exchange carries everything that belongs to them."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bert_mlperf.data.shards import Samples
from common.collectives import all_to_all_ragged

HEADER = 3
"""int32 numbers at the beginning: samples, tokens, masked positions."""


def exchange_samples(parts: list[Samples], group: dist.ProcessGroup, device: torch.device) -> list[Samples]:
    """Sends parts[r] to rank r and returns what each rank sent here, by rank; goes by way of `device`."""
    outgoing = [torch.from_numpy(to_bytes(part)).to(device) for part in parts]
    return [from_bytes(part.cpu().numpy()) for part in all_to_all_ragged(outgoing, group)]


def to_bytes(samples: Samples) -> NDArray[np.uint8]:
    """The samples as bytes, a multiple of 4 of them: the int32 fields first, so that all stay aligned."""
    header = np.array([len(samples), len(samples.tokens), len(samples.masked_ids)], dtype=np.int32)
    wide = (samples.lengths, samples.masked_counts, samples.tokens, samples.masked_positions, samples.masked_ids)
    narrow = (samples.segments, samples.next_sentence)
    parts = [array.view(np.uint8) for array in (header, *wide, *narrow)]
    size = sum(len(part) for part in parts)
    return np.concatenate([*parts, np.zeros(-size % 4, dtype=np.uint8)])


def from_bytes(raw: NDArray[np.uint8]) -> Samples:
    """The samples that `to_bytes` made these bytes of."""
    count, tokens, masked = raw[: 4 * HEADER].view(np.int32).tolist()
    place = 4 * HEADER
    wide = []
    for size in (count, count, tokens, masked, masked):
        wide.append(raw[place : place + 4 * size].view(np.int32))
        place += 4 * size
    lengths, masked_counts, token_ids, masked_positions, masked_ids = wide
    return Samples(
        tokens=token_ids,
        segments=raw[place : place + tokens],
        lengths=lengths,
        masked_positions=masked_positions,
        masked_ids=masked_ids,
        masked_counts=masked_counts,
        next_sentence=raw[place + tokens : place + tokens + count],
    )
