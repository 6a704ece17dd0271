"""A bucket of parameters, and the all-gather of the buckets of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from composable_fsdp._core.comm import Collective, Communicator, Transfer, WorkList
from composable_fsdp._core.group_plan import BucketPlan
from composable_fsdp._core.layout import aligned_bytes, payload_widths, unpack_parameter
from composable_fsdp._core.memory import OwnedBuffer, ShardStore, Work, cast_and_move, group_by_key, is_host, view_at
from composable_fsdp._core.mesh import ProcessGroups
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.reduce import BucketReducer


@dataclass(slots=True)
class AllGatherBuffers:
    """The buffers of one bucket in an all-gather.

    ``zero_copy`` are transfers into the unsharded buffer. ``payloads``, 1-d and contiguous, of any dtypes, are packed
    into one message of the group. Its received rows are in ``rows``: per payload ``(num_shards, numel)``, contiguous
    along the last dim only. Both keep the memory of the message alive.
    """

    zero_copy: list[Transfer]
    payloads: list[torch.Tensor]
    rows: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CachedPart:
    """One bucket of a cached message: ``packed``, 1-d, is cast to ``dtype`` and gathered, one row per rank.

    ``places``, each ``(num_shards, padded_numel)``, follow each other in the rows.
    """

    packed: torch.Tensor
    dtype: torch.dtype
    buffer: OwnedBuffer
    places: Sequence[torch.Tensor]


class Gatherable(Protocol):
    """The input and output of an all-gather: a bucket, or slices of its full parameters in its place."""

    plan: BucketPlan
    pgs: ProcessGroups

    def sent_bytes(self) -> tuple[list[tuple[int, int]], int]:
        """Return the bytes of each payload, and of its elements, in an all-gather, and the zero-copy bytes besides.

        Payloads of hooks are known after the first all-gather.
        """

    @property
    def needs_barrier(self) -> bool:
        """True if all ranks must have come to the all-gather before its inputs are prepared. All ranks agree on it."""

    @property
    def cached_part(self) -> CachedPart | None:
        """The inputs and outputs of an all-gather that never changes, or ``None`` if it takes other work."""

    def allocate_gather(self) -> torch.Tensor | None:
        """Allocate the memory that the all-gather writes to directly. Return memory for a cast, if shards need one."""

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        """Return the inputs of the all-gather. ``cast`` is the result of :meth:`allocate_gather`; ``None`` if that was
        not called.
        """

    def finish_gather(self, gather: AllGatherBuffers) -> None:
        """Allocate the rest of the unsharded memory and copy the received rows into it."""


class AnyBucket(Gatherable, Protocol):
    """The interface of a bucket that a parameter group uses."""

    parameters: list[ShardedParameter]
    reducer: BucketReducer

    @property
    def creates_parameters(self) -> bool:
        """True if an all-gather may make new unsharded parameters."""

    @property
    def versioned(self) -> Sequence[torch.Tensor]:
        """The tensors whose version counters together count the in-place changes of the shards that torch sees."""

    @property
    def unsharded_bytes(self) -> int:
        """The memory in bytes that the full parameters take now, beside the shards."""

    def update_plan(self, plan: BucketPlan) -> None:
        """Adopt a plan that differs only in which parameters are trainable."""

    @property
    def free(self) -> Callable[[], None]:
        """Frees the unsharded parameters. Does nothing if they are free."""


class Bucket:
    """The parameters of one group with the same axes and dtypes.

    Invariant: the local tensor of every parameter is one of ``store``, its unsharded tensor a view of ``buffer``.

    Args:
        plan: which of the group's ``parameters`` are in the bucket, and their offsets.
        store: the shards at rest.
        device: where modules compute.
    """

    needs_barrier = creates_parameters = False

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        pgs: ProcessGroups,
        store: ShardStore,
        device: torch.device,
    ) -> None:
        self.parameters = [parameters[i] for i in plan.indices]
        self.store = store
        self.pgs = pgs
        self.device = device
        self.buffer = OwnedBuffer(plan.gather.places.numel, plan.compute_dtype, device)
        self.free = self.buffer.free
        self.gather_by(plan)
        rest, pinned = store.flat.device, store.flat.is_pinned()
        self.reducer = BucketReducer(plan, self.parameters, pgs, device, rest, pin_memory=pinned)

    def gather_by(self, plan: BucketPlan) -> None:
        """Use the layouts of ``plan``."""
        self.plan = plan
        self._row_places = list(map(self._row_place, plan.gather.packed))

    @property
    def versioned(self) -> Sequence[torch.Tensor]:
        return [self.store.flat]

    @property
    def unsharded_bytes(self) -> int:
        return self.buffer.nbytes

    def sent_bytes(self) -> tuple[list[tuple[int, int]], int]:
        layout, itemsize = self.plan.gather, self.plan.compute_dtype.itemsize
        zero_copy = sum(layout.shards[i].padded_numel for i in layout.zero_copy) * itemsize
        return [(layout.packed_numel * itemsize, itemsize)] if layout.packed_numel else [], zero_copy

    @property
    def cached_part(self) -> CachedPart | None:
        plan, layout, flat = self.plan, self.plan.gather, self.store.flat
        if not layout.packed_numel or layout.zero_copy or flat.device != self.device:
            return None
        if not all(layout.shards[i].concatenates for i in layout.packed) or layout.has_gaps:
            return None
        return CachedPart(flat[: layout.packed_numel], plan.compute_dtype, self.buffer, self._row_places)

    def update_plan(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.reducer.update_plan(plan)

    def parameter_data(self, k: int) -> torch.Tensor:
        """Return the view of the unsharded buffer for the ``k``-th parameter."""
        return self.buffer.parameter_data(self.plan.gather.places.offsets[k], self.parameters[k].shape)

    # -- shards to full parameters

    def allocate_gather(self) -> torch.Tensor | None:
        if self.plan.gather.zero_copy:
            self.buffer.allocate()
        flat, dtype = self.store.flat, self.plan.compute_dtype
        if flat.dtype == dtype or flat.device != self.device:
            return None
        return torch.empty(flat.numel(), dtype=dtype, device=self.device)

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        flat, layout, gather = self.store.flat, self.plan.gather, AllGatherBuffers([], [])
        wire = cast_and_move(flat, self.plan.compute_dtype, self.device) if cast is None else cast.copy_(flat)
        if layout.zero_copy:
            self.buffer.allocate()
        for i in layout.zero_copy:
            length, offset = layout.shards[i].padded_numel, layout.store.offsets[i]
            place = self.buffer.region(layout.places.offsets[i], length * layout.num_shards)
            gather.zero_copy.append(Transfer(place, wire[offset : offset + length]))
        if layout.packed_numel:
            gather.payloads.append(wire[: layout.packed_numel])
        return gather

    def finish_gather(self, gather: AllGatherBuffers) -> None:
        if gather.payloads:
            self.buffer.allocate()
            self.unpack(gather.rows[0], slice(None))

    def unpack(self, received: torch.Tensor, ranks: slice) -> None:
        """Copy the rows received from ``ranks`` to their places."""
        layout = self.plan.gather
        # A shard of dim 0 is a block of the parameter, copied as it is; others are unpacked one by one.
        rows = received.split_with_sizes(layout.packed_widths, dim=1)
        places, sources = [], []
        for position, (i, row) in enumerate(zip(layout.packed, rows, strict=True)):
            shards = layout.shards[i]
            source = row if row.size(1) == shards.padded_numel else row[:, : shards.padded_numel]
            if shards.concatenates:
                place = self._row_places[position]
                places.append(place if ranks == slice(None) else place[ranks])
                sources.append(source)
            else:
                unpack_parameter(shards, source, self._row_places[position])
        if places:
            torch._foreach_copy_(places, sources)

    def _row_place(self, i: int) -> torch.Tensor:
        """Return the memory of the full parameter, as one row per rank if it is the concatenation of its shards."""
        layout = self.plan.gather
        shards = layout.shards[i]
        place = self.buffer.region(layout.places.offsets[i], shards.full_numel)
        return place.view(layout.num_shards, shards.padded_numel) if shards.concatenates else place


class InPlaceBucket:
    """A bucket whose full parameters are the shards, because one rank holds all: nothing is gathered or freed.

    A derived class may have the shards elsewhere, and no ``store``.
    """

    creates_parameters = False
    cached_part = None

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        pgs: ProcessGroups,
        store: ShardStore | None,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.parameters = [parameters[i] for i in plan.indices]
        self.pgs = pgs
        self.store = store
        self.versioned: Sequence[torch.Tensor] = [] if store is None else [store.flat]
        self.reducer = BucketReducer(plan, self.parameters, pgs, device, device, pin_memory=False)

    @property
    def needs_barrier(self) -> bool:
        return False

    @property
    def unsharded_bytes(self) -> int:
        return 0

    def parameter_data(self, k: int) -> torch.Tensor:
        assert self.store is not None
        return view_at(self.store.flat.data, self.plan.gather.places.offsets[k], self.parameters[k].shape)

    def sent_bytes(self) -> tuple[list[tuple[int, int]], int]:
        return [], 0

    def update_plan(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.reducer.update_plan(plan)

    def allocate_gather(self) -> None: ...

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        return self.use()

    def use(self) -> AllGatherBuffers:
        """Begin to use the full parameters as they are."""
        return AllGatherBuffers([], [])

    def finish_gather(self, gather: AllGatherBuffers) -> None: ...

    def free(self) -> None: ...


class AllGather:
    """The all-gather of ``buckets``, which is one collective per communicator.

    It is launched any number of times, one after the other, while buckets and communicators stay what they are. If all
    shards are sent unchanged in one message, that is prepared once: 10 to 12 % of the host time of small groups.

    Args:
        buckets: in the same order on every rank.
        device: where modules compute.
    """

    def __init__(self, buckets: Sequence[Gatherable], device: torch.device) -> None:
        self._buckets = buckets
        self._communicators = [bucket.pgs.gather for bucket in buckets]
        self._device = device
        self._cached = cached_message([bucket.cached_part for bucket in buckets], self._communicators)
        self.begin("")

    def is_of(self, buckets: Sequence[Gatherable]) -> bool:
        """Return True if it gathers ``buckets``, over the communicators that they have now."""
        return buckets == self._buckets and [bucket.pgs.gather for bucket in buckets] == self._communicators

    def begin(self, label: str) -> None:
        """Forget the last launch. ``label`` is the name of the next one in errors, the same on every rank."""
        self._label = label
        self._rows: torch.Tensor | None = None
        """The memory of the cached message."""
        self._casts: list[torch.Tensor | None] = []
        self._gathers: list[AllGatherBuffers] = []
        self._messages: list[tuple[Communicator, list[Transfer], list[Transfer]]] = []
        """The zero-copy and the packed transfers over each communicator."""
        self.writes_to_places = False
        """True while collectives in flight write directly into the unsharded memory."""

    def allocate(self) -> None:
        """Allocate all but packed messages that are prepared each time: their size is not known yet."""
        if self._cached is not None:
            self._rows = self._cached.allocate()
        else:
            self._casts = [bucket.allocate_gather() for bucket in self._buckets]

    def prepare(self) -> None:
        """Pack the messages."""
        # The cached message: only the memory that receives it is new.
        if self._cached is not None:
            rows = self._rows = self._cached.allocate() if self._rows is None else self._rows
            self._messages = [(self._cached.communicator, [], [Transfer(rows.view(-1), self._cached.pack(rows))])]
            return
        # Otherwise each bucket prepares its inputs, and those of one communicator become one message.
        self._await_ranks()
        for bucket, cast in zip(self._buckets, self._casts or [None] * len(self._buckets), strict=True):
            self._gathers.append(bucket.prepare_gather(cast))
        self._casts = []
        for communicator, gathers in group_by_key(self._communicators, self._gathers):
            zero_copy = [transfer for gather in gathers for transfer in gather.zero_copy]
            self._messages.append((communicator, zero_copy, pack_messages(gathers, communicator, self._device)))

    def launch(self) -> Work:
        if not self._messages:
            self.prepare()
        works, messages, self._messages = list[Work](), self._messages, []  # ``finish`` may free what was received
        # One collective for each communicator, usually one in all.
        for communicator, zero_copy, packed in messages:
            if communicator.traits.aliases and not zero_copy and not packed:
                # Shards are in place once all ranks reach the barrier.
                works.append(communicator.launch(Collective.BARRIER, (), self._label))
            else:
                works.append(communicator.launch(Collective.ALL_GATHER, zero_copy + packed, self._label))
            self.writes_to_places = self.writes_to_places or bool(zero_copy)
        return works[0] if len(works) == 1 else WorkList(tuple(works))

    def _await_ranks(self) -> None:
        """Block until all ranks have come here, if a bucket needs that."""
        awaited = [bucket.pgs.axes.shard for bucket in self._buckets if bucket.needs_barrier]
        if awaited:
            label, axes = "release before an all-gather", dict.fromkeys(awaited)
            for work in [axis.launch(Collective.BARRIER, (), label) for axis in axes]:
                work.wait()

    def finish(self) -> None:
        """Copy what was received to its places, and release the messages."""
        self.writes_to_places = False
        if self._cached is not None:
            assert self._rows is not None
            self._cached.take(self._rows)
        else:
            for bucket, gather in zip(self._buckets, self._gathers, strict=True):
                bucket.finish_gather(gather)
        self._rows, self._gathers = None, []  # not after an error: the next group that waits finishes it again


def pack_messages(
    gathers: Sequence[AllGatherBuffers], communicator: Communicator, device: torch.device
) -> list[Transfer]:
    """Pack all payloads into one message and return its transfer. Sets the ``rows`` of each gather.

    A single payload is sent without a copy. Several are copied into one message: a copy of packed payloads, which are
    small, is cheaper than one more launch.
    """
    filled = [gather for gather in gathers if gather.payloads]
    payloads = [payload for gather in filled for payload in gather.payloads]
    if not payloads:
        return []
    dtype = payloads[0].dtype
    widths = payload_widths([(p.nbytes, p.itemsize) for p in payloads]) if len(payloads) > 1 else []
    # One payload: the shard itself is sent.
    if len(payloads) == 1:
        sent, rows = payloads[0], _allocate_rows(communicator, payloads[0].numel(), dtype, device)
        places: Sequence[torch.Tensor] = (rows,)
    # Several of one dtype without gaps: one concatenation, into the row of this rank.
    elif all(p.dtype == dtype and p.nbytes == width for p, width in zip(payloads, widths, strict=True)):
        rows = _allocate_rows(communicator, sum(p.numel() for p in payloads), dtype, device)
        sent = torch.cat(payloads, out=rows[communicator.rank])
        places = torch.split_with_sizes(rows, [p.numel() for p in payloads], dim=1)
    else:
        # Several dtypes: as bytes, each aligned.
        sent, rows, places = _as_bytes(payloads, widths, communicator, device)
    # Each bucket gets the views of its payloads in the rows of all ranks.
    remaining = iter(places)
    for gather in filled:
        gather.rows = [next(remaining) for _ in gather.payloads]
    return [Transfer(rows.view(-1), sent)]


def _allocate_rows(communicator: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate the memory that receives messages of ``numel`` elements, one row per rank.

    A message that is copied together or cast is written to the row of this rank at once, and takes no other memory.
    """
    return communicator.allocate(communicator.size * numel, dtype, device).view(communicator.size, numel)


