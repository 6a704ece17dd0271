"""New safetensors files in a directory in place of old ones, so that at every moment one of the two is there, whole.

Readers take ``model.safetensors``, or else what the index names. So new files come beside the old ones, under names
that these do not have. The rename of the file or index that readers look at, or the removal of ``model.safetensors``
where an index is to count, changes from the old to the new, and then what was old goes. Until all is written and on
disk, files are in a directory of their own, which nobody takes for a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from composable_fsdp.checkpoint._safetensors.file_layout import INDEX, SINGLE, FileLayout, TensorFiles

__all__ = ["Replacement", "has_parts", "reserve"]

_INCOMPLETE = ".incomplete-"
_PART = re.compile(r"model-([0-9a-f]+-)?\d{5}-of-\d{5}\.safetensors")


def has_parts(folder: Path) -> bool:
    """Whether files of a checkpoint of several are in ``folder``."""
    return folder.is_dir() and any(_PART.fullmatch(path.name) for path in folder.iterdir())


@dataclass(frozen=True)
class Replacement:
    """The files of one save into ``folder``. ``token`` distinguishes it from all others."""

    folder: Path
    token: str

    @property
    def aside(self) -> Path:
        """Where files are until all are complete."""
        return self.folder / f"{_INCOMPLETE}{self.token}"

    def begin(self, files: TensorFiles) -> None:
        """Makes all files in their full size, with their headers. What saves that were killed have left goes.

        Raises:
            OSError: there is no room for them on the disk, for one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"{_INCOMPLETE}*"):
            shutil.rmtree(old)
        self.aside.mkdir()
        for file in files.files:
            with open(self.aside / file.name, "wb") as opened:
                opened.write(file.header)
                opened.flush()
                reserve(opened.fileno(), file.nbytes)

    def sees(self, file: FileLayout) -> bool:
        """Whether what :meth:`begin` made is visible from here."""
        path = self.aside / file.name
        return path.is_file() and path.stat().st_size == file.nbytes

    def commit(self, files: TensorFiles) -> None:
        """Puts the new files, which are complete and on disk, in the place of the old ones."""
        if files.indexed:
            for file in files.files:
                os.replace(self.aside / file.name, self.folder / file.name)
            with open(self.aside / INDEX, "wb") as opened:
                opened.write(files.index)
                opened.flush()
                os.fsync(opened.fileno())
            _sync(self.folder)
            os.replace(self.aside / INDEX, self.folder / INDEX)
            _sync(self.folder)
            (self.folder / SINGLE).unlink(missing_ok=True)
        else:
            os.replace(self.aside / SINGLE, self.folder / SINGLE)
            _sync(self.folder)
            (self.folder / INDEX).unlink(missing_ok=True)
        _sync(self.folder)
        self.aside.rmdir()
        current = {file.name for file in files.files}
        for path in self.folder.iterdir():
            if _PART.fullmatch(path.name) and path.name not in current:
                path.unlink()

    def abandon(self) -> None:
        """Removes what is not complete."""
        shutil.rmtree(self.aside, ignore_errors=True)


def reserve(file: int, nbytes: int) -> None:
    """A disk that is full must be an error here, and not while ranks write."""
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.truncate(file, nbytes)


def _sync(folder: Path) -> None:
    """Renames reach the disk with the directory that they are in."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
