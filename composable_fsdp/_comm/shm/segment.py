"""Memory that other processes can map: anonymous files, of which nothing is left once nobody maps them."""

from __future__ import annotations

import os
import weakref
from collections import deque
from heapq import heappop, heappush

import torch

__all__ = ["BLOCK_BYTES", "SLOT_BYTES", "Blocks", "Segment", "map_segment"]

SLOT_BYTES = 2 << 20
"""What one rank stages at a time. Two slots take turns, so that a rank fills one while its peers read the other."""

BLOCK_BYTES = 2 * SLOT_BYTES

_KEPT_BYTES = 16 << 20
"""Of idle staging. What goes beyond is given back, as after a burst of launches; taking it again costs page faults."""


def map_segment(descriptor: int) -> torch.Tensor:
    """All bytes of an open file, mapped for as long as the tensor or a view of it lives. ``descriptor`` may be closed.

    Raises:
        OSError: the file cannot be mapped here.
    """
    path, nbytes = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    try:
        with torch.inference_mode(False):  # a tensor for any use
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(f"{nbytes} bytes of shared memory cannot be mapped: {error}") from error


class Segment:
    """``nbytes`` of shared memory made by this process: zeros, which take no memory until they are written."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("composable_fsdp")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, nbytes)
        self.memory = map_segment(self.descriptor)

    def give_back(self) -> None:
        """Frees the memory. Mappings stay, here and at the peers, and read zeros."""
        os.ftruncate(self.descriptor, 0)
        os.ftruncate(self.descriptor, self.nbytes)


class Blocks:
    """The staging blocks of one rank, each a segment of its own, known by their number.

    Invariant: a block is either free, or in use by one operation until every rank has completed that.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._written: list[int] = []
        """By block, the bytes from its start that may take memory."""
        self._free: list[int] = []  # a heap: lower ones first, so that few are ever written
        self._in_use: deque[tuple[int, int]] = deque()

    @property
    def written_bytes(self) -> int:
        """What all blocks may take of memory."""
        return sum(self._written)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take(self, sequence: int, nbytes: int) -> int:
        """A block for the operation ``sequence``, which will write its first ``nbytes``; a new one if none is free."""
        if not self._free:
            self.segments.append(Segment(BLOCK_BYTES))
            self._written.append(0)
            self._free.append(len(self.segments) - 1)
        block = heappop(self._free)
        self._in_use.append((sequence, block))
        self._written[block] = max(self._written[block], nbytes)
        return block

    def release(self, completed: int) -> None:
        """Frees the blocks of the operations before ``completed``, which every rank has completed."""
        while self._in_use and self._in_use[0][0] < completed:
            _, block = self._in_use.popleft()
            heappush(self._free, block)
            if sum(self._written[b] for b in self._free) > _KEPT_BYTES:
                last = max(self._free, key=lambda b: (self._written[b] > 0, b))
                self.segments[last].give_back()
                self._written[last] = 0
