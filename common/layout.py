"""ParallelLayout: the sizes of the parallel axes and which rank sits where.

A rank's coordinates follow from its number alone. Axes are ordered from the one that communicates most (fastest
varying: neighbouring ranks, the same node) to the one that communicates least, as in Megatron-LM (Narayanan et al.
2021, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from common.config import ConfigError

AXES = ("tp", "dap", "bp", "ep", "dp_shard", "pp", "dp_replicate")
"""Every axis, fastest varying first. `sp` has no size of its own: it runs over the ranks of `tp`."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes; their product is the world size.

    Raises ConfigError where a size is not a positive integer.
    """

    tp: int = 1
    """Tensor parallel: a layer's matrices are cut over these ranks."""
    dap: int = 1
    """Dynamic-axial parallel: activations are cut along the axis that attention does not mix."""
    bp: int = 1
    """Branch parallel: independent branches of a block run on different ranks."""
    ep: int = 1
    """Expert parallel: experts are dealt over these ranks."""
    dp_shard: int = 1
    """Data parallel; optimizer state (and more, by level) is cut over these ranks."""
    pp: int = 1
    """Pipeline parallel: layers are cut into stages."""
    dp_replicate: int = 1
    """Data parallel over replicas of everything the axes above hold."""

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"layout.{axis}={size!r} is not a positive integer; use 1 to leave the axis out")

    @property
    def world_size(self) -> int:
        """Number of ranks the layout needs."""
        return math.prod(self.sizes().values())

    @property
    def data_parallel(self) -> int:
        """Number of ranks that each read different samples (dp_shard x dp_replicate)."""
        return self.dp_shard * self.dp_replicate

    def sizes(self) -> dict[str, int]:
        """Axis name -> size, fastest varying first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> position of `rank` on it.

        Raises ValueError where `rank` is outside [0, world_size).
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the layout's {self.world_size} ranks (0..{self.world_size - 1})")
        position = {}
        for axis, size in self.sizes().items():
            rank, position[axis] = divmod(rank, size)
        return position

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; axes left out are at 0.

        Raises ValueError where an axis is unknown or a coordinate outside it.
        """
        unknown = set(coordinates) - set(AXES)
        if unknown:
            raise ValueError(f"unknown axis {sorted(unknown)[0]!r}; axes are {', '.join(AXES)}")
        rank, stride = 0, 1
        for axis, size in self.sizes().items():
            position = coordinates.get(axis, 0)
            if not 0 <= position < size:
                raise ValueError(f"{axis}={position} is outside the axis of {size} ranks (0..{size - 1})")
            rank += position * stride
            stride *= size
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """The rank lists that communicate over `axes` together: ranks that differ in no other axis.

        Every rank is in exactly one list, lists are in order of their first rank, members in rank order. No axes: one
        list with every rank.

        Raises ValueError where an axis name is unknown.
        """
        unknown = set(axes) - set(AXES)
        if unknown:
            raise ValueError(f"unknown axis {sorted(unknown)[0]!r}; axes are {', '.join(AXES)}")
        if not axes:
            return [list(range(self.world_size))]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = self.coordinates(rank)
            members.setdefault(tuple(position[axis] for axis in AXES if axis not in axes), []).append(rank)
        return sorted(members.values())

    def check_world(self, world_size: int) -> None:
        """Raises ConfigError where the layout does not use exactly `world_size` ranks."""
        if self.world_size != world_size:
            shape = " x ".join(f"{axis}={size}" for axis, size in self.sizes().items() if size > 1) or "all axes 1"
            raise ConfigError(
                f"layout {shape} needs {self.world_size} ranks but {world_size} were started; "
                f"start {self.world_size} ranks or change the sizes so that their product is {world_size}"
            )

    def __str__(self) -> str:
        return (
            " x ".join(
                f"{field.name}{getattr(self, field.name)}" for field in fields(self) if getattr(self, field.name) > 1
            )
            or "1 rank"
        )
