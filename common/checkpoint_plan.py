"""How flat pieces are written and read by `torch.distributed.checkpoint`: each as a chunk of the flattened tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from common.flat_shard import FlatShard


def as_shard(value: Tensor | FlatShard) -> FlatShard:
    """A whole tensor is the piece that covers it; every rank has it, and one writes it."""
    return value if isinstance(value, FlatShard) else FlatShard(value.detach().reshape(-1), 0, value.shape)


def _chunk(shard: FlatShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([shard.start]), sizes=torch.Size([len(shard.data)]))


class SavePieces(DefaultSavePlanner):
    """Writes every piece; of pieces that several ranks hold alike, one (the default planner leaves out the others)."""

    def __init__(self, pieces: dict[str, FlatShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(name, shard) for name, shard in self._pieces.items() if self._writes(shard)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[write_item.index.fqn].data

    @staticmethod
    def _writes(shard: FlatShard) -> bool:
        # An empty piece at 0 stands for a tensor without elements; any other has nothing to say.
        return len(shard.data) > 0 or shard.numel == 0

    @staticmethod
    def _item(name: str, shard: FlatShard) -> WriteItem:
        return WriteItem(
            index=MetadataIndex(name, torch.Size([shard.start])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(shard),
                properties=TensorProperties(dtype=shard.data.dtype),
                size=torch.Size([shard.numel]),
            ),
        )


class LoadPieces(DefaultLoadPlanner):
    """Fills the pieces of this rank from whatever chunks were written."""

    def __init__(self, pieces: dict[str, FlatShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, shard in self._pieces.items():
            stored: Any = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            if len(shard.data):
                items += create_read_items_for_chunk_list(name, stored, [_chunk(shard)])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        shard = self._pieces[read_item.dest_index.fqn]
        (offset,), (length,) = read_item.dest_offsets, read_item.lengths
        return shard.data[offset : offset + length]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """What was read is in place already."""