def _as_bytes(
    payloads: Sequence[torch.Tensor], widths: Sequence[int], communicator: Communicator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the message, the memory for all ranks' messages, and the views of each payload in that."""
    nbytes = sum(widths)
    rows = _allocate_rows(communicator, nbytes, torch.uint8, device)
    sent = rows.view(-1)[nbytes * communicator.rank :][:nbytes]  # also aligned if it is empty
    places, start = [], 0
    for payload, width in zip(payloads, widths, strict=True):
        stop = start + payload.nbytes
        sent[start:stop].view(payload.dtype).copy_(payload)
        place = rows[:, start:stop]
        # Empty rows cannot be viewed: their stride is not a multiple of the itemsize.
        places.append(place.view(payload.dtype) if payload.numel() else place.to(payload.dtype))
        start += width
    return sent, rows, places


def cached_message(parts: Sequence[CachedPart | None], communicators: Sequence[Communicator]) -> CachedMessage | None:
    """Return the message of all ``parts``, or ``None`` if they cannot share one.

    Args:
        parts: the part of each bucket; ``None`` for a bucket that cannot be cached.
        communicators: the communicator of each bucket.
    """
    # One communicator, one dtype, no gaps between parts.
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts) or any(other != communicators[0] for other in communicators):
        return None
    dtype, sizes = known[0].dtype, [part.packed.numel() * part.dtype.itemsize for part in known]
    if any(part.dtype != dtype for part in known) or payload_widths([(n, dtype.itemsize) for n in sizes]) != sizes:
        return None
    return CachedMessage(known, communicators[0])


