"""The data of one conversion, and its incomplete output: a staging directory, and tensors in memory-mapped files."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._safetensors.atomic_replace import reserve
from composable_fsdp.checkpoint._tools.sources import Source, Spec

__all__ = ["Conversion", "MappedFile", "staging_directory", "staging_path", "view_of"]


@dataclass
class Conversion:
    """The tensors and objects to write in one conversion.

    Attributes:
        source: the checkpoint to read.
        tensors: shapes and dtypes to write, by path.
        aliases: further paths of these tensors.
        objects: values that are not tensors.
        done: called with the size in bytes of each block that was written.
    """

    source: Source
    tensors: dict[contents.Path, Spec]
    aliases: dict[contents.Path, contents.Path]
    objects: dict[contents.Path, Any]
    done: Callable[[int], None] = field(default=lambda count: None)

    @property
    def is_model_only(self) -> bool:
        """True if there is nothing but the model."""
        return all(path[0] == "model" for path in (*self.tensors, *self.objects))

    def fill(self, path: contents.Path, out: torch.Tensor) -> None:
        """Copy a full tensor into ``out``."""
        for box in self.source.boxes(path):
            part = out[box.slices]
            self.source.read(path, box, part)
            self.done(part.nbytes)


def staging_path(target: Path) -> Path:
    """Return the path of incomplete output for ``target``. It exists during a conversion, or after a killed one."""
    return target.parent / f".{target.name}.incomplete"


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """Create a directory on the target's disk for incomplete output. Output of killed conversions is deleted first."""
    staging = staging_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class MappedFile:
    """A file of ``nbytes``, created if missing, that is written through tensors and synced when the context ends.

    Raises:
        OSError: the disk is full.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            reserve(self._file, max(nbytes, 1))  # a full disk must fail here, not as a bus error later
            self._map = mmap.mmap(self._file, max(nbytes, 1))
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Sync and close the file. The mapping lives as long as tensors that view it."""
        try:
            if error is None:
                self._map.flush()
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def view(self, offset: int, spec: Spec) -> torch.Tensor:
        """Return a tensor at ``offset`` bytes."""
        return view_of(self._map, offset, spec)

    @contextmanager
    def tensor(self, offset: int, spec: Spec) -> Iterator[torch.Tensor]:
        """Yield a tensor at ``offset`` bytes to write to. Its memory pages are released afterwards."""
        yield self.view(offset, spec)
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if spec.nbytes:
            self._map.flush(begin, offset + spec.nbytes - begin)
            self._map.madvise(mmap.MADV_DONTNEED, begin, offset + spec.nbytes - begin)


def view_of(memory: mmap.mmap | bytearray, offset: int, spec: Spec) -> torch.Tensor:
    """Return a tensor at ``offset`` bytes of ``memory``, with a storage of exactly its size."""
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    data = torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes, offset=offset)
    return data.view(spec.dtype).view(spec.shape)
