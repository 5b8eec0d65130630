"""Dropout whose masks are a function of (seed, step, sample, place), never of rank, layout or how often it was called.

A counter-based generator: every element hashes its own coordinates, so any rank can make any part of any mask, a
recomputed forward pass makes the same mask again, and CPU and CUDA make the same one (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). The element hash is the 32-bit mixer "lowbias32" (Wellons, "Prospecting for hash
functions", 2018); each hash decides two neighbouring elements, 16 bits each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 2**18
"""Elements of a mask that a CPU makes at a time: the dozen passes over them then stay in its second-level cache."""


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


def row_seeds(keys: Tensor, site: int, streams: int = 1) -> Tensor:
    """What `keep_values` hashes with the column, [streams, rows] int32.

    keys: [rows] int64 of `token_keys`; site: number of the place in the model, so that no two places share a mask;
    streams: independent masks of that place, one for each attention head say.
    """
    offsets = [_signed(_mix_int(_mix_int(site) + stream)) for stream in range(streams)]
    return _mix(keys + torch.tensor(offsets, device=keys.device)[:, None]).to(torch.int32)


def keep_values(seeds: Tensor, columns: int, p: float) -> Tensor:
    """1 where an element stays and 0 where it is dropped, [*seeds.shape, columns] int16.

    An element stays with probability 1 - p, to within 2^-17. seeds: int32 of `row_seeds`, of any shape.
    """
    if seeds.is_cuda:
        return _compiled_keep_values(seeds, columns, p)
    pairs = torch.arange((columns + 1) // 2, dtype=torch.int32, device=seeds.device).mul_(_signed32(0x9E3779B1))
    bits = seeds[..., None] + pairs
    shifted = torch.empty_like(bits)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        # A logical shift: int32 would drag its sign along.
        torch.bitwise_right_shift(bits, shift, out=shifted).bitwise_and_((1 << (32 - shift)) - 1)
        bits ^= shifted
        if factor != 1:
            bits *= _signed32(factor)
    # [..., columns / 2] int32 -> [..., columns] int16, uniform in [-2^15, 2^15)
    halves = bits.view(torch.int16)[..., :columns]
    # What `>= first` says, by arithmetic: comparisons to bool, and bool to float, are several times slower on a CPU.
    first = _threshold(p)
    return halves.clamp_(first - 1, first).sub_(first - 1)


def keep_mask(keys: Tensor, site: int, columns: int, p: float) -> Tensor:
    """True where an element stays, [rows, columns] bool.

    keys: [rows] int64 of `token_keys`; site: as in `row_seeds`.
    """
    seeds = row_seeds(keys, site)[0]
    mask = torch.empty(len(keys), columns, dtype=torch.int8, device=keys.device)
    for rows in row_blocks(len(keys), columns, keys.device):
        mask[rows] = keep_values(seeds[rows], columns, p)
    return mask.view(torch.bool) if p > 0 else mask.fill_(1).view(torch.bool)


def row_blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of the rows of a [rows, columns] tensor that fit a CPU's cache; on CUDA all of them at once."""
    step = max(1, BLOCK // max(columns, 1)) if device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def dropout(x: Tensor, keys: Tensor | None, site: int, p: float) -> Tensor:
    """Dropout of x, [rows, columns]; without keys or with p = 0, x itself."""
    if keys is None or p == 0.0:
        return x
    return _Dropout.apply(x, keys, site, p)


def dropout_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, keys: Tensor | None, site: int, p: float
) -> Tensor:
    """LayerNorm of residual + dropout(x), all [rows, columns]; without keys or with p = 0 nothing is dropped.

    weight, bias: [columns] of the norm. Kept for backward: the sum, one byte an element for the mask, two numbers
    a row. On CUDA one compiled kernel, on a CPU blocks that stay in its cache.
    """
    if keys is None or p == 0.0:
        return F.layer_norm(residual + x, weight.shape, weight, bias, eps)
    if x.is_cuda:
        return _compiled_dropout_add_norm(x, residual, weight, bias, eps, row_seeds(keys, site)[0], p)
    return _DropoutAddNorm.apply(x, residual, weight, bias, eps, keys, site, p)


def keep_values_by_element(seeds: Tensor, columns: int, p: float) -> Tensor:
    """`keep_values`, each element for itself: twice the hashing, but one kernel once compiled."""
    place = torch.arange(columns, dtype=torch.int32, device=seeds.device)
    bits = seeds[..., None] + (place >> 1) * _signed32(0x9E3779B1)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * _signed32(factor)
    halves = torch.where((place & 1) == 1, bits >> 16, (bits << 16) >> 16)
    return (halves >= _threshold(p)).to(torch.int16)


def dropout_add_norm_by_element(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, seeds: Tensor, p: float
) -> Tensor:
    """`dropout_add_norm` in plain operations, for the compiler; autograd makes its backward."""
    keep = keep_values_by_element(seeds, x.shape[1], p).to(x.dtype)
    return F.layer_norm(residual + x * keep * (1.0 / (1.0 - p)), weight.shape, weight, bias, eps)


_compiled_keep_values = torch.compile(keep_values_by_element, dynamic=True)
_compiled_dropout_add_norm = torch.compile(dropout_add_norm_by_element, dynamic=True)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, site: int, p: float) -> Tensor:
        y, keep = _drop(x, None, keys, site, p)
        ctx.save_for_backward(keep)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (keep,) = ctx.saved_tensors
        return _drop_again(grad, keep, ctx.p), None, None, None


class _DropoutAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        keys: Tensor,
        site: int,
        p: float,
    ) -> Tensor:
        z, keep = _drop(x, residual, keys, site, p)
        y, mean, rstd = torch.native_layer_norm(z, weight.shape, weight, bias, eps)
        ctx.save_for_backward(z, keep, mean, rstd, weight, bias)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, keep, mean, rstd, weight, bias = ctx.saved_tensors
        dz, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), z, weight.shape, mean, rstd, weight, bias, [True, True, True]
        )
        return _drop_again(dz, keep, ctx.p), dz, dweight, dbias, None, None, None, None


def _drop(x: Tensor, residual: Tensor | None, keys: Tensor, site: int, p: float) -> tuple[Tensor, Tensor]:
    """residual + dropout(x), and the mask, [rows, columns] int8."""
    rows, columns = x.shape
    seeds = row_seeds(keys, site)[0]
    keep = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    y = torch.empty_like(x)
    for part in row_blocks(rows, columns, x.device):
        values = keep_values(seeds[part], columns, p)
        keep[part] = values
        if residual is None:
            torch.mul(x[part], values.to(x.dtype), out=y[part]).mul_(1.0 / (1.0 - p))
        else:
            torch.addcmul(residual[part], x[part], values.to(x.dtype), value=1.0 / (1.0 - p), out=y[part])
    return y, keep


def _drop_again(grad: Tensor, keep: Tensor, p: float) -> Tensor:
    result = torch.empty_like(grad)
    for part in row_blocks(len(grad), grad.shape[1], grad.device):
        torch.mul(grad[part], keep[part].to(grad.dtype), out=result[part]).mul_(1.0 / (1.0 - p))
    return result


def _threshold(p: float) -> int:
    """Smallest of the 16-bit numbers that keep an element."""
    return min(max(round(p * 65536), 1), 65535) - 32768


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
