"""DCP's file reader and writer, with checksums on writing and a safe unpickler for the metadata on reading."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._dcp.directory import METADATA
from composable_fsdp.checkpoint._dcp.manifest import FileRecord, Manifest
from composable_fsdp.errors import CheckpointError

__all__ = ["ChecksummingWriter", "read_metadata"]


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
        raw: _RawFile | None = None
        try:
            raw = _RawFile(path, mode)
            with _BufferedFile(raw) as file:
                yield file
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) or raw is None else raw.error
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise
        self.records[Path(path).name] = FileRecord(raw.bytes, f"{raw.checksum:08x}")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class ChecksummingWriter(FileSystemWriter):
    """DCP's writer with one synced file per rank. It records size and checksum of each file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.fs = self._file_system = _ChecksummingFileSystem()

    @property
    def records(self) -> dict[str, FileRecord]:
        """Records of all files that this process wrote, by file name."""
        return self._file_system.records

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write without the checksum that ``torch.save`` computes for each tensor: torch's readers do not check it."""
        with cast(Any, serialization_config).patch({"save.compute_crc32": False}):
            return super().write_data(plan, planner)

    def complete(
        self,
        metadata: Metadata,
        written: Sequence[tuple[list[WriteResult], Mapping[str, FileRecord]]],
        aliases: Mapping[contents.Path, contents.Path],
        step: int,
        ranks: int,
    ) -> None:
        """Write DCP's metadata and the manifest.

        Args:
            metadata: the metadata of the plan. Each tensor becomes readable under its ``aliases`` too.
            written: for each rank, the results of ``write_data`` and the records of its files.
            aliases: further paths of tensors, with the path in ``metadata``.
            step: training step.
            ranks: number of ranks that save.
        """
        keys: dict[str, list[str]] = {}
        for alias, key in ((contents.key_of(alias), contents.key_of(path)) for alias, path in aliases.items()):
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
        """Return the metadata without the path: the directory is renamed later, and pickled paths depend on the Python
        version.
        """
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
    """Read DCP's metadata of the checkpoint ``folder``.

    Raises:
        CheckpointError: the metadata is missing or damaged, or was not written by DCP.
    """
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
