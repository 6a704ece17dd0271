"""Offsets of every tensor of a bucket in the flat shard store, in the messages and in the flat unsharded buffer.

A bucket holds parameters of one group with the same dtypes. Each parameter is communicated in one of two ways.
*Zero-copy*, for large ones: the all-gather writes directly into the unsharded buffer, padded tail included. *Packed*,
for small ones: they are copied into one message, which is cheaper than one more launch. All offsets and lengths are in
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from composable_fsdp._layout.shard import TensorShards

__all__ = [
    "ALIGNMENT_BYTES",
    "NEVER_ZERO_COPY",
    "FlatLayout",
    "GatherLayout",
    "ReduceLayout",
    "aligned_bytes",
    "payload_widths",
    "plan_gather",
    "plan_reduce",
    "split_at",
]

NEVER_ZERO_COPY = 1 << 62
"""A threshold in bytes that no parameter reaches: turns zero-copy off for values that must be cast or encoded first."""

ALIGNMENT_BYTES = 16
"""Alignment of every tensor. Vectorised and fused kernels, and NCCL, are slow on unaligned tensors."""

_LEAST_BYTES_PER_GAP = 64
"""Packed shards have no gaps if these would add more than 1/64 to the bytes that a rank sends, and to the time of the
collective. Shards are then shorter than 1 KiB on average, for which a kernel takes longer to launch than to run."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Disjoint segments of one flat buffer.

    Invariant: segments do not overlap. They need not be in the order of ``offsets``.
    """

    offsets: tuple[int, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class GatherLayout:
    """Offsets for the all-gather of one bucket.

    Invariants: every parameter is zero-copy or packed. The shards of packed parameters are the first ``packed_numel``
    elements of the store, so they form a message without a copy. ``places`` has room for the padded all-gather of every
    parameter.
    """

    shards: tuple[TensorShards, ...]
    num_shards: int
    store: FlatLayout
    places: FlatLayout
    zero_copy: tuple[int, ...]
    packed: tuple[int, ...]
    packed_widths: tuple[int, ...]
    """Elements of each packed parameter in each rank's row of the message, gap included."""
    packed_numel: int

    @property
    def wire_numel(self) -> int:
        """The number of elements that one all-gather moves, over all ranks."""
        return self.num_shards * (self.packed_numel + sum(self.shards[i].padded_numel for i in self.zero_copy))


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """Offsets for the reduce-scatter of one bucket: from full gradients to this rank's shards.

    ``output.offsets[k]`` is the offset of the gradient of parameter ``indices[k]``. At ``flags_offset`` of the output
    are ``num_flags`` flags: one per parameter, or none at all. A flag is nonzero if any rank had a gradient for that
    parameter. Flags are sent after the packed gradients.

    Invariants: every gradient is zero-copy or packed. The shards of packed gradients, and the flags, are the first
    ``packed_numel`` elements of the output and of each rank's row of the packed message.
    """

    indices: tuple[int, ...]
    shards: tuple[TensorShards, ...]
    output: FlatLayout
    zero_copy: tuple[int, ...]
    packed: tuple[int, ...]
    packed_widths: tuple[int, ...]
    """Elements of each packed gradient, and last of the flags, in each rank's row, gap included."""
    packed_numel: int
    gaps: tuple[tuple[int, int], ...]
    """The gaps for alignment in each rank's row, last first: the packed gradients before it, and its elements."""
    most_uneven: int
    """The elements of the largest packed gradient with padded shards."""
    in_chunks: bool
    """True if each rank's row is the ``torch.chunk`` of every packed gradient on dim 0, then zeros. None is empty."""
    num_flags: int
    flags_offset: int
    flags_width: int
    """Elements of the flags in each rank's row of the packed message, gap included."""

    @property
    def gradient_numel(self) -> int:
        """The number of elements of packed gradients in each rank's row, without flags."""
        return self.packed_numel - self.flags_width

    @property
    def sharded_numel(self) -> int:
        """The number of elements of the output without flags."""
        return self.output.numel - self.flags_width

    @property
    def wire_numel(self) -> int:
        """The number of elements that one reduction moves, over all ranks."""
        if not self.shards:
            return 0
        shares = self.packed_numel + sum(self.shards[k].padded_numel for k in self.zero_copy)
        return self.shards[0].num_shards * shares


