"""Samples -> the flat tensors that the model reads, without padding, on the model's device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert_mlperf.data.shards import Samples
from bert_mlperf.model import PackedBatch


def pack(samples: Samples, sample_ids: NDArray[np.int64]) -> PackedBatch:
    """One flat batch on the host of these samples, [n], in their order; sample_ids: [n], position in the stream."""
    lengths = samples.lengths.astype(np.int64)
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    starts = cu_seqlens[:-1]
    return PackedBatch(
        input_ids=torch.from_numpy(samples.tokens.astype(np.int64)),
        segment_ids=torch.from_numpy(samples.segments.astype(np.int64)),
        position_ids=torch.from_numpy(np.arange(cu_seqlens[-1]) - np.repeat(starts, lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        lengths=tuple(lengths.tolist()),
        masked_index=torch.from_numpy(samples.masked_positions + np.repeat(starts, samples.masked_counts)),
        masked_labels=torch.from_numpy(samples.masked_ids.astype(np.int64)),
        next_sentence=torch.from_numpy(samples.next_sentence.astype(np.int64)),
        sample_ids=torch.from_numpy(np.asarray(sample_ids, dtype=np.int64)),
    )


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch on `device`, by way of pinned memory so that the copy does not hold up the host."""
    if device.type == "cpu":
        return batch
    tensors: dict[str, Any] = {
        field.name: value.pin_memory().to(device, non_blocking=True)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def hand_over(batch: PackedBatch, copied: torch.cuda.Event) -> None:
    """Makes the current stream wait for copies made on another one, and keeps their memory until it is done with it."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)
    for field in dataclasses.fields(batch):
        if isinstance(value := getattr(batch, field.name), Tensor):
            value.record_stream(stream)
