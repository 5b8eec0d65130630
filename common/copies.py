"""Copies: parameters that several ranks of a model-parallel layout hold alike, as optimizers have to know them.

Tensor parallelism leaves norms and biases whole on every tp rank; a tied embedding is on the first and on the last
stage. The gradient norm must count such a parameter once, and where every rank has only a summand of its gradient
(sequence parallelism, the two uses of a tied weight) these are to be added up before the update.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Copies:
    """Parameters that all ranks of `group` hold alike.

    names: in the model of this rank; where ranks name them differently, in the same order. partial_gradients: each
    rank's gradient is a summand.
    """

    names: Collection[str]
    group: dist.ProcessGroup
    partial_gradients: bool

    @property
    def counts(self) -> bool:
        """Whether this rank is the one that counts them in a norm."""
        return dist.get_rank(self.group) == 0


def summing_groups(copies: Collection[Copies], name: str) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which the gradient of this parameter has to be summed."""
    return tuple(
        c.group for c in copies if c.partial_gradients and name in c.names and dist.get_world_size(c.group) > 1
    )
