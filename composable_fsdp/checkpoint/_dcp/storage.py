"""The load planner, the file writer and the reader for ``torch.distributed.checkpoint`` (DCP).

DCP's default planners ask a value for its blocks. Those of a DTensor follow its placements, which cannot describe every
shard that ``fully_shard`` makes of a tensor-parallel shard; those of a ``LocalShard`` follow its extent. The planners
here and in ``save.py`` add to the defaults:

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
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from composable_fsdp.checkpoint._dcp.directory import METADATA, FileRecord, Manifest
from composable_fsdp.errors import CheckpointError


class _LoadPlanner(DefaultLoadPlanner):
    """A planner that reads tensors directly into the memory of a ``LocalShard``, and objects in serialized form."""

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
        aliases: Mapping[str, str],
        step: int,
        ranks: int,
    ) -> None:
        """Write DCP's metadata and the manifest.

        Args:
            metadata: the metadata of the plan. Each tensor becomes readable under its ``aliases`` too.
            written: for each rank, the results of ``write_data`` and the records of its files.
            aliases: further keys of tensors, with the key in ``metadata``.
            step: for the manifest, as ``ranks``.
            ranks: the number of ranks that save.
        """
        keys: dict[str, list[str]] = {}
        for alias, key in aliases.items():
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
