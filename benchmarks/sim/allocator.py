"""A model of torch's caching allocator for CUDA: which memory it reserves for a sequence of allocations and frees.

Sizes are rounded up to 512 bytes. Requests of up to 1 MiB come from segments of 2 MiB, requests below 10 MiB from
segments of 20 MiB, and each larger one begins a segment of its own size, rounded up to 2 MiB. A request takes the
smallest free block of its stream and its pool that is large enough; what is left over stays free, and free neighbours
are merged. With expandable segments, each stream and pool has one segment, which grows by pages of 2 MiB (small
requests) or 20 MiB. Only ``empty_cache`` gives memory back to the device: free segments, and free pages at the end of
expandable ones. Torch's also gives back free pages in between.

The rules are those of torch 2.13's documentation of ``PYTORCH_CUDA_ALLOC_CONF`` and its ``c10/core/AllocatorConfig.h``.
Not modelled: garbage collection, limits of splitting, graphs, and the retry after memory has run out.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

__all__ = ["Allocator", "Block"]

_LEAST = 512
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_MEDIUM, _MEDIUM_SEGMENT = 10 << 20, 20 << 20
_ROUND = 2 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment. ``before`` and ``after`` are its neighbours."""

    pool: tuple[Hashable, bool]
    size: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class Allocator:
    """The segments of one device.

    Attributes:
        expandable: each stream and pool has one segment that grows.
        reserved: the bytes of all segments.
        allocated: the bytes of all blocks in use.
        peak_reserved: the largest number of reserved bytes.
        peak_allocated: the largest number of allocated bytes.
    """

    expandable: bool = False
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    _free: dict[tuple[Hashable, bool], list[Block]] = field(default_factory=dict)
    _ends: dict[tuple[Hashable, bool], Block] = field(default_factory=dict)
    """The last block of each expandable segment."""

    def allocate(self, nbytes: int, stream: Hashable) -> Block:
        """Return a block of at least ``nbytes`` bytes on ``stream``."""
        size = _rounded(nbytes, _LEAST)
        pool = stream, size <= _SMALL
        block = min((b for b in self._free.get(pool, ()) if b.size >= size), key=lambda b: b.size, default=None)
        if block is None:
            block = self._grown(pool, size) if self.expandable else self._new(pool, size)
        else:
            self._free[pool].remove(block)
        block.is_free = False
        self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give ``block`` back to its stream."""
        self.allocated -= block.size
        self._release(block)

    def empty_cache(self) -> None:
        """Give free segments, and free pages at the end of expandable ones, back to the device."""
        for pool, free in self._free.items():
            page = _SMALL_SEGMENT if pool[1] else _MEDIUM_SEGMENT
            for block in list(free):
                size = block.size
                if self.expandable:
                    size = size // page * page if self._ends[pool] is block else 0
                elif block.before is not None or block.after is not None:
                    size = 0
                self.reserved -= size
                block.size -= size
                if not block.size:
                    self._drop(block)

    def _drop(self, block: Block) -> None:
        """Forget a free ``block`` of no size."""
        self._free[block.pool].remove(block)
        if self._ends.get(block.pool) is block:
            del self._ends[block.pool]
            if block.before is not None:
                self._ends[block.pool] = block.before
                block.before.after = None

    def forget_peaks(self) -> None:
        """Set both peaks to the bytes of now."""
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def _new(self, pool: tuple[Hashable, bool], size: int) -> Block:
        if size <= _SMALL:
            return self._reserve(pool, _SMALL_SEGMENT)
        return self._reserve(pool, _MEDIUM_SEGMENT if size < _MEDIUM else _rounded(size, _ROUND))

    def _grown(self, pool: tuple[Hashable, bool], size: int) -> Block:
        """Return a block at the end of the segment of ``pool``, which grows."""
        end = self._ends.get(pool)
        there = end.size if end is not None and end.is_free else 0
        new = self._reserve(pool, _rounded(size - there, _SMALL_SEGMENT if pool[1] else _MEDIUM_SEGMENT))
        if end is not None and there:
            self._free[pool].remove(end)
            end.size += new.size
            new = end
        elif end is not None:
            end.after, new.before = new, end
        self._ends[pool] = new
        return new

    def _reserve(self, pool: tuple[Hashable, bool], size: int) -> Block:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(pool, size)

    def _split(self, block: Block, size: int) -> None:
        """Free what ``block`` has beyond ``size``, if that is worth a block."""
        left = block.size - size
        if left < _LEAST or (not self.expandable and not block.pool[1] and left <= _SMALL):
            return
        rest = Block(block.pool, left, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        self._release(rest)

    def _release(self, block: Block) -> None:
        """Merge ``block`` with its free neighbours, and make it free."""
        free = self._free.setdefault(block.pool, [])
        before, after = block.before, block.after
        if after is not None and after.is_free:
            free.remove(after)
            self._absorb(block, after)
        if before is not None and before.is_free:
            free.remove(before)
            self._absorb(before, block)
            block = before
        block.is_free = True
        free.append(block)

    def _absorb(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if self._ends.get(block.pool) is after:
            self._ends[block.pool] = block


def _rounded(size: int, unit: int) -> int:
    return max(unit, -(-size // unit) * unit)