class CachedMessage:
    """The message of ``parts`` over ``communicator``, with the ranges that are the same in each all-gather."""

    def __init__(self, parts: Sequence[CachedPart], communicator: Communicator) -> None:
        self.communicator = communicator
        self._packed = [part.packed for part in parts]
        self._numel = sum(packed.numel() for packed in self._packed)
        self._dtype = parts[0].dtype
        self._device = self._packed[0].device
        self._buffers = [part.buffer for part in parts]
        self._places = [place for part in parts for place in part.places]
        self._widths = [place.size(1) for place in self._places]
        self._parts = parts
        self._are_alike = is_host(self._device) and len(self._places) >= 2 * len(parts)
        self._are_alike &= all(len({place.size(1) for place in part.places}) == 1 for part in parts)
        self._stacks: list[torch.Tensor] = []
        """If they are alike, the places of each part as one, made with the first rows: only then there is memory."""

    def allocate(self) -> torch.Tensor:
        """Return memory for the rows of a launch."""
        return _allocate_rows(self.communicator, self._numel, self._dtype, self._device)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the message of this rank: its row of ``rows``, or the shard."""
        sent = self._packed[0]
        if len(self._packed) > 1:
            return torch.cat(self._packed, out=rows[self.communicator.rank])
        return sent if sent.dtype == self._dtype else rows[self.communicator.rank].copy_(sent)

    def take(self, rows: torch.Tensor) -> None:
        """Copy ``rows`` to their places, whose memory is allocated only now."""
        for buffer in self._buffers:
            buffer.allocate()
        if len(self._places) == 1:
            self._places[0].copy_(rows)  # half the host time of the operation for several
        elif self._are_alike:  # on the host, the operation for several takes the time of one for each
            self._stacks = self._stacks or [_stacked(part.places) for part in self._parts]
            blocks = rows.split_with_sizes([part.packed.numel() for part in self._parts], dim=1)
            sources = [
                block.view(block.size(0), stack.size(0), stack.size(2)).transpose(0, 1)
                for block, stack in zip(blocks, self._stacks, strict=True)
            ]
            torch._foreach_copy_(self._stacks, sources)
        else:
            torch.split_with_sizes_copy(rows, self._widths, dim=1, out=self._places)


def _stacked(places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``places``, of one shape and at equal distances, as one tensor."""
    first, step = places[0], 0 if len(places) == 1 else places[1].storage_offset() - places[0].storage_offset()
    return first.as_strided((len(places), *first.shape), (step, *first.stride()))


