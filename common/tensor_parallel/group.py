"""TensorParallel: the ranks that share every layer, and the moves of token rows between them.

Outside the parallel layers activations are [tokens, ...]: alike on all ranks or, under sequence parallelism, cut by
rows, rank r holding tokens [r * n, (r + 1) * n) (Korthikanti et al. 2022, section 4.2). Which tokens these are does not
matter to norms, dropout and residuals, so any flat batch that the ranks divide will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from common.collectives import (
    Pending,
    all_reduce,
    all_reduce_async,
    copy_to,
    gather_along,
    reduce_from,
    reduce_scatter_along,
    reduce_scatter_flat,
)
from common.runtime import Runtime


class TensorParallel:
    """The tp ranks as the parallel layers see them.

    sequence_parallel: activations between the parallel regions are cut by tokens. With one rank nothing is cut and
    nothing communicates.
    """

    def __init__(self, runtime: Runtime, *, sequence_parallel: bool = False, axis: str = "tp") -> None:
        self.size = runtime.axis_size(axis)
        self.rank = runtime.axis_rank(axis)
        self.group = runtime.group(axis)
        self.sequence_parallel = sequence_parallel and self.size > 1

    def rows(self, tokens: int) -> slice:
        """The rows of [tokens, ...] that this rank works on outside the parallel regions.

        Raises ValueError where sequence parallelism does not divide the tokens.
        """
        if not self.sequence_parallel:
            return slice(0, tokens)
        if tokens % self.size:
            raise ValueError(
                f"{tokens} tokens do not divide into tp={self.size} equal parts for sequence parallelism; "
                f"make micro-batch x sequence length a multiple of {self.size}, or switch sequence parallelism off"
            )
        own = tokens // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def own_tokens(self, tensor: Tensor) -> Tensor:
        """This rank's rows of what all ranks hold and what needs no gradient: positions, sample ids, dropout keys."""
        return tensor[self.rows(len(tensor))]

    def enter(self, x: Tensor) -> Tensor:
        """Into a region where ranks do different things with all tokens; backward sums over the ranks.

        Under sequence parallelism [own tokens, ...] -> [tokens, ...]. The parallel linear layers do it by themselves.
        """
        if self.size == 1:
            return x
        return gather_along(x, self.group, 0) if self.sequence_parallel else copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Out of such a region, where every rank holds a summand: the sum, or this rank's rows of it."""
        if self.size == 1:
            return x
        if self.sequence_parallel:
            self.rows(len(x))
            return reduce_scatter_along(x, self.group, 0)
        return reduce_from(x, self.group)

    # What the layers are made of; without autograd.

    def sum_async(self, x: Tensor) -> Callable[[], Tensor]:
        """Begins to sum [tokens, ...] over the ranks (overwrites x); calling the result gives what `leave` would."""
        if self.size == 1:
            return lambda: x
        if not self.sequence_parallel:
            work = all_reduce_async(x, self.group)

            def finish() -> Tensor:
                work.wait()
                return x

            return finish
        own = x.new_empty(len(x) // self.size, *x.shape[1:])
        scatter = reduce_scatter_flat(x.view(-1), self.group, own.view(-1))

        def finish_rows() -> Tensor:
            scatter.wait()
            return own

        return finish_rows

    def matmul_sum(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T summed over the ranks: [tokens, in] -> [tokens, out], or [own tokens, out].

        Under sequence parallelism on a host the rows of the other ranks are computed first and leave while those of
        this rank are computed. On CUDA one matmul and one reduce-scatter: smaller ones would fill the device less well.
        """
        if not self.sequence_parallel or x.device.type != "cpu":
            return self.sum_async(x @ weight.mT)()
        part = self.rows(len(x)).stop // (self.rank + 1)
        incoming = {r: x.new_empty(part, len(weight)) for r in range(self.size) if r != self.rank}
        peers = {r: dist.get_global_rank(self.group, r) for r in incoming}
        receives = {r: dist.irecv(incoming[r], peers[r], group=self.group) for r in incoming}
        sends: list[tuple[Pending | None, Tensor]] = []
        for r in self._others():
            leaving = x[r * part : (r + 1) * part] @ weight.mT
            sends.append((dist.isend(leaving, peers[r], group=self.group), leaving))
        total: Tensor | None = None
        own = x[self.rows(len(x))] @ weight.mT
        for r in range(self.size):  # in the order of ranks, whichever came first: sums repeat bit by bit
            work = receives.get(r)
            if work is not None:
                work.wait()
            summand = incoming.get(r, own)
            total = summand if total is None else total.add_(summand)
        for send, _ in sends:
            assert send is not None
            send.wait()
        assert total is not None
        return total

    def gather(self, x: Tensor) -> RowGather:
        """Begins to gather [own tokens, ...] into [tokens, ...]."""
        return RowGather(x, self)

    def combine(self, stats: Tensor) -> Tensor:
        """[...] of every rank, stacked: [ranks, ...]."""
        if self.size == 1:
            return stats[None]
        gathered = stats.new_zeros(self.size, *stats.shape)
        gathered[self.rank] = stats
        return all_reduce(gathered, self.group)

    def _others(self) -> Iterator[int]:
        """The other ranks, from the next one on, so that they are not all served in the same order."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size


class RowGather:
    """Rows of all ranks on their way into one tensor; without sequence parallelism they are there already."""

    def __init__(self, x: Tensor, tp: TensorParallel) -> None:
        self._tp = tp
        self._works: list[Pending | None] = []
        if not tp.sequence_parallel:
            self._whole = x
            return
        part = len(x)
        self._whole = x.new_empty(part * tp.size, *x.shape[1:])
        own = self._whole[tp.rank * part : (tp.rank + 1) * part]
        own.copy_(x)
        if x.device.type == "cpu":
            self._works = [
                dist.broadcast(rows, dist.get_global_rank(tp.group, r), group=tp.group, async_op=True)
                for r, rows in enumerate(self._whole.chunk(tp.size))
            ]
        else:
            work = dist.all_gather_into_tensor(self._whole, own, group=tp.group, async_op=True)
            self._works = [work] * tp.size

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, their values), this rank's own first while the others are on their way."""
        if not self._works:
            yield slice(0, len(self._whole)), self._whole
            return
        part = len(self._whole) // self._tp.size
        for r in (self._tp.rank, *self._tp._others()):
            rows = slice(r * part, (r + 1) * part)
            if r != self._tp.rank:
                self._wait(r)
            yield rows, self._whole[rows]
        self.wait()

    def wait(self) -> Tensor:
        """[tokens, ...], all of them."""
        for r in range(len(self._works)):
            self._wait(r)
        return self._whole

    def _wait(self, r: int) -> None:
        work, self._works[r] = self._works[r], None
        if work is not None:
            work.wait()


def times(gather: RowGather, weight: Tensor) -> Tensor:
    """gathered @ weight.T, [tokens, out]; the parts are multiplied as they arrive."""
    out: Tensor | None = None
    for rows, x in gather.parts():
        if rows.stop - rows.start == len(gather._whole):
            return x @ weight.mT
        if out is None:
            out = x.new_empty(len(gather._whole), len(weight))
        torch.mm(x, weight.mT, out=out[rows])
    assert out is not None
    return out
