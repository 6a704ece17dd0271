"""Save and load planners for ``torch.distributed.checkpoint``, based on the blocks of tensors that each rank holds.

DCP's default plans follow the placements of DTensors, which cannot describe every shard that ``fully_shard`` makes of a
tensor-parallel shard. These plans follow the :class:`~composable_fsdp._layout.block.ShardExtent` of each local shard.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from composable_fsdp._memory.device_capabilities import is_accelerator
from composable_fsdp.checkpoint._dcp.contents import Contents

__all__ = ["LoadPlanner", "SavePlanner", "add_aliases"]


class SavePlanner(DefaultSavePlanner):
    """A planner that writes ``contents``. DCP merges the plans of the ranks and validates the result.

    Args:
        contents: what this rank has to save.
        written: called with the size in bytes of each item that is passed to the writer.
    """

    def __init__(self, contents: Contents, written: Callable[[int], None] = lambda count: None) -> None:
        super().__init__()
        self.contents = contents
        self.written = written
        self._blocks = {
            MetadataIndex(key, offsets): block
            for key, part in contents.parts.items()
            for offsets, block in part.blocks().items()
        }

    def create_local_plan(self) -> SavePlan:
        parts = self.contents.parts
        items = [_write_item(i, block.shape, parts[i.fqn].shape, block.dtype) for i, block in self._blocks.items()]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.contents.objects]
        return SavePlan(items, planner_data=self.contents.paths)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            data = self.contents.objects[write_item.index.fqn]
            self.written(len(data))
            return io.BytesIO(data)
        block = self._blocks[write_item.index]
        self.written(block.nbytes)
        return block

    def stage(self, plan: SavePlan) -> None:
        """Copy the tensors in ``plan`` to host memory and release all others."""
        indices = [item.index for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self._blocks = {index: _on_host(self._blocks[index]) for index in indices}
        self.contents = replace(self.contents, parts={})
        if any(block.is_pinned() for block in self._blocks.values()):
            torch.accelerator.synchronize()

    def nbytes(self, plan: SavePlan) -> int:
        """Return the number of bytes of all items in ``plan``, without file headers."""
        tensors = sum(self._blocks[i.index].nbytes for i in plan.items if i.type != WriteItemType.BYTE_IO)
        objects = (i.index.fqn for i in plan.items if i.type == WriteItemType.BYTE_IO)
        return tensors + sum(len(self.contents.objects[key]) for key in objects)


def _write_item(index: MetadataIndex, sizes: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> WriteItem:
    """Return the item for a block of these ``sizes`` at the offset in ``index``, of a tensor of this ``shape``."""
    assert index.offset is not None
    chunk = ChunkStorageMetadata(index.offset, torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _on_host(block: torch.Tensor) -> torch.Tensor:
    """Return a host copy of ``block``. A copy from an accelerator is complete once the accelerator is synchronized."""
    block = block.detach()
    on_accelerator = is_accelerator(block.device)
    host = torch.empty(block.shape, dtype=block.dtype, pin_memory=on_accelerator)
    return host.copy_(block, non_blocking=on_accelerator)


def add_aliases(metadata: Metadata, results: Iterable[list[WriteResult]], aliases: Mapping[str, str]) -> None:
    """Make each tensor readable under its ``aliases`` too."""
    keys: dict[str, list[str]] = {}
    for alias, key in aliases.items():
        if alias not in metadata.state_dict_metadata:
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            keys.setdefault(key, []).append(alias)
    for written in results:
        written += [
            replace(result, index=MetadataIndex(alias, result.index.offset, result.index.index))
            for result in written
            for alias in keys.get(result.index.fqn, ())
        ]


class LoadPlanner(DefaultLoadPlanner):
    """A planner that reads tensors directly into the given memory, and objects in serialized form.

    Args:
        metadata: DCP's metadata of the checkpoint.
        blocks: memory for this rank's blocks, by key and offsets. All keys must be in the metadata.
        objects: keys of objects to read. Their bytes are in ``read`` afterwards.
        done: called with the size in bytes of each piece that has been copied.
    """

    def __init__(
        self,
        metadata: Metadata,
        blocks: Mapping[str, Mapping[tuple[int, ...], torch.Tensor]],
        objects: Iterable[str] = (),
        done: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__()
        self.read: dict[str, bytes] = {}
        self._saved = metadata.state_dict_metadata
        self._blocks = blocks
        self._objects = list(objects)
        self._done = done

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, blocks in self._blocks.items():
            saved = self._saved[key]
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(torch.Size(at), block.shape) for at, block in blocks.items()]
            items += create_read_items_for_chunk_list(key, saved, chunks)
        for key in self._objects:
            assert isinstance(self._saved[key], BytesStorageMetadata)
            index, start = MetadataIndex(key), torch.Size([0])
            items.append(ReadItem(LoadItemType.BYTE_IO, index, start, index, start, start))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._blocks[index.fqn][tuple(index.offset)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._done(tensor.nbytes)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.read[read_item.dest_index.fqn] = value.getvalue()
        self._done(len(value.getbuffer()))