class WireBytes(NamedTuple):
    """The bytes of one collective's messages on one rank: outputs of an all-gather, inputs of a reduction.

    A rank sends, and receives, ``(size - 1) / size`` of these bytes.
    ``plain_bytes`` is the same without codecs and hooks.
    """

    bytes: int
    plain_bytes: int


def all_gather_wire_bytes(buckets: Sequence[Gatherable]) -> WireBytes:
    """Return the bytes of the all-gather over the shard axis, or of slices over a smaller one."""
    total = 0
    for pgs, members in group_by_key([bucket.pgs for bucket in buckets], buckets):
        sent = [bucket.sent_bytes() for bucket in members]
        packed = sum(payload_widths([payload for payloads, _ in sent for payload in payloads]))
        total += pgs.axes.shard.size * (packed + sum(zero_copy for _, zero_copy in sent))
    return WireBytes(total, sum(bucket.plan.wire_bytes for bucket in buckets))


def reduce_scatter_wire_bytes(buckets: Sequence[AnyBucket], *, were_summed: bool = False) -> WireBytes:
    """Return the bytes of the reduction over the shard axis.

    Args:
        buckets: the buckets to reduce.
        were_summed: the gradients were accumulated before, in the dtype of the sum.
    """
    total = plain = 0
    for bucket in (bucket for bucket in buckets if bucket.plan.reduce.indices):
        plan, own = bucket.plan, bucket.reducer.own
        itemsize = (plan.sum_dtype if were_summed else plan.wire_dtype).itemsize
        row_bytes = None if own is None else own.row_bytes
        if row_bytes is not None:
            total += bucket.pgs.axes.shard.size * aligned_bytes(row_bytes)
        else:
            total += plan.reduce.wire_numel * itemsize
        plain += plan.reduce.wire_numel * (itemsize if own is None else plan.reduce_dtype.itemsize)
    return WireBytes(total, plain)
