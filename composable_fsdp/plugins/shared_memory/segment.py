"""Memory that other processes can map: anonymous files, which are freed when no process maps them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from collections import deque
from heapq import heappop, heappush

import torch

SLOT_BYTES = 2 << 20
"""The bytes staged per rank at a time. A rank fills one of two slots while its peers read the other."""

BLOCK_BYTES = 2 * SLOT_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE = 0x02 | 0x01
"""Linux: ``FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE``, which frees pages of a file whose size is sealed."""

_KEPT_BYTES = 16 << 20
"""The bytes of idle staging memory to keep, because new pages cost page faults. The rest is freed."""


def check_sealed(descriptor: int) -> None:
    """Raise ``OSError`` unless the size of the file ``descriptor``, which a peer sent, can never change.

    A peer that shrinks a file, or dies while it does, would end this process by SIGBUS at the next access.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
        raise OSError(errno.EPERM, "a peer sent memory that is not sealed against shrinking")


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def map_segment(descriptor: int) -> torch.Tensor:
    """Map the open file ``descriptor``, which may be closed then, as bytes for the life of the tensor and its views.

    Raises:
        OSError: the file cannot be mapped here.
    """
    path, nbytes = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    try:
        with torch.inference_mode(False):  # not an inference tensor
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(f"{nbytes} bytes of shared memory cannot be mapped: {error}") from error


class Segment:
    """``nbytes`` of zeroed shared memory created by this process. Pages take memory once they are written."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("composable_fsdp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, nbytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _seals())
        self.memory = map_segment(self.descriptor)

    def discard(self) -> None:
        """Free the memory. Mappings remain valid, here and in the peers, and read zeros."""
        if _LIBC.fallocate(self.descriptor, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(self.nbytes)) != 0:
            raise OSError(ctypes.get_errno(), "shared memory cannot be freed")


class Blocks:
    """The staging blocks of one rank, each a segment of its own, identified by an index.

    Invariant: a block is either free, or in use by one operation until every rank has completed that operation.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.written: list[int] = []
        """By block, the bytes from its start that may have been written."""
        self.free: list[int] = []
        """A heap of indices: reuse low ones first, so that few blocks are ever written."""
        self._in_use: deque[tuple[int, int]] = deque()

    def acquire(self, sequence: int, nbytes: int) -> int:
        """Return a free block, or a new one, for the operation ``sequence``, which will write its first ``nbytes``."""
        if not self.free:
            self.segments.append(Segment(BLOCK_BYTES))
            self.written.append(0)
            self.free.append(len(self.segments) - 1)
        block = heappop(self.free)
        self._in_use.append((sequence, block))
        self.written[block] = max(self.written[block], nbytes)
        return block

    def release(self, completed: int) -> None:
        """Free the blocks of the operations before ``completed``, which every rank has completed."""
        while self._in_use and self._in_use[0][0] < completed:
            _, block = self._in_use.popleft()
            heappush(self.free, block)
            if sum(self.written[b] for b in self.free) > _KEPT_BYTES:
                last = max(self.free, key=lambda b: (self.written[b] > 0, b))
                self.segments[last].discard()
                self.written[last] = 0
