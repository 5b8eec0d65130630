"""All-reduce in two levels: reduce-scatter inside each node, all-reduce of the shards across nodes, all-gather inside.

The slow links between nodes then carry each element once for a node instead of once for a rank. Whether that pays
depends on the links and the size, so it is measured: time = alpha + beta x bytes is fitted for both ways, and each size
takes the faster one (Thakur et al. 2005, "Optimization of collective communication operations in MPICH", section 3, for
the model).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.collectives import all_gather_flat, all_gather_object, all_reduce, reduce_scatter_flat
from common.runtime import Runtime

PROBE_BYTES = (1 << 16, 1 << 20, 1 << 23)
"""Sizes at which both ways are timed, bytes."""


@dataclass(frozen=True)
class AlphaBeta:
    """Time of a collective of n bytes: alpha + beta * n, seconds."""

    alpha: float
    beta: float

    def seconds(self, size: int) -> float:
        """Predicted time for `size` bytes."""
        return self.alpha + self.beta * size

    @classmethod
    def fit(cls, sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta:
        """Least squares on relative errors, so that small sizes count as much as large ones; neither is negative."""
        weights = 1.0 / np.asarray(seconds)
        matrix = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=float)], axis=1) * weights[:, None]
        alpha, beta = np.linalg.lstsq(matrix, np.ones(len(sizes)), rcond=None)[0]
        return cls(max(float(alpha), 0.0), max(float(beta), 0.0))


class TwoLevelAllReduce:
    """Sums tensors over all ranks; nodes are groups of `ranks_per_node` neighbouring ranks.

    Made by all ranks together. Without measurement (`calibrate`) every size goes in two levels.

    Raises ValueError where `ranks_per_node` does not divide the ranks.
    """

    def __init__(self, runtime: Runtime, ranks_per_node: int | None = None) -> None:
        size = runtime.local_world_size if ranks_per_node is None else ranks_per_node
        if size < 1 or runtime.world_size % size:
            raise ValueError(f"ranks_per_node={size} does not divide {runtime.world_size} ranks; nodes must be alike")
        self._runtime, self._local = runtime, size
        world = list(range(runtime.world_size))
        inside = [world[first : first + size] for first in range(0, len(world), size)]
        across = [world[place::size] for place in range(size)]
        self._world = runtime.group()
        self._inside = dist.new_subgroups_by_enumeration(inside)[0]
        self._across = dist.new_subgroups_by_enumeration(across)[0]
        self.flat: AlphaBeta | None = None
        self.two_level: AlphaBeta | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self._runtime.world_size // self._local

    def calibrate(self, sizes: Sequence[int] = PROBE_BYTES, repeats: int = 5) -> None:
        """Times both ways at these sizes (bytes) and fits them; the slowest rank's median counts, the same on all."""
        times: dict[str, list[float]] = {"flat": [], "two_level": []}
        for size in sizes:
            tensor = torch.ones(max(size // 4, 1), device=self._runtime.device)
            for name, reduce in (("flat", self.reduce_flat), ("two_level", self.reduce_two_level)):
                reduce(tensor)
                mine = statistics.median(self._time(reduce, tensor) for _ in range(repeats))
                times[name].append(max(all_gather_object(mine, self._world)))
        self.flat = AlphaBeta.fit(sizes, times["flat"])
        self.two_level = AlphaBeta.fit(sizes, times["two_level"])

    def takes_two_levels(self, size: int) -> bool:
        """Whether `size` bytes go in two levels; the same on every rank."""
        if self.nodes == 1 or self._local == 1:
            return False
        if self.flat is None or self.two_level is None:
            return True
        return self.two_level.seconds(size) < self.flat.seconds(size)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks in place, the way that is faster for its size; returns it."""
        if self.takes_two_levels(tensor.numel() * tensor.element_size()):
            return self.reduce_two_level(tensor)
        return self.reduce_flat(tensor)

    def reduce_flat(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks in place by one collective."""
        return all_reduce(tensor, self._world) if tensor.numel() else tensor

    def reduce_two_level(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks in place by two levels; a size that a node's ranks do not divide is padded."""
        if not tensor.numel():
            return tensor
        share = -(-tensor.numel() // self._local)
        whole = tensor.is_contiguous() and share * self._local == tensor.numel()
        flat = tensor.view(-1) if whole else tensor.new_zeros(share * self._local)
        if not whole:
            flat[: tensor.numel()] = tensor.reshape(-1)
        shard = torch.empty(share, dtype=tensor.dtype, device=tensor.device)
        reduce_scatter_flat(flat, self._inside, shard).wait()
        all_reduce(shard, self._across)
        own = flat[dist.get_rank(self._inside) * share :][:share]
        own.copy_(shard)
        all_gather_flat(flat, self._inside, own).wait()
        if not whole:
            tensor.copy_(flat[: tensor.numel()].view_as(tensor))
        return tensor

    def explain(self) -> str:
        """What was measured and what follows, in a line for each way."""
        if self.flat is None or self.two_level is None:
            return "not calibrated: every size goes in two levels"
        lines = [
            f"{name}: {1e6 * fit.alpha:.0f} us + {8e-9 / fit.beta if fit.beta else float('inf'):.2f} Gbit/s"
            for name, fit in (("flat", self.flat), ("two-level", self.two_level))
        ]
        return "; ".join(lines)

    def _time(self, reduce: object, tensor: Tensor) -> float:
        assert callable(reduce)
        self._runtime.barrier()
        start = time.perf_counter()
        reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter() - start
