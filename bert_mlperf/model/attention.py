"""Self-attention inside each sequence of a flat batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from common.dropout import BLOCK, keep_values, row_seeds


def ragged_attention(
    qkv: Tensor, lengths: tuple[int, ...], cu_seqlens: Tensor, keys: Tensor | None, site: int, p: float
) -> Tensor:
    """Self-attention inside each sequence of a flat batch, [tokens, heads, head_dim].

    qkv: [tokens, 3, heads, head_dim]; lengths: tokens of each sequence; cu_seqlens: [sequences + 1] int32, the same
    added up, on the device. keys: [tokens] of `token_keys`, None without dropout; p: dropout of the attention weights,
    each by (sample, head, query, key).

    Half-precision CUDA without dropout takes one variable-length flash kernel for the whole batch. Otherwise heads of
    one sequence at a time go through plain matrix products: no flash kernel takes a given mask.
    """
    if keys is None or p == 0:
        if qkv.is_cuda and qkv.dtype in (torch.float16, torch.bfloat16):
            from torch.nn.attention.varlen import varlen_attn

            q, k, v = qkv.unbind(dim=1)
            longest = max(lengths)
            mixed = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
            assert isinstance(mixed, Tensor)
            return mixed
        return _RaggedAttention.apply(qkv, lengths, None, 0.0)
    return _RaggedAttention.apply(qkv, lengths, row_seeds(keys, site, qkv.shape[2]), p)


class _RaggedAttention(torch.autograd.Function):
    """Weights are kept for backward, heads * n^2 for a sequence of n; those dropped have a negative sign.

    Gradients as in Dao et al. 2022, "FlashAttention", appendix B.4, from kept weights. Results go straight into the
    flat tensors: slices with their own backward would each fill a whole gradient with zeros.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, lengths: tuple[int, ...], seeds: Tensor | None, p: float) -> Tensor:
        tokens, _, heads, d = qkv.shape
        out = qkv.new_empty(tokens, heads, d)
        keeps = ctx.needs_input_grad[0]
        kept = qkv.new_empty(heads * sum(n * n for n in lengths) if keeps else 0)
        for rows, group, place in _blocks(lengths, heads, qkv.device):
            q, k, v = _heads_first(qkv, rows, group)
            scores = q.new_empty(len(q), q.shape[1], q.shape[1])  # [heads, query, key]
            torch.baddbmm(scores, q, k.mT, beta=0, alpha=d**-0.5, out=scores)
            weights = kept[place].view_as(scores) if keeps else torch.empty_like(scores)
            torch.softmax(scores, dim=-1, out=weights)
            if seeds is None:
                mixed = torch.bmm(weights, v)
            else:
                weights *= keep_values(seeds[group, rows], q.shape[1], p).mul_(2).sub_(1).to(qkv.dtype)
                mixed = torch.bmm(torch.clamp_min(weights, 0, out=scores), v).mul_(1 / (1 - p))
            out[rows, group] = mixed.transpose(0, 1)
        ctx.save_for_backward(qkv, kept, out)
        ctx.lengths, ctx.p = lengths, p
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, kept, out = ctx.saved_tensors
        scale = qkv.shape[3] ** -0.5
        dots = (grad * out).sum(dim=-1).mT  # [heads, tokens]
        dqkv = torch.empty_like(qkv)
        for rows, group, place in _blocks(ctx.lengths, qkv.shape[2], qkv.device):
            q, k, v = _heads_first(qkv, rows, group)
            dq, dk, dv = _heads_first(dqkv, rows, group)
            g = grad[rows, group].transpose(0, 1)
            weights = kept[place].view(len(q), q.shape[1], q.shape[1])
            dot = dots[group, rows, None]
            if ctx.p:
                g = g * (1 / (1 - ctx.p))
                dropped = torch.clamp_min(weights, 0)
                dv.copy_(torch.bmm(dropped.mT, g))
                dscores = torch.bmm(g, v.mT).mul_(dropped)
                dscores.addcmul_(torch.abs(weights, out=dropped), dot, value=-1)
            else:
                dv.copy_(torch.bmm(weights.mT, g))
                dscores = torch.bmm(g, v.mT).sub_(dot).mul_(weights)
            dq.copy_(torch.bmm(dscores, k).mul_(scale))
            dk.copy_(torch.bmm(dscores.mT, q).mul_(scale))
        return dqkv, None, None, None


def _heads_first(qkv: Tensor, rows: slice, group: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Views [heads, n, head_dim] of query, key and value."""
    q, k, v = rearrange(qkv[rows, :, group], "n three heads d -> three heads n d").unbind()
    return q, k, v


def _blocks(lengths: Sequence[int], heads: int, device: torch.device) -> Iterator[tuple[slice, slice, slice]]:
    """(tokens of a sequence, heads of it, their place among the kept weights), one after another.

    On a CPU as many heads as keep the weights in its cache; otherwise all heads of a sequence.
    """
    row = place = 0
    for n in lengths:
        step = max(1, min(heads, BLOCK // (n * n))) if device.type == "cpu" else heads
        for head in range(0, heads, step):
            size = min(step, heads - head)
            yield slice(row, row + n), slice(head, head + size), slice(place, place + size * n * n)
            place += size * n * n
        row += n