def aligned_bytes(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the next alignment boundary."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def payload_widths(payloads: Sequence[tuple[int, int]]) -> list[int]:
    """Return the bytes of each payload in the message of all, from its bytes and those of an element.

    There are no gaps if all elements have one size. Those of one byte may hold wider values, which must be aligned.
    """
    itemsizes = {itemsize for _, itemsize in payloads}
    end_to_end = len(payloads) == 1 or (len(itemsizes) == 1 and 1 not in itemsizes)
    return [nbytes if end_to_end else aligned_bytes(nbytes) for nbytes, _ in payloads]


def plan_gather(
    shards: Sequence[TensorShards],
    *,
    itemsize: int,
    zero_copy_min_bytes: int,
    places: FlatLayout | None = None,
    encoded: bool = False,
) -> GatherLayout:
    """Lay out the all-gather of one bucket.

    Args:
        shards: the bucket's parameters, at least one.
        itemsize: bytes per element on the wire.
        zero_copy_min_bytes: full size in bytes from which a parameter is zero-copy.
        places: the layout of an unsharded buffer that exists already, made for a multiple of this number of shards.
        encoded: a codec encodes the packed message, whose gaps decide which values share a block.
    """
    zero_copy = tuple(
        i for i, s in enumerate(shards) if s.concatenates and s.numel > 0 and s.numel * itemsize >= zero_copy_min_bytes
    )
    store, packed, widths = _packed_first([s.padded_numel for s in shards], zero_copy, itemsize, encoded)
    places = places or FlatLayout(*_aligned([s.full_numel for s in shards], itemsize))
    return GatherLayout(tuple(shards), shards[0].num_shards, store, places, zero_copy, packed, widths, sum(widths))


def plan_reduce(
    shards: Sequence[TensorShards],
    indices: Sequence[int],
    *,
    itemsize: int,
    zero_copy_min_bytes: int,
    flags: bool = False,
    encoded: bool = False,
) -> ReduceLayout:
    """Lay out the reduction of the gradients of the parameters ``indices`` among ``shards``, as for a gather.

    A gradient has no padded tail, so only even shards can be zero-copy.
    """
    chosen = tuple(shards[i] for i in indices)
    zero_copy = tuple(
        k
        for k, s in enumerate(chosen)
        if s.concatenates and s.layout.is_even and s.numel > 0 and s.numel * itemsize >= zero_copy_min_bytes
    )
    num_flags = len(chosen) if flags else 0
    lengths = [s.padded_numel for s in chosen] + ([num_flags] if num_flags else [])  # the flags are packed last
    output, packed, widths = _packed_first(lengths, zero_copy, itemsize, encoded)
    gradients = packed[:-1] if num_flags else packed
    flags_width = widths[-1] if num_flags else 0  # all of it is written, so it does not count as a gap
    numbered = enumerate(zip(gradients, widths, strict=False), 1)
    gaps = [(number, width - chosen[k].padded_numel) for number, (k, width) in numbered]
    uneven = [chosen[k].numel for k in gradients if chosen[k].numel != chosen[k].padded_numel * chosen[k].num_shards]
    in_chunks = all(chosen[k].dim == 0 and chosen[k].numel > 0 for k in gradients)
    offsets = output.offsets[: len(chosen)]
    flags_offset = output.offsets[-1] if num_flags else 0
    return ReduceLayout(
        tuple(indices),
        chosen,
        FlatLayout(offsets, output.numel),
        zero_copy,
        gradients,
        widths,
        sum(widths),
        tuple((number, gap) for number, gap in reversed(gaps) if gap),
        max(uneven, default=0),
        in_chunks,
        num_flags,
        flags_offset,
        flags_width,
    )


def _packed_first(
    lengths: Sequence[int], others: Sequence[int], itemsize: int, encoded: bool
) -> tuple[FlatLayout, tuple[int, ...], tuple[int, ...]]:
    """Return segments with the packed ones in front of ``others``, which are packed, and their lengths with gaps."""
    packed, step = tuple(i for i in range(len(lengths)) if i not in others), max(1, ALIGNMENT_BYTES // itemsize)
    gaps = sum(-lengths[i] % step for i in packed)
    packed_step = step if encoded or gaps * _LEAST_BYTES_PER_GAP <= sum(lengths) else 1
    widths = tuple(lengths[i] + -lengths[i] % packed_step for i in packed)
    rest, end = _aligned([lengths[i] for i in others], itemsize)
    first = sum(widths) + (-sum(widths) % step if others else 0)
    offsets = dict(zip(packed, accumulate(widths, initial=0), strict=False)) | {
        i: first + start for i, start in zip(others, rest, strict=True)
    }
    return FlatLayout(tuple(offsets[i] for i in range(len(lengths))), first + end), packed, widths


def _aligned(lengths: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Return the start of each of consecutive segments, and the end of the last, all aligned."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // step) * step
    return tuple(starts), end


def split_at(begins: Sequence[int], ends: Sequence[int], numel: int) -> tuple[list[int], list[int]]:
    """Return the widths that split ``numel`` elements into intervals and the gaps around them.

    Also return which of the pieces each interval is.

    Args:
        begins: the first element of each interval, in any order. Intervals may be empty, and do not overlap.
        ends: the end of each interval.
        numel: the end of the last gap.
    """
    widths: list[int] = []
    pieces = [0] * len(begins)
    last = 0
    for begin, end, k in sorted(zip(begins, ends, range(len(begins)), strict=True)):
        if last < begin:
            widths.append(begin - last)
        pieces[k] = len(widths)
        widths.append(end - begin)
        last = end
    if last < numel:
        widths.append(numel - last)
    return widths, pieces
