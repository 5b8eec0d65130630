"""Shape of the model, and the parameters and floating-point operations that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.config import check
from common.recompute import Recompute

Activation = Literal["gelu_tanh", "gelu", "swiglu"]


@dataclass(frozen=True)
class GptConfig:
    """Shape of the model; the default is GPT-3 175B (Brown et al. 2020, table 2.1), vocabulary padded to 51,200.

    GPT-3's sparse attention in every other layer is not part of it: all layers are dense, as in later
    reproductions.
    """

    layers: int = 96
    hidden: int = 12288
    heads: int = 96
    kv_heads: int = 0
    """Key and value heads, each shared by an equal group of query heads (GQA, Ainslie et al. 2023); 0: `heads`."""
    ffn: int = 0
    """Width of the feed-forward part; 0: 4 x hidden."""
    vocab_size: int = 51200
    max_positions: int = 2048
    """Longest sequence."""
    positions: Literal["learned", "rope"] = "learned"
    """A table of learned vectors, or queries and keys turned by their place (RoPE, Su et al. 2021)."""
    rope_theta: float = 10000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    activation: Activation = "gelu_tanh"
    """gelu_tanh is GPT-2's and GPT-3's; swiglu multiplies silu(gate) with up (Shazeer 2020)."""
    bias: bool = True
    """Whether linear layers have biases."""
    tied: bool = True
    """Whether the output projection is the token embedding."""
    dropout: float = 0.0
    """Of embeddings and of what each half of a layer adds."""
    attention_dropout: float = 0.0
    """Of attention weights."""
    init_std: float = 0.02
    """Standard deviation of the start values; of what adds to the residual stream it is divided by sqrt(2 x layers)."""
    recompute: Recompute = "none"
    """What is run again in backward instead of being kept: nothing, the attention core, or whole layers."""
    recompute_layers: int = 0
    """How many layers of a stage that is done in, from its first on; 0: all."""
    offload: bool = False
    """Keep the inputs of recomputed parts in host memory (for accelerators; on a CPU it is only a copy)."""

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def validate(self) -> None:
        """Raises ConfigError where a value breaks a rule."""
        for name in ("layers", "hidden", "heads", "vocab_size", "max_positions"):
            check(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} is below 1; use a positive number")
        for name in ("kv_heads", "ffn", "recompute_layers"):
            check(getattr(self, name) >= 0, f"model.{name}={getattr(self, name)} is negative; use 0 for the default")
        check(
            self.hidden % self.heads == 0,
            f"model.heads={self.heads} does not divide model.hidden={self.hidden}; use one of {_divisors(self.hidden)}",
        )
        check(
            self.heads % self.key_heads == 0,
            f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; use one of "
            f"{_divisors(self.heads)}",
        )
        check(
            self.positions != "rope" or self.head_dim % 2 == 0,
            f"model.positions=rope turns pairs of numbers, but a head has {self.head_dim}; make hidden / heads even",
        )
        for name in ("dropout", "attention_dropout"):
            check(0 <= getattr(self, name) < 1, f"model.{name}={getattr(self, name)} is not in [0, 1)")
        for name in ("norm_eps", "init_std", "rope_theta"):
            check(getattr(self, name) > 0, f"model.{name}={getattr(self, name)} is not positive")
        check(
            self.recompute_layers <= self.layers,
            f"model.recompute_layers={self.recompute_layers} exceeds model.layers={self.layers}; use 0 for all",
        )


def layer_parameters(config: GptConfig) -> int:
    """Parameters of one layer: weights, biases and both norms."""
    h, f, kv = config.hidden, config.ffn_width, config.key_heads * config.head_dim
    up = 2 * f if config.activation == "swiglu" else f
    weights = h * (h + 2 * kv) + h * h + h * up + f * h
    biases = (h + 2 * kv) + h + up + h if config.bias else 0
    return weights + biases + 2 * norm_parameters(config)


def norm_parameters(config: GptConfig) -> int:
    """Parameters of one norm."""
    return config.hidden * (2 if config.norm == "layernorm" else 1)


def embedding_parameters(config: GptConfig) -> int:
    """Parameters of the token and position tables."""
    positions = config.max_positions if config.positions == "learned" else 0
    return (config.vocab_size + positions) * config.hidden


def head_parameters(config: GptConfig) -> int:
    """Parameters of the last norm and the output projection; a tied one counts as the embedding's."""
    return norm_parameters(config) + (0 if config.tied else config.vocab_size * config.hidden)


def parameters(config: GptConfig) -> int:
    """All parameters; for GPT's own shape l h^2 (12 + 13 / h) + (V + s + 2) h (Narayanan et al. 2021, equation 2)."""
    return config.layers * layer_parameters(config) + embedding_parameters(config) + head_parameters(config)


def layer_flops(config: GptConfig, sequence: int) -> float:
    """Forward FLOPs of one layer for one token of a sequence of `sequence`; a multiply-add is two.

    Attention counts as full, not causal, as the published formulas do. GPT's shape: 24 h^2 + 4 s h.
    """
    h, f, kv = config.hidden, config.ffn_width, config.key_heads * config.head_dim
    matrices = h * (h + 2 * kv) + h * h + h * f * (3 if config.activation == "swiglu" else 2)
    return 2.0 * matrices + attention_flops(config, sequence)


def attention_flops(config: GptConfig, sequence: int) -> float:
    """Forward FLOPs of the attention core (scores and weighted sum) of one layer for one token: 4 s h."""
    return 4.0 * sequence * config.hidden


def flops(config: GptConfig, samples: int, sequence: int, *, with_recompute: bool = False) -> float:
    """FLOPs of forward and backward for `samples` sequences of `sequence` tokens.

    Model FLOPs, which MFU counts, are 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)) for GPT's own shape. with_recompute:
    hardware FLOPs, counting what is run again in backward as the config says; with full recompute of all layers
    96 B s l h^2 (1 + s / (6 h) + V / (16 l h)) (Narayanan et al. 2021, equation 3).
    """
    layer = layer_flops(config, sequence)
    total = 3.0 * (config.layers * layer + 2.0 * config.hidden * config.vocab_size)
    if with_recompute and config.recompute != "none":
        again = layer if config.recompute == "full" else attention_flops(config, sequence)
        total += (config.recompute_layers or config.layers) * again
    return samples * sequence * total


def _divisors(n: int) -> str:
    found = [d for d in range(1, min(n, 128) + 1) if n % d == 0]
    return ", ".join(map(str, found)) + (", ..." if n > 128 else "")
