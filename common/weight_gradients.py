"""Weight gradients that wait: backward makes a layer's input gradient now and its weight gradient later.

Zero-bubble schedules (Qi et al. 2023, "Zero bubble pipeline parallelism", section 2) send the input gradient on at once
and fill their bubbles with the weight gradients. Autograd has no such split, so layers that know this queue hand it a
function for each weight gradient instead of the gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Task = tuple[Tensor, Callable[[], Tensor]]
"""A leaf parameter and what computes a gradient of it."""


class WeightGradients:
    """The queue of one stage: layers `add` to it in backward, and while it is `deferring`, `take` hands that over.

    A layer that has a queue must not give its weight to autograd: a parameter whose gradient is None for now still has
    its hooks called, and they would take the gradient for complete. It gives `anchor` in the weight's place, so that
    backward comes by even where the input needs no gradient.
    """

    def __init__(self) -> None:
        self.deferring = False
        self.anchor = torch.zeros((), requires_grad=True)
        self._tasks: list[Task] = []

    def add(self, parameter: Tensor, compute: Callable[[], Tensor]) -> None:
        """Keeps `compute`, which returns a gradient of `parameter`; calls it at once where nothing is deferred."""
        if not parameter.requires_grad:
            return
        self._tasks.append((parameter, compute))
        if not self.deferring:
            run_tasks(self.take())

    def take(self) -> list[Task]:
        """What was added since the last call, in that order."""
        tasks, self._tasks = self._tasks, []
        return tasks


def run_tasks(tasks: list[Task]) -> None:
    """Computes the gradients and adds each to its parameter as backward would: hooks on the parameter run too."""
    for parameter, compute in tasks:
        with torch.no_grad():
            gradient = compute()
        torch.autograd.backward((parameter,), (gradient,))
    tasks.clear()


def defer_weight_gradients(module: nn.Module) -> WeightGradients:
    """Makes the linear layers inside `module` able to defer, and returns their queue.

    Those are `nn.Linear` and every module with an attribute `weight_gradients` (None until now), which says that it
    uses the queue. A weight that two modules share is left alone: part of its gradient would arrive with the
    input gradients, part later, and whoever counts arrivals would take it for complete too early.
    """
    queue = WeightGradients()
    uses: dict[int, int] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for child in module.modules():
        if any(uses[id(parameter)] > 1 for parameter in child.parameters(recurse=False)):
            continue
        if type(child) is nn.Linear:
            child.forward = _DeferringForward(child, queue)  # type: ignore[assignment, method-assign]
        elif getattr(child, "weight_gradients", queue) is None:
            child.weight_gradients = queue  # type: ignore[assignment]
    return queue


class _DeferringForward:
    """Takes the place of an nn.Linear's forward."""

    def __init__(self, linear: nn.Linear, queue: WeightGradients) -> None:
        self._linear, self._queue = linear, queue

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, self._linear.weight, self._linear.bias)
        return _Linear.apply(x, self._queue.anchor, self._linear.bias, self._linear, self._queue)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, bias: Tensor | None, linear: nn.Linear, queue: WeightGradients
    ) -> Tensor:
        # The weight itself must not be an argument: autograd would take every tensor that is one for its own.
        weight = linear.weight.detach()
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.queue = linear.weight, queue
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # [..., out] -> [tokens, out]
        flat = grad.reshape(-1, grad.shape[-1])
        ctx.queue.add(ctx.parameter, lambda: flat.mT @ x.reshape(-1, x.shape[-1]))
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        return grad @ weight if needs_x else None, None, flat.sum(dim=0) if needs_bias else None, None, None
