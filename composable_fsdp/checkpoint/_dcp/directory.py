"""A folder of checkpoints, of which at every instant the last complete one can be loaded.

A checkpoint ``step-00000020`` is written as ``step-00000020.partial`` and renamed when every byte of it is on disk. One
of that step that is there already is renamed to ``step-00000020.old`` for that moment, and counts while the new one is
not in its place. What is to be deleted is renamed to ``….deleted`` first. So whenever a process is killed, a name says
what a directory is, and the next save puts the folder in order.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
from pathlib import Path

from composable_fsdp.errors import CheckpointError

__all__ = ["MANIFEST", "METADATA", "Writing", "candidates", "complete", "find", "leftovers", "options", "step_of"]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
METADATA = ".metadata"

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL, _OLD, _DELETED = ".partial", ".old", ".deleted"
_LOCK = ".lock"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def complete(path: str | os.PathLike[str]) -> dict[int, Path]:
    """The complete checkpoints in the folder ``path``, by step, ascending; none where there is no such folder."""
    folder = Path(path)
    names = os.listdir(folder) if folder.is_dir() else []
    steps = {int(match[1]) for name in names if (match := _NAME.fullmatch(name.removesuffix(_OLD)))}
    found = {}
    for step in sorted(steps):
        for candidate in (folder / _name(step), folder / (_name(step) + _OLD)):
            if (candidate / MANIFEST).is_file():
                found[step] = candidate
                break
    return found


def candidates(path: str | os.PathLike[str]) -> list[Path]:
    """All checkpoints in the folder ``path``, damaged ones too, the newest first.

    A save renames a directory only when all is in it, so one that has lost its manifest is damaged too.
    """
    folder = Path(path)
    found = complete(folder)
    for name in os.listdir(folder) if folder.is_dir() else []:
        if (match := _NAME.fullmatch(name)) and (folder / name).is_dir():
            found.setdefault(int(match[1]), folder / name)
    return [found[step] for step in sorted(found, reverse=True)]


def step_of(checkpoint: Path) -> int:
    """The step in the name of one of :func:`candidates`."""
    match = _NAME.match(checkpoint.name)
    assert match is not None
    return int(match[1])


def leftovers(path: str | os.PathLike[str]) -> list[str]:
    """Names of what killed saves left in the folder ``path``, and the next one puts in order."""
    suffixes = (_PARTIAL, _OLD, _DELETED)
    return sorted(name for name in os.listdir(path) if _NAME.match(name) and name.endswith(suffixes))


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that ``path`` is, or the newest one in it.

    Raises:
        CheckpointError: neither; or it was never finished, or lacks its manifest.
    """
    found = options(path)[0]
    if not (found / MANIFEST).is_file() and not (found == Path(path) and (found / METADATA).is_file()):
        raise CheckpointError(f"{found / MANIFEST} is missing.")
    return found


def options(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoint that ``path`` is, or those in it, damaged ones too, the newest first.

    Raises:
        CheckpointError: neither; or ``path`` is one that was never finished, or lacks its manifest.
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


def _sync_directory(path: Path) -> None:
    """Makes names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writing:
    """A checkpoint of ``step`` that is being written into ``partial``, and is at ``final`` after :meth:`commit`.

    One process, that of rank 0, has this. It first removes what killed saves left behind; it holds a lock on the folder
    meanwhile, so this is never what another process writes.

    Raises:
        CheckpointError: another process is saving into the folder.
    """

    def __init__(self, path: Path, step: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.step = step
        self.final = path / _name(step)
        self.partial = path / (_name(step) + _PARTIAL)
        self._lock: int | None = _locked(path)
        try:
            _tidy(path)
            self.partial.mkdir()
        except BaseException:
            self._unlock()
            raise

    def commit(self, keep_last: int | None = None) -> None:
        """Puts what has been written, synced files and a manifest, in place; then deletes all but ``keep_last``."""
        _sync_directory(self.partial)
        old = self.final.with_name(self.final.name + _OLD)
        replaces = self.final.exists()
        if replaces:
            self.final.rename(old)
        self.partial.rename(self.final)
        _sync_directory(self._path)
        doomed = [old] if replaces else []
        if keep_last is not None:
            others = [found for step, found in complete(self._path).items() if step != self.step]
            doomed += others[: max(0, len(others) - keep_last + 1)]
        try:
            for each in doomed:
                _remove(each)
        except OSError as error:  # the checkpoint is complete all the same
            logger.warning("%s: what is no longer needed could not be deleted: %s", self._path, error)
        self._unlock()

    def abandon(self) -> None:
        """Removes what has been written so far, unless it is committed."""
        if self._lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _tidy(path: Path) -> None:
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
    doomed = directory.with_name(_NAME.match(directory.name)[0] + _DELETED)  # type: ignore[index]
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # what resists is left to the next save


def _locked(path: Path) -> int:
    """The descriptor of a lock on the folder, which the kernel lifts when it is closed or the process ends.

    Where the file system has no locks there is none. POSIX locks: forked data loaders do not inherit them.
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
