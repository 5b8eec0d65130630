"""Update rules on flat pieces of parameters: AdamW and LAMB.

A rule knows neither ranks nor buckets. `prepare` sees all pieces that this rank holds once the gradients are there;
`apply` then updates them a bucket at a time, so that each bucket can leave for the other ranks while the next is
updated. In between the caller sums what `prepare` returned over the ranks that hold the other pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = {"cpu": 1 << 16}
"""Elements that LAMB works through together, by device: on a CPU what a block touches stays in the cache."""
OTHER_BLOCK = 1 << 24
"""The same where the device is not named: enough to fill an accelerator, and a buffer of only 64 MB."""


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
class AdamW(UpdateRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW computes it."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def prepare(self, pieces: Sequence[Piece], parameters: int, scale: Tensor, step: int) -> None:
        self._step, self._scale = step, scale

    def apply(self, pieces: Sequence[Piece], lr: float, sums: Tensor | None) -> None:
        for excluded in (False, True):
            chosen = [_part(piece) for piece in pieces if piece.excluded == excluded and piece.master.numel()]
            if chosen:
                adam = _FusedAdam(chosen[0].master, self._scale, self._step, self.betas, self.eps)
                adam([part.master for part in chosen], chosen, lr, 0.0 if excluded else self.weight_decay)


@dataclass
class LAMB(UpdateRule):
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
        squares = torch.zeros(2, parameters, dtype=torch.float64, device=scale.device)
        for dtype in dict.fromkeys(piece.master.dtype for piece in pieces):
            same = [piece for piece in pieces if piece.master.dtype == dtype and piece.master.numel()]
            if not same:
                continue
            adam = _FusedAdam(same[0].master, scale, step, self.betas, self.eps)
            limit = BLOCK.get(same[0].master.device.type, OTHER_BLOCK)
            buffer = same[0].master.new_empty(min(2 * limit, sum(piece.master.numel() for piece in same)))
            for excluded in (False, True):
                for block in _blocks([piece for piece in same if piece.excluded == excluded], limit):
                    directions = self._direct(block, adam, buffer)
                    torch._foreach_copy_([part.grad for part in block], directions)
                    if not excluded:
                        places = torch.tensor([part.number for part in block], device=squares.device)
                        for row, tensors in enumerate(([part.master for part in block], directions)):
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

    def _direct(self, block: Sequence[_Part], adam: _FusedAdam, buffer: Tensor) -> list[Tensor]:
        """The direction of the update, by part, in `buffer`; brings the moments up to date.

        A step of Adam with rate -1, begun where the decay points, adds Adam's direction to it in one pass.
        """
        sizes = [part.master.numel() for part in block]
        directions = list(buffer[: sum(sizes)].split(sizes))
        for direction, part in zip(directions, block, strict=True):
            if part.excluded:
                direction.zero_()
            else:
                torch.mul(part.master, self.weight_decay, out=direction)
        adam(directions, block, lr=-1.0, weight_decay=0.0)
        return directions


class _Part(NamedTuple):
    """Some elements of a piece."""

    number: int
    """Index of the parameter."""
    excluded: bool
    master: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor


def _part(piece: Piece) -> _Part:
    first, second = piece.slots["exp_avg"], piece.slots["exp_avg_sq"]
    return _Part(piece.index, piece.excluded, piece.master, piece.grad, first, second)


class _FusedAdam:
    """Step number `step` of Adam with gradients `grad * scale`, on tensors of the dtype and device of `like`."""

    def __init__(self, like: Tensor, scale: Tensor, step: int, betas: tuple[float, float], eps: float) -> None:
        self._betas, self._eps = betas, eps
        self._count = torch.tensor(float(step), device=like.device)
        self._divisor: Tensor | None = None
        self._factor = 1.0
        if like.dtype != torch.float32:  # the fused kernel knows its divisor in fp32 only
            self._factor = scale.item()
        elif like.device.type != "cpu" or scale.item() != 1.0:
            self._divisor = scale.reciprocal().to(torch.float32)

    def __call__(self, weights: list[Tensor], parts: Sequence[_Part], lr: float, weight_decay: float) -> None:
        """Updates `weights` and the moments of `parts`; leaves the gradients scaled."""
        grads = [part.grad for part in parts]
        if self._factor != 1.0:
            torch._foreach_mul_(grads, self._factor)
        torch._fused_adamw_(
            weights,
            grads,
            [part.first for part in parts],
            [part.second for part in parts],
            [],
            [self._count] * len(parts),
            lr=lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=self._divisor,
        )


def _blocks(pieces: Sequence[Piece], limit: int) -> Iterator[list[_Part]]:
    """Pieces cut to parts of at most `limit` elements, gathered to blocks of less than twice that."""
    block: list[_Part] = []
    size = 0
    for piece in pieces:
        number, excluded, *tensors = _part(piece)
        for parts in zip(*(tensor.split(limit) for tensor in tensors), strict=True):
            block.append(_Part(number, excluded, *parts))
            size += parts[0].numel()
            if size >= limit:
                yield block
                block, size = [], 0
    if block:
        yield block
