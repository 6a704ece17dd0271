"""Where each tensor of a bucket lies: in the flat shard store, on the wire, in the flat unsharded buffer.

A bucket holds the parameters of one group that share their dtypes. Large ones travel *direct*: the all-gather of one
lands in its place in the unsharded buffer, padded tail included. Small ones are *packed* into one transfer, since a
launch costs more than a copy there. All offsets and lengths are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composable_fsdp.layout.shard import TensorShards

__all__ = [
    "ALIGNMENT_BYTES",
    "NEVER_DIRECT",
    "FlatLayout",
    "GatherLayout",
    "ReduceLayout",
    "aligned_bytes",
    "plan_gather",
    "plan_reduce",
]

NEVER_DIRECT = 1 << 62
"""More bytes than any parameter has: for what must be cast or encoded, and so cannot travel from where it lies."""

ALIGNMENT_BYTES = 16
"""Every tensor starts on this boundary: vectorised and fused kernels, and NCCL, fall back to slow paths otherwise."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Segments of one flat buffer. Invariant: segments are disjoint, in ``offsets``' order only where said so."""

    offsets: tuple[int, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class GatherLayout:
    """From shards to full parameters.

    Invariants: the packed parameters' shards are the first ``packed_numel`` elements of the store, so that they are one
    message without a copy; ``places`` fits the padded gather of every direct parameter.
    """

    shards: tuple[TensorShards, ...]
    store: FlatLayout
    places: FlatLayout
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    packed_widths: tuple[int, ...]
    """Elements per packed parameter in each rank's row of the message, alignment included."""
    packed_numel: int
    in_chunks: bool
    """Whether every packed parameter's rows are its memory in order, one parameter after the other without gaps."""

    @property
    def num_shards(self) -> int:
        return self.shards[0].num_shards

    @property
    def wire_numel(self) -> int:
        """Elements that one gather moves in total, over all ranks' shares."""
        return self.num_shards * (self.packed_numel + sum(self.shards[i].padded_numel for i in self.direct))


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """From full gradients to this rank's reduced shards.

    ``output.offsets[k]`` belongs to parameter ``indices[k]``. Behind the packed gradients lie ``num_flags`` elements
    from ``flags_offset`` on, one for each of ``indices``, or none: not zero where a rank had a gradient for it.
    Invariant: the packed gradients' shards and the flags are the first ``packed_numel`` elements of the output, and of
    each rank's row of the packed message.
    """

    indices: tuple[int, ...]
    shards: tuple[TensorShards, ...]
    output: FlatLayout
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    packed_widths: tuple[int, ...]
    """Elements per packed gradient in each rank's row of the message, and of the flags, alignment included."""
    packed_numel: int
    has_padding: bool
    in_chunks: bool
    """Whether each rank's row is what ``torch.chunk`` gives of every packed gradient on dim 0, gaps left aside."""
    gaps: tuple[int, ...]
    """Elements between each packed gradient and the next in a row, for alignment."""
    num_flags: int
    flags_offset: int

    @property
    def gradient_numel(self) -> int:
        """Elements of packed gradients in each rank's row, flags left out."""
        return self.flags_offset if self.num_flags else self.packed_numel

    @property
    def flags_width(self) -> int:
        """Elements of the flags in each rank's row, alignment included."""
        return self.packed_numel - self.gradient_numel

    @property
    def wire_numel(self) -> int:
        """Elements that one reduction moves in total, over all ranks' shares."""
        if not self.shards:
            return 0
        return self.shards[0].num_shards * (self.packed_numel + sum(self.shards[k].padded_numel for k in self.direct))


def aligned_bytes(nbytes: int) -> int:
    """The next boundary."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan_gather(
    shards: Sequence[TensorShards], *, itemsize: int, direct_bytes: int, places: FlatLayout | None = None
) -> GatherLayout:
    """Lays out one bucket.

    Args:
        shards: the bucket's parameters, at least one.
        itemsize: bytes per element on the wire.
        direct_bytes: parameters whose full size reaches this travel direct.
        places: an unsharded buffer that is there already, laid out for a multiple of this number of shards.
    """
    direct = tuple(
        i for i, s in enumerate(shards) if s.concatenates and s.numel > 0 and s.numel * itemsize >= direct_bytes
    )
    store, packed, widths = _packed_first([s.padded_numel for s in shards], direct, itemsize)
    if places is None:
        offsets, end = _aligned([s.full_numel for s in shards], itemsize)
        places = FlatLayout(offsets, end)
    in_chunks = all(shards[i].concatenates and shards[i].padded_numel == w for i, w in zip(packed, widths, strict=True))
    return GatherLayout(tuple(shards), store, places, direct, packed, widths, sum(widths), in_chunks)


def plan_reduce(
    shards: Sequence[TensorShards], indices: Sequence[int], *, itemsize: int, direct_bytes: int, flags: bool = False
) -> ReduceLayout:
    """Lays out the reduction of the gradients of the parameters ``indices`` among ``shards``.

    A gradient has no padded tail, so only even shards can be reduced straight out of it.
    """
    chosen = tuple(shards[i] for i in indices)
    direct = tuple(
        k
        for k, s in enumerate(chosen)
        if s.concatenates and s.layout.is_even and s.numel > 0 and s.numel * itemsize >= direct_bytes
    )
    num_flags = len(chosen) if flags else 0
    lengths = [s.padded_numel for s in chosen]
    if num_flags:  # a last segment, packed, and so between the packed gradients and the direct ones
        lengths.append(num_flags)
    output, packed, widths = _packed_first(lengths, direct, itemsize)
    gradients = packed[:-1] if num_flags else packed
    num_shards = chosen[0].num_shards if chosen else 1
    flags_width = widths[-1] if num_flags else 0  # all of it is written, so none of it counts as padding
    payload = sum(chosen[k].numel for k in gradients) + num_shards * flags_width
    padded = sum(widths) * num_shards != payload
    gaps = tuple(w - chosen[k].padded_numel for k, w in zip(gradients, widths, strict=False))
    offsets = output.offsets[: len(chosen)]
    flags_offset = output.offsets[-1] if num_flags else 0
    return ReduceLayout(
        tuple(indices),
        chosen,
        FlatLayout(offsets, output.numel),
        direct,
        gradients,
        widths,
        sum(widths),
        padded,
        all(chosen[k].dim == 0 for k in gradients),
        gaps,
        num_flags,
        flags_offset,
    )


def _packed_first(
    lengths: Sequence[int], direct: tuple[int, ...], itemsize: int
) -> tuple[FlatLayout, tuple[int, ...], tuple[int, ...]]:
    """Segments with the packed ones in front; also which are packed, and their aligned lengths."""
    packed = tuple(i for i in range(len(lengths)) if i not in direct)
    order = (*packed, *direct)
    starts, end = _aligned([lengths[i] for i in order], itemsize)
    offsets = dict(zip(order, starts, strict=True))
    bounds = (*starts, end)
    widths = tuple(bounds[i + 1] - bounds[i] for i in range(len(packed)))
    return FlatLayout(tuple(offsets[i] for i in range(len(lengths))), end), packed, widths


def _aligned(lengths: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Start of each of consecutive segments, each start and the end on an aligned boundary."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // step) * step
    return tuple(starts), end
