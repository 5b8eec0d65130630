"""Collectives: named functions over a process group, with and without autograd.

Recipes communicate through these and never import `torch.distributed`. The differentiable ones come in dual pairs: the
backward of each is the other, summed over ranks, so that every rank's loss counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Op = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Returns once the result may be used."""


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: Op = "sum") -> Tensor:
    """Reduces `tensor` over the group in place; returns it."""
    dist.all_reduce(tensor, op=_OPS[op], group=group)
    return tensor


def all_reduce_async(tensor: Tensor, group: dist.ProcessGroup, op: Op = "sum") -> Pending:
    """Begins to reduce `tensor` over the group in place; it is not to be touched before `wait`."""
    work = dist.all_reduce(tensor, op=_OPS[op], group=group, async_op=True)
    assert work is not None
    return work


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Overwrites `tensor` with that of global rank `source`; returns it."""
    dist.broadcast(tensor, src=source, group=group)
    return tensor


def all_gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each rank passed (it must pickle), by rank. For small things: it goes through the host."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def all_to_all_ragged(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Sends parts[r], [n_r], to rank r and returns what each rank sent here, by rank; sizes may differ and be 0.

    All parts of all ranks have one dtype, one device, and the same shape but for the first dim.

    Raises ValueError where the number of parts is not the number of ranks, or they differ in dtype or shape.
    """
    world_size = dist.get_world_size(group)
    if len(parts) != world_size:
        raise ValueError(f"{len(parts)} parts for {world_size} ranks; give one part for each rank")
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"parts of {part.dtype} {tuple(part.shape)} and {first.dtype} {tuple(first.shape)} together; "
                "all must have one dtype and the same shape but for the first dim"
            )
    sizes = torch.tensor([len(part) for part in parts], device=first.device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    counts = incoming.tolist()
    received = first.new_empty((sum(counts), *first.shape[1:]))
    dist.all_to_all_single(received, torch.cat(list(parts)), counts, sizes.tolist(), group=group)
    return list(received.split(counts))


def reduce_scatter_flat(
    flat: Tensor, group: dist.ProcessGroup, shard: Tensor, scratch: Tensor | None = None
) -> Pending:
    """Begins to sum `flat`, [ranks * n], over the group and to put this rank's part into `shard`, [n].

    NCCL has it natively. Gloo carries it out as an all-reduce of everything and more (100 MB on 2 ranks: 147 ms against
    77 ms); there each rank instead sends every other rank its part and adds what it receives, in rank order.
    scratch: at least as large as `flat`, room for what is received; made anew where None.

    Raises ValueError where the ranks do not divide `flat` into such shards.
    """
    if flat.numel() != shard.numel() * dist.get_world_size(group):
        raise ValueError(f"{flat.numel()} elements do not scatter into shards of {shard.numel()}; pad them")
    if flat.device.type != "cpu":
        work = dist.reduce_scatter_tensor(shard, flat, group=group, async_op=True)
        assert work is not None
        return work
    parts = torch.empty_like(flat) if scratch is None else scratch[: flat.numel()]
    return _ReduceScatterByExchange(flat, group, shard, parts)


class _ReduceScatterByExchange:
    def __init__(self, flat: Tensor, group: dist.ProcessGroup, shard: Tensor, parts: Tensor) -> None:
        self._shard, self._parts = shard, parts
        self._flat = flat  # kept alive until the exchange is over
        self._work = dist.all_to_all_single(parts, flat, group=group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        first, *others = self._parts.chunk(self._parts.numel() // self._shard.numel())
        if not others:
            self._shard.copy_(first)
            return
        torch.add(first, others[0], out=self._shard)
        for part in others[1:]:
            self._shard.add_(part)


def all_gather_flat(flat: Tensor, group: dist.ProcessGroup, shard: Tensor) -> Pending:
    """Begins to fill `flat`, [ranks * n], with the `shard`, [n], of every rank; `shard` is this rank's part of `flat`.

    On a host it is a broadcast of every part, which lands in place; gloo's own all-gather copies (100 MB on 2 ranks:
    118 ms against 27 ms).

    Raises ValueError where the shards do not make up `flat`.
    """
    ranks = dist.get_world_size(group)
    if flat.numel() != shard.numel() * ranks:
        raise ValueError(f"shards of {shard.numel()} do not gather into {flat.numel()} elements; pad them")
    if flat.device.type != "cpu":
        work = dist.all_gather_into_tensor(flat, shard, group=group, async_op=True)
        assert work is not None
        return work
    works = [
        dist.broadcast(part, src=dist.get_global_rank(group, rank), group=group, async_op=True)
        for rank, part in enumerate(flat.chunk(ranks))
    ]
    return _All([work for work in works if work is not None])


class _All:
    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_sum(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _scatter_sum(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.group, ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(tensor.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, split_dim: int, gather_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.gather_dim = group, split_dim, gather_dim
        return _exchange(tensor, group, split_dim, gather_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.group, ctx.gather_dim, ctx.split_dim), None, None, None


def gather_along(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Every rank's tensor side by side along `dim`, in rank order. Backward: sum over ranks, this rank's part."""
    return _AllGather.apply(tensor, group, dim)


def reduce_scatter_along(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The sum over ranks, this rank's part along `dim`. Backward: gathers the parts.

    Raises ValueError where the ranks do not divide that dim.
    """
    return _ReduceScatter.apply(tensor, group, dim)


def reduce_from(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks on every rank, for what follows alike on all of them. Backward: the gradient as it is."""
    return _AllReduce.apply(tensor, group)


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor itself, which all ranks hold alike and use differently. Backward: sum over ranks."""
    return _Copy.apply(tensor, group)


def exchange_along(tensor: Tensor, group: dist.ProcessGroup, split_dim: int, gather_dim: int) -> Tensor:
    """All-to-all: cuts `split_dim`, sends part r to rank r, and lays what arrives along `gather_dim`; its own dual.

    Raises ValueError where the ranks do not divide `split_dim`.
    """
    return _AllToAll.apply(tensor, group, split_dim, gather_dim)


def _gather(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def _scatter_sum(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    parts = torch.stack(_cut(tensor, dist.get_world_size(group), dim))
    shard = torch.empty_like(parts[0])
    reduce_scatter_flat(parts.view(-1), group, shard.view(-1)).wait()
    return shard


def _exchange(tensor: Tensor, group: dist.ProcessGroup, split_dim: int, gather_dim: int) -> Tensor:
    parts = torch.stack(_cut(tensor, dist.get_world_size(group), split_dim))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(list(received.unbind()), dim=gather_dim)


def _cut(tensor: Tensor, parts: int, dim: int) -> list[Tensor]:
    size = tensor.shape[dim]
    if size % parts:
        raise ValueError(f"dim {dim} of size {size} does not cut into {parts} equal parts; pad it to a multiple")
    return list(tensor.chunk(parts, dim=dim))
