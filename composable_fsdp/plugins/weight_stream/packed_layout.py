"""Buckets of full tensors in flat memory, and the messages of shards of which they are made. No communication.

A bucket is packed without gaps: tensors of a multiple of 16 bytes first, the others after them by the size of their
elements, so that each is aligned to its elements. Shards in a message are packed in the same way, each with the padding
of the rank that has most: the first rank has a full shard of everything, so that a message is never longer than what
that rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from composable_fsdp._core.layout import ALIGNMENT_BYTES, aligned_bytes
from composable_fsdp._extents import Cut, ShardExtent
from composable_fsdp.plugins.weight_stream.weight_names import PackedTensor, Unit

__all__ = ["Distribution", "MessageLayout", "PackedLayout", "Slot", "fill_buckets", "placed"]


@dataclass(frozen=True)
class PackedLayout:
    """The tensors in ``WeightBucket.packed``. It can be pickled: with it another process can read the bytes.

    Invariant: the tensors tile the bytes, up to at most 15 zeros at the end.

    Attributes:
        tensors: name, shape, dtype and offset in bytes of each, in the order of their offsets.
        nbytes: the size of the flat tensor.
        aliases: further names of tied tensors, with the names of their tensors.
    """

    tensors: tuple[PackedTensor, ...]
    nbytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)

    def unpack(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors by name, in the memory of ``packed``: 1-d and contiguous, uint8, ``nbytes`` long."""
        if packed.dtype != torch.uint8 or packed.shape != (self.nbytes,):
            raise ValueError(
                f"a layout of {self.nbytes} bytes needs a uint8 tensor of shape ({self.nbytes},), not "
                f"{packed.dtype} of shape {tuple(packed.shape)}."
            )
        parts = {t.name: packed[t.offset : t.offset + t.nbytes].view(t.dtype).view(t.shape) for t in self.tensors}
        return {name: part.data for name, part in parts.items()}  # a view would keep the memory, whatever becomes of it


def _order(tensor: PackedTensor | Distribution, nbytes: int) -> int:
    """Return the key to sort tensors by: first those after which everything is aligned, then by size of elements."""
    return -tensor.dtype.itemsize if nbytes % ALIGNMENT_BYTES else -ALIGNMENT_BYTES - 1


def placed(units: Iterable[Unit]) -> tuple[PackedLayout, list[tuple[Unit, int]]]:
    """Return the layout of a bucket of ``units``, and the units with their offsets in it."""
    offsets, end = [], 0
    for unit in sorted(units, key=lambda unit: _order(unit.tensors[0], unit.nbytes)):
        offsets.append((unit, end))
        end += unit.nbytes
    tensors = tuple(replace(each, offset=at + each.offset) for unit, at in offsets for each in unit.tensors)
    aliases = {alias: name for unit, _ in offsets for alias, name in unit.aliases.items()}
    return PackedLayout(tensors, aligned_bytes(end), aliases), offsets


def fill_buckets(costs: Sequence[int], limit: int) -> list[range]:
    """Cut consecutive units into buckets that cost at most ``limit`` each. One that costs more is alone."""
    buckets, begin, total = [], 0, 0
    for k, cost in enumerate(costs):
        if k > begin and total + cost > limit:
            buckets.append(range(begin, k))
            begin, total = k, 0
        total += cost
    return [*buckets, range(begin, len(costs))] if costs else []


@dataclass(frozen=True)
class Distribution:
    """The distribution of a tensor of ``shape`` over ranks, as it is sent.

    Args:
        shape: the global shape.
        dtype: of what is sent.
        cuts: for each axis of several ranks the dim, the number of ranks, and that of blocks as of ``Cut``, in the
            order in which they are made.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[tuple[int, int, int], ...] = ()

    def extent(self, *ranks: int) -> ShardExtent:
        """Return the extent of the rank with the indices ``ranks`` on the axes, by default of the first rank."""
        return _extent(self, ranks or (0,) * len(self.cuts))

    @cached_property
    def row_numel(self) -> int:
        """The elements of each rank's shard in a message."""
        return prod(self.extent().local_shape)

    @cached_property
    def row_bytes(self) -> int:
        return self.row_numel * self.dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def concatenates(self) -> bool:
        """The shards of the ranks, one after the other, are the full tensor."""
        return not self.cuts or (len(self.cuts) == 1 and self.cuts[0][0] == 0 and self.cuts[0][2] == 1)


