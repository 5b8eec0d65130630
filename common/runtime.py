"""Runtime: process groups, device, seed and teardown in one object that is passed on; no module-level state."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from types import TracebackType

import torch
import torch.distributed as dist

from common.config import ConfigError
from common.layout import ParallelLayout


class Runtime:
    """What a rank knows about itself and how it reaches the others.

    Made by `Runtime.start`; a context manager that tears the process groups down. Groups are made in the same order on
    every rank, so `group` and `background_group` must be called by all ranks in the same order.
    """

    def __init__(self, layout: ParallelLayout, device: torch.device, seed: int, timeout_s: float) -> None:
        self.layout = layout
        self.device = device
        self.seed = seed
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    @classmethod
    def start(
        cls,
        layout: ParallelLayout | None = None,
        *,
        device: str = "auto",
        seed: int = 0,
        timeout_s: float = 600.0,
        store: dist.Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Runtime:
        """Joins the job and returns this rank's Runtime.

        Reads the environment that torchrun sets; without it, one rank by itself. `store`, `rank` and `world_size`
        override the environment (the test pool brings its own store).

        layout: sizes of the axes; None puts every rank on `dp_shard`.
        device: "auto" takes CUDA where there is one, else the CPU; "cpu" and "cuda" insist.
        timeout_s: seconds after which a collective that some rank never joined is an error.

        Raises ConfigError where the layout does not fit the number of ranks or the device is not there.
        """
        if rank is None or world_size is None:
            rank, world_size = _launched()
        layout = layout or ParallelLayout(dp_shard=world_size)
        layout.check_world(world_size)
        chosen = _choose_device(device)
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        if store is None and "MASTER_ADDR" not in os.environ:
            store = dist.HashStore()  # one rank by itself
        timeout = datetime.timedelta(seconds=timeout_s)
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        return cls(layout, chosen, seed, timeout_s)

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes what is written once."""
        return self.rank == 0

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.rank // self.local_world_size

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one only along `axes`; no axes: all ranks.

        Groups are made at the first call, by all ranks together, and kept.
        """
        axes = tuple(sorted(axes))
        if axes not in self._groups:
            lists = self.layout.groups(*axes)
            if not axes or len(lists) == 1:
                group = dist.group.WORLD
                assert group is not None
            else:
                group, _ = dist.new_subgroups_by_enumeration(lists, timeout=self._timeout)
            self._groups[axes] = group
        return self._groups[axes]

    def new_group(self, *axes: str) -> dist.ProcessGroup:
        """As `group`, but one of its own at every call: for messages whose order others must not disturb."""
        group, _ = dist.new_subgroups_by_enumeration(self.layout.groups(*axes), timeout=self._timeout)
        return group

    def axis_size(self, *axes: str) -> int:
        """Number of ranks in `group(*axes)`; makes no group."""
        return len(self.layout.groups(*axes)[0])

    def axis_rank(self, *axes: str) -> int:
        """This rank's position in `group(*axes)`; makes no group."""
        return next(ranks.index(self.rank) for ranks in self.layout.groups(*axes) if self.rank in ranks)

    def background_group(self) -> dist.ProcessGroup:
        """A new gloo group over all ranks, on host memory: one for each thread that communicates beside training."""
        return dist.new_group(backend="gloo", timeout=self._timeout)

    def node_group(self) -> dist.ProcessGroup:
        """The ranks of this node."""
        nodes = [
            list(range(first, min(first + self.local_world_size, self.world_size)))
            for first in range(0, self.world_size, self.local_world_size)
        ]
        group, _ = dist.new_subgroups_by_enumeration(nodes, timeout=self._timeout)
        return group

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        dist.barrier(group=self.group())

    def stop(self) -> None:
        """Leaves the job. Called twice, does nothing the second time."""
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.world_size > 1 and not issubclass(kind, SystemExit):
            # The other ranks wait in a collective that this one will never join. An orderly teardown would wait for
            # them too, so show what happened and leave at once: the launcher then stops the rest within seconds.
            print(f"rank {self.rank} failed:", file=sys.stderr)
            traceback.print_exception(kind, error, trace)
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)
        self.stop()


def _launched() -> tuple[int, int]:
    """(rank, world size) as torchrun says them; (0, 1) without it."""
    numbers = {}
    for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)):
        text = os.environ.get(name, str(alone))
        if not text.isdigit():
            raise ConfigError(f"{name}={text!r} is no number; start the ranks with torchrun")
        numbers[name] = int(text)
    if "MASTER_ADDR" in os.environ and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise ConfigError("MASTER_ADDR is set but RANK or WORLD_SIZE is not; start the ranks with torchrun")
    if "MASTER_ADDR" not in os.environ and numbers["WORLD_SIZE"] > 1:
        raise ConfigError(
            f"WORLD_SIZE={numbers['WORLD_SIZE']} without MASTER_ADDR, so the ranks cannot meet; start them with "
            "torchrun"
        )
    return numbers["RANK"], numbers["WORLD_SIZE"]


def _choose_device(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r} is not known; use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device; use device=cpu or auto")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {index} has no CUDA device of its own ({torch.cuda.device_count()} on this node); "
            f"start at most {torch.cuda.device_count()} ranks a node"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
