"""A folder of checkpoint directories. Its last complete checkpoint can be loaded at any time, even after a crash.

A checkpoint ``step-00000020`` is written as ``step-00000020.partial`` and renamed once all of it is on disk. An
existing checkpoint of the same step is first renamed to ``step-00000020.old``, and is still valid until the new one has
been renamed. A directory is renamed to ``….deleted`` before it is deleted. If a process is killed, the names show the
state of each directory, and the next save cleans up the folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
from pathlib import Path

from composable_fsdp.checkpoint._safetensors.save_safetensors import sync
from composable_fsdp.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "METADATA",
    "PartialCheckpoint",
    "candidates",
    "checkpoints_at",
    "complete",
    "find",
    "leftovers",
    "step_of",
]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
METADATA = ".metadata"

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL, _OLD, _DELETED = ".partial", ".old", ".deleted"
_LOCK = ".lock"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def complete(path: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the complete checkpoints in the folder ``path`` by ascending step; empty if there is no such folder."""
    folder = Path(path)
    found: dict[int, Path] = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():  # a step comes before its older version
        match = _NAME.fullmatch(name.removesuffix(_OLD))
        if match and (folder / name / MANIFEST).is_file():
            found.setdefault(int(match[1]), folder / name)
    return dict(sorted(found.items()))


def candidates(path: str | os.PathLike[str]) -> list[Path]:
    """Return all checkpoints in the folder ``path``, the newest first, including damaged ones.

    A save renames a directory only once it is complete, so a directory without a manifest is damaged.
    """
    folder = Path(path)
    found = complete(folder)
    for name in os.listdir(folder) if folder.is_dir() else []:
        if (match := _NAME.fullmatch(name)) and (folder / name).is_dir():
            found.setdefault(int(match[1]), folder / name)
    return [found[step] for step in sorted(found, reverse=True)]


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint from :func:`candidates`."""
    match = _NAME.match(checkpoint.name)
    assert match is not None
    return int(match[1])


def leftovers(path: str | os.PathLike[str]) -> list[str]:
    """Return the names that killed saves left in the folder ``path``. The next save cleans them up."""
    suffixes = (_PARTIAL, _OLD, _DELETED)
    return sorted(name for name in os.listdir(path) if _NAME.match(name) and name.endswith(suffixes))


def find(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest checkpoint in the folder ``path``.

    Raises:
        CheckpointError: there is no checkpoint, or it is incomplete or has lost its manifest.
    """
    found = checkpoints_at(path)[0]
    if not (found / MANIFEST).is_file() and not (found == Path(path) and (found / METADATA).is_file()):
        raise CheckpointError(f"{found / MANIFEST} is missing.")
    return found


def checkpoints_at(path: str | os.PathLike[str]) -> list[Path]:
    """Return ``path`` if it is a checkpoint, else all checkpoints in the folder, the newest first, damaged ones too.

    Raises:
        CheckpointError: there is no checkpoint, or ``path`` is one that is incomplete or has lost its manifest.
    """
    given = Path(path)
    if given.name.endswith((_PARTIAL, _DELETED)):
        raise CheckpointError(f"{given} is not complete: its save, or its deletion, did not come to an end.")
    if (given / MANIFEST).is_file():
        return [given]
    if (given / METADATA).is_file():
        if _NAME.fullmatch(given.name):
            raise CheckpointError(f"{given / MANIFEST} is missing.")
        return [given]
    found = candidates(given)
    if not found:
        unfinished = sorted(entry.name for entry in given.glob(f"*{_PARTIAL}")) if given.is_dir() else []
        hint = f" Never finished: {', '.join(unfinished)}." if unfinished else ""
        what = "no complete checkpoint is in it" if given.exists() else "it does not exist"
        raise CheckpointError(f"{given} is not a checkpoint, and {what}.{hint}")
    return found


class PartialCheckpoint:
    """A checkpoint of ``step`` that is being written to ``partial``. :meth:`commit` moves it to ``final``.

    Only rank 0 creates one. The constructor locks the folder and removes what killed saves left behind. With the lock
    held, no other process can be writing these directories.

    Raises:
        CheckpointError: another process is saving into the folder.
    """

    def __init__(self, path: Path, step: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.step = step
        self.final = path / _name(step)
        self.partial = path / (_name(step) + _PARTIAL)
        self._lock: int | None = _acquire_lock(path)
        try:
            _clean_up(path)
            self.partial.mkdir()
        except BaseException:
            self._unlock()
            raise

    def commit(self, keep_last: int | None = None) -> None:
        """Move the written files, already synced, to ``final``. Then delete all but the ``keep_last`` highest steps."""
        sync(self.partial)
        old = self.final.with_name(self.final.name + _OLD)
        replaces = self.final.exists()
        if replaces:
            self.final.rename(old)
        self.partial.rename(self.final)
        sync(self._path)
        obsolete = [old] if replaces else []
        if keep_last is not None:
            others = [found for step, found in complete(self._path).items() if step != self.step]
            obsolete += others[: max(0, len(others) - keep_last + 1)]
        try:
            for each in obsolete:
                _remove(each)
        except OSError as error:  # the new checkpoint is complete anyway
            logger.warning("%s: old checkpoints could not be deleted: %s", self._path, error)
        self._unlock()

    def abandon(self) -> None:
        """Delete the files written so far, unless they are committed."""
        if self._lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _clean_up(path: Path) -> None:
    for name in sorted(os.listdir(path)):
        entry = path / name
        if not _NAME.match(name):
            continue
        if name.endswith(_OLD) and not entry.with_suffix("").exists():
            entry.rename(entry.with_suffix(""))  # killed between the two renames of a commit
        elif name.endswith((_OLD, _PARTIAL)):
            _remove(entry)
        elif name.endswith(_DELETED):
            shutil.rmtree(entry, ignore_errors=True)


def _remove(directory: Path) -> None:
    obsolete = directory.with_name(_NAME.match(directory.name)[0] + _DELETED)  # type: ignore[index]
    shutil.rmtree(obsolete, ignore_errors=True)
    directory.rename(obsolete)
    shutil.rmtree(obsolete, ignore_errors=True)  # the next save retries what could not be deleted


def _acquire_lock(path: Path) -> int:
    """Return the descriptor of a lock on the folder. The kernel releases it when it is closed or the process ends.

    It is a POSIX lock, which forked data loaders do not inherit. File systems without locks are not protected.
    """
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise CheckpointError(f"{path} is being written to by {holder}. Wait for it, or save elsewhere.") from None
    except OSError:
        return descriptor
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor
