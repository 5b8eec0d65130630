"""Where a parameter lies over the tensor-parallel ranks: what the optimizer, checkpoints and initialisation ask.

The contract: `placements(model, tp)` gives one Placement for every parameter by name. From it follow the whole shape,
which elements of the whole a rank holds (checkpoints, import and export), whether a gradient norm counts the parameter
on every rank or once (`dim is None`: once), and whether its gradient has to be summed over the ranks before the update
(`partial_gradient`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from common.copies import Copies
from common.tensor_parallel.group import TensorParallel


class Run(NamedTuple):
    """Consecutive indices along the cut dim that a rank holds."""

    whole: int
    """First index in the whole tensor."""
    local: int
    """First index in the rank's tensor."""
    length: int


class Rectangle(NamedTuple):
    """A block of the whole tensor that lies, in row-major order, in a row in a rank's flattened tensor."""

    start: int
    """First element in the rank's flattened tensor."""
    offsets: tuple[int, ...]
    """First index of each dim in the whole tensor."""
    sizes: tuple[int, ...]
    """Of the block; their product is its number of elements."""


@dataclass(frozen=True)
class Placement:
    """How a parameter is cut over the tp ranks.

    dim: the dim that is cut; None: every rank holds all of it. sections: sizes along `dim` of the parts of the whole
    tensor that are cut each for itself, in order ((queries, keys, values), (gate, up), or one part). Rank r of n holds
    indices [r * c, (r + 1) * c) of each section, c = ceil(size / n), one section after another; what lies beyond a
    section's end is padding, always zero. partial_gradient: every rank computes only a part of the gradient (of its own
    tokens under sequence parallelism, say); the gradient is the sum over tp.

    Raises ValueError where the sections do not fit.
    """

    dim: int | None = None
    sections: tuple[int, ...] = ()
    partial_gradient: bool = False

    def __post_init__(self) -> None:
        if (self.dim is None) != (not self.sections) or any(size < 1 for size in self.sections):
            raise ValueError(f"dim={self.dim} with sections {self.sections}: a cut needs positive sizes, others none")
        if self.dim is not None and self.partial_gradient:
            raise ValueError("partial_gradient is for parameters that are not cut; a part has its whole gradient")

    def local_size(self, ranks: int) -> int:
        """Size along `dim` on every rank, padding included."""
        return sum(-(-size // ranks) for size in self.sections)

    def local_shape(self, whole: Sequence[int], ranks: int) -> torch.Size:
        """Shape on every rank of a tensor that is `whole` altogether."""
        return self._resized(whole, self.local_size(ranks))

    def whole_shape(self, local: Sequence[int]) -> torch.Size:
        """Shape of the whole tensor, without padding."""
        return self._resized(local, sum(self.sections))

    def runs(self, rank: int, ranks: int) -> list[Run]:
        """What rank `rank` of `ranks` holds along `dim`, padding left out."""
        found, whole, local = [], 0, 0
        for size in self.sections:
            part = -(-size // ranks)
            length = min(part, size - rank * part)
            if length > 0:
                found.append(Run(whole + rank * part, local, length))
            whole, local = whole + size, local + part
        return found

    def take(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The rank's part of the whole tensor, a new tensor; padding is zero.

        Raises ValueError where the tensor is not as large as the sections say.
        """
        if self.dim is None:
            return whole.clone()
        if whole.shape[self.dim] != sum(self.sections):
            raise ValueError(f"dim {self.dim} of {tuple(whole.shape)} does not have the sections {self.sections}")
        local = whole.new_zeros(self.local_shape(whole.shape, ranks))
        for run in self.runs(rank, ranks):
            local.narrow(self.dim, run.local, run.length).copy_(whole.narrow(self.dim, run.whole, run.length))
        return local

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of the parts of all ranks; a tensor that is not cut is that of the first."""
        if self.dim is None:
            return parts[0].clone()
        whole = parts[0].new_empty(self.whole_shape(parts[0].shape))
        for rank, part in enumerate(parts):
            for run in self.runs(rank, len(parts)):
                whole.narrow(self.dim, run.whole, run.length).copy_(part.narrow(self.dim, run.local, run.length))
        return whole

    def rectangles(self, local: Sequence[int], rank: int, ranks: int, start: int, length: int) -> Iterator[Rectangle]:
        """Elements [start, start + length) of the rank's flattened tensor of shape `local`, as blocks of the whole.

        Padding is in none. Few and large: of a tensor cut along dim 0 at most three for each section, of one cut along
        dim 1 in one section at most three; with several sections or padding along dim 1, one for each row and section.
        """
        strides = [math.prod(local[d + 1 :]) for d in range(len(local))]
        for low, high in _boxes(tuple(local), start, start + length):
            if self.dim is None:
                yield _rectangle(strides, low, low, [b - a for a, b in zip(low, high, strict=True)])
                continue
            dim = self.dim
            for run in self.runs(rank, ranks):
                first, last = max(low[dim], run.local), min(high[dim], run.local + run.length)
                if (first, last) == (0, local[dim]):
                    whole = (*low[:dim], run.whole, *low[dim + 1 :])
                    yield _rectangle(strides, low, whole, [b - a for a, b in zip(low, high, strict=True)])
                    continue
                # A box that is wider than 1 before the cut dim falls apart: its blocks do not follow each other.
                for outer in itertools.product(*map(range, low[:dim], high[:dim])) if first < last else ():
                    behind = (b - a for a, b in zip(low[dim + 1 :], high[dim + 1 :], strict=True))
                    sizes = [*([1] * dim), last - first, *behind]
                    inside = (*outer, first, *low[dim + 1 :])
                    whole = (*outer, first - run.local + run.whole, *low[dim + 1 :])
                    yield _rectangle(strides, inside, whole, sizes)

    def _resized(self, shape: Sequence[int], size: int) -> torch.Size:
        if self.dim is None:
            return torch.Size(shape)
        return torch.Size([*shape[: self.dim], size, *shape[self.dim + 1 :]])


REPLICATED = Placement()


@runtime_checkable
class Placed(Protocol):
    """A module that cuts parameters of its own."""

    def parameter_placements(self) -> dict[str, Placement]:
        """Placement of each own parameter by its name in the module."""


def placements(model: nn.Module, *, sequence_parallel: bool) -> dict[str, Placement]:
    """The Placement of every parameter of `model` by name.

    Modules with `parameter_placements` say it themselves. All other parameters are whole on every rank; under sequence
    parallelism they see the rank's own tokens only, so their gradient is partial.
    """
    found: dict[str, Placement] = {}
    for prefix, module in model.named_modules():
        own = module.parameter_placements() if isinstance(module, Placed) else {}
        for name, _ in module.named_parameters(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            found[path] = own.get(name, Placement(partial_gradient=sequence_parallel))
    return found


def copies(model: nn.Module, tp: TensorParallel) -> list[Copies]:
    """The parameters that all tp ranks hold, for `ShardedOptimizer(copies=...)`."""
    found = placements(model, sequence_parallel=tp.sequence_parallel)
    whole = {name: place.partial_gradient for name, place in found.items() if place.dim is None}
    return [
        Copies([name for name, partial in whole.items() if partial == kind], tp.group, kind) for kind in (False, True)
    ]


def fill_normal(
    local: Tensor,
    *,
    seed: int,
    name: str,
    std: float,
    placement: Placement = REPLICATED,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Fills a rank's part of a parameter with normal values of mean 0 that any layout has alike.

    Every element hashes (seed, name, its place in the whole tensor) with SplitMix64 (Steele et al. 2014), and its two
    halves make the normal value (Box and Muller 1958), so a rank makes only what it holds. Padding is zero.

    name: of the parameter in the whole model, the same in any layout.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    base = int.from_bytes(digest, "little", signed=True)
    dim = 0 if placement.dim is None else placement.dim
    whole = placement.whole_shape(local.shape)
    strides = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    runs = [Run(0, 0, whole[0])] if placement.dim is None else placement.runs(rank, ranks)
    with torch.no_grad():
        if placement.dim is not None:
            local.zero_()
        for run in runs:
            part = local.narrow(dim, run.local, run.length)
            # A few million elements at a time, for the sake of memory.
            step = max(1, 2**21 // max(1, part[0].numel()))
            for first in range(0, len(part), step):
                rows = part[first : first + step]
                starts = [first + (run.whole if dim == 0 else 0), *([0] * (rows.ndim - 1))]
                if dim > 0:
                    starts[dim] = run.whole
                index = torch.full((1,) * rows.ndim, 0, dtype=torch.int64, device=local.device)
                for d, (size, start) in enumerate(zip(rows.shape, starts, strict=True)):
                    along = torch.arange(start, start + size, device=local.device) * strides[d]
                    index = index + along.view([-1 if i == d else 1 for i in range(rows.ndim)])
                rows.copy_(_normal(index, base).mul_(std))


def _normal(index: Tensor, base: int) -> Tensor:
    """Standard normal values in float64, one for each int64 index."""
    bits = index * _signed(0x9E3779B97F4A7C15) + base
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    bits = bits ^ ((bits >> 31) & ((1 << 33) - 1))
    radius = (((bits >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32)).log_().mul_(-2.0).sqrt_()
    return radius.mul_((bits & 0xFFFFFFFF).double().mul_(2.0**-31 * math.pi).cos_())


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _rectangle(strides: Sequence[int], inside: Sequence[int], whole: Sequence[int], sizes: Sequence[int]) -> Rectangle:
    start = sum(index * stride for index, stride in zip(inside, strides, strict=True))
    return Rectangle(start, tuple(whole), tuple(sizes))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Flat elements [start, stop) of a row-major tensor as boxes (first index, past-the-last index of each dim)."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        for low, high in _boxes(shape[1:], start - first * row, stop - first * row):
            yield (first, *low), (first + 1, *high)
        return
    if start % row:
        yield from _boxes(shape, start, (first + 1) * row)
        first += 1
    full = stop // row
    if full > first:
        yield (first, *([0] * (len(shape) - 1))), (full, *shape[1:])
    if stop % row:
        yield from _boxes(shape, full * row, stop)
