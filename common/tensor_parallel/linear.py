"""Linear layers cut over the tp ranks: by their outputs (column) or by their inputs (row).

Shoeybi et al. 2019, "Megatron-LM", section 3; sequence parallelism after Korthikanti et al. 2022, section 4.2.2. In
backward the communication of the input gradient runs under the matmul of the weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.config import ConfigError
from common.tensor_parallel.group import RowGather, TensorParallel, times
from common.tensor_parallel.placement import Placement
from common.weight_gradients import WeightGradients


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W, and so the columns of y, cut over the ranks.

    [tokens, in] (own tokens under sequence parallelism) -> [tokens, out / ranks]. Made by `cut`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tp: TensorParallel, sections: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.tp, self.sections = tp, sections
        self.weight_gradients: WeightGradients | None = None

    @classmethod
    def cut(cls, linear: nn.Linear, tp: TensorParallel, sections: Sequence[int] | None = None) -> ColumnParallelLinear:
        """This rank's part of `linear`, which every rank holds whole (or on the meta device).

        sections: sizes of the parts of the outputs that are cut each for itself, as `qkv_sections` gives them; None:
        one part.

        Raises ConfigError where the ranks do not divide a section.
        """
        sections = tuple(sections or (linear.out_features,))
        for size in sections:
            _check_divides(tp, size, "outputs of a column-parallel linear layer")
        place = Placement(0, sections)
        weight = place.take(linear.weight.detach(), tp.rank, tp.size)
        bias = None if linear.bias is None else place.take(linear.bias.detach(), tp.rank, tp.size)
        return cls(weight, bias, tp, sections)

    def parameter_placements(self) -> dict[str, Placement]:
        """Weight and bias are cut along dim 0."""
        return {"weight": Placement(0, self.sections), "bias": Placement(0, self.sections)}

    def forward(self, x: Tensor) -> Tensor:
        return _apply(_Column, self, x)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W, and so those of x, cut over the ranks; every rank holds the bias.

    [tokens, in / ranks] -> [tokens, out] (own tokens under sequence parallelism). Made by `cut`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tp: TensorParallel, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.tp, self.inputs = tp, inputs
        self.weight_gradients: WeightGradients | None = None

    @classmethod
    def cut(cls, linear: nn.Linear, tp: TensorParallel) -> RowParallelLinear:
        """This rank's part of `linear`, which every rank holds whole (or on the meta device).

        Raises ConfigError where the ranks do not divide its inputs.
        """
        _check_divides(tp, linear.in_features, "inputs of a row-parallel linear layer")
        weight = Placement(1, (linear.in_features,)).take(linear.weight.detach(), tp.rank, tp.size)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(weight, bias, tp, linear.in_features)

    def parameter_placements(self) -> dict[str, Placement]:
        """The weight is cut along dim 1; the bias is whole and sees the tokens that the output has."""
        return {
            "weight": Placement(1, (self.inputs,)),
            "bias": Placement(partial_gradient=self.tp.sequence_parallel),
        }

    def forward(self, x: Tensor) -> Tensor:
        return _apply(_Row, self, x)


def qkv_sections(heads: int, kv_heads: int, head_dim: int, tp: int) -> tuple[int, int, int]:
    """Sections of a fused [queries, keys, values] projection, so that every rank gets whole groups of heads.

    A group is the query heads that share one key and value head (Ainslie et al. 2023, "GQA"); multi-head attention has
    groups of one.

    Raises ConfigError where heads do not form equal groups or the ranks do not divide the groups.
    """
    if heads % kv_heads:
        raise ConfigError(f"heads={heads} do not form equal groups for kv_heads={kv_heads}; make it a multiple")
    if kv_heads % tp:
        fitting = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        kind = f"heads={heads}" if heads == kv_heads else f"kv_heads={kv_heads}"
        raise ConfigError(f"tp={tp} does not divide {kind}; use one of {fitting}")
    return heads * head_dim, kv_heads * head_dim, kv_heads * head_dim


def _check_divides(tp: TensorParallel, size: int, what: str) -> None:
    if size % tp.size:
        raise ConfigError(f"tp={tp.size} does not divide the {size} {what}; use a tp that does")


def _apply(
    function: type[torch.autograd.Function], layer: ColumnParallelLinear | RowParallelLinear, x: Tensor
) -> Tensor:
    queue = layer.weight_gradients if torch.is_grad_enabled() else None
    seen = layer.weight if queue is None else queue.anchor
    out: Tensor = function.apply(x, seen, layer.bias, layer, queue)
    return out


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seen: Tensor,
        bias: Tensor | None,
        layer: ColumnParallelLinear | RowParallelLinear,
        queue: WeightGradients | None,
    ) -> Tensor:
        weight, tp = layer.weight.detach(), layer.tp
        # Only the own rows are kept; backward gathers again (Korthikanti et al. 2022, end of section 4.2.2).
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.tp, ctx.queue = layer.weight, tp, queue
        if bias is not None and not tp.sequence_parallel:
            return torch.addmm(bias, x, weight.mT)
        out = times(tp.gather(x), weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp, queue = ctx.tp, ctx.queue
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gather = tp.gather(x) if needs_weight and queue is None else None
        dx = tp.sum_async(grad @ weight) if needs_x else None
        dweight = None
        if gather is not None:
            dweight = _weight_gradient(grad, gather)
        dbias = grad.sum(dim=0) if needs_bias else None
        done = None if dx is None else dx()
        if queue is not None:
            queue.add(ctx.parameter, lambda: _weight_gradient(grad, tp.gather(x)))
        return done, dweight, dbias, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seen: Tensor,
        bias: Tensor | None,
        layer: ColumnParallelLinear | RowParallelLinear,
        queue: WeightGradients | None,
    ) -> Tensor:
        weight, tp = layer.weight.detach(), layer.tp
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.tp, ctx.queue = layer.weight, tp, queue
        if tp.size == 1:
            return torch.addmm(bias, x, weight.mT) if bias is not None else x @ weight.mT
        out = tp.matmul_sum(x, weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        gather = ctx.tp.gather(grad)
        dbias = grad.sum(dim=0) if needs_bias else None
        dx = times(gather, weight.mT) if needs_x else None
        whole = gather.wait()
        dweight = None
        if ctx.queue is not None:
            ctx.queue.add(ctx.parameter, lambda: whole.mT @ x)
        elif needs_weight:
            dweight = whole.mT @ x
        return dx, dweight, dbias, None, None


def _weight_gradient(grad: Tensor, gather: RowGather) -> Tensor:
    """grad.T @ gathered, [out, in]; on a host the parts are added up as they arrive."""
    if grad.device.type != "cpu" or grad.dtype not in (torch.float32, torch.float64):
        return grad.mT @ gather.wait()
    total: Tensor | None = None
    for rows, x in gather.parts():
        if total is None:
            total = grad[rows].mT @ x
        else:
            total.addmm_(grad[rows].mT, x)
    assert total is not None
    return total
