"""GPT on one device: GPT-3 as published, and what today's users train, by configuration.

    embedding -> layers -> head -> cross entropy

Activations are [tokens, hidden], the sequences of a batch end to end; only attention knows their length. Nothing here
knows that ranks exist. What makes the model easy to cut: every linear layer is an `nn.Linear` that can be replaced;
attention counts its heads by what its projection returns; a stage of a pipeline is this same class with some layers,
the embedding or the head taken away; a parameter is used only in or after the forward of the module that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from common.dropout import DropoutKey, dropout, keep_values, row_seeds, token_keys
from common.recompute import Recompute, recomputed
from common.tensor_parallel import Placement, fill_normal
from gpt_hundred_b.loss import chunked_cross_entropy
from gpt_hundred_b.shape import GptConfig

__all__ = ["DropoutKey", "Gpt", "GptConfig", "KeyValueCache", "Sequences", "TokenBatch", "fill_start_values"]


@dataclass
class TokenBatch:
    """Sequences of one length; int64 on the model's device."""

    input_ids: Tensor
    """[samples, sequence]"""
    labels: Tensor
    """[samples, sequence], the token to predict at each place (the next one), -100 where none counts."""
    sample_ids: Tensor
    """[samples], position of each sample in the stream; dropout masks go by it."""

    def tokens(self) -> Tensor:
        """[tokens], the sequences end to end."""
        return self.input_ids.reshape(-1)


class KeyValueCache:
    """Keys and values of the tokens so far, by layer, for making one token at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0
        """Tokens of each sequence that are in it; whoever runs the model adds to it."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, [samples, kv_heads, tokens so far + new, head_dim]; k, v: of the new tokens."""
        if layer in self._kept:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._kept[layer], (k, v), strict=True))
        self._kept[layer] = k, v
        return k, v


@dataclass
class Sequences:
    """What the layers have to know beside the activations."""

    length: int
    """Tokens of each sequence; attention splits its tokens by it."""
    positions: Tensor
    """[tokens] int64, place of each token inside its sequence."""
    keys: Tensor | None = None
    """[tokens] of `token_keys`, for the dropout outside attention; None: nothing is dropped."""
    attention_keys: Tensor | None = None
    """[tokens] of `token_keys` for the tokens that attention sees: the same, unless ranks hold parts of them."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine, [length, head_dim / 2], of RoPE."""
    cache: KeyValueCache | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: GptConfig, batch: TokenBatch, key: DropoutKey | None, dtype: torch.dtype) -> Sequences:
        """Of a batch that starts at position 0. key: of this step, None to drop nothing.

        Raises ValueError where the sequences are longer than the model allows.
        """
        samples, length = batch.input_ids.shape
        check_length(config, length)
        positions = torch.arange(length, device=batch.input_ids.device).repeat(samples)  # [tokens]
        keys = None
        if key is not None and (config.dropout or config.attention_dropout):
            keys = token_keys(key, batch.sample_ids.repeat_interleave(length, output_size=samples * length), positions)
        return cls(length, positions, keys, keys, rotation(config, positions[:length], dtype))


def check_length(config: GptConfig, length: int) -> None:
    """Raises ValueError where a sequence is longer than the model allows."""
    if length > config.max_positions:
        raise ValueError(
            f"a sequence of {length} tokens exceeds model.max_positions={config.max_positions}; use shorter ones"
        )


