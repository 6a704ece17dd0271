"""Buckets of full tensors in flat memory, and the messages of shards of which they are made. No communication.

A bucket is packed without gaps: tensors of a multiple of 16 bytes first, the others after them by the size of their
elements, so that each is aligned to its elements. Shards in a message are packed in the same way, each with the padding
of the rank that has most: the first rank has a full shard of everything, so that a message is never longer than what
that rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod

import torch

from composable_fsdp._core.layout import ALIGNMENT_BYTES, TensorShards, aligned_bytes, unpack_parameter
from composable_fsdp._core.memory import contiguous_strides
from composable_fsdp._extents import Cut, ShardExtent
from composable_fsdp.plugins.weight_stream.weight_names import PackedTensor, Unit, moved

__all__ = [
    "HEADER_BYTES",
    "HEADER_NUMBERS",
    "Distribution",
    "MessageLayout",
    "PackedLayout",
    "Slot",
    "fill_buckets",
    "placed",
]

HEADER_NUMBERS = 8
HEADER_BYTES = 8 * HEADER_NUMBERS
"""Each rank's row of a message begins with int64 of which all ranks learn the largest."""


@dataclass(frozen=True)
class PackedLayout:
    """The tensors in ``WeightBucket.packed``. It can be pickled: with it another process can read the bytes.

    Invariant: the tensors tile the bytes in any order, up to at most 15 zeros at the end.

    Attributes:
        tensors: name, shape, dtype and offset in bytes of each, in the order of the model.
        nbytes: the size of the flat tensor.
        aliases: further names of tied tensors, with the names of their tensors.
    """

    tensors: tuple[PackedTensor, ...]
    nbytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)

    def unpack(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors by name, in the memory of ``packed``: 1-d and contiguous, uint8, ``nbytes`` long.

        Raises:
            ValueError: ``packed`` is another tensor.
        """
        if packed.dtype != torch.uint8 or packed.shape != (self.nbytes,) or not packed.is_contiguous():
            raise ValueError(
                f"a layout of {self.nbytes} bytes needs a contiguous uint8 tensor of shape ({self.nbytes},), not "
                f"{packed.dtype} of shape {tuple(packed.shape)}."
            )
        storage, start, device = packed.untyped_storage(), packed.storage_offset(), packed.device
        tensors = {}
        for each in self.tensors:
            at, rest = divmod(int(start) + each.offset, each.dtype.itemsize)
            if rest:
                raise ValueError(
                    f"{each.name!r} is not aligned: packed begins {start} bytes after that of its storage."
                )
            # No view: a view would keep ``packed`` alive, whatever becomes of the view.
            tensor = torch.empty(0, dtype=each.dtype, device=device)
            tensors[each.name] = tensor.set_(storage, at, each.shape, contiguous_strides(each.shape))
        return tensors


def _order(nbytes: int, itemsize: int) -> int:
    """Return the key to sort tensors by: first those after which everything is aligned, then by size of elements."""
    return -itemsize if nbytes % ALIGNMENT_BYTES else -ALIGNMENT_BYTES - 1


def placed(units: Sequence[Unit]) -> tuple[PackedLayout, list[int]]:
    """Return the layout of a bucket of ``units``, and the offset of each unit in it."""
    order = sorted(range(len(units)), key=lambda k: _order(units[k].nbytes, units[k].tensors[0].dtype.itemsize))
    offsets, end = [0] * len(units), 0
    for k in order:
        offsets[k] = end
        end += units[k].nbytes
    tensors = tuple(
        moved(tensor, offset) if offset else tensor
        for unit, offset in zip(units, offsets, strict=True)
        for tensor in unit.tensors
    )
    aliases = {alias: name for unit in units for alias, name in unit.aliases.items()}
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


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a tensor of ``shape`` is distributed over ranks.

    First the ``inner`` cuts are made, one for each model-parallel axis; then the shard axis cuts ``dim`` of the result
    into ``num_shards``.

    Args:
        shape: the global shape.
        dim: the dim that the shard axis cuts.
        num_shards: the ranks of the shard axis.
        inner: for each model-parallel axis of several ranks the dim, the number of ranks, and that of blocks as of
            ``Cut``.
    """

    shape: tuple[int, ...]
    dim: int = 0
    num_shards: int = 1
    inner: tuple[tuple[int, int, int], ...] = ()

    def parts(self) -> tuple[tuple[tuple[int, ...], ShardExtent, TensorShards], ...]:
        """Return the coordinates on the inner axes, and the extent and the shards, of each part."""
        return _parts(self)

    @property
    def padded_numel(self) -> int:
        """The elements of each rank's shard in a message."""
        return max(shards.padded_numel for _, _, shards in _parts(self))

    @property
    def num_ranks(self) -> int:
        """The number of rows that a rank receives, one from each rank."""
        return self.num_shards * prod(ranks for _, ranks, _ in self.inner)


@lru_cache(maxsize=4096)
def _parts(tensor: Distribution) -> tuple[tuple[tuple[int, ...], ShardExtent, TensorShards], ...]:
    found = []
    for at in product(*(range(ranks) for _, ranks, _ in tensor.inner)):
        cuts = [Cut(dim, ranks, rank, blocks) for (dim, ranks, blocks), rank in zip(tensor.inner, at, strict=True)]
        extent = ShardExtent.after(tensor.shape, cuts)
        shape = extent.local_shape or (1,)  # a scalar is on every rank
        found.append((at, extent, TensorShards(shape, tensor.dim, tensor.num_shards)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter in a message, and in the bucket that is made of it. Offsets and sizes are in bytes.

    Args:
        source: the number of the parameter.
        dtype: the dtype that it is sent in.
        tensor: how it is distributed.
        row_bytes: its size in each rank's row.
        place: where the full tensor begins in the bucket.
        offset: where it begins in each rank's row.
    """

    source: int
    dtype: torch.dtype
    tensor: Distribution
    row_bytes: int
    place: int
    offset: int = 0

    @property
    def tiles_rows(self) -> bool:
        """True if the shards of the ranks of one axis, one after the other, are the full tensor."""
        (_, _, shards), *others = self.tensor.parts()
        return not others and shards.concatenates and shards.layout.is_even


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """A message that is all-gathered over the axes ``route``: one row from each rank, of ``width`` bytes.

    Invariant: slots do not overlap, and each is aligned to its elements.

    Args:
        route: numbers of axes, the shard axis first if ``is_sharded``, then the inner axes in the order of the slots'
            distributions. It may be empty.
        is_sharded: the route begins with a shard axis.
        slots: the parameters. Without any, the row is a header.
        width: the bytes of a row.
    """

    route: tuple[int, ...]
    is_sharded: bool
    slots: tuple[Slot, ...] = ()
    width: int = HEADER_BYTES

    @staticmethod
    def of(route: tuple[int, ...], is_sharded: bool, slots: Sequence[Slot]) -> MessageLayout:
        """Lay out ``slots``, in any order, after the header."""
        end, laid_out = HEADER_BYTES, []
        for slot in sorted(slots, key=lambda slot: _order(slot.row_bytes, slot.dtype.itemsize)):
            laid_out.append(replace(slot, offset=end))
            end += slot.row_bytes
        return MessageLayout(route, is_sharded, tuple(laid_out), aligned_bytes(end))

    def unpack(self, rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Copy the full tensors to their places in ``packed``.

        Args:
            rows: the received rows, contiguous, uint8: a dim for each axis of the route, of the axis with the largest
                number first, then the width.
            packed: 1-d, contiguous, uint8, a multiple of 16 bytes.
        """
        axes = sorted(self.route, reverse=True)
        wanted = (*self.route[1:], self.route[0]) if self.is_sharded else self.route
        by_part = rows.permute([*map(axes.index, wanted), -1])
        sources: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        wide = {size: (rows.view(kind), packed.view(kind)) for size, kind in _KINDS.items()}
        for slot in self.slots:
            shards = slot.tensor.parts()[0][2]
            if slot.tensor.inner or not shards.concatenates:
                _unpack_parts(slot, by_part, packed)
            elif shards.numel:
                # The first ranks have a full shard each, and the next one may have part of one.
                full = shards.numel * slot.dtype.itemsize
                step = gcd(slot.offset, slot.place, slot.row_bytes, full, 8)
                source, place = wide[step]
                width, row, (whole, rest) = self.width // step, slot.row_bytes // step, divmod(full, slot.row_bytes)
                at = source.storage_offset() + slot.offset // step
                begin = place.storage_offset() + slot.place // step
                sources.append(source.as_strided((whole, row), (width, 1), at))
                places.append(place.as_strided((whole, row), (row, 1), begin))
                if rest:
                    sources.append(source.as_strided((rest // step,), (1,), at + whole * width))
                    places.append(place.as_strided((rest // step,), (1,), begin + whole * row))
        if places:
            torch._foreach_copy_(places, sources)


_KINDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The dtypes as which bytes are copied: the wider, the faster."""


def _unpack_parts(slot: Slot, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy a tensor that is cut on several axes, or on another dim than the first.

    ``rows`` has a dim for each inner axis, one for the shard axis if there is one, and the width.
    """
    size = slot.dtype.itemsize
    nbytes = prod(slot.tensor.shape) * size
    flat = packed[slot.place : slot.place + nbytes].view(slot.dtype)
    if not slot.tensor.inner:  # no memory for a part: it would be all of the tensor
        shards = slot.tensor.parts()[0][2]
        if shards.numel:
            own = rows[..., slot.offset : slot.offset + shards.padded_numel * size].view(slot.dtype)
            unpack_parameter(shards, own if own.ndim == 2 else own.unsqueeze(0), flat)
        return
    full = flat.view(slot.tensor.shape)
    for at, extent, shards in slot.tensor.parts():
        if not shards.numel:
            continue
        own = rows[at][..., slot.offset : slot.offset + shards.padded_numel * size].view(slot.dtype)
        part = torch.empty(shards.full_numel, dtype=slot.dtype, device=packed.device)
        unpack_parameter(shards, own if own.ndim == 2 else own.unsqueeze(0), part)
        part = part[: shards.numel].view(extent.local_shape)
        for box in extent.boxes():
            full[box.slices].copy_(box.of_part(part))
