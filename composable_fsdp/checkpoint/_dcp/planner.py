"""What each rank writes and reads, for ``torch.distributed.checkpoint``: blocks of tensors as they are really cut.

DCP's own plans follow the placements of DTensors, which cannot describe every cut that ``fully_shard`` makes within a
tensor-parallel one; these follow the :class:`~composable_fsdp._layout.block.Extent` of what a rank holds.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
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

from composable_fsdp.checkpoint._dcp.contents import Contents
from composable_fsdp.checkpoint._state_dict.shard_view import Part

__all__ = ["LoadPlanner", "SavePlanner", "add_aliases"]


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of ``contents``. Merging the ranks' plans and validating the result are DCP's.

    Args:
        contents: of this rank.
        written: is told the bytes of each item that is handed to the writer.
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
        items = [_write_item(index, parts[index.fqn], block) for index, block in self._blocks.items()]
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
        """Takes copies, in host memory, of all that ``plan`` says, and lets go of the rest."""
        indices = [item.index for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self._blocks = {index: _on_host(self._blocks[index]) for index in indices}
        self.contents = replace(self.contents, parts={})
        if any(block.is_pinned() for block in self._blocks.values()):
            torch.accelerator.synchronize()

    def nbytes(self, plan: SavePlan) -> int:
        """Of what ``plan`` says, without headers."""
        tensors = sum(self._blocks[i.index].nbytes for i in plan.items if i.type != WriteItemType.BYTE_IO)
        objects = (i.index.fqn for i in plan.items if i.type == WriteItemType.BYTE_IO)
        return tensors + sum(len(self.contents.objects[key]) for key in objects)


def _write_item(index: MetadataIndex, part: Part, block: torch.Tensor) -> WriteItem:
    assert index.offset is not None
    data = TensorWriteData(
        ChunkStorageMetadata(index.offset, block.shape),
        TensorProperties(dtype=block.dtype),
        torch.Size(part.shape),
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _on_host(block: torch.Tensor) -> torch.Tensor:
    """A copy; of what an accelerator holds one that is complete when the accelerator is."""
    block = block.detach()
    on_accelerator = block.device.type != "cpu"
    host = torch.empty(block.shape, dtype=block.dtype, pin_memory=on_accelerator)
    return host.copy_(block, non_blocking=on_accelerator)


def add_aliases(metadata: Metadata, results: Iterable[list[WriteResult]], aliases: Mapping[str, str]) -> None:
    """Lets readers find what was written under one key under its ``aliases`` too."""
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
    """Reads tensors straight to where they belong, and objects as they were serialised.

    Args:
        metadata: of the checkpoint.
        blocks: of this rank's parts, by key and offsets. All keys are in the metadata.
        objects: keys to read. What is there is in ``read`` afterwards.
        done: is told the bytes of each piece that has been copied.
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