@lru_cache(maxsize=4096)
def _extent(tensor: Distribution, ranks: tuple[int, ...]) -> ShardExtent:
    cuts = [Cut(dim, count, rank, blocks) for (dim, count, blocks), rank in zip(tensor.cuts, ranks, strict=True)]
    return ShardExtent.after(tensor.shape, cuts)


class Slot(NamedTuple):
    """A parameter in a message, and in the bucket that is made of it. Offsets are in bytes.

    Args:
        source: what the values are taken from.
        tensor: how it is distributed.
        place: where the full tensor begins in the bucket.
        offset: where it begins in each rank's row.
    """

    source: Any
    tensor: Distribution
    place: int
    offset: int = 0


class MessageLayout(NamedTuple):
    """A message that is all-gathered over the axes ``route``: one row from each rank, of ``width`` bytes.

    Invariant: slots do not overlap, and each is aligned to its elements.

    Args:
        route: numbers of axes, in the order of the cuts of the slots. It may be empty.
        slots: the parameters.
        width: the bytes of a row.
    """

    route: tuple[int, ...]
    slots: tuple[Slot, ...]
    width: int

    @staticmethod
    def of(route: tuple[int, ...], slots: Iterable[Slot]) -> MessageLayout:
        """Lay out ``slots``, in any order."""
        end, laid_out = 0, []
        for slot in sorted(slots, key=lambda slot: _order(slot.tensor, slot.tensor.row_bytes)):
            laid_out.append(slot._replace(offset=end))
            end += slot.tensor.row_bytes
        return MessageLayout(route, tuple(laid_out), aligned_bytes(max(1, end)))

    def unpack(self, rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Copy the full tensors to their places in ``packed``.

        Args:
            rows: the received rows, contiguous, uint8: a dim for each axis of the route, of the axis with the largest
                number first, then the width.
            packed: 1-d, contiguous, uint8, a multiple of 16 bytes.
        """
        axes = sorted(self.route, reverse=True)
        by_cut = rows.permute([*map(axes.index, self.route), -1])
        sources: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for dtype in dict.fromkeys(slot.tensor.dtype for slot in self.slots):
            source, place, size = by_cut.view(dtype), packed.view(dtype), dtype.itemsize
            first, start, width = int(source.storage_offset()), int(place.storage_offset()), self.width // size
            for slot in self.slots:
                tensor, row, begin, at = slot.tensor, slot.tensor.row_numel, slot.place // size, slot.offset // size
                if tensor.dtype != dtype or not row:
                    continue
                numel = prod(tensor.shape)
                if tensor.concatenates:  # the first ranks have a full shard each, and the next one may have a part
                    whole, rest = divmod(numel, row)
                    sources.append(source.as_strided((whole, row), (width, 1), first + at))
                    places.append(place.as_strided((whole, row), (row, 1), start + begin))
                    if rest:
                        sources.append(source.as_strided((rest,), (1,), first + at + whole * width))
                        places.append(place.as_strided((rest,), (1,), start + begin + whole * row))
                    continue
                full = place[begin : begin + numel].view(tensor.shape)
                for ranks in product(*(range(count) for _, count, _ in tensor.cuts)):
                    extent = tensor.extent(*ranks)
                    part = source[ranks][at : at + prod(extent.local_shape)].view(extent.local_shape)
                    for box in extent.boxes():
                        sources.append(box.of_part(part))
                        places.append(full[box.slices])
        if places:
            torch._foreach_copy_(places, sources)
