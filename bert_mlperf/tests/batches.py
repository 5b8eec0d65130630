"""Models of random weights and batches of made-up word pieces, packed for ours and padded for transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bert_mlperf.model import BertConfig, BertForPreTraining, PackedBatch


def random_model(config: BertConfig, dtype: torch.dtype = torch.float32, seed: int = 3) -> BertForPreTraining:
    """A model whose every parameter is random: with biases of 0 and norms of 1, mistakes in them would not show."""
    model = BertForPreTraining(config).to(dtype)
    model.initialize(seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw, dtype=dtype)
    return model


def packed_batch(
    config: BertConfig, lengths: Sequence[int], seed: int = 0, sample_ids: Sequence[int] | None = None
) -> PackedBatch:
    """A batch of sequences of these lengths, about 15 % of each masked. What a sample holds goes by its id alone."""
    ids = list(range(len(lengths))) if sample_ids is None else list(sample_ids)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("tokens", "segments", "positions", "masked", "labels")}
    next_sentence, start = [], 0
    for length, number in zip(lengths, ids, strict=True):
        draw = torch.Generator().manual_seed(seed * 1_000_003 + number)
        columns["tokens"].append(torch.randint(config.vocab_size, (length,), generator=draw))
        columns["segments"].append((torch.arange(length) > length // 2).long())
        columns["positions"].append(torch.arange(length))
        masked = torch.randperm(length, generator=draw)[: max(1, round(0.15 * length))].sort().values
        columns["masked"].append(start + masked)
        columns["labels"].append(torch.randint(config.vocab_size, (len(masked),), generator=draw))
        next_sentence.append(int(torch.randint(2, (1,), generator=draw)))
        start += length
    flat = {name: torch.cat(parts) for name, parts in columns.items()}
    return PackedBatch(
        input_ids=flat["tokens"],
        segment_ids=flat["segments"],
        position_ids=flat["positions"],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        lengths=tuple(lengths),
        masked_index=flat["masked"],
        masked_labels=flat["labels"],
        next_sentence=torch.tensor(next_sentence),
        sample_ids=torch.tensor(ids),
    )


def padded(batch: PackedBatch, width: int) -> dict[str, Tensor]:
    """The same batch as transformers' BertForPreTraining takes it, [samples, width] each."""
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.masked_index] = batch.masked_labels

    def pad(flat: Tensor, value: int) -> Tensor:
        rows = [torch.nn.functional.pad(row, (0, width - len(row)), value=value) for row in flat.split(batch.lengths)]
        return torch.stack(rows)

    return {
        "input_ids": pad(batch.input_ids, 0),
        "token_type_ids": pad(batch.segment_ids, 0),
        "attention_mask": pad(torch.ones_like(batch.input_ids), 0),
        "labels": pad(labels, -100),
        "next_sentence_label": batch.next_sentence,
    }
