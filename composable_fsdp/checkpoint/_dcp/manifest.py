"""The manifest of a checkpoint: its files, their sizes and checksums; and the search for damage by it.

A save writes ``manifest.json`` last.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composable_fsdp.checkpoint._coordination.mismatch import dtype_name
from composable_fsdp.checkpoint._dcp.directory import MANIFEST, candidates, complete
from composable_fsdp.errors import CheckpointError

__all__ = [
    "FORMAT",
    "FileRecord",
    "Manifest",
    "TensorRecord",
    "check_file",
    "damage_text",
    "latest",
    "problem_of",
    "problems_of",
    "read_manifest",
]

logger = logging.getLogger(__name__)

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
        return _manifest_of(folder, _body_of(folder))

    def share(self, rank: int = 0, ranks: int = 1) -> dict[str, FileRecord]:
        """Return the files that ``rank`` of ``ranks`` checks: each file once, about as many bytes on each rank."""
        by_size = sorted(self.files.items(), key=lambda item: (-item[1].bytes, item[0]))
        return dict(by_size[rank::ranks])


def read_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """Return the manifest of the checkpoint ``folder`` and an empty text, or ``None`` and the damage.

    Raises:
        CheckpointError: the manifest has a newer format, which does not count as damage.
    """
    try:
        body = _body_of(folder)
    except CheckpointError as error:
        return None, str(error)
    return _manifest_of(folder, body), ""


def _body_of(folder: Path) -> dict[str, Any]:
    """Read the manifest in any format version. Raise if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text())
        body = dict(document["manifest"])
        is_newer = _is_newer(body["format"])
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if not is_newer and document.get("crc32") != _checksum(body):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit.")
    return body


def _manifest_of(folder: Path, body: dict[str, Any]) -> Manifest:
    version = body.pop("format")
    if _is_newer(version):
        raise CheckpointError(
            f"{folder} has format version {version}, written by composable_fsdp {body.get('library')}; this one "
            f"reads versions up to {FORMAT}. Update composable_fsdp."
        )
    body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
    body["tensors"] = {key: TensorRecord(tuple(t["shape"]), t["dtype"]) for key, t in body["tensors"].items()}
    return Manifest(**body)


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
        size = path.stat().st_size
        crc32 = _crc32(path) if contents and size == record.bytes else record.crc32
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if size != record.bytes:
        raise CheckpointError(f"{path} has {size} bytes instead of {record.bytes}: it is truncated or overwritten.")
    if crc32 != record.crc32:
        raise CheckpointError(f"{path} is damaged: its CRC-32 is {crc32} instead of {record.crc32}.")


def problem_of(path: Path, record: FileRecord, *, contents: bool) -> str:
    """Return the text of the error of :func:`check_file`, empty if there is none."""
    try:
        check_file(path, record, contents=contents)
    except CheckpointError as error:
        return str(error)
    return ""


def _crc32(path: Path) -> str:
    checksum, block = 0, bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(memoryview(block)[:count], checksum)
    return f"{checksum:08x}"


def problems_of(checkpoint: Path, *, contents: bool = True) -> Iterator[str]:
    """Describe the damage in ``checkpoint``, which ``save`` wrote: one sentence for each damaged file.

    Args:
        checkpoint: a directory.
        contents: compare checksums too, which reads all files; otherwise only their sizes.

    Raises:
        CheckpointError: the manifest has a newer format.
    """
    manifest, problem = read_manifest(checkpoint)
    if manifest is None:
        yield problem
        return
    found = (problem_of(checkpoint / name, each, contents=contents) for name, each in manifest.share().items())
    yield from filter(None, found)


def latest(path: str | os.PathLike[str], *, verify: bool = False) -> Path | None:
    """Return the newest complete checkpoint in the folder ``path``, the one of the highest step; ``None`` if there is
    none.

    Not collective. Without ``verify`` it only lists the folder.

    Args:
        path: a folder of checkpoints.
        verify: return the newest checkpoint whose files have the recorded sizes and checksums. Damaged ones are logged
            as a warning. This process then reads all of that checkpoint, and newer ones up to their first damaged file.
            Call it on one process only, or use ``load(path, ..., fallback=True)``, where each rank reads a share.

    Raises:
        CheckpointError: with ``verify``, no checkpoint is intact, though there are some; the text lists the damage. Or
            one has a newer format.
    """
    if not verify:
        return next(reversed(complete(path).values()), None)
    damaged: dict[str, str] = {}
    for candidate in candidates(path):
        problem = next(problems_of(candidate), "")
        if not problem:
            if damaged:
                logger.warning("%s is the newest intact checkpoint. Damaged:%s", candidate, damage_text(damaged))
            return candidate
        damaged[candidate.name] = problem
    if damaged:
        raise CheckpointError(f"no checkpoint in {path} is intact:{damage_text(damaged)}")
    return None


def damage_text(damaged: dict[str, str]) -> str:
    """Return one line for each damaged checkpoint, by name."""
    return "".join(f"\n  {name}: {problem}" for name, problem in damaged.items())


def _library_version() -> str:
    """Return the installed version of composable_fsdp."""
    try:
        return importlib.metadata.version("composable-fsdp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
