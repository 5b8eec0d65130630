"""What goes into the model and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass
class PackedBatch:
    """Samples end to end; indices are int64 and on the model's device."""

    input_ids: Tensor
    """[tokens], word pieces, masked ones included."""
    segment_ids: Tensor
    """[tokens], 0 or 1."""
    position_ids: Tensor
    """[tokens], place inside the own sequence."""
    cu_seqlens: Tensor
    """[samples + 1] int32, where each sequence begins, and the end."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, on the host."""
    masked_index: Tensor
    """[masked], places in the flat batch."""
    masked_labels: Tensor
    """[masked], the word pieces to predict."""
    next_sentence: Tensor
    """[samples], 1 where the second sentence is a random one."""
    sample_ids: Tensor
    """[samples], position of each sample in the stream; dropout masks go by it."""


class Output(NamedTuple):
    """Sums over the batch, to be divided by the counts of the whole step."""

    mlm_loss_sum: Tensor
    """Over masked tokens."""
    nsp_loss_sum: Tensor
    """Over samples."""
    mlm_correct: Tensor
    """Masked tokens predicted right."""
