"""Files in folders that somebody else has sent or can write to: only regular files are read, no link is written to.

A file is named by a folder and a plain name, because names come from files too: from manifests, metadata and indexes.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from pathlib import Path

MOST_TEXT_BYTES = 256 << 20
"""The most bytes of a file that is read as a whole. A manifest has about 100 bytes for a tensor or a file."""


def regular_file(folder: str | os.PathLike[str], name: object) -> Path:
    """Return the path of the regular file ``name`` in ``folder``, with its links resolved.

    A link may lead to another file in the folder. In a folder ``snapshots/REVISION``, which is how the cache of Hugging
    Face's hub stores models, a link may also lead to the folder ``blobs`` beside ``snapshots``.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: ``name`` is not a plain name; or it is a directory, a device or a pipe; or a link leads elsewhere.
    """
    if type(name) is not str or name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
        raise OSError(errno.EINVAL, "this is not the plain name of a file in the folder", f"{name}")
    inside, given = Path(os.path.realpath(folder)), Path(folder, name)
    found = Path(os.path.realpath(given))
    if not found.is_relative_to(inside):
        blobs = inside.parent.parent / "blobs"
        if inside.parent.name != "snapshots" or not found.is_relative_to(blobs):
            raise OSError(errno.EINVAL, "this link leads out of its folder. Copy the file into the folder", str(given))
    if not stat.S_ISREG(os.stat(found).st_mode):
        raise OSError(errno.EINVAL, "this is not a regular file", str(given))
    return found


def open_regular(folder: str | os.PathLike[str], name: object) -> io.FileIO:
    """Open the regular file ``name`` in ``folder`` for reading, unbuffered. It raises as :func:`regular_file` does."""
    return io.FileIO(regular_file(folder, name))


def read_text(folder: str | os.PathLike[str], name: object) -> str:
    """Return the text of the regular file ``name`` in ``folder``.

    Raises:
        OSError: it cannot be read, as in :func:`regular_file`, or has more than ``MOST_TEXT_BYTES``.
        UnicodeDecodeError: it is no UTF-8.
    """
    with open_regular(folder, name) as file:
        if (nbytes := os.fstat(file.fileno()).st_size) > MOST_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"this has {nbytes} bytes, at most {MOST_TEXT_BYTES} are read", file.name)
        return file.readall().decode()


def create(path: str | os.PathLike[str], flags: int) -> int:
    """Open ``path`` for writing; it must not be a link. An ``opener`` of Python's ``open`` and ``io.FileIO``."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class Directory:
    """A directory that is held open, whose files are created, opened and renamed by its descriptor.

    Whoever can write to the folder around a directory can move it away, and put another one or a link in its place.
    Invariant: nothing is written but files that were made for it. A file that is created is new, and no link is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    @staticmethod
    def make(path: Path) -> Directory:
        path.mkdir()
        return Directory(path)

    def opener(self, name: str, flags: int) -> int:
        """Open the file ``name``. An ``opener`` of Python's ``open``, which should have the mode ``"x"``."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None

    def reopen(self, name: str) -> io.FileIO:
        """Open the file ``name``, created by another rank, for writing into it, unbuffered.

        Raises:
            OSError: it is missing, or is a link, also a hard link, which may be of somebody else's file.
        """
        file = io.FileIO(name, "r+", opener=self.opener)
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
            return file
        file.close()
        raise OSError(errno.EINVAL, "this is not the file that was made here", str(self.path / name))

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` to the new file ``name``, and to disk."""
        with open(name, "xb", opener=self.opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def move(self, name: str, target: Path) -> None:
        """Move the file ``name`` to another directory."""
        os.replace(name, target, src_dir_fd=self._descriptor)

    def sync(self) -> None:
        """Flush the names in the directory to disk. Raise ``OSError`` if another one was put in its place."""
        os.fsync(self._descriptor)
        if not os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path)):
            text = "somebody has put something else in its place: save to a folder that only you can write to"
            raise OSError(errno.ESTALE, text, str(self.path))

    def close(self) -> None:
        """Close the descriptor. This may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def delete(path: Path) -> None:
    """Delete a directory as far as possible, or a link, a file or a pipe of its name. A pipe must not be opened."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write ``data`` to a new file beside ``path`` and rename it, so that readers find the old or the new file.

    If ``path`` is a link, the link is replaced, not the file that it leads to.
    """
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
    try:
        with open(aside, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
