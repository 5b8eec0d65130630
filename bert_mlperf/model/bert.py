"""The model's modules, from embeddings to heads.

The sequences of a batch lie end to end in [tokens, hidden]; only attention knows where one ends. The prediction head
sees the masked places alone. Nothing here knows that ranks exist; a parameter is used only in or after the forward of
the module that owns it, so that whoever cuts the model may fetch it there.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from bert_mlperf.model.attention import ragged_attention
from bert_mlperf.model.batch import Output, PackedBatch
from bert_mlperf.model.prediction import prediction_loss
from bert_mlperf.model.shape import BertConfig
from common.dropout import DropoutKey, dropout, dropout_add_norm, token_keys
from common.recompute import recomputed


class ResidualNorm(nn.Module):
    """LayerNorm of residual + dropout(x), all [tokens, hidden]. site: number of its dropout."""

    def __init__(self, config: BertConfig, site: int) -> None:
        super().__init__()
        self.eps, self.p, self.site = config.layer_norm_eps, config.dropout, site
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.hidden))

    def forward(self, x: Tensor, residual: Tensor, keys: Tensor | None) -> Tensor:
        return dropout_add_norm(x, residual, self.weight, self.bias, self.eps, keys, self.site, self.p)


class Attention(nn.Module):
    """Self-attention, its output dropped out, added to the input and normalized. [tokens, hidden] -> same."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.config, self.site = config, 4 * layer
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)
        self.norm = ResidualNorm(config, self.site + 2)

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
        return self.norm(self.output(mixed), x, keys)


class FeedForward(nn.Module):
    """Two linear maps with GELU between, dropped out, added to the input and normalized. [tokens, hidden] -> same."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.inner = nn.Linear(config.hidden, config.ffn)
        self.output = nn.Linear(config.ffn, config.hidden)
        self.norm = ResidualNorm(config, site=4 * layer + 3)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        return self.norm(self.output(F.gelu(self.inner(x))), x, keys)


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
