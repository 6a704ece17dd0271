"""Offsets of shards: at rest, in messages, and in full parameters. Packing, and factors of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One tensor dim split into ``num_shards`` equal shards, the tail zero-padded (the rule of ``torch.chunk``).

    Invariant: the ranges of ranks 0..n-1, in order, tile ``range(length)`` exactly.
    """

    length: int
    num_shards: int

    @property
    def padded_shard(self) -> int:
        """The number of rows in every rank's shard, padding included."""
        return -(-self.length // self.num_shards)

    @property
    def is_even(self) -> bool:
        return self.padded_shard * self.num_shards == self.length

    def owned_by(self, rank: int) -> range:
        """Return the indices of the dim that ``rank`` holds; empty for the last ranks of a short dim."""
        start = min(rank * self.padded_shard, self.length)
        return range(start, min(start + self.padded_shard, self.length))


@dataclass(frozen=True, slots=True)
class TensorShards:
    """A tensor of ``shape`` sharded on ``dim`` into ``num_shards`` shards.

    Invariant: every rank's shard has ``padded_numel`` elements: first the ones that it owns, contiguous in the order of
    a tensor of ``shard_shape(rank)``, then padding. On a dim other than the first this is *not* a narrowed view of a
    tensor of ``padded_shape``: local shards stay contiguous however uneven the sharding is.

    The derived numbers are computed once, because every step looks them up for every parameter.
    """

    shape: tuple[int, ...]
    dim: int
    num_shards: int
    layout: ShardLayout = field(init=False, compare=False, repr=False)
    numel: int = field(init=False, compare=False, repr=False)
    padded_shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Shape of one rank's shard with its padding."""
    padded_numel: int = field(init=False, compare=False, repr=False)
    concatenates: bool = field(init=False, compare=False, repr=False)
    """True if the concatenation of the padded shards is the tensor's own memory followed by padding."""

    def __post_init__(self) -> None:
        layout = ShardLayout(self.shape[self.dim], self.num_shards)
        padded_shape = (*self.shape[: self.dim], layout.padded_shard, *self.shape[self.dim + 1 :])
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "numel", prod(self.shape))
        object.__setattr__(self, "padded_shape", padded_shape)
        object.__setattr__(self, "padded_numel", prod(padded_shape))
        object.__setattr__(self, "concatenates", prod(self.shape[: self.dim]) == 1)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard that ``rank`` owns, without padding."""
        return (*self.shape[: self.dim], len(self.layout.owned_by(rank)), *self.shape[self.dim + 1 :])

    @property
    def full_numel(self) -> int:
        """The number of elements that the gathered full tensor needs, with the tail that receives the padding."""
        return self.padded_numel * self.num_shards if self.concatenates else self.numel


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
    def has_gaps(self) -> bool:
        """True if there are gaps for alignment in each rank's row of the message."""
        return self.packed_numel > sum(self.shards[i].padded_numel for i in self.packed)

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
    # Large even gradients are sent from where autograd left them.
    chosen = tuple(shards[i] for i in indices)
    zero_copy = tuple(
        k
        for k, s in enumerate(chosen)
        if s.concatenates and s.layout.is_even and s.numel > 0 and s.numel * itemsize >= zero_copy_min_bytes
    )
    # Flags are one more packed segment, the last one.
    num_flags = len(chosen) if flags else 0
    lengths = [s.padded_numel for s in chosen] + ([num_flags] if num_flags else [])  # the flags are packed last
    output, packed, widths = _packed_first(lengths, zero_copy, itemsize, encoded)
    # Where gaps are in each row, and how large the largest copy with padding is.
    gradients = packed[:-1] if num_flags else packed
    flags_width = widths[-1] if num_flags else 0  # all of it is written, so it does not count as a gap
    numbered = enumerate(zip(gradients, widths, strict=False), 1)  # widths has the flags too, last
    gaps = [(number, width - chosen[k].padded_numel) for number, (k, width) in numbered]
    uneven = [chosen[k].numel for k in gradients if chosen[k].numel != chosen[k].padded_numel * chosen[k].num_shards]
    in_chunks = all(chosen[k].dim == 0 and chosen[k].numel > 0 for k in gradients)
    # Gradients and flags in the output.
    offsets = output.offsets[: len(chosen)]
    flags_offset = output.offsets[-1] if num_flags else 0
    return ReduceLayout(
        indices=tuple(indices),
        shards=chosen,
        output=FlatLayout(offsets, output.numel),
        zero_copy=zero_copy,
        packed=gradients,
        packed_widths=widths,
        packed_numel=sum(widths),
        gaps=tuple((number, gap) for number, gap in reversed(gaps) if gap),
        most_uneven=max(uneven, default=0),
        in_chunks=in_chunks,
        num_flags=num_flags,
        flags_offset=flags_offset,
        flags_width=flags_width,
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
    # The sums have the end too, last.
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


def pack_gradient(shards: TensorShards, gradient: Tensor | None, rows: Tensor) -> None:
    """Copy each rank's shard of ``gradient`` into that rank's row of a message, and cast it to the message's dtype.

    Args:
        shards: how the gradient's parameter is sharded.
        gradient: of shape ``shards.shape``, any strides, any dtype; ``None`` counts as zeros.
        rows: ``(num_shards, padded_numel)``, contiguous along the last dim only: a column block of the message. Padding
            is not written.
    """
    if gradient is None:
        rows.zero_()
        return
    for part, piece in _same_elements(shards, gradient, rows):
        piece.copy_(part)


def unpack_parameter(shards: TensorShards, rows: Tensor, place: Tensor) -> None:
    """Copy the shards of all ranks into one full tensor, ``place[: numel].view(shape)``.

    Args:
        shards: how the parameter is sharded.
        rows: ``(num_shards, padded_numel)``, contiguous along the last dim only: a column block of the message.
        place: 1-d and contiguous, at least ``shards.full_numel`` elements; elements after those are not written.
    """
    if shards.concatenates:
        place[: shards.full_numel].view(rows.shape).copy_(rows)
        return
    full = place[: shards.numel].view(shards.shape)
    for part, piece in _same_elements(shards, full, rows):
        part.copy_(piece)


def take_shard(shards: TensorShards, full: Tensor, rank: int, out: Tensor) -> None:
    """Copy the shard of ``rank`` from ``full`` into ``out``, cast to its dtype, and zero the padding.

    Args:
        shards: how the tensor is sharded.
        full: of shape ``shards.shape``, any strides, any dtype.
        rank: the owner of the shard, in ``range(num_shards)``.
        out: 1-d and contiguous, ``padded_numel`` elements.
    """
    owned, shape = shards.layout.owned_by(rank), shards.shard_shape(rank)
    numel = prod(shape)
    out[:numel].view(shape).copy_(full.narrow(shards.dim, owned.start, len(owned)))
    if numel < shards.padded_numel:
        out[numel:].zero_()


class _ShardViews(NamedTuple):
    """The view shapes that match a full tensor's memory with the ranks' rows.

    The first ``num_full`` ranks own full shards. Their rows, viewed as ``block`` and permuted to ``order``, are the
    first indices of the sharded dim, viewed as ``split``.
    """

    num_full: int
    block: tuple[int, ...]
    order: tuple[int, ...]
    split: tuple[int, ...]


@lru_cache(maxsize=8192)
def _views_of(shards: TensorShards) -> _ShardViews:
    """Return the view shapes of ``shards``, cached: computing them costs as much as the copy of a small tensor."""
    dim, piece = shards.dim, shards.layout.padded_shard
    num_full = shards.layout.length // max(1, piece)
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(shards.shape) + 1))
    split = (*shards.shape[:dim], num_full, piece, *shards.shape[dim + 1 :])
    return _ShardViews(num_full, (num_full, *shards.padded_shape), order, split)


def _same_elements(shards: TensorShards, full: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views of ``full`` and ``rows`` with the same elements at equal indices. They cover ``full``."""
    num_full, block, order, split = _views_of(shards)
    if num_full == shards.num_shards:
        yield full.view(split), rows.view(block).permute(order)
        return
    # The full shards, and that of the next rank, which is shorter or empty.
    end, length = num_full * shards.layout.padded_shard, shards.layout.length
    yield full.narrow(shards.dim, 0, end).view(split), rows[:num_full].view(block).permute(order)
    if end < length:
        short = full.narrow(shards.dim, end, length - end)
        yield short, rows[num_full, : short.numel()].view(short.shape)


_LARGEST_EXPONENT = 100
"""Largest exponent of a power of two whose reciprocal is a normal fp32 number. Narrower floats multiply in fp32 too."""

_CHUNK_NUMEL = 1 << 18
"""The number of elements summed at a time, so that the sum stays in cache."""


class ReduceOp(Enum):
    """The operation that a communicator reduces with."""

    SUM = "sum"
    AVERAGE = "average"


@dataclass(frozen=True, slots=True)
class Reduction:
    """Divide by ``pre_divide``, reduce with ``op`` over every axis, divide by ``post_divide``.

    Invariant: for ``ReduceOp.SUM`` the product of the two divisors is the divide factor.
    """

    op: ReduceOp
    pre_divide: float = 1.0
    post_divide: float = 1.0

    def divisor_after(self, num_ranks: int) -> float:
        """Return what the sum is divided by once it is reduced over a first axis of ``num_ranks``."""
        return float(num_ranks) if self.op is ReduceOp.AVERAGE else self.pre_divide


def plan_division(
    dtype: torch.dtype, num_ranks: int, *, averages: bool, divide_factor: float | None = None, sum_only: bool = False
) -> Reduction:
    """Return how to reduce gradients of ``dtype`` over ``num_ranks`` data-parallel ranks.

    Args:
        dtype: dtype of the sum. For a 16-bit float with few exponent bits (fp16) the division is split in two, before
            and after the sum, so that neither the sum overflows nor the summands underflow.
        num_ranks: shard ranks times replicate ranks.
        averages: True if the communicators support ``ReduceOp.AVERAGE``.
        divide_factor: the divisor of the sum; ``None`` is ``num_ranks``, the mean.
        sum_only: never use ``ReduceOp.AVERAGE``.
    """
    factor = float(num_ranks if divide_factor is None else divide_factor)
    if dtype not in (torch.float32, torch.float64, torch.bfloat16) and dtype.is_floating_point:
        pre = 1.0  # the smallest power of two not below the square root of the factor: dividing by it is exact
        while factor / pre > pre:
            pre *= 2
        return Reduction(ReduceOp.SUM, pre_divide=pre, post_divide=factor / pre)
    if averages and not sum_only and factor == num_ranks:
        return Reduction(ReduceOp.AVERAGE)
    return Reduction(ReduceOp.SUM, post_divide=factor)


def add_up(summands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum ``summands`` in order into ``out``: in fp32 if they are narrower, rounded once if ``out`` is narrow too.

    In rank order, the sum is the same on every rank and in every run.
    """
    if len(summands) == 1:
        out.copy_(summands[0])
        return
    narrow = out.dtype.is_floating_point and out.dtype.itemsize < torch.float32.itemsize
    same_dtype = not narrow and summands[0].dtype == out.dtype
    for start in range(0, out.numel(), _CHUNK_NUMEL):
        chunk = slice(start, start + _CHUNK_NUMEL)
        target = out[chunk]
        if same_dtype:
            total = torch.add(summands[0][chunk], summands[1][chunk], out=target)
        else:
            total = summands[0][chunk].float() if narrow else target.copy_(summands[0][chunk])
        for summand in summands[2 if same_dtype else 1 :]:
            total.add_(summand[chunk])
        if narrow:
            target.copy_(total)


def divide(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide ``tensor`` in place and return it.

    If the reciprocal is a power of two this multiplies instead: the result is bitwise the same, and faster.
    """
    if divisor == 1.0:
        return tensor
    mantissa, exponent = math.frexp(divisor)
    exact = abs(mantissa) == 0.5 and abs(exponent) <= _LARGEST_EXPONENT
    return tensor.mul_(1.0 / divisor) if exact else tensor.div_(divisor)


MOST_WASTE = 0.1
"""The part of the memory in use that rounding may add, if any cut makes that possible."""

_UNCUT_BYTES = 1 << 20
"""Less than this is not cut: the copies of each part would cost more than the memory is worth."""


def pinned_bytes(nbytes: int) -> int:
    """Return the page-locked memory that an allocation of ``nbytes`` takes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


@lru_cache(maxsize=1024)
def cut_pinned(sizes: Sequence[tuple[int, ...]]) -> list[range]:
    """Cut parameters into the fewest runs whose allocations waste at most :data:`MOST_WASTE`, or else the least.

    Args:
        sizes: the bytes of each parameter in each of several allocations that a run makes: one for its shards, one for
            its gradients.
    """
    # One allocation for all is good enough, or too small to matter.
    columns = [(0, *accumulate(column)) for column in zip(*sizes, strict=True)]
    count, total = len(sizes), sum(ends[-1] for ends in columns)
    if total < _UNCUT_BYTES or sum(pinned_bytes(ends[-1]) for ends in columns) <= (1 + MOST_WASTE) * total:
        return [range(count)]
    # The memory that each run of parameters would take.
    taken = [
        [sum(pinned_bytes(ends[end] - ends[begin]) for ends in columns) for begin in range(end)]
        for end in range(count + 1)
    ]
    least = [0.0] * (count + 1)
    for end in range(1, count + 1):
        least[end] = min(least[begin] + taken[end][begin] for begin in range(end))
    # Add one more run at a time until the waste is small.
    enough = max((1 + MOST_WASTE) * total, least[count])
    costs, begins = [0.0, *[inf] * count], list[list[int]]()  # of the first parameters in one more run each time
    while costs[count] > enough:
        begins.append([min(range(end), key=lambda b: costs[b] + taken[end][b], default=0) for end in range(count + 1)])
        costs = [inf, *(costs[begins[-1][end]] + taken[end][begins[-1][end]] for end in range(1, count + 1))]
    # Walk back through the choices.
    runs, end = list[range](), count
    for begin_of in reversed(begins):
        runs.append(range(begin_of[end], end))
        end = begin_of[end]
    return runs[::-1]
