"""The files of ``torch.distributed.checkpoint``: written with checksums, read without running what is in them."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from composable_fsdp.checkpoint._dcp.directory import METADATA
from composable_fsdp.checkpoint._dcp.manifest import FileRecord
from composable_fsdp.errors import CheckpointError

__all__ = ["ChecksummingWriter", "read_metadata", "reader_of"]


class _Stream:
    """A file that takes the checksum of what goes by. Written from the beginning to the end, as DCP does."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.checksum = 0
        self.bytes = 0
        self.error: OSError | None = None
        """That of a write: torch's zip writer turns it into one that does not say what it was."""

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            count: int = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.bytes += count
        return count

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # DCP asks in order to sync; of the metadata it has not flushed all by then
        return cast(int, self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _ChecksummingFiles(FileSystem):
    """Keeps a record of every file that it wrote, and names the file of which writing failed."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        stream = None
        try:
            with super().create_stream(path, mode) as file:
                stream = _Stream(file)
                yield stream
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) or stream is None else stream.error
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise
        self.records[Path(path).name] = FileRecord(stream.bytes, f"{stream.checksum:08x}")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class ChecksummingWriter(FileSystemWriter):
    """DCP's writer, one synced file per rank, with the size and checksum of what it wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.fs = self._files = _ChecksummingFiles()

    @property
    def records(self) -> dict[str, FileRecord]:
        """Of every file that this process wrote, by name."""
        return self._files.records

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Without the checksum that ``torch.save`` puts beside each tensor: no reader of torch's looks at it."""
        with cast(Any, serialization_config).patch({"save.compute_crc32": False}):
            return super().write_data(plan, planner)

    def storage_meta(self) -> StorageMeta:
        """Without the path, which is not where the checkpoint will be, nor can every Python read another's."""
        return StorageMeta(save_id=self.save_id)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but what DCP's metadata consists of: no other code can run, whatever is in the file."""

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
    """DCP's description of the checkpoint ``folder``.

    Raises:
        CheckpointError: it is damaged, or not what DCP writes.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        assert isinstance(metadata, Metadata)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except Exception as error:  # whatever unpickling damaged bytes may raise
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    return metadata


def reader_of(folder: Path, metadata: Metadata) -> FileSystemReader:
    """DCP's reader, ready to read items that were planned with ``metadata``."""
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    return reader
