"""Flat buckets: parameters and gradients in few large tensors that are communicated while the model computes.

Buckets are filled in the order in which backward makes gradients (the reverse of that in which modules were defined). A
bucket whose gradients are all there is reduce-scattered at once; new parameters are gathered bucket by bucket, and a
module's forward waits only for the buckets that hold its own parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.collectives import Pending, all_gather_flat, all_reduce_async, broadcast
from common.copies import Copies, summing_groups
from common.optimizers import Piece
from common.reduce_scatter import BufferPool, start_reduce_scatter

ALIGNMENT = 16
"""Elements that the shards of a bucket are padded to a multiple of, for aligned vector loads."""
LAG = 2
"""Buckets that may be in a reduce-scatter before the oldest is waited for: enough to hide it, and few buffers."""


@dataclass
class Slot:
    """One parameter in its bucket."""

    name: str
    parameter: nn.Parameter
    offset: int
    """First element in the bucket."""
    filled: bool = False
    """Whether the bucket's gradient holds something of this step."""


@dataclass(eq=False)
class Bucket:
    """Parameters that are communicated together."""

    slots: list[Slot]
    numel: int
    """Elements, padded so that the ranks divide them."""
    dtype: torch.dtype
    summing: tuple[dist.ProcessGroup, ...] = ()
    """Groups whose ranks hold copies of these parameters and a summand of their gradient each."""
    parameters: Tensor = field(init=False)
    """[numel], what the parameters are views of."""
    gradients: Tensor | None = None
    """[numel] in the master's type; level 2 keeps it only from the first gradient to the end of the reduce-scatter."""
    gradient_shard: Tensor = field(init=False)
    """[numel / ranks], the summed gradient of this rank's part (level 0: all of it); at level 1 inside `gradients`."""
    missing: int = 0
    """Parameters without a gradient in the present backward."""
    launched: bool = False
    """Whether its gradients are on their way."""
    scattered: bool = False
    """Whether this rank's sum over the shard group is there."""
    reducing: Pending | None = None
    borrowed: list[Tensor] = field(default_factory=list)
    """Buffers of the pool that go back once the reduce-scatter is over."""
    gathering: Pending | None = None


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which parameters of `dtype` are updated and their gradients summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BucketStore:
    """Owns the parameters and gradients of a model in buckets; levels 0, 1 and 2 of ShardedOptimizer.

    level 0 all-reduces gradients and updates everything everywhere; 1 cuts the update over `shard_group`; 2 also gives
    the full gradients back once they are reduced. `replicate_group` holds the ranks with the same shard: shards are
    summed across it after the reduce-scatter, which makes the reduction two-level by construction.

    What `copies` says is to be summed lies in buckets of its own at the end, alike on all ranks that hold it, so that
    their shards can be summed; those buckets leave when the step ends, not from a hook, since ranks may get there in
    different orders.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        shard_group: dist.ProcessGroup,
        replicate_group: dist.ProcessGroup,
        level: int,
        bucket_bytes: float,
        excluded: Callable[[str, nn.Parameter], bool],
        slots: Sequence[str],
        copies: Sequence[Copies] = (),
    ) -> None:
        self._shard_group, self._replicate_group, self._level = shard_group, replicate_group, level
        self._replicas = dist.get_world_size(replicate_group)
        cut = level > 0
        self._ranks = dist.get_world_size(shard_group) if cut else 1
        self._rank = dist.get_rank(shard_group) if cut else 0
        self._accumulating = False
        self._next = 0
        self._keeps_gradients = level < 2 or self._ranks == 1
        self._pool = BufferPool(2 * (LAG + 1))
        self.waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around every wait for communication; telemetry puts its span here."""
        self.buckets = self._fill(model, bucket_bytes, copies)
        order = {name: index for index, (name, p) in enumerate(model.named_parameters()) if p.requires_grad}
        for bucket in self.buckets:
            self._flatten(bucket)
        self.groups = [
            [self._piece(bucket, slot, order[slot.name], excluded, slots) for slot in bucket.slots]
            for bucket in self.buckets
        ]
        self._masters = [
            self._make_masters(bucket, group) for bucket, group in zip(self.buckets, self.groups, strict=True)
        ]
        self._hook(model)
        self._begin_step()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add up gradients and communicate nothing."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def finish_gradients(self) -> None:
        """Returns once the summed gradients are in the pieces; a parameter without one counts as zero."""
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        for bucket in self.buckets:
            self._sum_replicas(bucket)
        for bucket in self.buckets:
            self._finish(bucket)
        for turn in range(max(len(bucket.summing) for bucket in self.buckets)):
            for bucket in self.buckets:
                if turn < len(bucket.summing):
                    bucket.reducing = all_reduce_async(bucket.gradient_shard, bucket.summing[turn])
            for bucket in self.buckets:
                self._finish(bucket)
        self._begin_step()

    def publish(self, group: int) -> None:
        """Sends the updated pieces of `groups[group]` to the other ranks; the model's next forward waits for them."""
        bucket, own = self.buckets[group], self._masters[group]
        mine = self._own(bucket.parameters)
        if own.dtype != mine.dtype:
            mine.copy_(own)
        if self._ranks > 1:
            bucket.gathering = all_gather_flat(bucket.parameters, self._shard_group, mine)

    def wait_parameters(self) -> None:
        """Returns once all parameters are the updated ones."""
        self._wait_all(self.buckets)

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by name."""
        return {slot.name: slot.parameter.detach() for bucket in self.buckets for slot in bucket.slots}

    # Construction.

    def _fill(self, model: nn.Module, bucket_bytes: float, copies: Sequence[Copies]) -> list[Bucket]:
        buckets: list[Bucket] = []
        found = [
            (summing_groups(copies, name), name, parameter)
            for name, parameter in reversed(list(model.named_parameters()))
            if parameter.requires_grad
        ]
        kinds = sorted(dict.fromkeys(summing for summing, *_ in found), key=len)
        for summing, name, parameter in (item for kind in kinds for item in found if item[0] == kind):
            last = buckets[-1] if buckets else None
            limit = bucket_bytes / parameter.element_size()
            if (
                last is None
                or (last.dtype, last.summing) != (parameter.dtype, summing)
                or last.numel + parameter.numel() > limit
            ):
                last = Bucket([], 0, parameter.dtype, summing)
                buckets.append(last)
            last.slots.append(Slot(name, parameter, last.numel))
            last.numel += parameter.numel()
        unit = self._ranks * ALIGNMENT
        for bucket in buckets:
            bucket.numel = -(-bucket.numel // unit) * unit
        return buckets

    def _flatten(self, bucket: Bucket) -> None:
        """Moves the parameters into one tensor, all ranks to the values of the first."""
        device = bucket.slots[0].parameter.device
        bucket.parameters = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
        for slot in bucket.slots:
            view = self._view(bucket.parameters, slot)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        for group in (self._shard_group, self._replicate_group):
            if dist.get_world_size(group) > 1:
                broadcast(bucket.parameters, dist.get_global_rank(group, 0), group)
        wide = master_dtype(bucket.dtype)
        if self._keeps_gradients:
            bucket.gradients = torch.zeros(bucket.numel, dtype=wide, device=device)
            bucket.gradient_shard = self._own(bucket.gradients)
        else:
            bucket.gradient_shard = torch.zeros(bucket.numel // self._ranks, dtype=wide, device=device)

    def _piece(
        self,
        bucket: Bucket,
        slot: Slot,
        index: int,
        excluded: Callable[[str, nn.Parameter], bool],
        slots: Sequence[str],
    ) -> Piece:
        size = bucket.numel // self._ranks
        first = max(slot.offset, self._rank * size)
        last = max(first, min(slot.offset + slot.parameter.numel(), (self._rank + 1) * size))
        local = slice(first - self._rank * size, last - self._rank * size) if last > first else slice(0, 0)
        grad = bucket.gradient_shard[local]
        return Piece(
            name=slot.name,
            index=index,
            start=first - slot.offset if last > first else 0,
            shape=slot.parameter.shape,
            excluded=excluded(slot.name, slot.parameter),
            master=grad,  # set by _make_masters
            grad=grad,
            slots={name: torch.zeros_like(grad) for name in slots},
        )

    def _make_masters(self, bucket: Bucket, group: list[Piece]) -> Tensor:
        """This rank's masters, flat; a view of the parameters where the types allow."""
        own = self._own(bucket.parameters)
        if bucket.dtype != master_dtype(bucket.dtype):
            own = own.to(master_dtype(bucket.dtype))
        base = bucket.gradient_shard.storage_offset()
        for piece in group:
            first = piece.grad.storage_offset() - base
            piece.master = own[first : first + piece.grad.numel()]
        return own

    def _hook(self, model: nn.Module) -> None:
        home = {slot.parameter: bucket for bucket in self.buckets for slot in bucket.slots}
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(
                    lambda parameter, bucket=bucket, slot=slot: self._take(bucket, slot)
                )
        if self._ranks == 1:
            return
        own = {
            module: list(dict.fromkeys(home[p] for p in module.parameters(recurse=False) if p in home))
            for module in model.modules()
        }
        self._uncalled = {module for module, needed in own.items() if needed}
        for module in own:
            inside = {child: own[child] for child in module.modules() if child is not module and own[child]}
            module.register_forward_pre_hook(
                lambda module, _, needed=own[module], inside=inside: self._before_forward(module, needed, inside)
            )

    # Backward.

    def _begin_step(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.launched = bucket.scattered = False
            # One more than can come: buckets with sums leave in finish_gradients.
            bucket.missing = len(bucket.slots) + bool(bucket.summing)
            for slot in bucket.slots:
                slot.filled = False

    def _take(self, bucket: Bucket, slot: Slot) -> None:
        """Moves a new gradient into its bucket; launches the buckets that are complete, in the order of all ranks."""
        if bucket.launched:
            raise RuntimeError(
                f"{slot.name} got a gradient after its bucket was sent; run all backward passes of a step but the last "
                "inside accumulating()"
            )
        if bucket.gradients is None:
            self._borrow_gradients(bucket)
        grad = slot.parameter.grad
        assert grad is not None and bucket.gradients is not None
        view = self._view(bucket.gradients, slot)
        if slot.filled:
            view.add_(grad)
        else:
            view.copy_(grad)
        slot.filled = True
        slot.parameter.grad = None
        if self._accumulating:
            return
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        """Begins the reduction of a bucket, and takes an older one a step further."""
        if bucket.gradients is None:
            self._borrow_gradients(bucket)
        assert bucket.gradients is not None
        for slot in bucket.slots:
            if not slot.filled:
                self._view(bucket.gradients, slot).zero_()
        number = self._next
        bucket.launched = True
        self._next += 1
        if self._level == 0:
            if dist.get_world_size(self._shard_group) > 1:
                bucket.reducing = all_reduce_async(bucket.gradients, self._shard_group)
        elif self._ranks > 1:
            bucket.reducing = start_reduce_scatter(
                bucket.gradients, self._shard_group, bucket.gradient_shard, self._borrow_scratch(bucket)
            )
        if number >= LAG:
            self._sum_replicas(self.buckets[number - LAG])

    def _sum_replicas(self, bucket: Bucket) -> None:
        """Ends the reduction inside the shard group and begins that across replicas."""
        if bucket.scattered:
            return
        self._finish(bucket)
        bucket.scattered = True
        for buffer in bucket.borrowed:
            self._pool.give(buffer)
        bucket.borrowed = []
        if not self._keeps_gradients:
            bucket.gradients = None
        if self._replicas > 1:
            bucket.reducing = all_reduce_async(bucket.gradient_shard, self._replicate_group)

    def _finish(self, bucket: Bucket) -> None:
        if bucket.reducing is not None:
            with self.waiting():
                bucket.reducing.wait()
            bucket.reducing = None

    def _borrow_gradients(self, bucket: Bucket) -> None:
        buffer = self._pool.take(bucket.numel, master_dtype(bucket.dtype), bucket.parameters.device)
        bucket.borrowed.append(buffer)
        bucket.gradients = buffer[: bucket.numel]
        last = bucket.slots[-1]
        bucket.gradients[last.offset + last.parameter.numel() :].zero_()

    def _borrow_scratch(self, bucket: Bucket) -> Tensor | None:
        """Room for what a host receives in a reduce-scatter."""
        if bucket.parameters.device.type != "cpu":
            return None
        shard = bucket.gradient_shard
        buffer = self._pool.take((self._ranks - 1) * shard.numel(), shard.dtype, shard.device)
        bucket.borrowed.append(buffer)
        return buffer

    # Forward.

    def _before_forward(
        self, module: nn.Module, needed: Sequence[Bucket], inside: Mapping[nn.Module, Sequence[Bucket]]
    ) -> None:
        """Waits for a module's own parameters, and for those of modules inside it that have never been called.

        Such a module may be one that only holds parameters, for the module around it to use.
        """
        self._uncalled.discard(module)
        self._wait_all(needed)
        if self._uncalled:
            for child, held in inside.items():
                if child in self._uncalled:
                    self._wait_all(held)

    def _wait_all(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.gathering is not None:
                with self.waiting():
                    bucket.gathering.wait()
                bucket.gathering = None

    def _own(self, flat: Tensor) -> Tensor:
        size = flat.numel() // self._ranks
        return flat[self._rank * size : (self._rank + 1) * size]

    @staticmethod
    def _view(flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset : slot.offset + slot.parameter.numel()].view(slot.parameter.shape)
