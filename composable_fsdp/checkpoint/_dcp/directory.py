"""A folder of checkpoints, and the manifest of each: its files with their sizes and checksums.

The last complete checkpoint in a folder can be loaded at any time, even after a crash. A checkpoint ``step-00000020``
is written as ``step-00000020.partial``, the manifest last, and renamed once all of it is on disk. An existing
checkpoint of the same step is first renamed to ``step-00000020.old``, and is still valid until the new one has been
renamed. A directory is renamed to ``….deleted`` before it is deleted. If a process is killed, the names show the state
of each directory, and the next save cleans up the folder. Other names, such as ``step-00000020-best.old``, are the
user's. A link in place of a checkpoint is treated as the checkpoint; only the link is renamed or deleted.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from composable_fsdp._consistency.verify_ranks import library_version
from composable_fsdp._files import Directory, create, delete, open_regular, read_text
from composable_fsdp.checkpoint._safetensors import sync
from composable_fsdp.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
METADATA = ".metadata"

_NAME = re.compile(r"step-(\d{8,})(\.partial|\.old|\.deleted)?")
PARTIAL, _OLD, _DELETED = ".partial", ".old", ".deleted"
_LOCK = ".lock"


def name_of(step: int, suffix: str = "") -> str:
    return f"step-{step:08d}{suffix}"


def _entries(path: str | os.PathLike[str]) -> dict[str, tuple[int, str]]:
    """Return the names in the folder ``path`` that saves give, with step and suffix; empty if there is no such folder.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be listed: {error.strerror}.") from error
    found = {match[0]: (int(match[1]), match[2] or "") for match in map(_NAME.fullmatch, names) if match}
    return {name: parsed for name, parsed in found.items() if name == name_of(*parsed)}


