"""Where each tensor of a bucket lies: in the flat shard store, on the wire, in the flat unsharded buffer.

A bucket holds the parameters of one group that share their dtypes. Large ones travel *direct*: the all-gather of one
lands in its place in the unsharded buffer, padded tail included. Small ones are *packed* into one transfer, since a
launch costs more than a copy there. Those of which many ranks hold no row travel *whole*: what each rank has of them,
zeros elsewhere, is summed up in place, so that no padding travels or takes memory. All offsets and lengths are in
elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composable_fsdp._layout.shard import TensorShards

__all__ = [
    "ALIGNMENT_BYTES",
    "NEVER_DIRECT",
    "FlatLayout",
    "GatherLayout",
    "ReduceLayout",
    "aligned_bytes",
    "plan_gather",
    "plan_reduce",
    "worth_whole",
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

    Invariants: every parameter is direct, packed or whole. The packed ones' shards are the first ``packed_numel``
    elements of the store, so that they are one message without a copy; ``places`` fits the padded gather of every
    parameter that is not whole. ``spans`` hold the places of the whole ones, and nothing else but gaps for alignment.
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
    whole: tuple[int, ...] = ()
    spans: tuple[range, ...] = ()
    """Of the unsharded buffer, each bounded by aligned offsets."""

    @property
    def num_shards(self) -> int:
        return self.shards[0].num_shards

    @property
    def wire_numel(self) -> int:
        """Elements that one gather moves in total, over all ranks' shares; twice what is summed up, which goes forth
        and back."""
        shares = self.packed_numel + sum(self.shards[i].padded_numel for i in self.direct)
        return self.num_shards * shares + 2 * self.whole_numel

    @property
    def whole_numel(self) -> int:
        """Elements that are summed up."""
        return sum(map(len, self.spans))


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """From full gradients to this rank's reduced shards.

    ``output.offsets[k]`` belongs to parameter ``indices[k]``. From ``flags_offset`` of the output on lie ``num_flags``
    elements, one for each of ``indices``, or none: not zero where a rank had a gradient for it. They travel behind the
    whole gradients where there are any, else behind the packed ones.
    Invariants: every gradient is direct, packed or whole. The packed gradients' shards, and the flags that travel with
    them, are the first ``packed_numel`` elements of the output, and of each rank's row of the packed message.
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
    flags_width: int
    """Elements of the flags in each rank's row of the packed message, alignment included."""
    whole: tuple[int, ...] = ()
    message: FlatLayout = FlatLayout((), 0)
    """Where full gradients that travel whole lie in their message, and behind them the flags."""

    @property
    def gradient_numel(self) -> int:
        """Elements of packed gradients in each rank's row, flags left out."""
        return self.packed_numel - self.flags_width

    @property
    def wire_numel(self) -> int:
        """As that of a gather."""
        if not self.shards:
            return 0
        shares = self.packed_numel + sum(self.shards[k].padded_numel for k in self.direct)
        return self.shards[0].num_shards * shares + 2 * self.message.numel


def aligned_bytes(nbytes: int) -> int:
    """The next boundary."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def worth_whole(shards: Sequence[TensorShards], *, itemsize: int, whole_bytes: int) -> tuple[int, ...]:
    """Those that had better travel whole: what is padded to twice its size or more, if that is worth a launch.

    Summing up moves a tensor twice, so from there on it moves no more bytes, and takes half the memory or less.

    Args:
        shards: of one bucket.
        itemsize: bytes per element on the wire.
        whole_bytes: padding of all of them together from which one more launch is worth it.
    """
    padded = [s.num_shards * s.padded_numel for s in shards]
    wide = tuple(i for i, s in enumerate(shards) if 0 < 2 * s.numel <= padded[i])
    padding = sum(padded[i] - shards[i].numel for i in wide)
    return wide if padding * itemsize >= whole_bytes else ()


def plan_gather(
    shards: Sequence[TensorShards],
    *,
    itemsize: int,
    direct_bytes: int,
    places: FlatLayout | None = None,
    whole: Sequence[int] = (),
) -> GatherLayout:
    """Lays out one bucket.

    Args:
        shards: the bucket's parameters, at least one.
        itemsize: bytes per element on the wire.
        direct_bytes: parameters whose full size reaches this travel direct.
        places: an unsharded buffer that is there already, laid out for a multiple of this number of shards.
        whole: which travel whole.
    """
    direct = tuple(
        i
        for i, s in enumerate(shards)
        if i not in whole and s.concatenates and s.numel > 0 and s.numel * itemsize >= direct_bytes
    )
    store, packed, widths = _packed_first([s.padded_numel for s in shards], (*direct, *whole), itemsize)
    if places is None:  # those that travel whole next to each other, so that they are one message
        places, *_ = _packed_first(
            [s.numel if i in whole else s.full_numel for i, s in enumerate(shards)], whole, itemsize
        )
    in_chunks = all(shards[i].concatenates and shards[i].padded_numel == w for i, w in zip(packed, widths, strict=True))
    spans = _spans([(places.offsets[i], shards[i].numel) for i in whole], itemsize)
    return GatherLayout(
        tuple(shards), store, places, direct, packed, widths, sum(widths), in_chunks, tuple(whole), spans
    )


def plan_reduce(
    shards: Sequence[TensorShards],
    indices: Sequence[int],
    *,
    itemsize: int,
    direct_bytes: int,
    flags: bool = False,
    whole_bytes: int = NEVER_DIRECT,
) -> ReduceLayout:
    """Lays out the reduction of the gradients of the parameters ``indices`` among ``shards``.

    A gradient has no padded tail, so only even shards can be reduced straight out of it.
    """
    chosen = tuple(shards[i] for i in indices)
    whole = worth_whole(chosen, itemsize=itemsize, whole_bytes=whole_bytes)
    direct = tuple(
        k
        for k, s in enumerate(chosen)
        if k not in whole and s.concatenates and s.layout.is_even and s.numel > 0 and s.numel * itemsize >= direct_bytes
    )
    num_flags = len(chosen) if flags else 0
    lengths, unpacked = [s.padded_numel for s in chosen], (*direct, *whole)
    full_lengths = [chosen[k].numel for k in whole]
    if num_flags:  # a last segment: of what is packed, and so before the direct ones, or of what is whole
        lengths.append(num_flags)
        if whole:
            unpacked = (*unpacked, len(chosen))
            full_lengths.append(num_flags)
    output, packed, widths = _packed_first(lengths, unpacked, itemsize)
    is_flagged = num_flags > 0 and not whole
    gradients = packed[:-1] if is_flagged else packed
    num_shards = chosen[0].num_shards if chosen else 1
    flags_width = widths[-1] if is_flagged else 0  # all of it is written, so none of it counts as padding
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
        flags_width,
        whole,
        FlatLayout(*_aligned(full_lengths, itemsize)),
    )


def _packed_first(
    lengths: Sequence[int], others: Sequence[int], itemsize: int
) -> tuple[FlatLayout, tuple[int, ...], tuple[int, ...]]:
    """Segments with the packed ones in front of ``others``; also which are packed, and their aligned lengths."""
    packed = tuple(i for i in range(len(lengths)) if i not in others)
    order = (*packed, *others)
    starts, end = _aligned([lengths[i] for i in order], itemsize)
    offsets = dict(zip(order, starts, strict=True))
    bounds = (*starts, end)
    widths = tuple(bounds[i + 1] - bounds[i] for i in range(len(packed)))
    return FlatLayout(tuple(offsets[i] for i in range(len(lengths))), end), packed, widths


def _spans(segments: Iterable[tuple[int, int]], itemsize: int) -> tuple[range, ...]:
    """The aligned ranges that ``segments``, each an offset and a length, cover: few, where they lie side by side."""
    spans: list[range] = []
    for offset, length in sorted(segments):
        _, end = _aligned([length], itemsize)
        start = spans.pop().start if spans and spans[-1].stop == offset else offset
        spans.append(range(start, offset + end))
    return tuple(spans)


def _aligned(lengths: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Start of each of consecutive segments, each start and the end on an aligned boundary."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // step) * step
    return tuple(starts), end
