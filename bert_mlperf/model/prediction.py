"""The loss of the masked-LM head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def prediction_loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the decoder over the vocabulary, summed over rows, and how many rows it predicts right.

    hidden: [masked, h]; weight: [vocab, h]; bias: [vocab]; labels: [masked]. One buffer of [masked, vocab] is made and
    turned in place from logits into their gradient; loss and softmax are in fp32 (float64 stays).
    """
    loss, correct = _PredictionLoss.apply(hidden, weight, bias, labels)
    return loss, correct


class _PredictionLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = torch.addmm(bias, hidden, weight.mT).to(wide)
        if len(labels) == 0:
            best, place = logits.new_zeros(0), labels
        else:
            best, place = logits.max(dim=1)
        picked = logits.gather(1, labels[:, None])[:, 0]
        correct = (picked == best).sum()
        softmax = torch.softmax(logits, dim=1, out=logits)
        # log(sum(exp(logits))) from the largest, whose softmax is at least 1 / vocab and so keeps its digits.
        normalizer = best - softmax.gather(1, place[:, None])[:, 0].log()
        dlogits = softmax.scatter_add_(1, labels[:, None], softmax.new_full((len(labels), 1), -1.0))
        ctx.save_for_backward(hidden, weight, dlogits)
        ctx.mark_non_differentiable(correct)
        return (normalizer - picked).sum(), correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        hidden, weight, dlogits = ctx.saved_tensors
        if dlogits.dtype != hidden.dtype:
            # Half precision: scaled first, since the loss scale is what keeps small ones from being 0.
            dlogits, grad = (dlogits * grad).to(hidden.dtype), torch.ones_like(grad)
        return (
            (dlogits @ weight).mul_(grad),
            dlogits.mT @ (hidden * grad),
            dlogits.sum(dim=0).mul_(grad),
            None,
        )
