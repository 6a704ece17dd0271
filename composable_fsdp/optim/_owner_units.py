"""Units, which owners compute. Their tensors are blocks of tensors that are cut over the ranks of a mesh.

A *unit* is what one owner computes at once, such as a matrix: it has input tensors and output tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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


class AxisCut(NamedTuple):
    """A mesh axis that cuts tensor dim ``dim``, which is first split into ``blocks``."""

    axis: int
    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class Tiling:
    """How a tensor of ``shape`` is cut over a mesh of ``sizes``, by ``cuts`` in their order."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    cuts: tuple[AxisCut, ...] = ()

    @cached_property
    def uncut(self) -> tuple[int, ...]:
        """The mesh axes whose ranks hold the same shards."""
        cut = {each.axis for each in self.cuts}
        return tuple(axis for axis in range(len(self.sizes)) if axis not in cut)

    def extent(self, coordinate: Coordinate) -> ShardExtent:
        """Return the part of the tensor that the rank at ``coordinate`` holds."""
        key = tuple(coordinate[cut.axis] for cut in self.cuts)
        if key not in self._extents:
            cuts = [Cut(c.dim, self.sizes[c.axis], at, c.blocks) for c, at in zip(self.cuts, key, strict=True)]
            self._extents[key] = ShardExtent.after(self.shape, cuts)
        return self._extents[key]

    @cached_property
    def _extents(self) -> dict[Coordinate, ShardExtent]:
        return {}

    @cached_property
    def largest(self) -> int:
        """The elements of the largest shard: the first rank's, as of ``torch.chunk``."""
        return prod(self.extent((0,) * len(self.sizes)).local_shape)


def tiling_of(tensor: torch.Tensor) -> Tiling:
    """Return how ``tensor`` is cut: a parameter at rest, another DTensor without partial sums, or a plain tensor."""
    if not isinstance(tensor, DTensor):
        return Tiling(tuple(tensor.shape))
    sizes = tuple(tensor.device_mesh.shape)
    return Tiling(tuple(tensor.shape), sizes, axis_cuts(tensor.placements, sizes, find_parameter(tensor) is not None))


def axis_cuts(placements: Sequence[Placement], sizes: tuple[int, ...], is_parameter: bool) -> tuple[AxisCut, ...]:
    """Return the cuts of ``placements`` in their order.

    ``fully_shard`` cuts what tensor parallelism has left. A strided shard says so, but describes it exactly only if the
    rows can be divided evenly. So for its parameters the order is followed instead.
    """
    found = [
        AxisCut(axis, cast(Any, placement).dim, getattr(placement, "split_factor", 1))
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    ]
    for cut in found if is_parameter else ():
        later = prod(sizes[other.axis] for other in found if other.axis > cut.axis and other.dim == cut.dim)
        if cut.blocks == later > 1:
            return (*(other for other in found if other is not cut), AxisCut(cut.axis, cut.dim))
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
        return all(sender[axis] == owner[axis] for axis in self.tiling.uncut)

    @property
    def held(self) -> int:
        """The most bytes of this block that a rank may hold, about: its share of the largest shard."""
        share = min(prod(self.sizes), self.tiling.largest)
        return aligned_bytes(share * self.dtype.itemsize)


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

    @property
    def held(self) -> int:
        """The bytes of the largest shards of the inputs, or of the outputs."""
        return max(sum(slot.held for slot in slots) for slots in (self.inputs, self.outputs))
