"""Level 3: parameters sharded too, by torch's `fully_shard`; the update runs on the local rows of each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from common.buckets import master_dtype
from common.collectives import broadcast
from common.optimizers import Piece
from common.runtime import Runtime


class FullyShardedStore:
    """Cuts every parameter by rows over the shard group; pieces are this rank's rows."""

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
    ) -> None:
        self.waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        excludes = {name: excluded(name, parameter) for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            broadcast(parameter.data, 0, runtime.group())
        mesh = _mesh(runtime, shard_axes, replicate_axes)
        frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
        for unit in _units(model) if units is None else units:
            fully_shard(unit, mesh=mesh, ignored_params=frozen)
        root = fully_shard(model, mesh=mesh, ignored_params=frozen)
        assert isinstance(root, FSDPModule)
        self._root = root
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sums, as the bucket store does; a mean is a factor of the update.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
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
        """Takes the reduced gradients from the parameters."""
        for parameter, (piece,) in zip(self._parameters, self.groups, strict=True):
            if parameter.grad is None:
                piece.grad.zero_()
            else:
                piece.grad.copy_(_local(parameter.grad).reshape(-1))
            parameter.grad = None

    def publish(self, group: int) -> None:
        """Puts updated rows back where they are kept in another type than the masters'."""
        (piece,) = self.groups[group]
        rows = _local(self._parameters[group].data).view(-1)
        if rows.data_ptr() != piece.master.data_ptr():
            rows.copy_(piece.master)

    def wait_parameters(self) -> None:
        """Nothing to wait for: parameters are gathered where they are used."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by name."""
        full = {}
        for parameter, (piece,) in zip(self._parameters, self.groups, strict=True):
            assert isinstance(parameter.data, DTensor)
            full[piece.name] = parameter.data.full_tensor()
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
    rows = _local(parameter.data)
    flat = rows.view(-1)
    dtype = master_dtype(parameter.dtype)
    master = flat if flat.dtype == dtype else flat.to(dtype)
    # torch.chunk's rule: all ranks but the last ones hold ceil(rows / ranks) rows.
    size = -(-parameter.shape[0] // ranks) * (parameter.numel() // max(parameter.shape[0], 1))
    return Piece(
        name=name,
        index=index,
        start=min(rank * size, parameter.numel() - flat.numel()),
        shape=parameter.shape,
        excluded=excluded,
        master=master,
        grad=torch.zeros_like(master),
        slots={slot: torch.zeros_like(master) for slot in slots},
    )
