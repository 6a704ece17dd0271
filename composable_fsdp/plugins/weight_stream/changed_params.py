"""Streams of the values that changed since the last stream.

Each rank casts its shards of a bucket to the dtype of the wire, one after the other in a row, and compares the row with
the one that it sent last. What differs is sent by its offset in the bucket, which is the full tensors one after the
other: so renamed, joined and split tensors need nothing more. All parameters of a bucket have one dtype.

The rows of one message are as long as that of the rank with most changes. Ranks learn that length from the header of
the message before, so that the changes of a bucket are found before the bucket in front of it is launched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._core.layout import aligned_bytes
from composable_fsdp._core.memory import is_host
from composable_fsdp._extents import DTYPES, ShardExtent, extent_of
from composable_fsdp.errors import ConfigurationError, ParameterError
from composable_fsdp.plugins.weight_stream.bucket_gather import BucketGather, BucketPlan, plan_buckets
from composable_fsdp.plugins.weight_stream.flush import INTEGERS, Flush, FlushHeader
from composable_fsdp.plugins.weight_stream.model_sources import ModelSources, prepare
from composable_fsdp.plugins.weight_stream.packed_layout import (
    HEADER_BYTES,
    HEADER_NUMBERS,
    MessageLayout,
    Slot,
    fill_buckets,
)
from composable_fsdp.plugins.weight_stream.stream import BUCKET_BYTES, WeightStream, check_arguments
from composable_fsdp.plugins.weight_stream.weight_names import KeyMap, Named, units_of

__all__ = ["SentParams", "stream_changed_params"]

CALLER = "stream_changed_params"
_NUM_LENGTHS = HEADER_NUMBERS - 4
_COUNT_BYTES = 16
"""Each row of changes begins with their number, and is aligned after it."""


class SentParams:
    """Copies of this rank's shards as :func:`stream_changed_params` sent them last, in the dtype that is sent.

    The copies are in host memory. It refers to the parameters of the model. Of a new one, such as after a restart of
    the sender, the first stream sends all values.
    """

    def __init__(self) -> None:
        self._stream = self._number = 0
        self._needs_all = True
        self._is_complete = False
        """The last stream has ended: on this rank all that it had to send was taken."""
        self._rows: list[list[torch.Tensor]] = []
        self._key: object = None
        self._made_of: object = None
        self._planned: tuple[ModelSources, _Buckets] | None = None
        """The plan of a stream of ``_made_of``, which is made once."""

    def forget(self) -> None:
        """Send all values next time, on all ranks if it is called on any: a receiver is new, or has lost a flush."""
        self._needs_all = True

    @property
    def nbytes(self) -> int:
        """The bytes of the copies."""
        return sum(row.nbytes for rows in self._rows for row in rows)


def stream_changed_params(
    model: nn.Module,
    since: SentParams,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    whole_above: float = 0.2,
) -> WeightStream[Flush]:
    """Return an iterator of flushes with the values of ``model``'s parameters that differ from those sent last.

    After a step of fine-tuning in bf16 a few in a hundred values differ. ``since`` notes what is sent::

        sent = SentParams()
        for batch in batches:
            train(batch)
            for flush in stream_changed_params(model, sent, dtype=torch.bfloat16, rank0_only=True):
                if flush.values is not None:
                    send(flush.to_bytes())

    A receiver calls :func:`apply_changes`. The first stream of ``since`` sends all values. So does the next one after a
    stream that did not end on all ranks, after :meth:`SentParams.forget` on any rank, and after a change of the model's
    parameters or of an argument. Each flush is one all-gather for each mesh axis; on replicas each value is sent once.
    All ranks must call this together and iterate equally far, as for :func:`stream_full_params`, which says what
    happens if they do not, and what ``bucket_bytes``, ``dtype``, ``key_map``, ``device`` and ``rank0_only`` are. One
    ``key_map`` must always give the same results; another one with the same results changes nothing.

    Values are compared by their bits, after the cast. Memory is that of two buckets, and of ``since``. Tensors of a
    flush are valid until the next one is asked for.

    Args:
        model: a module, sharded or not.
        since: what was sent.
        bucket_bytes: the most bytes of a bucket, if all of it is sent. A bucket has parameters of one dtype.
        dtype: cast parameters of floating point to it, before they are compared.
        key_map: renames, joins and splits.
        device: the device of the flushes.
        rank0_only: only the first rank gets values.
        whole_above: the share of a bucket's values, from 0 to 1, from which on all of them are sent, without indices.
            On ranks with fewer changes than others, as many as the others have count.

    Raises:
        ConfigurationError: an argument makes no sense.
        ParameterError: parameters are on the meta device, pending sums, of a tensor class, or of a dtype that
            safetensors lacks.
        LifecycleError: during a forward or backward.
        DivergenceError: ranks call it for different models, or with different arguments.
        PeerError: another rank has raised one of these; in the loop, another rank has left it.
    """
    sharded = prepare(model, CALLER)
    named = list(model.named_parameters(remove_duplicate=False))
    names = dict(key_map) if isinstance(key_map, Mapping) else key_map
    properties = [
        (n, id(p), p.dtype, p.device, p.shape, p.requires_grad, id(sharded.get(id(p))))
        + ((p.device_mesh, p.placements) if isinstance(p, DTensor) else ())
        for n, p in named
    ]
    made_of = properties, bucket_bytes, dtype, names
    given: Any = since  # a wrong type is an error that all ranks raise, in contents()
    sent: SentParams = given if isinstance(given, SentParams) else SentParams()
    known = sent._planned if sent._made_of == made_of else None
    sources = ModelSources.of(model, sharded) if known is None else known[0]

    def contents() -> _ChangedParams:
        check_arguments(bucket_bytes, dtype, 1)
        if sent is not since or not 0 <= whole_above <= 1:
            raise ConfigurationError(
                f"{CALLER} needs since=SentParams(), kept from call to call, and whole_above from 0 to 1, not "
                f"{type(since).__name__} and {whole_above!r}."
            )
        buckets = _plan(sources, dtype, key_map, bucket_bytes) if known is None else known[1]
        sent._made_of, sent._planned = made_of, (sources, buckets)
        return _ChangedParams(sources, buckets, sent, whole_above)

    return WeightStream(CALLER, sources, contents, device, rank0_only, 1)


_BLOCK_BYTES = 1 << 20
"""The bytes of a shard that are compared at once in host memory."""
_Changes = tuple[torch.Tensor, torch.Tensor]
"""Places in a bucket, and values as integers of their size."""
_Tensor = tuple[str, tuple[int, ...], int]
"""Name, shape and number of values."""


class _Segment:
    """This rank's shards of those parameters of a bucket that are gathered over one route, one after the other.

    Invariant: shards are in the order of their parameters in the bucket, and none is empty.
    """

    def __init__(
        self, sources: ModelSources, route: tuple[int, ...], slots: Sequence[Slot], index_dtype: torch.dtype
    ) -> None:
        self.route = route
        self.num_rows = prod(sources.axes[axis].size for axis in route)
        own, begins, moves, end = [], [0], [], 0
        self._scattered: list[tuple[int, int, ShardExtent]] = []
        """The shards that are not contiguous in their parameter: number, place of the parameter, extent."""
        self.extents: list[tuple[int, ShardExtent]] = []
        """The place of the parameter of each shard, and the extent of the shard in it."""
        for slot in sorted(slots, key=lambda slot: slot.place):
            source = sources.sources[slot.source]
            extent, size = extent_of(source.tensor, source.sharding), slot.dtype.itemsize
            if extent.is_empty:
                continue
            self.extents.append((slot.place, extent))
            place, boxes = slot.place // size, list(extent.boxes())
            length, runs = boxes[0].runs(extent.shape)
            numel = source.plain.numel()
            if length == numel:
                moves.append(place + next(runs) - end)
            else:
                self._scattered.append((len(moves), place, extent))
                moves.append(0)
            own.append(Slot(slot.source, slot.dtype, slot.tensor, numel * size, slot.place, end * size))
            end += numel
            begins.append(end)
        self.slots, self.nbytes = tuple(slots), aligned_bytes(end * slots[0].dtype.itemsize)
        self._begins, self._moves = torch.tensor(begins, dtype=index_dtype), torch.tensor(moves, dtype=index_dtype)
        self._block_bytes = min(self.nbytes, _BLOCK_BYTES) if is_host(sources.device) else self.nbytes
        self._blocks = []
        """The shards that are compared together. One of more than a block is alone."""
        for block in fill_buckets([slot.row_bytes for slot in own], self._block_bytes):
            chosen = own[block.start : block.stop]
            moved = tuple(replace(slot, offset=slot.offset - chosen[0].offset) for slot in chosen)
            self._blocks.append(MessageLayout(route, False, moved, sum(slot.row_bytes for slot in chosen)))

    def update(self, sources: ModelSources, known: torch.Tensor, most: int) -> tuple[int, _Changes | None]:
        """Write this rank's row to ``known``, integers in host memory. Return how many values differed, and which.

        Once more than ``most`` differ, -1 for all, no others are looked for and none is returned. A block is cast,
        compared and noted while it is in the cache of the processor.
        """
        count, begin = 0, 0
        places, values = [self._begins[:0].to(sources.device)], [known[:0].to(sources.device)]
        for new in self._new_blocks(sources, known.dtype):
            old = known[begin : begin + new.numel()]
            more, at = _differing(new, old, most - count) if count <= most else (0, None)
            count += more
            if at is None:
                old.copy_(new)
            elif more:
                places.append((at + begin).to(self._begins.dtype))
                values.append(new.index_select(0, at))
                old.index_copy_(0, at.to(old.device), values[-1].to(old.device))
            begin += new.numel()
        return count, None if count > most else (self.places(torch.cat(places)), torch.cat(values))

    def _new_blocks(self, sources: ModelSources, kind: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield this rank's row in blocks, each as integers and valid until the next one."""
        block = torch.empty(self._block_bytes, dtype=torch.uint8, device=sources.device)
        for message in self._blocks:
            if message.width <= self._block_bytes:
                sources.pack(message, block)
                yield block[: message.width].view(kind)
                continue
            (slot,) = message.slots
            own = block.view(slot.dtype)
            for part in sources.sources[slot.source].plain.reshape(-1).split(own.numel()):
                yield own[: part.numel()].copy_(part).view(kind)

    def places(self, at: torch.Tensor) -> torch.Tensor:
        """Return the places in the bucket of elements ``at`` of the row, ascending, both 1-d and of its index dtype."""
        bounds = torch.searchsorted(at, self._begins.to(at.device))
        places = at + torch.repeat_interleave(self._moves.to(at.device), bounds.diff(), output_size=at.numel())
        ends = bounds.tolist() if self._scattered else []
        for k, place, extent in self._scattered:
            own = slice(ends[k], ends[k + 1])
            places[own] = place + _full_index(at[own] - int(self._begins[k]), extent)
        return places


