"""Save and load planners for ``torch.distributed.checkpoint`` (DCP), of the blocks of tensors that each rank holds.

DCP's default planners ask a value for its blocks (``_Checkpointable``). Those of a DTensor follow its placements, which
cannot describe every shard that ``fully_shard`` makes of a tensor-parallel shard; :class:`Blocks` follows the
:class:`~composable_fsdp._layout.block.ShardExtent` of a local shard. These planners add to the defaults:

- blocks of values that are no tensors are found, where ``find_state_dict_object`` raises;
- objects are bytes, serialized when the save is planned. By default they are serialized when they are written, after
  training has gone on, and deserialized with ``weights_only=False``;
- tensors are copied to host memory after the plans are merged, so that each rank copies only what it writes;
- progress is reported.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from composable_fsdp._memory.device_capabilities import is_accelerator
from composable_fsdp.checkpoint._dcp.contents import Contents, key_of

__all__ = ["Blocks", "SavePlanner", "read"]


class Blocks:
    """This rank's blocks of a tensor of this ``shape``, by offsets. DCP's planners call its methods."""

    def __init__(self, shape: Sequence[int], blocks: Mapping[tuple[int, ...], torch.Tensor]) -> None:
        self._shape = torch.Size(shape)
        self._blocks = blocks

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        items = []
        for chunk, block in zip(self.__create_chunk_list__(), self._blocks.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties(dtype=block.dtype), self._shape)
            items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), block.shape) for at, block in self._blocks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._blocks[tuple(index.offset)]


class SavePlanner(DefaultSavePlanner):
    """A planner that writes ``contents``. DCP merges the plans of the ranks and validates the result.

    Attributes:
        written: called with the size in bytes of each item that is passed to the writer.
    """

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self.written: Callable[[int], None] = lambda count: None
        self._staged: dict[MetadataIndex, torch.Tensor | bytes] = {}
        self.is_coordinator = False
        self.state_dict = {key_of(path): Blocks(part.shape, part.blocks()) for path, part in contents.parts.items()}
        self.state_dict |= {key_of(path): data for path, data in contents.objects.items()}
        self.mappings = {key_of(path): path for path in (*contents.parts, *contents.objects, *contents.aliases)}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor | bytes:
        if index in self._staged:
            return self._staged[index]
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Blocks) else value

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.lookup_object(write_item.index)
        self.written(_nbytes(value))
        return io.BytesIO(value) if isinstance(value, bytes) else value

    def stage(self, plan: SavePlan) -> None:
        """Copy the tensors in ``plan`` to host memory and release all others."""
        values = {item.index: self.lookup_object(item.index) for item in plan.items}
        self._staged = {i: _on_host(v) if isinstance(v, torch.Tensor) else v for i, v in values.items()}
        self.state_dict = {}
        if any(isinstance(value, torch.Tensor) and value.is_pinned() for value in self._staged.values()):
            torch.accelerator.synchronize()

    def nbytes(self, plan: SavePlan) -> int:
        """Return the number of bytes of all items in ``plan``, without file headers."""
        return sum(_nbytes(self.lookup_object(item.index)) for item in plan.items)


def _nbytes(value: torch.Tensor | bytes) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes


def _on_host(block: torch.Tensor) -> torch.Tensor:
    """Return a host copy of ``block``. A copy from an accelerator is complete once the accelerator is synchronized."""
    on_accelerator = is_accelerator(block.device)
    host = torch.empty(block.shape, dtype=block.dtype, pin_memory=on_accelerator)
    return host.copy_(block.detach(), non_blocking=on_accelerator)


class _LoadPlanner(DefaultLoadPlanner):
    """A planner that reads tensors directly into the memory of ``Blocks``, and objects in serialized form."""

    def __init__(self, state: dict[str, Any], metadata: Metadata, done: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = state
        self.metadata = metadata
        self._done = done

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        shard: torch.Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return shard

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._done(tensor.nbytes)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


def read(
    folder: str | os.PathLike[str],
    metadata: Metadata,
    state: dict[str, Any],
    done: Callable[[int], None] = lambda count: None,
) -> None:
    """Read the values in ``state`` by key from the checkpoint ``folder``.

    Args:
        folder: the checkpoint.
        metadata: DCP's metadata of it. It has all keys.
        state: blocks to fill, and any bytes for an object, which are replaced by its own.
        done: called with the size in bytes of each piece that has been copied to a block.
    """
    planner, reader = _LoadPlanner(state, metadata, done), FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()
