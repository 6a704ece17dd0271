"""The manifest of a checkpoint: its files, their sizes and checksums. A save writes ``manifest.json`` last."""

from __future__ import annotations

import importlib.metadata
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composable_fsdp.checkpoint._coordination.mismatch import dtype_name
from composable_fsdp.checkpoint._dcp.directory import MANIFEST
from composable_fsdp.errors import CheckpointError

__all__ = ["FORMAT", "FileRecord", "Manifest", "TensorRecord", "body_of", "check_file"]

FORMAT = 1
"""Version of the manifest and of the checkpoint's keys. All versions up to this one can be read."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and its CRC-32 in hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class TensorRecord:
    """Shape of a full tensor, and its dtype without ``torch.``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint.

    Attributes:
        step: training step.
        ranks: number of ranks that saved.
        files: files by name, except the manifest, which contains its own checksum.
        tensors: tensors by key, including aliases.
        library: version of composable_fsdp that saved.
        torch: version of torch that saved.
    """

    step: int
    ranks: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    library: str
    torch: str

    @staticmethod
    def of(step: int, ranks: int, files: Mapping[str, FileRecord], metadata: Metadata) -> Manifest:
        """Describe a checkpoint that this library and torch have saved, with DCP's ``metadata``, aliases included."""
        tensors = {
            key: TensorRecord(tuple(saved.size), dtype_name(saved.properties.dtype))
            for key, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }
        return Manifest(step, ranks, files, tensors, _library_version(), torch.__version__)

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder`` and sync it to disk."""
        body = {"format": FORMAT, **asdict(self)}
        with (folder / MANIFEST).open("w") as file:
            json.dump({"crc32": _checksum(body), "manifest": body}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of the checkpoint ``folder``.

        Raises:
            CheckpointError: the manifest is missing or damaged, or has a newer format.
        """
        body = body_of(folder)
        version = body.pop("format")
        if _is_newer(version):
            raise CheckpointError(
                f"{folder} has format version {version}, written by composable_fsdp {body.get('library')}; this one "
                f"reads versions up to {FORMAT}. Update composable_fsdp."
            )
        body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
        body["tensors"] = {key: TensorRecord(tuple(t["shape"]), t["dtype"]) for key, t in body["tensors"].items()}
        return Manifest(**body)


def body_of(folder: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint ``folder``, in any format version, as a dict.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text())
        body = dict(document["manifest"])
        version = body["format"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if not _is_newer(version) and document.get("crc32") != _checksum(document["manifest"]):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit.")
    return body


def _is_newer(version: object) -> bool:
    return isinstance(version, int) and version > FORMAT


def _checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def check_file(path: Path, record: FileRecord, *, contents: bool = True) -> None:
    """Compare the file ``path`` with its ``record``; only its size unless ``contents``.

    Raises:
        CheckpointError: the file is missing, truncated, changed or unreadable. The text names it.
    """
    try:
        _check(path, record, contents)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _check(path: Path, record: FileRecord, contents: bool) -> None:
    size = path.stat().st_size
    if size != record.bytes:
        raise CheckpointError(f"{path} has {size} bytes instead of {record.bytes}: it is truncated or overwritten.")
    if not contents:
        return
    checksum, block = 0, bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(memoryview(block)[:count], checksum)
    if f"{checksum:08x}" != record.crc32:
        raise CheckpointError(f"{path} is damaged: its CRC-32 is {checksum:08x} instead of {record.crc32}.")


def _library_version() -> str:
    """Return the installed version of composable_fsdp."""
    try:
        return importlib.metadata.version("composable-fsdp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
