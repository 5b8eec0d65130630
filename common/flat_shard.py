"""FlatShard: a piece of a tensor, as sharded state is named, saved and loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class FlatShard:
    """The elements [start, start + len(data)) of a tensor flattened to one dim; the pieces of all ranks tile it.

    Raises ValueError where the piece does not lie inside the tensor.
    """

    data: Tensor
    """1-D; may be empty."""
    start: int
    shape: torch.Size
    """Of the whole tensor."""

    def __post_init__(self) -> None:
        self.shape = torch.Size(self.shape)
        if self.data.ndim != 1 or not 0 <= self.start <= self.numel - len(self.data):
            raise ValueError(
                f"a piece of shape {tuple(self.data.shape)} at {self.start} does not lie in {self.numel} flat elements"
            )

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)
