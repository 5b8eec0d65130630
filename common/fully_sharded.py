"""Level 3: parameters sharded too, by torch's `fully_shard`; the update runs on the local rows of each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common.buckets import master_dtype
from common.collectives import all_reduce, broadcast
from common.copies import Copies, summing_groups
from common.optimizers import Piece
from common.runtime import Runtime


class FullyShardedStore:
    """Cuts every parameter by rows over the shard group; pieces are this rank's rows, in the master's type.

    Where that is wider than the model's type, rows are gathered in the model's and gradients summed in the master's.

    Raises ValueError where trained parameters differ in dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        shard_axes: tuple[str, ...],
        replicate_axes: tuple[str, ...],
        *,
        units: Iterable[nn.Module] | None,
        excluded: Callable[[str, nn.Parameter], bool],
        slots: Sequence[str],
        copies: Sequence[Copies] = (),
    ) -> None:
        self._copies = copies
        self.waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        excludes = {name: excluded(name, parameter) for name, parameter in model.named_parameters()}
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        if len(dtypes) != 1:
            raise ValueError(f"level 3 needs trained parameters of one dtype, not {sorted(map(str, dtypes))}")
        (self._dtype,) = dtypes
        wide = master_dtype(self._dtype)
        for parameter in model.parameters():
            for group in (runtime.group(*shard_axes), runtime.group(*replicate_axes)):
                if dist.get_world_size(group) > 1:
                    broadcast(parameter.data, dist.get_global_rank(group, 0), group)
            if parameter.requires_grad:
                parameter.data = parameter.data.to(wide)
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if wide != self._dtype:
            policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=wide, cast_forward_inputs=False)
        mesh = _mesh(runtime, shard_axes, replicate_axes)
        frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
        for unit in _units(model) if units is None else units:
            fully_shard(unit, mesh=mesh, ignored_params=frozen, mp_policy=policy)
        root = fully_shard(model, mesh=mesh, ignored_params=frozen, mp_policy=policy)
        assert isinstance(root, FSDPModule)
        self._root = root
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sums, as the bucket store does; a mean is a factor of the update.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Ranks may differ in which parameters a step used; without this they would reduce different lists.
                module.set_reduce_scatter_unused_params(True)
        rank, ranks = runtime.axis_rank(*shard_axes), runtime.axis_size(*shard_axes)
        self._parameters: list[nn.Parameter] = []
        self.groups: list[list[Piece]] = []
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.requires_grad:
                self._parameters.append(parameter)
                self.groups.append([_piece(name, index, parameter, rank, ranks, excludes[name], slots)])

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add up whole gradients and communicate nothing."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def finish_gradients(self) -> None:
        """Hands the reduced gradients to the pieces."""
        for parameter, (piece,) in zip(self._parameters, self.groups, strict=True):
            if parameter.grad is None:
                piece.grad = torch.zeros_like(piece.master)
            else:
                piece.grad = _local(parameter.grad).reshape(-1)
            parameter.grad = None
            for group in summing_groups(self._copies, piece.name):  # they hold the same rows of it
                with self.waiting():
                    all_reduce(piece.grad, group)

    def publish(self, group: int) -> None:
        """Nothing to send: masters are the rows that are gathered where they are used."""

    def wait_parameters(self) -> None:
        """Nothing to wait for: parameters are gathered where they are used."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by name."""
        full = {}
        for parameter, (piece,) in zip(self._parameters, self.groups, strict=True):
            assert isinstance(parameter.data, DTensor)
            full[piece.name] = parameter.data.full_tensor().to(self._dtype)
        return full


def _mesh(runtime: Runtime, shard_axes: tuple[str, ...], replicate_axes: tuple[str, ...]) -> DeviceMesh:
    shard, replicate = runtime.group(*shard_axes), runtime.group(*replicate_axes)
    device = runtime.device.type
    if runtime.axis_size(*replicate_axes) == 1:
        return DeviceMesh.from_group(shard, device)
    both = next(ranks for ranks in runtime.layout.groups(*replicate_axes, *shard_axes) if runtime.rank in ranks)
    grid = torch.tensor(both).view(runtime.axis_size(*replicate_axes), runtime.axis_size(*shard_axes))
    return DeviceMesh.from_group([replicate, shard], device, mesh=grid, mesh_dim_names=("replicate", "shard"))


def _units(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _piece(
    name: str, index: int, parameter: nn.Parameter, rank: int, ranks: int, excluded: bool, slots: Sequence[str]
) -> Piece:
    master = _local(parameter.data).view(-1)
    # torch.chunk's rule: all ranks but the last ones hold ceil(rows / ranks) rows.
    size = -(-parameter.shape[0] // ranks) * (parameter.numel() // max(parameter.shape[0], 1))
    return Piece(
        name=name,
        index=index,
        start=min(rank * size, parameter.numel() - master.numel()),
        shape=parameter.shape,
        excluded=excluded,
        master=master,
        grad=master.new_empty(0),  # set by finish_gradients
        slots={slot: torch.zeros_like(master) for slot in slots},
    )
