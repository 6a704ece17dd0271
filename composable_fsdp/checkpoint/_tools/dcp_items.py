"""Access to single items in DCP's files. Each item is an archive in the format of ``torch.save``."""

from __future__ import annotations

import io
import mmap
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo

from composable_fsdp.errors import CheckpointError

__all__ = ["archive_in", "mapped_item"]


class _Window(io.RawIOBase):
    """A read-only view of ``length`` bytes of ``file`` from ``offset`` on."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def archive_in(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """Return the archive of one item in ``file`` as a file object."""
    return io.BufferedReader(_Window(file, offset, length))


def mapped_item(folder: Path, item: _StorageInfo) -> torch.Tensor:
    """Return the tensor ``item`` as a view of the memory-mapped file.

    DCP's own reader copies, and copying many large tensors in turn makes the heap grow beyond the memory in use.

    Raises:
        CheckpointError: the item was written with an extension of DCP, such as compression.
    """
    path = folder / item.relative_path
    if item.transform_descriptors:
        raise CheckpointError(
            f"{path} was written with {', '.join(item.transform_descriptors)}, which is not read here."
        )
    with path.open("rb") as file:
        with FakeTensorMode():  # reads the positions of the elements only
            described = torch.load(archive_in(file, item.offset, item.length), map_location="cpu", weights_only=True)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    storage = described.untyped_storage()
    if not storage.nbytes():
        return torch.empty(described.shape, dtype=described.dtype)
    begin = item.offset + storage._checkpoint_offset
    elements = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=begin).view(described.dtype)
    return elements.as_strided(described.shape, described.stride(), described.storage_offset())
