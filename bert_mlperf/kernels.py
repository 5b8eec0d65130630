"""The two pieces of BERT worth their own backward: attention over ragged sequences, and the prediction loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from common.dropout import keep_mask


def ragged_attention(
    qkv: Tensor, lengths: tuple[int, ...], cu_seqlens: Tensor, keys: Tensor | None, site: int, p: float
) -> Tensor:
    """Self-attention inside each sequence of a flat batch, [tokens, heads, head_dim].

    qkv: [tokens, 3, heads, head_dim]; lengths: tokens of each sequence; cu_seqlens: [sequences + 1] int32, the same
    added up, on the device. keys: of `token_keys`, None without dropout; p: dropout of the attention weights.

    Half-precision CUDA without dropout takes one variable-length flash kernel for the whole batch. Otherwise each
    sequence is a call of its own: there is no kernel that takes a given mask, and on a CPU a call a sequence is as fast.
    """
    if keys is not None and p > 0:
        parts = [
            _MaskedAttention.apply(part, mask_keys, site, p)
            for part, mask_keys in zip(qkv.split(lengths), keys.split(lengths), strict=True)
        ]
    elif qkv.is_cuda and qkv.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = qkv.unbind(dim=1)
        longest = max(lengths)
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    else:
        # split and unbind have one concatenation as their backward; slices would each fill a whole gradient with zeros.
        parts = [_attention(part) for part in qkv.split(lengths)]
    return torch.cat(parts)


def _attention(qkv: Tensor) -> Tensor:
    q, k, v = rearrange(qkv, "n three heads d -> three 1 heads n d").unbind()
    return rearrange(F.scaled_dot_product_attention(q, k, v), "1 heads n d -> n heads d")


class _MaskedAttention(torch.autograd.Function):
    """Attention of one sequence with a keyed dropout mask; weights and mask are made again in backward, not kept.

    [n, 3, heads, head_dim] -> [n, heads, head_dim]
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, keys: Tensor, site: int, p: float) -> Tensor:
        ctx.save_for_backward(qkv, keys)
        ctx.site, ctx.p = site, p
        q, k, v = _heads_first(qkv)
        weights = torch.softmax((q @ k.mT).mul_(q.shape[-1] ** -0.5), dim=-1)
        dropped = weights.mul_(_attention_mask(keys, site, p, len(q)))
        return rearrange((dropped @ v).mul_(1 / (1 - p)), "heads n d -> n heads d")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        qkv, keys = ctx.saved_tensors
        q, k, v = _heads_first(qkv)
        scale = q.shape[-1] ** -0.5
        weights = torch.softmax((q @ k.mT).mul_(scale), dim=-1)  # [heads, query, key]
        mask = _attention_mask(keys, ctx.site, ctx.p, len(q))
        grad = rearrange(grad, "n heads d -> heads n d") / (1 - ctx.p)
        result = torch.empty_like(qkv)
        dq, dk, dv = _heads_first(result)
        dv.copy_((weights * mask).mT @ grad)
        dweights = (grad @ v.mT).mul_(mask)
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype).mul_(scale)
        dq.copy_(dscores @ k)
        dk.copy_(dscores.mT @ q)
        return result, None, None, None


def _heads_first(qkv: Tensor) -> tuple[Tensor, ...]:
    return rearrange(qkv, "n three heads d -> three heads n d").unbind()


def _attention_mask(keys: Tensor, site: int, p: float, heads: int) -> Tensor:
    """Keyed by (sample, query) and (head, key): [heads, query, key]."""
    return rearrange(keep_mask(keys, site, heads * len(keys), p), "q (heads k) -> heads q k", heads=heads)


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
        logits = torch.addmm(bias, hidden, weight.mT)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logits = logits.to(wide)
        normalizer = torch.logsumexp(logits, dim=1, keepdim=True)
        picked = logits.gather(1, labels[:, None])
        best = logits.max(dim=1, keepdim=True).values if len(labels) else picked
        correct = (picked == best).sum()
        ctx.save_for_backward(hidden, weight, bias, labels, logits, normalizer)
        ctx.mark_non_differentiable(correct)
        return (normalizer - picked).sum(), correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight, bias, labels, logits, normalizer = ctx.saved_tensors
        # In place: the buffer is ours alone, and backward runs once.
        softmax = logits.sub_(normalizer).exp_()
        softmax.scatter_add_(1, labels[:, None], softmax.new_full((len(labels), 1), -1.0))
        dlogits = softmax.mul_(grad).to(hidden.dtype)
        return dlogits @ weight, dlogits.mT @ hidden, dlogits.sum(dim=0), None
