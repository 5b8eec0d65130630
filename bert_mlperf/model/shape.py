"""Shape of the model, and the floating-point operations of a training step that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.config import check
from common.recompute import Recompute


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
    """Keep the inputs of recomputed parts in host memory (for accelerators; on a CPU it is only a copy)."""

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


def flops_per_step(config: BertConfig, lengths: Sequence[int], masked: int) -> float:
    """Useful FLOPs of forward and backward: real tokens only, a multiply-add is two, recompute is not counted.

    lengths: tokens of each sequence; masked: masked places. Forward takes 8 h^2 + 4 h f per layer and token, 4 h per
    layer and pair of tokens, 2 h^2 + 2 h V per masked place, 2 h^2 + 4 h per sample; backward takes twice that.
    """
    h, tokens = config.hidden, sum(lengths)
    pairs = sum(n * n for n in lengths)
    layer = tokens * (8 * h * h + 4 * h * config.ffn) + pairs * 4 * h
    head = masked * (2 * h * h + 2 * h * config.vocab_size) + len(lengths) * (2 * h * h + 4 * h)
    return 3.0 * (config.layers * layer + head)