def has_file(path: Path) -> bool:
    """Return whether ``path`` is a file. Raise ``CheckpointError`` if that cannot be told."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _can_have(checkpoint: Path, *, manifest: bool) -> bool:
    """Return whether ``checkpoint`` is a directory, or has a ``manifest``; also if it cannot be read."""
    try:
        return has_file(checkpoint / MANIFEST) if manifest else stat.S_ISDIR(checkpoint.stat().st_mode)
    except FileNotFoundError:  # a link to nothing
        return False
    except (CheckpointError, OSError):
        return True


def candidates(path: str | os.PathLike[str]) -> dict[int, Path]:
    """Return all checkpoints in the folder ``path`` by ascending step, including damaged and unreadable ones.

    A save renames a directory only once it is complete, so a directory without a manifest is damaged. An older version
    of the same step is used instead, if it is still there.
    """
    found: dict[int, Path] = {}
    for name, (step, suffix) in _entries(path).items():  # "step-00000020" comes before "step-00000020.old"
        checkpoint = Path(path, name)
        if suffix == "" and _can_have(checkpoint, manifest=False):
            found[step] = checkpoint
        is_valid = suffix == _OLD and _can_have(checkpoint, manifest=True)
        if is_valid and (step not in found or not _can_have(found[step], manifest=True)):
            found[step] = checkpoint
    return dict(sorted(found.items()))


def checkpoints_at(path: str | os.PathLike[str]) -> list[Path]:
    """Return ``path`` if it is a checkpoint, else all checkpoints in the folder, the newest first, damaged ones too.

    Raises:
        CheckpointError: there is no checkpoint, or ``path`` is one that is incomplete or has lost its manifest.
    """
    given = Path(path)
    if has_file(given / MANIFEST):
        return [given]
    if has_file(given / METADATA):
        if _NAME.fullmatch(given.name):
            raise CheckpointError(f"{given / MANIFEST} is missing.")
        return [given]
    found = list(candidates(given).values())[::-1] if given.is_dir() else []
    if not found:
        what = "no complete checkpoint is in it" if given.exists() else "it does not exist"
        raise CheckpointError(f"{given} is not a checkpoint, and {what}.")
    return found


class PartialCheckpoint:
    """A checkpoint that rank 0 is writing to ``partial``. :meth:`commit` moves it to ``final``.

    The constructor locks the folder and removes what killed saves left behind. With the lock held, no other process can
    be writing these directories.
    """

    def __init__(self, path: Path, step: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.step = step
        self.final = path / name_of(step)
        self.partial = path / name_of(step, PARTIAL)
        self._has_ended = False
        with ExitStack() as held:
            held.callback(os.close, _acquire_lock(path))
            _clean_up(path)
            self._directory = held.enter_context(closing(Directory.make(self.partial)))
            self._held = held.pop_all()

    def commit(self, keep_last: int | None = None) -> None:
        """Move the written files, already synced, to ``final``. Then delete all but the ``keep_last`` highest steps."""
        self._directory.sync()
        old = self._path / name_of(self.step, _OLD)
        replaces = os.path.lexists(self.final)
        if replaces:
            self.final.rename(old)
        self.partial.rename(self.final)
        sync(self._path)
        try:
            obsolete = [old] if replaces else []
            if keep_last is not None:
                own = {step: found for step, found in candidates(self._path).items() if step != self.step}
                others = [found for found in own.values() if _can_have(found, manifest=True)]
                obsolete += others[: max(0, len(others) - keep_last + 1)]
            for each in obsolete:
                _remove(each)
        except (OSError, CheckpointError) as error:  # the new checkpoint is complete anyway
            logger.warning("%s: old checkpoints could not be deleted: %s", self._path, error)
        self._has_ended = True
        self._held.close()

    def abandon(self) -> None:
        """Delete the files written so far, unless they are committed or abandoned."""
        if not self._has_ended:
            delete(self.partial)
            self._has_ended = True
            self._held.close()


def _clean_up(path: Path) -> None:
    for name, (step, suffix) in _entries(path).items():
        if suffix == _OLD and not os.path.lexists(path / name_of(step)):
            (path / name).rename(path / name_of(step))  # killed between the two renames of a commit
        elif suffix in (_OLD, PARTIAL):
            _remove(path / name)
        elif suffix == _DELETED:
            delete(path / name)


def _remove(checkpoint: Path) -> None:
    obsolete = checkpoint.with_name(checkpoint.name.partition(".")[0] + _DELETED)
    delete(obsolete)
    checkpoint.rename(obsolete)
    delete(obsolete)  # the next save retries what could not be deleted


def _acquire_lock(path: Path) -> int:
    """Return the descriptor of a lock on the folder. The kernel releases it when it is closed or the process ends.

    It is a POSIX lock, which forked data loaders do not inherit. File systems without locks are not protected.
    """
    try:
        descriptor = create(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path / _LOCK} is no file to lock: {error.strerror}. Delete it.") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise CheckpointError(f"another process is writing to {path}. Wait for it, or save elsewhere.") from None
    except OSError:
        pass  # without locks
    return descriptor


# -- manifests


FORMAT = 3
"""Version of the manifest and of the checkpoint's keys."""


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and its CRC-32 in hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint: its step, the number of ranks that saved, and versions that they had.

    ``files`` are all but the manifest, which contains its own checksum.
    """

    step: int
    ranks: int
    files: Mapping[str, FileRecord]
    library: str = field(default_factory=library_version)
    torch: str = torch.__version__

    def write(self, folder: Directory) -> None:
        body = {"format": FORMAT, **asdict(self)}
        folder.write(MANIFEST, json.dumps({"crc32": _checksum(body), "manifest": body}, indent=1).encode())

    def share(self, rank: int = 0, ranks: int = 1) -> dict[str, FileRecord]:
        """Return the files that ``rank`` of ``ranks`` checks: each file once, about as many bytes on each rank."""
        by_size = sorted(self.files.items(), key=lambda item: (-item[1].bytes, item[0]))
        return dict(by_size[rank::ranks])


def read_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """Return the manifest and an empty text, or ``None`` and the damage. Another format is no damage, but an error."""
    path = folder / MANIFEST
    try:
        document = json.loads(read_text(folder, MANIFEST))
        body = dict(document["manifest"])
        version = body.pop("format")
        if isinstance(version, int) and version != FORMAT:
            text = f"{folder} has format version {version} of composable_fsdp {body.get('library')}, not {FORMAT}"
            raise CheckpointError(f"{text}. torch.distributed.checkpoint.load reads it.")
        if document.get("crc32") != _checksum({**body, "format": version}):
            raise ValueError("its checksum does not fit")
        body["files"] = files = {name: FileRecord(**record) for name, record in body["files"].items()}
        manifest = Manifest(**body)
        numbers = (manifest.step, manifest.ranks, *(record.bytes for record in files.values()))
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("a step, a number of ranks or of bytes is no number")
        return manifest, ""
    except FileNotFoundError:
        return None, f"{path} is missing."
    except OSError as error:
        return None, f"{path} cannot be read: {error}."
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return None, f"{path} is damaged: {error}."


def _checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def check_files(checkpoint: Path, files: Mapping[str, FileRecord], *, contents: bool) -> Iterator[str]:
    """Yield a sentence for each of ``files`` that differs from its record; only in size unless ``contents``."""
    for name, record in files.items():
        path = checkpoint / name
        try:
            with open_regular(checkpoint, name) as file:
                size = os.fstat(file.fileno()).st_size
                crc32 = _crc32(file) if contents and size == record.bytes else record.crc32
        except FileNotFoundError:
            yield f"{path} is missing."
        except OSError as error:
            yield f"{path} cannot be read: {error}."
        else:
            if size != record.bytes:
                yield f"{path} has {size} bytes instead of {record.bytes}: it is truncated or overwritten."
            elif crc32 != record.crc32:
                yield f"{path} is damaged: its CRC-32 is {crc32} instead of {record.crc32}."


def _crc32(file: io.FileIO) -> str:
    checksum, block = 0, bytearray(1 << 20)
    while count := file.readinto(block):
        checksum = zlib.crc32(memoryview(block)[:count], checksum)
    return f"{checksum:08x}"


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in the folder ``path``, the one of the highest step; ``None`` if there is
    none.

    Not collective. It only lists the folder; ``load(path, ..., fallback=True)`` finds the newest intact checkpoint.

    Raises:
        CheckpointError: the folder, or a directory in it that may be the newest checkpoint, cannot be read.
    """
    return next((found for found in reversed(candidates(path).values()) if has_file(found / MANIFEST)), None)
