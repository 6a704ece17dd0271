"""The save and load planners, the file writer and the reader for ``torch.distributed.checkpoint`` (DCP).

DCP's default planners ask a value for its blocks (``_Checkpointable``). Those of a DTensor follow its placements, which
cannot describe every shard that ``fully_shard`` makes of a tensor-parallel shard; :class:`Blocks` follows the
:class:`~composable_fsdp._api.extents.ShardExtent` of a local shard. These planners add to the defaults:

- blocks of values that are no tensors are found, where ``find_state_dict_object`` raises;
- objects are bytes, serialized when the save is planned. By default they are serialized when they are written, after
  training has gone on, and deserialized with ``weights_only=False``;
- tensors are copied to host memory after the plans are merged, so that each rank copies only what it writes.

The writer computes checksums of its files, and the metadata is unpickled safely.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from composable_fsdp._core.memory import is_accelerator
from composable_fsdp.checkpoint._dcp.contents import Contents, key_of
from composable_fsdp.checkpoint._dcp.contents import Path as ContentsPath
from composable_fsdp.checkpoint._dcp.directory import METADATA, FileRecord, Manifest
from composable_fsdp.errors import CheckpointError

__all__ = ["Blocks", "ChecksummingWriter", "SavePlanner", "read", "read_metadata"]


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
    """A planner that writes ``contents``. DCP merges the plans of the ranks and validates the result."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._staged: dict[MetadataIndex, torch.Tensor | bytes] = {}
        self.is_coordinator = False
        self.state_dict = {key_of(path): Blocks(part.shape, part.blocks()) for path, part in contents.parts.items()}
        self.state_dict |= {key_of(path): _serialized(key_of(path), value) for path, value in contents.objects.items()}
        self.mappings = {key_of(path): path for path in (*contents.parts, *contents.objects, *contents.aliases)}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor | bytes:
        if index in self._staged:
            return self._staged[index]
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Blocks) else value

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.lookup_object(write_item.index)
        return io.BytesIO(value) if isinstance(value, bytes) else value

    def stage(self, plan: SavePlan) -> None:
        """Copy the tensors in ``plan`` to host memory and release all others."""
        values = {item.index: self.lookup_object(item.index) for item in plan.items}
        self._staged = {i: _on_host(v) if isinstance(v, torch.Tensor) else v for i, v in values.items()}
        self.state_dict = {}
        if any(isinstance(value, torch.Tensor) and value.is_pinned() for value in self._staged.values()):
            torch.accelerator.synchronize()


def _serialized(key: str, value: object) -> bytes:
    data = io.BytesIO()
    try:
        torch.save(value, data)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # depending on the class
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for item, inner in items:
            _serialized(f"{key}[{item!r}]", inner)  # to name the innermost one
        raise CheckpointError(
            f"{key} cannot be pickled ({error}). Save what describes it instead: numbers, strings, lists, dicts and "
            "tensors"
        ) from error
    return data.getvalue()


def _on_host(block: torch.Tensor) -> torch.Tensor:
    """Return a host copy of ``block``. A copy from an accelerator is complete once the accelerator is synchronized."""
    on_accelerator = is_accelerator(block.device)
    host = torch.empty(block.shape, dtype=block.dtype, pin_memory=on_accelerator)
    return host.copy_(block.detach(), non_blocking=on_accelerator)


class _LoadPlanner(DefaultLoadPlanner):
    """A planner that reads tensors directly into the memory of ``Blocks``, and objects in serialized form."""

    def __init__(self, state: dict[str, Any], metadata: Metadata, changed: Callable[[], None]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = state
        self.metadata = metadata
        self._changed = changed

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        shard: torch.Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return shard

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._changed()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


def read(
    folder: str | os.PathLike[str],
    metadata: Metadata,
    state: dict[str, Any],
    changed: Callable[[], None] = lambda: None,
) -> None:
    """Read the values in ``state`` by key from the checkpoint ``folder`` with its ``metadata``.

    Args:
        state: blocks to fill, and any bytes for an object, which are replaced by its own.
        changed: called after each piece that has been copied to a block.
    """
    planner, reader = _LoadPlanner(state, metadata, changed), FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()


# -- files


class _RawFile(io.FileIO):
    """A file that computes a checksum of the bytes written. Writes must be sequential, as DCP's are."""

    checksum = 0
    bytes = 0
    error: OSError | None = None
    """The error of a failed write. torch's zip writer replaces it by one that does not say the reason."""

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.checksum = zlib.crc32(memoryview(data)[:count], self.checksum)
        self.bytes += count
        return count


class _BufferedFile(io.BufferedWriter):
    """A file that can be synced at any time: DCP syncs its files before it has flushed them."""

    def fileno(self) -> int:
        self.flush()
        return super().fileno()


class _ChecksummingFileSystem(FileSystem):
    """A file system that records size and checksum of every file written, and adds the file name to write errors."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        raw = _RawFile(path, mode)
        try:
            with _BufferedFile(raw) as file:
                yield file
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else raw.error
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        self.records[Path(path).name] = FileRecord(raw.bytes, f"{raw.checksum:08x}")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class ChecksummingWriter(FileSystemWriter):
    """DCP's writer with one synced file per rank. It records size and checksum of each file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.fs = file_system = _ChecksummingFileSystem()
        self.records = file_system.records

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Write without the checksum that ``torch.save`` computes for each tensor: torch's readers do not check it."""
        with cast(Any, serialization_config).patch({"save.compute_crc32": False}):
            return super().write_data(plan, planner)

    def complete(
        self,
        metadata: Metadata,
        written: Sequence[tuple[list[WriteResult], Mapping[str, FileRecord]]],
        aliases: Mapping[ContentsPath, ContentsPath],
        step: int,
        ranks: int,
    ) -> None:
        """Write DCP's metadata and the manifest.

        Args:
            metadata: the metadata of the plan. Each tensor becomes readable under its ``aliases`` too.
            written: for each rank, the results of ``write_data`` and the records of its files.
            aliases: further paths of tensors, with the path in ``metadata``.
            step: for the manifest, as ``ranks``.
            ranks: the number of ranks that save.
        """
        keys: dict[str, list[str]] = {}
        for alias, key in ((key_of(alias), key_of(path)) for alias, path in aliases.items()):
            if alias not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
                keys.setdefault(key, []).append(alias)
        results = [result for of_rank, _ in written for result in of_rank]
        results += [
            replace(result, index=MetadataIndex(alias, result.index.offset, result.index.index))
            for result in results
            for alias in keys.get(result.index.fqn, ())
        ]
        self.finish(metadata, [results])
        files = {name: record for _, records in written for name, record in records.items()} | self.records
        Manifest.of(step, ranks, files, metadata).write(Path(self.path))

    def storage_meta(self) -> StorageMeta:
        """Leave out the path: the directory is renamed later, and pickled paths depend on the version of Python."""
        return StorageMeta(save_id=self.save_id)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes that DCP's metadata consists of, so that a file cannot run other code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of any metadata")
        return super().find_class(module, name)


_PATHS = {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_ALLOWED = {
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


def read_metadata(folder: Path) -> Metadata:
    """Read DCP's metadata of the checkpoint ``folder``. Raise ``CheckpointError`` if it is missing or damaged."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        assert isinstance(metadata, Metadata)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except Exception as error:  # unpickling damaged bytes may raise anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    return metadata
