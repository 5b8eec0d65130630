"""Tensor and sequence parallelism: layers cut over the ranks of `tp`, and where their parameters lie.

A recipe's model is plain; its `parallel.py` replaces submodules:

    tp = TensorParallel(runtime, sequence_parallel=True)
    block.qkv = ColumnParallelLinear.cut(block.qkv, tp, qkv_sections(heads, kv_heads, head_dim, tp.size))
    block.out = RowParallelLinear.cut(block.out, tp)
    model.embedding = VocabParallelEmbedding.cut(model.embedding, tp)
    loss = vocab_parallel_cross_entropy(hidden, model.embedding.weight, labels, tp, vocab=vocab)

Activations are [tokens, ...], flat. Between the parallel layers a rank holds all tokens or, under sequence parallelism,
`tp.rows(tokens)`; what goes with a token (position, sample id, and so its dropout mask: common.dropout) is taken by
`tp.own_tokens`. With one rank the layers are the plain ones.
"""

from common.tensor_parallel.group import TensorParallel
from common.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, qkv_sections
from common.tensor_parallel.placement import Placement, Rectangle, copies, fill_normal, placements
from common.tensor_parallel.vocabulary import (
    IGNORED,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
)

__all__ = [
    "IGNORED",
    "ColumnParallelLinear",
    "Placement",
    "Rectangle",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "copies",
    "fill_normal",
    "placements",
    "qkv_sections",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logits",
]
