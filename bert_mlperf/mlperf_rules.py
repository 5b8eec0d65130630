"""What the MLPerf rules fix for BERT: target, tensors, when to evaluate. Source: MLPerf Training v2.1 rules."""

from __future__ import annotations

from typing import Literal

from common.config import check

CLOSED_TARGET = 0.72
"""Held-out masked-LM accuracy that ends a closed-division run (MLPerf Training v2.1, BERT)."""

_LAYER = (
    "attention/self/query/kernel",
    "attention/self/query/bias",
    "attention/self/key/kernel",
    "attention/self/key/bias",
    "attention/self/value/kernel",
    "attention/self/value/bias",
    "attention/output/dense/kernel",
    "attention/output/dense/bias",
    "attention/output/LayerNorm/gamma",
    "attention/output/LayerNorm/beta",
    "intermediate/dense/kernel",
    "intermediate/dense/bias",
    "output/dense/kernel",
    "output/dense/bias",
    "output/LayerNorm/gamma",
    "output/LayerNorm/beta",
)


def tensor_names(layers: int) -> list[str]:
    """Names of a BERT's tensors in the TF1 checkpoint, in the checker's order: 14 + 16 x layers (398 for BERT-Large).

    Raises ConfigError where `layers` is below 1.
    """
    check(layers >= 1, f"layers={layers} is below 1; a BERT has at least one layer")
    embeddings = (
        "word_embeddings",
        "position_embeddings",
        "token_type_embeddings",
        "LayerNorm/gamma",
        "LayerNorm/beta",
    )
    return [
        *(f"bert/embeddings/{name}" for name in embeddings),
        *(f"bert/encoder/layer_{layer}/{name}" for layer in range(layers) for name in _LAYER),
        "bert/pooler/dense/kernel",
        "bert/pooler/dense/bias",
        "cls/predictions/output_bias",
        "cls/predictions/transform/dense/kernel",
        "cls/predictions/transform/dense/bias",
        "cls/predictions/transform/LayerNorm/gamma",
        "cls/predictions/transform/LayerNorm/beta",
        "cls/seq_relationship/output_weights",
        "cls/seq_relationship/output_bias",
    ]


def evaluation_interval(global_batch: int, override: int = 0, division: Literal["closed", "open"] = "open") -> int:
    """Samples between two evaluations.

    The rules (MLPerf Training v2.1, BERT): `floor(0.05 * (230.23 * global_batch + 3,000,000) / 25,000) * 25,000`, for
    example 150,000 at 448 and 175,000 at 3,072 sequences a batch. The compliance checker does not look at it.

    override: another interval, for runs too short to see the rules' one; open division only. 0: the rules' interval.

    Raises ConfigError where an argument is out of range or the closed division is given another interval.
    """
    check(global_batch >= 1, f"global_batch={global_batch} is below 1; use a positive number")
    check(override >= 0, f"eval_every_samples={override} is negative; use 0 for the interval of the rules")
    # 0.05 x 230.23 = 11.5115: whole numbers, so that no rounding decides the last interval.
    interval = (115_115 * global_batch + 1_500_000_000) // 250_000_000 * 25_000
    check(
        division == "open" or override in (0, interval),
        f"eval_every_samples={override} in the closed division, whose rules fix {interval} for "
        f"global_batch={global_batch}; use 0, or division=open",
    )
    return override or interval


def samples_at_evaluation(number: int, interval: int, global_batch: int) -> int:
    """Samples trained when evaluation `number` (first: 1) is due: after the first step that reaches its multiple."""
    return -(-number * interval // global_batch) * global_batch
