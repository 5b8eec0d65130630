"""Small models and random batches for the tests of the recipe."""

from __future__ import annotations

import torch

from bert_mlperf.model import BertConfig, BertForPreTraining, PackedBatch

TINY = BertConfig(
    layers=2, hidden=32, heads=4, ffn=64, vocab_size=97, max_positions=40, dropout=0.0, attention_dropout=0.0
)


def make_model(config: BertConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float64) -> BertForPreTraining:
    """A model whose biases and norms are random too, so that no term of it is zero."""
    model = BertForPreTraining(config)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def make_batch(config: BertConfig, lengths: list[int], seed: int = 0, first_sample: int = 0) -> PackedBatch:
    """Random tokens and labels for sequences of these lengths; about every sixth token is masked, at least one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    masked = torch.cat([
        start + 1 + torch.randperm(n - 1, generator=generator)[: max(1, n // 6)]
        for start, n in zip(starts[:-1], lengths, strict=True)
    ])  # fmt: skip
    return PackedBatch(
        # Not 0: transformers gives the embedding of the padding token no gradient.
        input_ids=torch.randint(1, config.vocab_size, (tokens,), generator=generator),
        segment_ids=torch.randint(2, (tokens,), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=starts.to(torch.int32),
        lengths=tuple(lengths),
        masked_index=masked,
        masked_labels=torch.randint(1, config.vocab_size, (len(masked),), generator=generator),
        next_sentence=torch.randint(2, (len(lengths),), generator=generator),
        sample_ids=torch.arange(first_sample, first_sample + len(lengths)),
    )
