"""Grouped parameter sharding: no update is computed twice, and its communication hides behind the model's compute.

Gradients are reduce-scattered over `dp_shard` in flat buckets while backward goes on, each rank updates its part in
fp32 (or fp64), and new parameters are gathered under the next forward (Rajbhandari et al. 2020, "ZeRO"; Zhao et al.
2023, "PyTorch FSDP"). `dp_replicate` sums shards across copies of all that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.buckets import BucketStore
from common.collectives import all_reduce
from common.copies import Copies
from common.flat_shard import FlatShard
from common.fully_sharded import FullyShardedStore
from common.optimizers import Piece, UpdateRule
from common.runtime import Runtime


class StepResult(NamedTuple):
    """What a step did."""

    grad_norm: float
    """Global norm of the (unscaled) gradient before clipping."""
    applied: bool
    """False where a gradient was not finite: then nothing has changed, on any rank."""


class ShardedOptimizer:
    """Updates a model's parameters, each element on one rank of the shard group.

    for batch in micro_batches[:-1]:
        with optimizer.accumulating():
            loss(batch).backward()
    loss(micro_batches[-1]).backward()
    result = optimizer.step(lr)

    level: what is cut over `shard_axes`: 0 nothing (all-reduce, the same update everywhere), 1 the optimizer state,
        2 and gradients (full ones live from a bucket's first gradient to the end of its reduce-scatter; while
        accumulating they stay, since accumulation does not communicate), 3 and parameters (torch's `fully_shard`).
    bucket_mb: MiB of a bucket. clip_norm: the global gradient norm is cut to this before the update; None leaves it.
    exclude: (name, parameter) -> not decayed nor adapted. reduction: gradients are summed over ranks (the loss is
        divided by global counts) or averaged. units: level 3 only, modules whose parameters are gathered together; None
        takes the entries of the model's ModuleLists.

    Model parallelism: cut_axes hold other parts of the same parameters (tp), stage_axes other parameters (pp); the
        gradient norm, and with it clipping and the decision to skip a step, and LAMB's norms are those of the whole
        model. copies: parameters that several of these ranks hold (`common.copies`), counted once; partial gradients
        are summed after the reduction over data-parallel ranks.

    Made by all ranks together; parameters take the values of the first. Frozen parameters stay out; a parameter without
    a gradient in a step, on some ranks or all, counts as one with gradient zero. At level 3 the ranks have to call the
    same units, since a unit's parameters are gathered where it is called. The order of sums is fixed, so a run repeats
    bit by bit.

    A module's forward waits for its own parameters, and for those of modules inside it that have never been called;
    whoever reads parameters outside of forward calls `wait_parameters` first.

    Raises ValueError for a level, size or reduction that is not known, or where nothing is to be trained; at level 3
    where trained parameters differ in dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        *,
        runtime: Runtime,
        shard_axes: tuple[str, ...] = ("dp_shard",),
        replicate_axes: tuple[str, ...] = ("dp_replicate",),
        level: Literal[0, 1, 2, 3] = 1,
        bucket_mb: float = 25.0,
        clip_norm: float | None = None,
        exclude: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False,
        reduction: Literal["sum", "mean"] = "sum",
        units: Iterable[nn.Module] | None = None,
        cut_axes: tuple[str, ...] = (),
        stage_axes: tuple[str, ...] = (),
        copies: Sequence[Copies] = (),
    ) -> None:
        if level not in (0, 1, 2, 3):
            raise ValueError(f"level={level} is not known; use 0, 1, 2 or 3")
        if bucket_mb <= 0 or (clip_norm is not None and clip_norm <= 0):
            raise ValueError(f"bucket_mb={bucket_mb}, clip_norm={clip_norm}: both must be positive (clip_norm or None)")
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction={reduction!r} is not known; use sum or mean")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("no parameter of the model requires a gradient; there is nothing to update")
        self._rule, self._clip = rule, clip_norm
        self._cut_group = runtime.group(*cut_axes) if runtime.axis_size(*cut_axes) > 1 and cut_axes else None
        self._stage_group = runtime.group(*stage_axes) if runtime.axis_size(*stage_axes) > 1 and stage_axes else None
        self._copies = tuple(copies)
        self._shard_group = runtime.group(*shard_axes)
        self._cut = level > 0 and runtime.axis_size(*shard_axes) > 1
        ranks = runtime.axis_size(*shard_axes) * runtime.axis_size(*replicate_axes)
        self._mean = 1.0 / ranks if reduction == "mean" else 1.0
        self._updates = 0
        self._store: BucketStore | FullyShardedStore
        if level == 3:
            self._store = FullyShardedStore(
                model,
                runtime,
                shard_axes,
                replicate_axes,
                units=units,
                excluded=exclude,
                slots=rule.slots,
                copies=copies,
            )
        else:
            self._store = BucketStore(
                model,
                shard_group=self._shard_group,
                replicate_group=runtime.group(*replicate_axes),
                level=level,
                bucket_bytes=bucket_mb * 2**20,
                excluded=exclude,
                slots=rule.slots,
                copies=copies,
            )
        self._pieces = [piece for group in self._store.groups for piece in group]
        self._parameters = 1 + max(piece.index for piece in self._pieces)
        elsewhere = {name for c in self._copies if not c.counts for name in c.names}
        self._counted = [piece for piece in self._pieces if piece.name not in elsewhere]
        cut_elsewhere = {name for c in self._copies if not c.counts and c.group == self._cut_group for name in c.names}
        self._uncounted_indices = sorted({piece.index for piece in self._pieces if piece.name in cut_elsewhere})

    @property
    def updates(self) -> int:
        """Updates applied so far."""
        return self._updates

    def accumulating(self) -> AbstractContextManager[None]:
        """Backward passes inside add up gradients and communicate nothing."""
        return self._store.accumulating()

    def wait_within(self, span: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enters `span()` around every wait for communication from now on, to measure what is exposed."""
        self._store.waiting = span

    def wait_parameters(self) -> None:
        """Returns once all parameters are the updated ones; modules wait for their own in forward by themselves."""
        self._store.wait_parameters()

    def step(self, lr: float, grad_scale: float = 1.0) -> StepResult:
        """Updates with learning rate `lr`; all ranks call it together.

        grad_scale: what the loss was multiplied by (fp16); gradients are divided by it before norm and clipping.
        """
        self._store.finish_gradients()
        unscale = self._mean / grad_scale
        norm = self._grad_norm() * unscale
        if not torch.isfinite(norm):
            return StepResult(norm.item(), applied=False)
        scale = torch.full_like(norm, unscale)
        if self._clip is not None:
            scale *= torch.clamp(self._clip / norm, max=1.0)  # a norm of 0 divides to infinity, then to 1
        sums = self._rule.prepare(self._pieces, self._parameters, scale, self._updates + 1)
        if sums is not None:
            if self._cut_group is not None:
                sums[..., self._uncounted_indices] = 0.0
            self._sum(sums, (self._shard_group if self._cut else None, self._cut_group))
        # The next forward needs the parameters that were defined first, which are in the last bucket.
        for number in reversed(range(len(self._store.groups))):
            self._rule.apply(self._store.groups[number], lr, sums)
            self._store.publish(number)
        self._updates += 1
        return StepResult(norm.item(), applied=True)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state as named pieces, and the number of updates; independent of the number of ranks.

        The pieces share memory with the optimizer: what is loaded into them in place is there, once `load_state_dict`
        has been called.
        """
        state: dict[str, Any] = {"updates": self._updates}
        for piece in self._pieces:
            for slot, tensor in (("master", piece.master), *piece.slots.items()):
                state[f"{slot}/{piece.name}"] = FlatShard(tensor, piece.start, piece.shape)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state of this sharding (as `state_dict` gives it), and hands the weights to the model.

        Raises ValueError where a piece is missing or is not this rank's.
        """
        for name, mine in self.state_dict().items():
            if name not in state:
                raise ValueError(f"the state lacks {name}; it is of another model or rule")
            if name == "updates":
                self._updates = int(state[name])
                continue
            theirs = state[name]
            if (theirs.start, theirs.shape, theirs.data.shape) != (mine.start, mine.shape, mine.data.shape):
                raise ValueError(
                    f"{name}: piece {theirs.start}+{theirs.data.numel()} of {tuple(theirs.shape)}, this rank holds "
                    f"{mine.start}+{mine.data.numel()} of {tuple(mine.shape)}; load it for this sharding"
                )
            mine.data.copy_(theirs.data)
        for number in range(len(self._store.groups)):
            self._store.publish(number)
        self.wait_parameters()

    def full_parameters(self) -> dict[str, Tensor]:
        """Every trained parameter whole, by name, in the model's dtype, on every rank; all ranks call it together."""
        self.wait_parameters()
        return self._store.full_parameters()

    def _grad_norm(self) -> Tensor:
        """Norm of the gradient as it lies in the pieces, [] in fp64; infinite or NaN if some element is."""
        grads = [piece.grad for piece in self._counted if piece.grad.numel()]
        device = self._pieces[0].grad.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if grads:
            total = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        self._sum(total, (self._shard_group if self._cut else None, self._cut_group, self._stage_group))
        return total.sqrt()

    def _sum(self, tensor: Tensor, groups: Iterable[dist.ProcessGroup | None]) -> None:
        for group in groups:
            if group is not None:
                with self._store.waiting():
                    all_reduce(tensor, group)


__all__ = ["Copies", "FlatShard", "Piece", "ShardedOptimizer", "StepResult"]
