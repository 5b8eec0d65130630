"""Update rules on flat pieces of parameters: AdamW and LAMB.

A rule knows neither ranks nor buckets. `prepare` sees all pieces that this rank holds once the gradients are there;
`apply` then updates them a bucket at a time, so that each bucket can leave for the other ranks while the next is
updated. In between the caller sums what `prepare` returned over the ranks that hold the other pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

CPU_BLOCK = 1 << 16
"""Elements that a chain of operations works through together on a CPU: what it touches stays in the cache."""


@dataclass
class Piece:
    """The part of one parameter that this rank updates; all tensors are 1-D, of the same size, and may be empty."""

    name: str
    index: int
    """Number of the parameter among all that are updated; the same on every rank."""
    start: int
    """Place of the first element in the flattened parameter."""
    shape: torch.Size
    """Of the whole parameter."""
    excluded: bool
    """From weight decay and from layer adaptation."""
    master: Tensor
    """The weights that are updated; fp32, or fp64 where the parameter is."""
    grad: Tensor
    """In master's type; a rule may overwrite it."""
    slots: dict[str, Tensor] = field(default_factory=dict)
    """State of the rule by name."""


class UpdateRule(Protocol):
    """What ShardedOptimizer asks of a rule."""

    slots: tuple[str, ...]
    """Names of the tensors of state that a piece has."""

    def prepare(self, pieces: Sequence[Piece], parameters: int, scale: Tensor, step: int) -> Tensor | None:
        """Begins update number `step` (the first is 1) with gradients `grad * scale`.

        parameters: how many there are in all. Returns sums that the caller has to add up over the pieces of other
        ranks before `apply`, or None.
        """

    def apply(self, pieces: Sequence[Piece], lr: float, sums: Tensor | None) -> None:
        """Updates these pieces; `sums` as returned by `prepare`, added up."""


@dataclass
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW computes it."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def prepare(self, pieces: Sequence[Piece], parameters: int, scale: Tensor, step: int) -> None:
        self._step, self._scale = step, scale

    def apply(self, pieces: Sequence[Piece], lr: float, sums: Tensor | None) -> None:
        for excluded in (False, True):
            chosen = [piece for piece in pieces if piece.excluded == excluded and piece.master.numel()]
            if not chosen:
                continue
            master = chosen[0].master
            step = torch.tensor(float(self._step), device=master.device)
            grads = [piece.grad for piece in chosen]
            divisor = None
            if master.dtype == torch.float32:
                divisor = self._scale.reciprocal().to(master.device, torch.float32)
            else:  # the fused kernel knows its divisor as a float only
                torch._foreach_mul_(grads, self._scale.item())
            torch._fused_adamw_(
                [piece.master for piece in chosen],
                grads,
                [piece.slots["exp_avg"] for piece in chosen],
                [piece.slots["exp_avg_sq"] for piece in chosen],
                [],
                [step] * len(chosen),
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=0.0 if excluded else self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )


@dataclass
class LAMB:
    """Layer-wise adaptive moments (You et al. 2020), as MLPerf's BERT uses it.

    With bias correction; the decay is part of the update; a tensor's step is scaled by |weights| / |update| (1 where
    either is 0); excluded tensors are neither decayed nor scaled. Norms are those of whole tensors, wherever their
    pieces lie.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def prepare(self, pieces: Sequence[Piece], parameters: int, scale: Tensor, step: int) -> Tensor:
        """Leaves the update's direction in `grad`; returns [2, parameters], squared norms of weights and directions."""
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        squares = torch.zeros(2, parameters, dtype=torch.float64, device=scale.device)
        factor = scale.item() if scale.device.type == "cpu" else scale
        for block in _blocks(pieces):
            grads, weights = [piece.grad for piece in block], [piece.master for piece in block]
            first, second = ([piece.slots[name] for piece in block] for name in self.slots)
            torch._foreach_mul_(grads, factor)
            torch._foreach_lerp_(first, grads, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
            root = torch._foreach_sqrt(second)
            torch._foreach_mul_(root, correction1 / correction2**0.5)
            torch._foreach_add_(root, self.eps * correction1)
            torch._foreach_copy_(grads, first)
            torch._foreach_div_(grads, root)
            if self.weight_decay and not block[0].excluded:
                torch._foreach_add_(grads, weights, alpha=self.weight_decay)
            if not block[0].excluded:
                places = torch.tensor([piece.index for piece in block], device=squares.device)
                for row, tensors in enumerate((weights, grads)):
                    norms = torch.stack(torch._foreach_norm(tensors)).double()
                    squares[row].index_add_(0, places, norms.square_())
        return squares

    def apply(self, pieces: Sequence[Piece], lr: float, sums: Tensor | None) -> None:
        assert sums is not None
        weights, directions = sums.sqrt()
        ratios = torch.where((weights > 0) & (directions > 0), weights / directions, 1.0)
        on_host = ratios.tolist() if ratios.device.type == "cpu" else None
        for piece in pieces:
            if on_host is not None:
                piece.master.add_(piece.grad, alpha=-lr * (1.0 if piece.excluded else on_host[piece.index]))
            else:
                ratio = -lr if piece.excluded else (ratios[piece.index] * -lr).to(piece.grad.dtype)
                piece.master.add_(piece.grad.mul_(ratio))


def _blocks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces alike in `excluded`; on a CPU cut and gathered to blocks of about CPU_BLOCK elements."""
    for excluded in (False, True):
        chosen = [piece for piece in pieces if piece.excluded == excluded and piece.master.numel()]
        if chosen and chosen[0].master.device.type != "cpu":
            yield chosen
            continue
        block: list[Piece] = []
        size = 0
        for piece in chosen:
            for first in range(0, piece.master.numel(), CPU_BLOCK):
                part = _cut(piece, slice(first, first + CPU_BLOCK))
                block.append(part)
                size += part.master.numel()
                if size >= CPU_BLOCK:
                    yield block
                    block, size = [], 0
        if block:
            yield block


def _cut(piece: Piece, where: slice) -> Piece:
    cut: Callable[[Tensor], Tensor] = lambda tensor: tensor[where]  # noqa: E731
    slots = {name: cut(tensor) for name, tensor in piece.slots.items()}
    return Piece(
        piece.name, piece.index, piece.start, piece.shape, piece.excluded, cut(piece.master), cut(piece.grad), slots
    )