class _Bucket:
    """A bucket: its plan if all values are sent, and its segments.

    Attributes:
        tensors: name, shape and elements of each, in the order of the bucket.
        lengths: of each segment the changes that each rank's row has room for, once that is known.
        sends_all: all values are sent.
    """

    def __init__(self, sources: ModelSources, plan: BucketPlan, dtype: torch.dtype) -> None:
        self.plan, self.dtype = plan, dtype
        by_route: dict[tuple[int, ...], list[Slot]] = {}
        for message in plan.messages:
            for slot in message.slots:
                by_route.setdefault(message.route, []).append(slot)
        for axis, slot in plan.direct:
            by_route.setdefault((axis,), []).append(slot)
        tensors = sorted(plan.layout.tensors, key=lambda tensor: (tensor.offset, prod(tensor.shape)))
        self.tensors = [(tensor.name, tensor.shape, prod(tensor.shape)) for tensor in tensors]
        self.numel = sum(numel for *_, numel in self.tensors)
        self.index_dtype = torch.int32 if self.numel < 1 << 31 else torch.int64
        self.segments = [_Segment(sources, route, slots, self.index_dtype) for route, slots in by_route.items()]
        self._offsets = torch.tensor([tensor.offset // dtype.itemsize for tensor in tensors], dtype=self.index_dtype)
        self.lengths: Sequence[int] = ()
        self.sends_all = False

    def messages(self) -> list[MessageLayout]:
        """Return the messages of changes: of each rank its header, their number, their places and values."""
        found = []
        for segment, length in zip(self.segments, self.lengths, strict=True):
            if segment.route and length:
                sizes = aligned_bytes(length * self.index_dtype.itemsize), aligned_bytes(length * self.dtype.itemsize)
                width = HEADER_BYTES + _COUNT_BYTES + sum(sizes)
                found.append(MessageLayout(segment.route, False, segment.slots, width))
        return found

    def parts_of(self, row: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where ``length`` places and values are in a row."""
        begin = HEADER_BYTES + _COUNT_BYTES
        middle = begin + aligned_bytes(length * self.index_dtype.itemsize)
        places = row[begin : begin + length * self.index_dtype.itemsize].view(self.index_dtype)
        values = row[middle : middle + length * self.dtype.itemsize].view(INTEGERS[self.dtype.itemsize])
        return places, values

    def merged(self, gather: BucketGather, own: Sequence[_Changes]) -> tuple[list[_Tensor], torch.Tensor, torch.Tensor]:
        """Return the tensors with changes, and the indices and values of all ranks, in the order of the bucket."""
        places, values = self._received(gather, own)
        places, order = _sorted(places)
        values = values.index_select(0, order)
        offsets = self._offsets.to(places.device)
        bounds = torch.searchsorted(places, offsets)
        changed = torch.cat([bounds, bounds.new_tensor([places.numel()])]).diff()
        places -= torch.repeat_interleave(offsets, changed, output_size=places.numel())
        numbered = zip(self.tensors, changed.tolist(), strict=True)
        tensors = [(name, shape, count) for (name, shape, _), count in numbered if count]
        return tensors, places, values.view(self.dtype)

    def _received(self, gather: BucketGather, own: Sequence[_Changes]) -> list[torch.Tensor]:
        """Return the places and values of all ranks, each in one tensor. What was received is freed."""
        found, received = [], iter(range(len(self.segments)))
        for segment, length, changes in zip(self.segments, self.lengths, own, strict=True):
            if segment.route and length:
                rows = gather.take_rows(next(received))
                counts = rows[:, HEADER_BYTES : HEADER_BYTES + 8].view(torch.int64).flatten().tolist()
                for row, count in zip(rows, counts, strict=True):
                    places, values = self.parts_of(row, length)
                    found.append((places[:count], values[:count]))
            else:
                found.append(changes)
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


class _Buckets(NamedTuple):
    """All buckets, and a checksum of what must be the same on all ranks."""

    buckets: Sequence[_Bucket]
    sizes: int


def _plan(sources: ModelSources, dtype: torch.dtype | None, key_map: KeyMap | None, bucket_bytes: int) -> _Buckets:
    named = sources.named(dtype)
    units = units_of(named, key_map)
    sources.check(units, named)
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for unit in units:
        by_dtype.setdefault(unit.tensors[0].dtype, []).append(unit)
        _check_dtype(named[unit.members[0]])
    buckets = [
        _Bucket(sources, plan, of_dtype)
        for of_dtype, chosen in by_dtype.items()
        for plan in plan_buckets(sources, chosen, named, bucket_bytes)
    ]
    return _Buckets(buckets, crc32(repr([bucket.plan.sizes() for bucket in buckets]).encode()))


def _check_dtype(named: Named) -> None:
    if named.is_whole or named.dtype not in DTYPES.values():
        what = "of a tensor class" if named.is_whole else f"of {named.dtype}"
        raise ParameterError(
            f"parameter {named.names[0]!r} is {what}, of which {CALLER} cannot send changes. Leave it out by "
            "key_map, and send it with stream_full_params."
        )


class _ChangedParams:
    """Contents of a stream: the values that changed."""

    def __init__(self, sources: ModelSources, buckets: _Buckets, sent: SentParams, whole_above: float) -> None:
        self._sources, self._buckets, self._sent = sources, buckets.buckets, sent
        self._whole_above, self._sizes = whole_above, buckets.sizes
        routes = dict.fromkeys(segment.route for bucket in self._buckets for segment in bucket.segments)
        self._field_of = {route: min(k, _NUM_LENGTHS - 1) for k, route in enumerate(routes)}
        self._key = [
            (bucket.dtype, bucket.tensors, bucket.plan.layout.aliases, [s.extents for s in bucket.segments])
            for bucket in self._buckets
        ]
        self._is_whole = sent._needs_all or not sent._is_complete or sent._key != self._key
        self._changes: dict[int, list[_Changes]] = {}
        """By bucket that is not received yet: places and values of the changes of each segment on this rank."""
        self._lengths: Sequence[int] = ()
        """The largest number of changes of a rank in the next bucket to launch, by field of the header."""

    def __len__(self) -> int:
        return len(self._buckets)

    def sizes(self) -> object:
        return self._sizes, self._whole_above

    def opening(self) -> Sequence[int]:
        """Return the begin of a new stream if this rank needs one, and the lengths of the first bucket."""
        if self._is_whole:
            return max(time.time_ns(), self._sent._stream + 1), *(0,) * _NUM_LENGTHS
        self._sent._is_complete = False  # changes are noted from here on, whatever becomes of the agreement
        return 0, *(self._find(0) if self._buckets else (0,) * _NUM_LENGTHS)

    def agreed(self, numbers: Sequence[int]) -> None:
        stream, *self._lengths = numbers
        self._is_whole = stream > 0
        sent = self._sent
        if self._is_whole:
            sent._stream, sent._number, sent._key, sent._needs_all = stream, 0, self._key, False
            sent._rows = [[] for _ in self._buckets]
        sent._is_complete = False

    def finish(self) -> None:
        self._sent._is_complete = True

    def gather(self, number: int, left: int) -> BucketGather:
        bucket = self._buckets[number]
        following: Sequence[int] = (0,) * _NUM_LENGTHS
        if self._is_whole and not left:
            self._sent._rows[number] = [torch.empty(s.nbytes, dtype=torch.uint8) for s in bucket.segments]
            for segment, row in zip(bucket.segments, self._sent._rows[number], strict=True):
                segment.update(self._sources, row.view(INTEGERS[bucket.dtype.itemsize]), most=-1)
        elif not left and number + 1 < len(self):
            following = self._find(number + 1)
        header, label = (left, 0, 0, 0, *following), f"bucket {number + 1} of {CALLER}"
        bucket.lengths = [self._lengths[self._field_of[segment.route]] for segment in bucket.segments]
        numel = sum(n * s.num_rows for n, s in zip(bucket.lengths, bucket.segments, strict=True))
        bucket.sends_all = self._is_whole or numel > self._whole_above * bucket.numel
        if bucket.sends_all:
            return BucketGather(self._sources, bucket.plan, header, label)
        messages = bucket.messages()
        others = set(range(len(self._sources.axes))).difference(*(message.route for message in messages))
        if others:
            messages.append(MessageLayout(tuple(sorted(others)), False))
        return BucketGather(
            self._sources, BucketPlan(bucket.plan.layout, (messages, ())), header, label, partial(self._pack, number)
        )

    def _find(self, number: int) -> Sequence[int]:
        """Find the changes of a bucket, and note them as sent. Return their numbers by field of the header.

        Places are not looked for if the changes of this rank are so many that all values will be sent.
        """
        bucket, lengths = self._buckets[number], [0] * _NUM_LENGTHS
        kind = INTEGERS[bucket.dtype.itemsize]
        found = self._changes[number] = []
        for segment, sent in zip(bucket.segments, self._sent._rows[number], strict=True):
            most = int(self._whole_above * bucket.numel / segment.num_rows)
            count, changes = segment.update(self._sources, sent.view(kind), most)
            field = self._field_of[segment.route]
            lengths[field] = max(lengths[field], count)
            if changes is not None:
                found.append(changes)
        return lengths

    def _pack(self, number: int, message: MessageLayout, row: torch.Tensor) -> None:
        """Write the number of changes of this rank, their places and values to ``row``, after the header."""
        if not message.slots:
            return
        bucket = self._buckets[number]
        k = [segment.route for segment in bucket.segments].index(message.route)
        places, values = self._changes[number][k]
        row[HEADER_BYTES : HEADER_BYTES + 8].view(torch.int64).fill_(places.numel())
        for part, given in zip(bucket.parts_of(row, bucket.lengths[k]), (places, values), strict=True):
            part[: given.numel()].copy_(given)

    def received(self, number: int, gather: BucketGather, device: torch.device, *, takes: bool) -> Flush:
        bucket, sent = self._buckets[number], self._sent
        own, self._lengths = self._changes.pop(number, []), gather.header[-_NUM_LENGTHS:]
        at, sent._number = sent._number, sent._number + 1
        if not takes:
            return Flush("", None, None, 0)
        if bucket.sends_all:
            tensors, indices = bucket.tensors, None
            values = gather.unpack()[: bucket.numel * bucket.dtype.itemsize].view(bucket.dtype)
        else:
            tensors, indices, values = bucket.merged(gather, own)
        names = {name for name, *_ in tensors}
        aliases = {alias: name for alias, name in bucket.plan.layout.aliases.items() if name in names}
        header = FlushHeader(sent._stream, at, number, len(self), bucket.sends_all, bucket.dtype, tensors, aliases)
        return Flush.of(header, indices if indices is None else indices.to(device), values.to(device))


def _sorted(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``places`` ascending, and their indices."""
    if not is_host(places.device):
        return places.sort()
    order = torch.from_numpy(np.argsort(places.numpy(), kind="stable"))  # fast for the ascending runs that ranks send
    return places.index_select(0, order), order


def _differing(new: torch.Tensor, old: torch.Tensor, most: int) -> tuple[int, torch.Tensor | None]:
    """Return how many elements differ, and their indices, int64, ascending.

    If more than ``most`` differ, ``None`` in place of the indices, and some number above ``most``.
    """
    if not is_host(new.device):
        differ = new != old.to(new.device)
        count = int(differ.count_nonzero())
        return count, None if count > most else differ.nonzero().squeeze(1)
    # numpy finds indices in a third of the time of torch, and in half of that if it looks for groups of 8 first.
    mask = np.zeros(-(-new.numel() // 8) * 8, dtype=bool)
    np.not_equal(new.numpy(), old.numpy(), out=mask[: new.numel()])
    groups = mask.view(np.uint64)
    found = (groups != 0).nonzero()[0]
    if len(found) > most:
        return len(found), None
    within = groups[found].view(bool).nonzero()[0]
    at = found[within >> 3]
    at <<= 3
    within &= 7
    at += within
    return len(at), torch.from_numpy(at) if len(at) <= most else None


def _full_index(at: torch.Tensor, extent: ShardExtent) -> torch.Tensor:
    """Return the indices in the flattened full tensor of elements ``at`` of the flattened shard of ``extent``."""
    full, stride = torch.zeros_like(at), 1
    for length, ranges in zip(reversed(extent.shape), reversed(extent.ranges), strict=True):
        coordinates = torch.cat([torch.arange(r.start, r.stop, device=at.device) for r in ranges])
        full += coordinates[at % coordinates.numel()] * stride
        at, stride = at // coordinates.numel(), stride * length
    return full
