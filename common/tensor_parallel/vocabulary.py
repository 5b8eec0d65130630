"""The vocabulary cut over the tp ranks: embedding, and the cross entropy that never sees all logits.

Shoeybi et al. 2019, "Megatron-LM", section 3. A vocabulary that the ranks do not divide is padded to a multiple; rows
of padding are never looked up nor multiplied, so they take no probability and get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.collectives import gather_along
from common.tensor_parallel.group import TensorParallel
from common.tensor_parallel.placement import Placement

IGNORED = -100
"""Label of a token that counts for nothing."""
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
"""Logits that a rank holds at a time."""


class VocabParallelEmbedding(nn.Module):
    """Rows of [vocab, hidden] for token ids; each rank holds ceil(vocab / ranks) of them. Made by `cut`.

    ids [tokens] int64, alike on all ranks -> [tokens, hidden] (own tokens under sequence parallelism).
    """

    def __init__(self, weight: Tensor, tp: TensorParallel, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.tp, self.vocab = tp, vocab

    @classmethod
    def cut(cls, embedding: nn.Embedding, tp: TensorParallel) -> VocabParallelEmbedding:
        """This rank's part of `embedding`, which every rank holds whole (or on the meta device)."""
        place = Placement(0, (embedding.num_embeddings,))
        return cls(place.take(embedding.weight.detach(), tp.rank, tp.size), tp, embedding.num_embeddings)

    def parameter_placements(self) -> dict[str, Placement]:
        """Cut along dim 0."""
        return {"weight": Placement(0, (self.vocab,))}

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.tp.rank * len(self.weight)
        mine = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.tp.leave(rows * mine[:, None].to(rows.dtype))


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp: TensorParallel,
    *,
    vocab: int,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross entropy of the logits hidden @ W^T, summed over tokens, [] in fp32 (or fp64), alike on every rank.

    hidden: [tokens, h] (own tokens under sequence parallelism); weight: [ceil(vocab / ranks), h], this rank's rows;
    labels: [tokens] int64 of all tokens, IGNORED (-100) where none is to be predicted. Divide by the number of labels
    of the whole step.

    Logits exist for `chunk_tokens` tokens and this rank's part of the vocabulary at a time: ranks exchange two numbers
    a token, the logarithm of their sum of exponentials and the label's logit. The gradients are made in the same pass,
    as the logits would have to be made again otherwise, and kept: [own tokens, h] and the shape of `weight`.

    Raises ValueError where labels and tokens differ in number.
    """
    keeps = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropy.apply(hidden, weight, labels, tp, vocab, chunk_tokens, keeps)


def vocab_parallel_logits(hidden: Tensor, weight: Tensor, tp: TensorParallel, *, vocab: int) -> Tensor:
    """All logits, [tokens, vocab], on every rank; for sampling from a few tokens, not for training."""
    logits = tp.enter(hidden) @ weight.mT
    return (logits if tp.size == 1 else gather_along(logits, tp.group, 1))[:, :vocab]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tp: TensorParallel,
        vocab: int,
        chunk_tokens: int | None,
        keeps: bool,
    ) -> Tensor:
        ranks = tp.size if tp.sequence_parallel else 1
        if len(labels) != len(hidden) * ranks:
            raise ValueError(f"{len(labels)} labels for {len(hidden) * ranks} tokens; give one for each, -100 for none")
        chunk = chunk_tokens or max(256, CHUNK_LOGITS[weight.device.type] // max(len(weight), 1))
        own = max(1, chunk // ranks)
        head = _Head(weight, tp, vocab, keeps)
        # [tokens] -> [ranks, own tokens]: a chunk holds the same rows of every rank.
        labels = labels.view(ranks, -1)
        dhidden = torch.empty_like(hidden) if keeps else None
        loss = hidden.new_zeros((), dtype=head.wide)
        starts = range(0, len(hidden), own)
        gather = tp.gather(hidden[:own])
        pending: tuple[slice, Callable[[], Tensor]] | None = None
        for first in starts:
            rows = slice(first, min(first + own, len(hidden)))
            x = gather.wait()
            if rows.stop < len(hidden):
                gather = tp.gather(hidden[rows.stop : rows.stop + own])
            part, dx = head.chunk(x, labels[:, rows].reshape(-1))
            loss += part
            if dhidden is not None and dx is not None:
                # Summed over the ranks while the next chunk is computed.
                if pending is not None:
                    dhidden[pending[0]] = pending[1]()
                pending = rows, tp.sum_async(dx)
        if dhidden is not None and pending is not None:
            dhidden[pending[0]] = pending[1]()
        ctx.gradients = (dhidden, head.dweight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this cross entropy were used up; backward through it once only")
        dhidden, dweight = ctx.gradients
        ctx.gradients = None
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        return (
            dhidden.mul_(grad) if needs_hidden else None,
            dweight.mul_(grad) if needs_weight else None,
            None,
            None,
            None,
            None,
            None,
        )


class _Head:
    """One rank's part of the projection to the vocabulary, chunk by chunk."""

    def __init__(self, weight: Tensor, tp: TensorParallel, vocab: int, keeps: bool) -> None:
        self._tp = tp
        self._first = tp.rank * len(weight)
        self._weight = weight[: max(0, min(len(weight), vocab - self._first))]
        self.wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._sum = torch.zeros_like(weight, dtype=self.wide) if keeps else None
        self._dtype = weight.dtype

    @property
    def dweight(self) -> Tensor | None:
        """Gradient of the sum of what `chunk` returned, in the type of the weight."""
        return None if self._sum is None else self._sum.to(self._dtype)

    def chunk(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Loss of x, [tokens, h], and this rank's summand of its gradient."""
        local = labels - self._first
        counts = labels != IGNORED
        mine = (local >= 0) & (local < len(self._weight)) & counts
        local = torch.where(mine, local, 0)[:, None]
        if len(self._weight) == 0:  # nothing but padding
            logits = x.new_zeros(len(x), 0, dtype=self.wide)
            own = x.new_full((len(x),), -torch.inf, dtype=self.wide)
            picked = torch.zeros_like(own)
            softmax = logits
        else:
            logits = (x @ self._weight.mT).to(self.wide)
            best, place = logits.max(dim=1, keepdim=True)
            picked = logits.gather(1, local)[:, 0] * mine
            softmax = torch.softmax(logits, dim=1, out=logits)
            # From the largest, whose softmax is at least 1 / vocab and so keeps its digits.
            own = (best - softmax.gather(1, place).log())[:, 0]
        stats = self._tp.combine(torch.stack((own, picked)))  # [ranks, 2, tokens]
        whole = stats[0, 0] if self._tp.size == 1 else torch.logsumexp(stats[:, 0], dim=0)
        loss = ((whole - stats[:, 1].sum(dim=0)) * counts).sum()
        if self._sum is None:
            return loss, None
        # The softmax over all ranks is this rank's, times its share.
        dlogits = softmax.mul_(((own - whole).exp() * counts)[:, None])
        if len(self._weight):
            dlogits.scatter_add_(1, local, -mine.to(self.wide)[:, None])
        narrow = dlogits.to(x.dtype)
        if narrow.dtype == self.wide:
            self._sum[: len(self._weight)].addmm_(narrow.mT, x)
        else:
            self._sum[: len(self._weight)] += narrow.mT @ x
        return loss, narrow @ self._weight
