"""Units, which owners compute. Their tensors are blocks of tensors that are cut over the ranks of a mesh.

A *unit* is what one owner computes at once, such as a matrix: it has input tensors and output tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable_fsdp._core.layout import aligned_bytes
from composable_fsdp._core.params import find_parameter
from composable_fsdp._extents import Box, Cut, ShardExtent

Coordinate = tuple[int, ...]
"""The place of a rank in a mesh, one number for each axis."""


class Tiling(NamedTuple):
    """The cuts of a tensor of ``shape`` over a mesh, in order: the axis of each, and the cut of its first rank."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Cut], ...] = ()

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes whose ranks hold different shards."""
        return tuple(sorted(axis for axis, _ in self.cuts))

    def extent(self, coordinate: Coordinate) -> ShardExtent:
        """Return the part of the tensor that the rank at ``coordinate`` holds."""
        return _extent(self.shape, tuple(cut._replace(rank=coordinate[axis]) for axis, cut in self.cuts))


_extent = lru_cache(1 << 12)(ShardExtent.after)


def tiling_of(tensor: torch.Tensor) -> Tiling:
    """Return how ``tensor`` is cut: a parameter at rest, another DTensor without partial sums, or a plain tensor."""
    if not isinstance(tensor, DTensor):
        return Tiling(tuple(tensor.shape))
    sizes = tuple(tensor.device_mesh.shape)
    return Tiling(tuple(tensor.shape), axis_cuts(tensor.placements, sizes, find_parameter(tensor) is not None))


def axis_cuts(
    placements: Sequence[Placement], sizes: tuple[int, ...], is_parameter: bool
) -> tuple[tuple[int, Cut], ...]:
    """Return the cuts of ``placements`` in their order.

    ``fully_shard`` cuts what tensor parallelism has left. A strided shard says so, but describes it exactly only if the
    rows can be divided evenly. So for its parameters the order is followed instead.
    """
    found = [
        (axis, Cut(cast(Any, placement).dim, sizes[axis], 0, getattr(placement, "split_factor", 1)))
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    ]
    for axis, cut in found if is_parameter else ():
        later = prod(other.ranks for of_axis, other in found if of_axis > axis and other.dim == cut.dim)
        if cut.blocks == later > 1:
            return (*(each for each in found if each[0] != axis), (axis, cut._replace(blocks=1)))
    return tuple(found)


class Slot:
    """One tensor of a unit: the block of ``sizes`` from ``offsets`` on of a tensor that is cut by ``tiling``."""

    def __init__(
        self,
        tiling: Tiling,
        dtype: torch.dtype,
        offsets: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.tiling, self.dtype = tiling, dtype
        self.offsets = (0,) * len(tiling.shape) if offsets is None else offsets
        self.sizes = tiling.shape if sizes is None else sizes
        self.nbytes = aligned_bytes(prod(self.sizes) * dtype.itemsize)

    def boxes(self, coordinate: Coordinate) -> Iterator[Box]:
        """Yield the boxes of this block that the rank at ``coordinate`` holds, with offsets in the block."""
        for box in self.tiling.extent(coordinate).boxes():
            sides = zip(box.offsets, box.local_offsets, box.sizes, self.offsets, self.sizes, strict=True)
            inside = [(max(o, b), lo, o, min(o + n, b + m), b) for o, lo, n, b, m in sides]
            if all(start < stop for start, _, _, stop, _ in inside):
                yield Box(
                    tuple(start - begin for start, *_, begin in inside),
                    tuple(lo + start - o for start, lo, o, _, _ in inside),
                    tuple(stop - start for start, _, _, stop, _ in inside),
                )

    def comes_from(self, sender: Coordinate, owner: Coordinate) -> bool:
        """Return whether ``owner`` receives the part of ``sender``: one of the ranks that hold it sends it."""
        return all(sender[axis] == owner[axis] for axis in range(len(owner)) if axis not in self.tiling.axes)


@dataclass(frozen=True, eq=False)
class Unit:
    """Tensors that one rank computes at once. ``cost`` is the time that it takes, in the same measure for all units."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    cost: float
    name: str = ""
    """The name in errors, such as that of the parameter."""

    @property
    def largest(self) -> int:
        """The bytes of the whole inputs, or of the whole outputs, whichever are more."""
        return max(sum(slot.nbytes for slot in slots) for slots in (self.inputs, self.outputs))
