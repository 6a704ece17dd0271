"""Blocks of a full tensor that one rank holds, however it was sharded: the geometry of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from composable_fsdp._layout.shard import ShardLayout

__all__ = ["Box", "Cut", "ShardExtent"]

Ranges = tuple[range, ...]


class Cut(NamedTuple):
    """One mesh axis that shards one tensor dim by the rule of ``torch.chunk``: chunk ``rank`` of ``ranks`` remains.

    With ``blocks`` above one the dim is first split into that many blocks, and each block is chunked. That is DTensor's
    strided sharding.
    """

    dim: int
    ranks: int
    rank: int
    blocks: int = 1


class Box(NamedTuple):
    """A contiguous block of ``sizes`` elements per dim.

    It starts at ``offsets`` in the full tensor and at ``local_offsets`` in the local shard.
    """

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this block in the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """Return the view of this block in ``part``, the local shard of a rank."""
        for dim, (offset, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        return part

    def pieces(self, shape: tuple[int, ...], limit: int) -> Iterator[Box]:
        """Yield smaller boxes that tile this one, in memory order.

        Each spans at most ``limit`` elements of the full tensor of ``shape``, from its first element to its last in
        memory, or is a single element. A box without elements yields itself.
        """
        dim = next((d for d, size in enumerate(self.sizes) if size > 1), None)
        if dim is None or 0 in self.sizes:
            yield self
            return
        stride = prod(shape[dim + 1 :])
        step = max(1, limit // stride)
        for start in range(0, self.sizes[dim], step):
            piece = self._narrow(dim, start, min(step, self.sizes[dim] - start))
            if stride > limit:
                yield from piece.pieces(shape, limit)
            else:
                yield piece

    def runs(self, shape: tuple[int, ...]) -> tuple[int, Iterator[int]]:
        """Return the length of the contiguous runs of this box in a full tensor of ``shape``, and where each run
        begins.

        All runs have the same length. Lengths and offsets are in elements; the offsets are in the order of the box's
        elements.
        """
        dim = len(shape)
        while dim > 0 and self.sizes[dim - 1] == shape[dim - 1]:
            dim -= 1
        cut = max(0, dim - 1)
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        steps = [range(o * s, (o + n) * s, s) for o, n, s in zip(self.offsets, self.sizes, strides, strict=True)]
        first = sum(r.start for r in steps[cut:])
        return prod(self.sizes[cut:]), (first + sum(at) for at in product(*steps[:cut]))

    def _narrow(self, dim: int, start: int, size: int) -> Box:
        def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:dim], value, *values[dim + 1 :])

        return Box(
            put(self.offsets, self.offsets[dim] + start),
            put(self.local_offsets, self.local_offsets[dim] + start),
            put(self.sizes, size),
        )


@dataclass(frozen=True, slots=True)
class ShardExtent:
    """The part of a tensor of ``shape`` that one rank holds.

    Invariant: in each dim the ``ranges`` are disjoint, ascending, not empty and not adjacent. The part is the product
    of the dims' ranges, in that order.
    """

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @staticmethod
    def after(shape: tuple[int, ...], cuts: Iterable[Cut] = ()) -> ShardExtent:
        """Return what remains of a tensor of ``shape`` after ``cuts``, applied in order."""
        ranges: list[Ranges] = [(range(length),) if length else () for length in shape]
        for cut in cuts:
            ranges[cut.dim] = _cut(ranges[cut.dim], cut)
        return ShardExtent(tuple(shape), tuple(ranges))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local shard."""
        return tuple(sum(map(len, ranges)) for ranges in self.ranges)

    @property
    def is_empty(self) -> bool:
        """True if the rank holds no element."""
        return 0 in self.local_shape

    def boxes(self) -> Iterator[Box]:
        """Yield the blocks that tile the local shard. A scalar is one block without dims."""
        for blocks in product(*map(_with_local_offsets, self.ranges)):
            offsets, local_offsets, sizes = zip(*blocks, strict=True) if blocks else ((), (), ())
            yield Box(offsets, local_offsets, sizes)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the full tensor ``whole``: a view if the part is one block, else a copy."""
        for dim, ranges in enumerate(self.ranges):
            pieces = [whole.narrow(dim, r.start, len(r)) for r in ranges]
            match pieces:
                case []:
                    whole = whole.narrow(dim, 0, 0)
                case [piece]:
                    whole = piece
                case _:
                    whole = torch.cat(pieces, dim)
        return whole


def _cut(ranges: Ranges, cut: Cut) -> Ranges:
    blocks = ShardLayout(sum(map(len, ranges)), cut.blocks)
    kept: list[range] = []
    for i in range(cut.blocks):
        block = blocks.owned_by(i)
        piece = ShardLayout(len(block), cut.ranks).owned_by(cut.rank)
        kept += _slice(ranges, block.start + piece.start, len(piece))
    return tuple(_joined(kept))


def _slice(ranges: Ranges, start: int, length: int) -> Iterator[range]:
    """Yield the ranges of ``length`` elements, counted along ``ranges`` from the ``start``-th element."""
    for each in ranges:
        inside = each[start : start + length]
        if inside:
            yield inside
        length -= len(inside)
        start = max(0, start - len(each))


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    """Yield ``ranges`` with adjacent ones merged."""
    last: range | None = None
    for each in ranges:
        if last is not None and last.stop == each.start:
            last = range(last.start, each.stop)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _with_local_offsets(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    offset = 0
    for each in ranges:
        yield each.start, offset, len(each)
        offset += len(each)
