"""Where a run's first weights come from, and where its last ones go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bert_mlperf.data.shards import ShardError, list_shards, read_shard
from bert_mlperf.model import BertForPreTraining
from bert_mlperf.weights.huggingface import load_huggingface, log_frequencies, save_huggingface
from bert_mlperf.weights.names import Found, WeightsError
from bert_mlperf.weights.tf1 import load_tf1, save_tf1

if TYPE_CHECKING:
    from bert_mlperf.config import BertTrainConfig

__all__ = [
    "Found",
    "WeightsError",
    "load_huggingface",
    "load_start_weights",
    "load_tf1",
    "log_frequencies",
    "save_huggingface",
    "save_tf1",
]

logger = logging.getLogger(__name__)


def load_start_weights(config: BertTrainConfig, model: BertForPreTraining) -> dict[str, Tensor]:
    """State dict on the CPU that training starts from: random by seed, the MLPerf TF1 checkpoint, or Hugging Face's.

    What a checkpoint does not have is named in the log (level warning). Raises WeightsError where it cannot be used.
    """
    model.initialize(config.seed)
    if config.weights.source == "random":
        return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    assert config.weights.path is not None  # config.validate
    if config.weights.source == "tf1":
        state, found = load_tf1(config.weights.path, model)
    else:
        try:
            counts = count_tokens(config.data.train, config.model.vocab_size)
        except ShardError as error:
            raise WeightsError(str(error)) from error
        state, found = load_huggingface(config.weights.path, model, counts)
    logger.log(logging.WARNING if found.started or found.ignored else logging.INFO, "%s", found)
    return state


def count_tokens(folder: Path, vocab_size: int) -> Tensor | None:
    """How often each word piece occurs in the first shard of a folder, [vocab]; None where there is no shard.

    Raises ShardError where the shard cannot be read.
    """
    paths = list_shards(folder)
    if not paths:
        return None
    samples = read_shard(paths[0], vocab_size)
    tokens = torch.from_numpy(samples.tokens).long()
    # What stands at a masked place is not what was there.
    starts = torch.from_numpy(samples.lengths).long().cumsum(0) - torch.from_numpy(samples.lengths).long()
    masked = torch.from_numpy(samples.masked_positions).long()
    masked += starts.repeat_interleave(torch.from_numpy(samples.masked_counts).long())
    tokens[masked] = torch.from_numpy(samples.masked_ids).long()
    return torch.bincount(tokens, minlength=vocab_size)