def rotation(config: GptConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of RoPE's angles, [positions, head_dim / 2]; None for learned positions."""
    if config.positions != "rope":
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    place = torch.arange(0, config.head_dim, 2, device=positions.device).to(wide) / config.head_dim
    angles = positions.to(wide)[:, None] * (1.0 / config.rope_theta**place)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + head_dim / 2) of x, [samples, length, heads, head_dim] (Su et al. 2021, section 3.2)."""
    cos, sin = (part[:, None] for part in turn)  # [length, 1, head_dim / 2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, seeds: Tensor | None, p: float) -> Tensor:
    """Attention of each query to the keys up to its own place, [samples, heads, queries, head_dim].

    q: [samples, heads, queries, head_dim]; k, v: [samples, kv_heads, keys, head_dim], keys >= queries; query i stands
    at place keys - queries + i. seeds: [samples, heads, queries] of `row_seeds`, None without dropout; p: dropout.
    """
    group = q.shape[1] // k.shape[1]
    grouped = group > 1 and q.is_cuda and seeds is None  # the kernel knows groups
    if group > 1 and not grouped:  # [samples, kv_heads, ...] -> [samples, heads, ...]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    queries, places = q.shape[2], k.shape[2]
    if seeds is None:
        if queries == places or queries == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=grouped)
        allowed = torch.ones(queries, places, dtype=torch.bool, device=q.device).tril(places - queries)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=grouped)
    hidden = torch.ones(queries, places, dtype=torch.bool, device=q.device).triu(places - queries + 1)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5  # [samples, heads, queries, keys]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    keep = keep_values(seeds, places, p).to(q.dtype)
    return (weights * keep * (1.0 / (1.0 - p))) @ v


class Attention(nn.Module):
    """Causal self-attention. [tokens, hidden] -> what it adds, [tokens, hidden]."""

    def __init__(self, config: GptConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        d = config.head_dim
        self.qkv = nn.Linear(config.hidden, (config.heads + 2 * config.key_heads) * d, bias=config.bias)
        self.output = nn.Linear(config.heads * d, config.hidden, bias=config.bias)
        self.first_head = 0
        """Number of the first query head here, where heads are cut over ranks."""

    def forward(self, x: Tensor, sequences: Sequences, recompute: bool = False) -> Tensor:
        mixed = recomputed(self.core, self.qkv(x), sequences, when=recompute, offload=self.config.offload)
        return self.output(mixed)

    def core(self, qkv: Tensor, sequences: Sequences) -> Tensor:
        """All but the projections, [tokens, heads * head_dim]; qkv: [tokens, (heads + 2 * kv_heads) * head_dim]."""
        config, d = self.config, self.config.head_dim
        kv_heads = qkv.shape[1] // (d * (config.heads // config.key_heads + 2))
        heads = qkv.shape[1] // d - 2 * kv_heads
        q, k, v = (
            rearrange(part, "(samples length) (heads d) -> samples length heads d", length=sequences.length, d=d)
            for part in qkv.split((heads * d, kv_heads * d, kv_heads * d), dim=1)
        )
        if sequences.rotation is not None:
            q, k = rotate(q, sequences.rotation), rotate(k, sequences.rotation)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [samples, heads, length, head_dim]
        if sequences.cache is not None:
            k, v = sequences.cache.extend(self.layer, k, v)
        seeds = None
        if sequences.attention_keys is not None and config.attention_dropout:
            seeds = row_seeds(sequences.attention_keys, 3 * self.layer + 1, config.heads)
            seeds = seeds[self.first_head : self.first_head + heads]
            seeds = rearrange(seeds, "heads (samples length) -> samples heads length", length=sequences.length)
        mixed = causal_attention(q, k, v, seeds, config.attention_dropout)
        return rearrange(mixed, "samples heads length d -> (samples length) (heads d)")


class FeedForward(nn.Module):
    """[tokens, hidden] -> what it adds, [tokens, hidden]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.activation = config.activation
        gated = config.activation == "swiglu"
        # Gate and up in one matmul, gate first.
        self.inner = nn.Linear(config.hidden, config.ffn_width * (2 if gated else 1), bias=config.bias)
        self.output = nn.Linear(config.ffn_width, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return self.output(F.silu(gate) * up)
        return self.output(F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class Layer(nn.Module):
    """One layer, norms before its two halves. [tokens, hidden] -> same."""

    def __init__(self, config: GptConfig, layer: int) -> None:
        super().__init__()
        self.dropout, self.site = config.dropout, 3 * layer
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, sequences: Sequences, recompute_attention: bool = False) -> Tensor:
        added = self.attention(self.attention_norm(x), sequences, recompute_attention)
        x = x + dropout(added, sequences.keys, self.site + 2, self.dropout)
        added = self.feed_forward(self.feed_forward_norm(x))
        return x + dropout(added, sequences.keys, self.site + 3, self.dropout)


class Embedding(nn.Module):
    """Token (+ learned position) vectors, dropped out. [tokens] -> [tokens, hidden]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.token = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden) if config.positions == "learned" else None

    def forward(self, ids: Tensor, sequences: Sequences) -> Tensor:
        x = self.token(ids)
        if self.position is not None:
            x = x + self.position(sequences.positions)
        return dropout(x, sequences.keys, 0, self.dropout)


class Head(nn.Module):
    """Last norm and projection to the vocabulary.

    weight: [vocab, hidden], its own; None where the token embedding's is given to `forward`.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden))

    def forward(self, x: Tensor, labels: Tensor, tied: Tensor | None) -> Tensor:
        """Cross entropy summed over tokens, []. x: [tokens, hidden]; labels: [tokens]."""
        return chunked_cross_entropy(self.norm(x), self.projection(tied), labels)

    def logits(self, x: Tensor, tied: Tensor | None) -> Tensor:
        """[rows, hidden] -> [rows, vocab]; all of them, so for a few rows."""
        return F.linear(self.norm(x), self.projection(tied))

    def projection(self, tied: Tensor | None) -> Tensor:
        """[vocab, hidden]"""
        weight = tied if self.weight is None else self.weight
        assert weight is not None, "a head without a weight needs the token embedding's"
        return weight


class Gpt(nn.Module):
    """The model, or the part of it that a stage holds: `embedding` or `head` may be None, layers missing."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.embedding: Embedding | None = Embedding(config)
        # By number, so that a layer has the same name in every stage.
        self.layers = nn.ModuleDict({str(layer): Layer(config, layer) for layer in range(config.layers)})
        self.head: Head | None = Head(config)

    def forward(self, batch: TokenBatch, key: DropoutKey | None = None) -> Tensor:
        """Cross entropy summed over the labels that count, []. key: of this step, for dropout.

        Raises ValueError where training drops out without a key.
        """
        assert self.embedding is not None and self.head is not None, "a part of a model runs by its own modules"
        sequences = self.sequences(batch, key)
        x = self.run_layers(self.embedding(batch.tokens(), sequences), sequences)
        return self.head(x, batch.labels.reshape(-1), self.tied_weight())

    def sequences(self, batch: TokenBatch, key: DropoutKey | None) -> Sequences:
        """What the layers have to know of a batch.

        Raises ValueError where training drops out without a key.
        """
        config = self.config
        if self.training and key is None and (config.dropout or config.attention_dropout):
            raise ValueError("dropout is on in training mode: pass DropoutKey(seed, step), or set dropout to 0")
        return Sequences.of(config, batch, key if self.training else None, next(self.parameters()).dtype)

    def run_layers(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The layers that are here, [tokens, hidden] -> same, recomputed as the config says."""
        config = self.config
        for number, layer in enumerate(self.layers.values()):
            chosen = number < (config.recompute_layers or config.layers)
            kind: Recompute = config.recompute if chosen and self.training else "none"
            x = recomputed(layer, x, sequences, kind == "selective", when=kind == "full", offload=config.offload)
        return x

    def tied_weight(self) -> Tensor | None:
        """The token embedding's weight where the head uses it."""
        return self.embedding.token.weight if self.config.tied and self.embedding is not None else None

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: KeyValueCache | None = None, *, last_only: bool = False) -> Tensor:
        """[samples, length, vocab], or [samples, 1, vocab] of the last place. ids: [samples, length].

        cache: of the tokens before these, which it then holds too; None where these are the first.
        """
        assert self.embedding is not None and self.head is not None
        (samples, length), config = ids.shape, self.config
        start = cache.length if cache is not None else 0
        check_length(config, start + length)
        positions = torch.arange(start, start + length, device=ids.device)
        turn = rotation(config, positions, next(self.parameters()).dtype)
        sequences = Sequences(length, positions.repeat(samples), rotation=turn, cache=cache)
        x = self.run_layers(self.embedding(ids.reshape(-1), sequences), sequences)
        if cache is not None:
            cache.length += length
        x = rearrange(x, "(samples length) hidden -> samples length hidden", samples=samples)
        return self.head.logits(x[:, -1:] if last_only else x, self.tied_weight())

    def initialize(self, seed: int) -> None:
        """Start values; a function of seed and parameter name alone, so every layout begins alike."""
        for name, parameter in self.named_parameters():
            fill_start_values(self.config, name, parameter, seed)


def make_norm(config: GptConfig) -> nn.Module:
    """LayerNorm or RMSNorm over [..., hidden]."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden, config.norm_eps)
    return nn.RMSNorm(config.hidden, config.norm_eps)


def fill_start_values(
    config: GptConfig,
    name: str,
    parameter: Tensor,
    seed: int,
    placement: Placement | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Start values of one parameter, or of the part of it that rank `rank` of `ranks` holds by `placement`.

    Normal of deviation init_std, divided by sqrt(2 x layers) where the output is added to the residual stream (Radford
    et al. 2019, section 2.3); biases 0; norms 1. name: in the whole model.
    """
    if parameter.ndim == 1:
        nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
        return
    std = config.init_std
    if name.endswith("output.weight"):
        std /= (2 * config.layers) ** 0.5
    fill_normal(parameter, seed=seed, name=name, std=std, placement=placement or Placement(), rank=rank, ranks=ranks)
