"""Which elements of a whole tensor one rank holds, whatever cut it: the geometry of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from composable_fsdp._layout.shard import ShardLayout

__all__ = ["Box", "Cut", "Extent"]

Ranges = tuple[range, ...]


class Cut(NamedTuple):
    """What one mesh axis does to one dim, by the rule of ``torch.chunk``: piece ``rank`` of ``ranks`` remains.

    With ``blocks`` above one, what is there falls into so many first, and of each of them a piece remains: DTensor's
    strided shards.
    """

    dim: int
    ranks: int
    rank: int
    blocks: int = 1


class Box(NamedTuple):
    """A contiguous block: ``sizes`` elements per dim, at ``offsets`` of the whole and ``local_offsets`` of the part."""

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """The view of this block in ``part``, what a rank holds."""
        for dim, (offset, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        return part

    def pieces(self, shape: tuple[int, ...], limit: int) -> Iterator[Box]:
        """The box cut into boxes of which each spans at most ``limit`` elements of the whole of ``shape``, from its
        first to its last in memory, or is one element. In the order of memory. One box stays if it has no elements.
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
        """How the box lies in the memory of the whole of ``shape``: runs of one length, in elements, and where each of
        them begins, in the order of the box's own elements.
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
class Extent:
    """The part of a tensor of ``shape`` that one rank holds.

    Invariant: per dim, ``ranges`` are disjoint, ascending, not empty and do not touch; the part is their product, in
    that order.
    """

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @staticmethod
    def after(shape: tuple[int, ...], cuts: Iterable[Cut] = ()) -> Extent:
        """What ``cuts``, in their order, leave of a tensor of ``shape``."""
        ranges: list[Ranges] = [(range(length),) if length else () for length in shape]
        for cut in cuts:
            ranges[cut.dim] = _cut(ranges[cut.dim], cut)
        return Extent(tuple(shape), tuple(ranges))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(map(len, ranges)) for ranges in self.ranges)

    @property
    def is_empty(self) -> bool:
        """Whether the rank has no element."""
        return 0 in self.local_shape

    def boxes(self) -> Iterator[Box]:
        """The blocks of the part. They tile it; a scalar is one block of no dims."""
        for blocks in product(*map(_with_local_offsets, self.ranges)):
            offsets, local_offsets, sizes = zip(*blocks, strict=True) if blocks else ((), (), ())
            yield Box(offsets, local_offsets, sizes)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of ``whole``, which has the whole shape. A view where the part is one block."""
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
    """``length`` elements from the ``start``-th on, counted along ``ranges``."""
    for each in ranges:
        inside = each[start : start + length]
        if inside:
            yield inside
        length -= len(inside)
        start = max(0, start - len(each))


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    """The same elements, where one range begins at the end of the one before as one range."""
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
