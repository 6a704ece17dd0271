"""Tensors whose memory is a file, so that a checkpoint of any size can be put together."""

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

__all__ = ["Mapped", "view_of"]


class Mapped:
    """A file of ``nbytes``, made if it is not there, to be written through tensors. On disk when the context ends.

    Raises:
        OSError: there is no room for it on the disk.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            reserve(self._file, max(nbytes, 1))  # a disk that is full must not be a bus error later
            self._map = mmap.mmap(self._file, max(nbytes, 1))
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Mapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The mapping itself lasts as long as tensors in it."""
        try:
            if error is None:
                self._map.flush()
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def view(self, offset: int, spec: Spec) -> torch.Tensor:
        """A tensor at ``offset`` bytes."""
        return view_of(self._map, offset, spec)

    @contextmanager
    def tensor(self, offset: int, spec: Spec) -> Iterator[torch.Tensor]:
        """A tensor at ``offset``, to be written in the body, after which its pages need not be in memory."""
        yield self.view(offset, spec)
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if spec.nbytes:
            self._map.flush(begin, offset + spec.nbytes - begin)
            self._map.madvise(mmap.MADV_DONTNEED, begin, offset + spec.nbytes - begin)


def view_of(memory: mmap.mmap | bytearray, offset: int, spec: Spec) -> torch.Tensor:
    """A tensor at ``offset`` bytes of ``memory``, with a storage of just its size."""
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    data = torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes, offset=offset)
    return data.view(spec.dtype).view(spec.shape)
