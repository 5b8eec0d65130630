"""Dropout whose masks are a function of (seed, step, sample, place), never of rank, layout or how often it was called.

A counter-based generator: every element hashes its own coordinates, so any rank can make any part of any mask, a
recomputed forward pass makes the same mask again, and CPU and CUDA make the same one (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). The element hash is the 32-bit mixer "lowbias32" (Wellons, "Prospecting for hash
functions", 2018); each hash decides two neighbouring elements, 16 bits each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class DropoutKey:
    """What all masks of a step have in common."""

    seed: int
    step: int


def token_keys(key: DropoutKey, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """One key for each token, [tokens] int64.

    sample_ids, positions: [tokens] int64, which sample a token belongs to and its place there.
    """
    base = _mix_int(_mix_int(key.seed) + key.step)
    return _mix(_mix(sample_ids + _signed(base)) + positions)


def keep_mask(keys: Tensor, site: int, columns: int, p: float) -> Tensor:
    """True where an element stays, [rows, columns] bool; each element stays with probability 1 - p (to within 2^-17).

    keys: [rows] int64 of `token_keys`; site: number of the place in the model, so that no two places share a mask.
    """
    rows = _mix(keys + _signed(_mix_int(site))).to(torch.int32)
    pairs = torch.arange((columns + 1) // 2, dtype=torch.int32, device=keys.device).mul_(_signed32(0x9E3779B1))
    bits = rows[:, None] + pairs  # [rows, columns / 2]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)  # a logical shift: int32 would drag its sign
        bits *= _signed32(factor)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    # [rows, columns / 2] int32 -> [rows, columns] int16, uniform in [-2^15, 2^15)
    return bits.view(torch.int16)[:, :columns] >= round(p * 65536) - 32768


def dropout_add(x: Tensor, residual: Tensor, keys: Tensor | None, site: int, p: float) -> Tensor:
    """residual + dropout(x), all [rows, columns]; without keys or with p = 0 the plain sum."""
    if keys is None or p == 0.0:
        return residual + x
    return _DropoutAdd.apply(x, residual, keep_mask(keys, site, x.shape[1], p), 1.0 / (1.0 - p))


def dropout(x: Tensor, keys: Tensor | None, site: int, p: float) -> Tensor:
    """Dropout of x, [rows, columns]; without keys or with p = 0, x itself."""
    if keys is None or p == 0.0:
        return x
    return x * (keep_mask(keys, site, x.shape[1], p).to(x.dtype) / (1.0 - p))


class _DropoutAdd(torch.autograd.Function):
    """One byte an element is kept for backward, not a scaled mask of the activations' type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.addcmul(residual, x, keep, value=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), grad, None, None


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al. 2014), elementwise on int64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _signed32(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x
