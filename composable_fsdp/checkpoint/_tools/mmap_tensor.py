"""Tensors in memory-mapped files, to assemble checkpoints that are larger than memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from composable_fsdp.checkpoint._safetensors.atomic_replace import reserve
from composable_fsdp.checkpoint._tools.sources import Spec

__all__ = ["MappedFile", "view_of"]


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
