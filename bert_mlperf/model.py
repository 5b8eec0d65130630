"""BERT for pretraining (Devlin et al. 2019) on one device, without a padded token from embedding to head.

The sequences of a batch lie end to end in [tokens, hidden]; only attention knows where one ends. The prediction head
sees the masked places alone. Nothing here knows that ranks exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from bert_mlperf.kernels import prediction_loss, ragged_attention
from common.config import check
from common.dropout import DropoutKey, dropout, dropout_add, token_keys
from common.recompute import Recompute, recomputed

__all__ = ["BertConfig", "BertForPreTraining", "DropoutKey", "Output", "PackedBatch", "flops_per_step"]


@dataclass(frozen=True)
class BertConfig:
    """Shape of the model; the default is BERT-Large as MLPerf trains it."""

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    ffn: int = 4096
    vocab_size: int = 30522
    max_positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    """Of embeddings and of what each half of a layer adds."""
    attention_dropout: float = 0.1
    """Of attention weights."""
    layer_norm_eps: float = 1e-12
    recompute: Recompute = "none"
    """What is run again in backward instead of being kept: nothing, the attention core, or whole layers."""
    offload: bool = False
    """Keep the inputs of recomputed parts in host memory."""

    def validate(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab_size", "max_positions", "segments"):
            check(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} is below 1; use a positive number")
        divisors = [n for n in range(1, min(self.hidden, 64) + 1) if self.hidden % n == 0]
        check(
            self.hidden % self.heads == 0,
            f"model.heads={self.heads} does not divide model.hidden={self.hidden}; use one of "
            f"{', '.join(map(str, divisors))}",
        )
        for name in ("dropout", "attention_dropout"):
            check(0 <= getattr(self, name) < 1, f"model.{name}={getattr(self, name)} is not in [0, 1)")
        check(self.layer_norm_eps > 0, f"model.layer_norm_eps={self.layer_norm_eps} is not positive")


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


class Attention(nn.Module):
    """Self-attention, its output dropped out, added to the input and normalized. [tokens, hidden] -> same."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.config, self.site = config, 4 * layer
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)

    def forward(self, x: Tensor, batch: PackedBatch, keys: Tensor | None) -> Tensor:
        config = self.config
        # [tokens, 3 * hidden] -> [tokens, 3, heads, head_dim]
        qkv = rearrange(self.qkv(x), "tokens (three heads d) -> tokens three heads d", three=3, heads=config.heads)
        mixed = recomputed(
            ragged_attention,
            qkv,
            batch.lengths,
            batch.cu_seqlens,
            keys,
            self.site + 1,
            config.attention_dropout,
            when=config.recompute == "selective" and self.training,
            offload=config.offload,
        )
        mixed = rearrange(mixed, "tokens heads d -> tokens (heads d)")
        return self.norm(dropout_add(self.output(mixed), x, keys, self.site + 2, config.dropout))


class FeedForward(nn.Module):
    """Two linear maps with GELU between, dropped out, added to the input and normalized. [tokens, hidden] -> same."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.config, self.site = config, 4 * layer
        self.inner = nn.Linear(config.hidden, config.ffn)
        self.output = nn.Linear(config.ffn, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        y = self.output(F.gelu(self.inner(x)))
        return self.norm(dropout_add(y, x, keys, self.site + 3, self.config.dropout))


class Layer(nn.Module):
    """One encoder layer. [tokens, hidden] -> same."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config, layer)

    def forward(self, x: Tensor, batch: PackedBatch, keys: Tensor | None) -> Tensor:
        return self.feed_forward(self.attention(x, batch, keys), keys)


class Embeddings(nn.Module):
    """Word + position + segment, normalized and dropped out: [tokens, hidden]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.segment = nn.Embedding(config.segments, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)

    def forward(self, batch: PackedBatch, keys: Tensor | None) -> Tensor:
        x = self.word(batch.input_ids) + self.position(batch.position_ids) + self.segment(batch.segment_ids)
        return dropout(self.norm(x), keys, 0, self.config.dropout)


class PredictionHead(nn.Module):
    """Masked-LM head on the masked places: transform, normalize, decode with the word embeddings (tied)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def hidden(self, x: Tensor) -> Tensor:
        """What the decoder multiplies, [masked, hidden]."""
        return self.norm(F.gelu(self.transform(x)))

    def logits(self, x: Tensor, word: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]; word: [vocab, hidden]."""
        return F.linear(self.hidden(x), word, self.bias)

    def forward(self, x: Tensor, word: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return prediction_loss(self.hidden(x), word, self.bias, labels)


class BertForPreTraining(nn.Module):
    """The encoder with both pretraining heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(1, config.layers + 1))
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.prediction = PredictionHead(config)
        self.next_sentence = nn.Linear(config.hidden, 2)

    def encode(self, batch: PackedBatch, key: DropoutKey | None = None) -> Tensor:
        """[tokens, hidden], the last layer's output.

        key: of this step, needed in training mode where dropout is on.
        """
        config = self.config
        keys = None
        if self.training and (config.dropout or config.attention_dropout):
            if key is None:
                raise ValueError("dropout is on in training mode: pass DropoutKey(seed, step), or set dropout to 0")
            sample_of_token = batch.sample_ids.repeat_interleave(
                batch.cu_seqlens.diff().long(), output_size=len(batch.input_ids)
            )
            keys = token_keys(key, sample_of_token, batch.position_ids)
        x = self.embeddings(batch, keys)
        for layer in self.layers:
            whole = config.recompute == "full" and self.training
            x = recomputed(layer, x, batch, keys, when=whole, offload=config.offload)
        return x

    def pool(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """[samples, 2], next-sentence logits from each sequence's first token."""
        return self.next_sentence(torch.tanh(self.pooler(x[batch.cu_seqlens[:-1].long()])))

    def forward(self, batch: PackedBatch, key: DropoutKey | None = None) -> Output:
        x = self.encode(batch, key)
        mlm, correct = self.prediction(x[batch.masked_index], self.embeddings.word.weight, batch.masked_labels)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        nsp = F.cross_entropy(self.pool(x, batch).to(wide), batch.next_sentence, reduction="sum")
        return Output(mlm, nsp, correct)

    def initialize(self, seed: int) -> None:
        """Start values as published: normal of deviation 0.02 cut at two deviations, biases 0, norms 1.

        A function of seed and parameter name alone, so every rank and layout begins alike.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
            else:
                draw = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(draw[:8], "little"))
                values = torch.empty(parameter.shape)
                nn.init.trunc_normal_(values, std=0.02, a=-0.04, b=0.04, generator=generator)
                with torch.no_grad():
                    parameter.copy_(values)


def flops_per_step(config: BertConfig, lengths: Sequence[int], masked: int) -> float:
    """Useful FLOPs of forward and backward: real tokens only, a multiply-add is two, recompute is not counted.

    lengths: tokens of each sequence; masked: masked places. Backward is twice forward. Per layer and token 8 h^2 + 4 h f,
    per layer and pair of tokens 4 h; head 2 h^2 + 2 h V a masked place; pooler 2 h^2 + 4 h a sample.
    """
    h, tokens = config.hidden, sum(lengths)
    pairs = sum(n * n for n in lengths)
    layer = tokens * (8 * h * h + 4 * h * config.ffn) + pairs * 4 * h
    head = masked * (2 * h * h + 2 * h * config.vocab_size) + len(lengths) * (2 * h * h + 4 * h)
    return 3.0 * (config.layers * layer + head)
