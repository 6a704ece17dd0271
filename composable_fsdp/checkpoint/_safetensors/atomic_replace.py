"""Atomic replacement of a safetensors checkpoint: at every moment the directory has the complete old or new one.

Readers take ``model.safetensors``, or else the files that the index names. New files therefore get names that the old
ones do not have. One operation switches from the old checkpoint to the new: the rename of the file or index that
readers open, or the removal of ``model.safetensors`` if an index replaces it. Old files are deleted after it. Until all
files are complete and on disk, they are in a hidden directory that readers ignore.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from composable_fsdp.checkpoint._safetensors.file_layout import INDEX, SINGLE, FileLayout, TensorFiles

__all__ = ["Replacement", "has_parts", "sync"]

_INCOMPLETE = ".incomplete-"
_PART = re.compile(r"model-([0-9a-f]+-)?\d{5}-of-\d{5}\.safetensors")


def has_parts(folder: Path) -> bool:
    """Return whether ``folder`` has files of a checkpoint that consists of several."""
    return folder.is_dir() and any(_PART.fullmatch(path.name) for path in folder.iterdir())


@dataclass(frozen=True)
class Replacement:
    """The files of one save into ``folder``. ``token`` is unique to the save."""

    folder: Path
    token: str

    @property
    def aside(self) -> Path:
        """The directory for files until all are complete."""
        return self.folder / f"{_INCOMPLETE}{self.token}"

    def begin(self, files: TensorFiles) -> None:
        """Create all files at full size with their headers, and delete what interrupted saves left behind.

        Raises:
            OSError: the files could not be created, for example because the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"{_INCOMPLETE}*"):
            shutil.rmtree(old)
        self.aside.mkdir()
        for file in files.files:
            with open(self.aside / file.name, "wb") as opened:
                opened.write(file.header)
                opened.flush()
                _reserve(opened.fileno(), file.nbytes)

    def sees(self, file: FileLayout) -> bool:
        """Return whether a file that :meth:`begin` created on rank 0 is visible on this rank."""
        path = self.aside / file.name
        return path.is_file() and path.stat().st_size == file.nbytes

    def commit(self, files: TensorFiles) -> None:
        """Replace the old files with the new ones, which are complete and on disk."""
        if files.indexed:
            for file in files.files:
                os.replace(self.aside / file.name, self.folder / file.name)
            with open(self.aside / INDEX, "wb") as opened:
                opened.write(files.index)
                opened.flush()
                os.fsync(opened.fileno())
            sync(self.folder)
            os.replace(self.aside / INDEX, self.folder / INDEX)
            sync(self.folder)
            (self.folder / SINGLE).unlink(missing_ok=True)
        else:
            os.replace(self.aside / SINGLE, self.folder / SINGLE)
            sync(self.folder)
            (self.folder / INDEX).unlink(missing_ok=True)
        sync(self.folder)
        self.aside.rmdir()
        current = {file.name for file in files.files}
        for path in self.folder.iterdir():
            if _PART.fullmatch(path.name) and path.name not in current:
                path.unlink()

    def abandon(self) -> None:
        """Delete the incomplete files."""
        shutil.rmtree(self.aside, ignore_errors=True)


def _reserve(file: int, nbytes: int) -> None:
    """Allocate the disk space now, so that a full disk is an error here and not while ranks write."""
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.truncate(file, nbytes)


def sync(path: Path) -> None:
    """Flush a file to disk, or a directory, and with it the renames of files in it."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
