"""Cross entropy over the vocabulary that never holds the logits of more than a chunk of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that counts for nothing."""
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**27}
"""Logits held at a time; on a CPU they then stay in its cache between the matmuls."""


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None) -> Tensor:
    """Cross entropy of the logits hidden @ weight.T, summed over tokens, [] in fp32 (float64 stays).

    hidden: [tokens, h]; weight: [vocab, h]; labels: [tokens] int64, IGNORED where nothing is to be predicted. chunk:
    tokens whose logits exist at a time.

    Gradients are made in the same pass, while a chunk's logits are there, and kept: [tokens, h] and [vocab, h]. So
    the projection is multiplied three times, not four, and backward goes through it once only.
    """
    keeps = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropy.apply(hidden, weight, labels, chunk or chunk_tokens(weight), keeps)


def chunk_tokens(weight: Tensor) -> int:
    """Tokens of a chunk: few enough for CHUNK_LOGITS, enough for matmuls to run at full speed."""
    return max(128, CHUNK_LOGITS.get(weight.device.type, 2**27) // len(weight))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, keeps: bool) -> Tensor:
        if len(labels) != len(hidden):
            raise ValueError(f"{len(labels)} labels for {len(hidden)} tokens; give one for each, {IGNORED} for none")
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        dhidden = torch.empty_like(hidden) if keeps else None
        dweight: Tensor | None = None
        loss = hidden.new_zeros((), dtype=wide)
        for first in range(0, len(hidden), chunk):
            rows = slice(first, first + chunk)
            x, counts = hidden[rows], labels[rows] != IGNORED
            label = torch.where(counts, labels[rows], 0)[:, None]
            logits = (x @ weight.mT).to(wide)  # [chunk, vocab]
            best = logits.amax(dim=1, keepdim=True)
            picked = logits.gather(1, label)
            softmax = torch.softmax(logits, dim=1, out=logits)
            # log(sum(exp(logits))) from the largest, whose softmax is at least 1 / vocab and so keeps its digits.
            normalizer = best - softmax.amax(dim=1, keepdim=True).log()
            loss += ((normalizer - picked)[:, 0] * counts).sum()
            if dhidden is None:
                continue
            # softmax - one_hot, and nothing where nothing counts
            softmax.scatter_add_(1, label, softmax.new_full((len(x), 1), -1.0))
            if x.is_cuda or not bool(counts.all()):  # asking would wait for the device
                softmax *= counts[:, None]
            dlogits = softmax.to(x.dtype)
            torch.mm(dlogits, weight, out=dhidden[rows])
            if dweight is None:
                dweight = (dlogits.mT @ x).to(wide)
            elif dlogits.dtype == wide:
                dweight.addmm_(dlogits.mT, x)
            else:  # summed over chunks in fp32
                dweight += dlogits.mT @ x
        ctx.gradients = (dhidden, None if dweight is None else dweight.to(weight.dtype))
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
            dweight.mul_(grad) if needs_weight and dweight is not None else None,
            None,
            None,
            None,
        )
