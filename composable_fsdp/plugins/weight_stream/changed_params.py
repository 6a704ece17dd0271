"""Streams of the values that changed since the last stream.

Each rank casts its shards of a bucket to the dtype of the wire, one after the other in a row, and compares the row with
the one that it sent last. What differs is sent by its offset in the bucket, which is the full tensors one after the
other: so renamed, joined and split tensors need nothing more. All parameters of a bucket have one dtype and one route.

The rows of a message are as long as that of the rank with most changes. Ranks learn that length from the header of the
message before, so that the changes of a bucket are found before the bucket in front of it is launched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import prod
from typing import Any
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
from composable_fsdp.plugins.weight_stream.flush import INTEGERS, Flush
from composable_fsdp.plugins.weight_stream.model_sources import ModelSources, Source, pack, prepare
from composable_fsdp.plugins.weight_stream.packed_layout import MessageLayout, Slot, fill_buckets
from composable_fsdp.plugins.weight_stream.stream import BUCKET_BYTES, WeightStream, checked_units
from composable_fsdp.plugins.weight_stream.weight_names import KeyMap, Unit
from composable_fsdp.policies import checks_keywords

__all__ = ["SentParams", "stream_changed_params"]

CALLER = "stream_changed_params"


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
        self._rows: list[torch.Tensor] = []
        self._key: object = None
        self._made_of: object = None
        self._buckets: list[_Bucket] = []
        """The buckets of ``_made_of``, which are planned once."""
        self._sources: ModelSources | None = None

    def forget(self) -> None:
        """Send all values next time, on all ranks if it is called on any: a receiver is new, or has lost a flush."""
        self._needs_all = True

    @property
    def nbytes(self) -> int:
        """The bytes of the copies."""
        return sum(row.nbytes for row in self._rows)


@checks_keywords
def stream_changed_params(
    model: nn.Module,
    since: SentParams,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
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
    happens if they do not, and what ``bucket_bytes``, ``dtype``, ``key_map`` and ``rank0_only`` are. One
    ``key_map`` must always give the same results; another one with the same results changes nothing.

    Values are compared by their bits, after the cast. Memory is that of two buckets, and of ``since``. Tensors of a
    flush are valid until the next one is asked for.

    Args:
        model: a module, sharded or not.
        since: what was sent.
        bucket_bytes: the most bytes of a bucket, if all of it is sent. A bucket has parameters of one dtype,
            which are sharded over the same axes.
        dtype: cast parameters of floating point to it, before they are compared.
        key_map: renames, joins and splits.
        rank0_only: only the first rank gets values.
        whole_above: the share of a bucket's values, from 0 to 1, from which on all of them are sent, without indices.
            On ranks with fewer changes than others, as many as the others have count.

    Raises:
        ConfigurationError: an argument makes no sense.
        ParameterError: parameters are on the meta device, pending sums, of a tensor class, of a dtype that
            safetensors lacks, or joined and sharded over other axes than each other.
        LifecycleError: during a forward or backward.
        DivergenceError: ranks call it for different models, or with different arguments.
        PeerError: another rank has raised one of these; in the loop, another rank has left it.
    """
    sharded = prepare(model, CALLER)
    properties = [
        (n, id(p), p.dtype, p.device, p.shape, p.requires_grad, id(sharded.get(id(p))))
        + ((p.device_mesh, p.placements) if isinstance(p, DTensor) else ())
        for n, p in model.named_parameters(remove_duplicate=False)
    ]
    made_of = properties, bucket_bytes, dtype, key_map
    given: Any = since  # a wrong type is an error that all ranks raise, in contents()
    sent: SentParams = given if isinstance(given, SentParams) else SentParams()
    known = sent._sources if sent._made_of == made_of else None
    sources = ModelSources.of(model, dtype, sharded) if known is None else known

    def contents() -> _ChangedParams:
        if sent is not since or not 0 <= whole_above <= 1:
            raise ConfigurationError(
                f"{CALLER} needs since=SentParams(), kept from call to call, and whole_above from 0 to 1, not "
                f"{type(since).__name__} and {whole_above!r}."
            )
        if known is None:
            sent._made_of = None
            sent._buckets = _plan(sources, checked_units(sources, bucket_bytes, dtype, key_map), bucket_bytes)
            sent._made_of, sent._sources = made_of, sources
        return _ChangedParams(sources, sent, whole_above)

    return WeightStream(CALLER, sources, contents, rank0_only)


def _plan(sources: ModelSources, units: list[Unit], bucket_bytes: int) -> list[_Bucket]:
    alike: dict[tuple[torch.dtype, tuple[int, ...]], list[Unit]] = {}
    for unit in units:
        routes, dtype = {sources.sources[i].route for i in unit.members}, unit.tensors[0].dtype
        is_wrapped = any(sources.sources[i].is_wrapped for i in unit.members)
        if is_wrapped or len(routes) > 1 or dtype not in DTYPES.values():
            what = "of a class that wraps other tensors" if is_wrapped else f"of {dtype}"
            what = what if len(routes) == 1 else "joined of parameters that are sharded over different axes"
            raise ParameterError(
                f"parameter {unit.tensors[0].name!r} is {what}, of which {CALLER} cannot send changes. Leave it out by "
                "key_map, and send it with stream_full_params."
            )
        alike.setdefault((dtype, routes.pop()), []).append(unit)
    return [
        _Bucket(sources, plan, dtype, route)
        for (dtype, route), chosen in alike.items()
        for plan in plan_buckets(sources, chosen, bucket_bytes)
    ]


_BLOCK_BYTES = 1 << 20
"""The bytes of a shard that are compared at once in host memory."""
_Changes = tuple[torch.Tensor, torch.Tensor]
"""Places in a bucket, and values as integers of their size."""


class _Bucket:
    """A bucket, and this rank's row: its shards of the parameters, in their order in the bucket.

    Attributes:
        plan: that of all values.
        check: a checksum of what must be the same on all ranks.
        tensors: name, shape and elements of each.
        extents: the place of the parameter of each shard that is not empty, and the extent of the shard in it.
        nbytes: the size of this rank's row.
    """

    def __init__(self, sources: ModelSources, plan: BucketPlan, dtype: torch.dtype, route: tuple[int, ...]) -> None:
        self._sources, self.plan, self.dtype, self.route = sources, plan, dtype, route
        self.num_rows = prod(sources.axes[axis].size for axis in route)
        self.tensors = [(tensor.name, tensor.shape, prod(tensor.shape)) for tensor in plan.layout.tensors]
        self.numel = sum(numel for *_, numel in self.tensors)
        self.check = crc32(repr(plan.sizes()).encode())
        self.kind = INTEGERS[dtype.itemsize]
        self.index_dtype = torch.int32 if self.numel < 1 << 31 else torch.int64
        own, sizes = list[Slot](), list[int]()
        begins, moves, end = [0], list[int](), 0
        self._scattered: list[tuple[int, int, ShardExtent]] = []
        """The shards that are not contiguous in their parameter: number, place of the parameter, extent."""
        self.extents: list[tuple[int, ShardExtent]] = []
        slots = [*plan.direct, *(slot for message in plan.messages for slot in message.slots)]
        for slot in sorted(slots, key=lambda slot: slot.place):
            source: Source = slot.source
            extent = extent_of(source.tensor, source.sharding)
            if extent.is_empty:
                continue
            self.extents.append((slot.place, extent))
            place, numel = slot.place // dtype.itemsize, prod(extent.local_shape)
            length, runs = next(extent.boxes()).runs(extent.shape)
            if length != numel:
                self._scattered.append((len(moves), place, extent))
            moves.append(place + next(runs) - end if length == numel else 0)
            own.append(slot._replace(offset=end * dtype.itemsize))
            sizes.append(numel * dtype.itemsize)
            end += numel
            begins.append(end)
        self.nbytes = end * dtype.itemsize
        self._block_bytes = min(self.nbytes, _BLOCK_BYTES) if is_host(sources.device) else self.nbytes
        self._blocks = []
        """The shards that are compared together. One of more than a block is alone."""
        for block in fill_buckets(sizes, self._block_bytes):
            chosen, first = own[block.start : block.stop], own[block.start].offset
            moved = tuple(slot._replace(offset=slot.offset - first) for slot in chosen)
            self._blocks.append(MessageLayout(route, moved, sum(sizes[block.start : block.stop])))
        offsets = [tensor.offset // dtype.itemsize for tensor in plan.layout.tensors]
        self._begins, self._moves, self._offsets = (
            torch.tensor(each, dtype=self.index_dtype) for each in (begins, moves, [*offsets, self.numel])
        )

    def update(self, known: torch.Tensor, most: int) -> tuple[int, _Changes | None]:
        """Write this rank's row to ``known``, integers in host memory. Return how many values differed, and which.

        Once more than ``most`` differ, -1 for all, no others are looked for and none is returned. A block is cast,
        compared and noted while it is in the cache of the processor.
        """
        count, begin = 0, 0
        places, values = [self._begins[:0].to(self._sources.device)], [known[:0].to(self._sources.device)]
        for new in self._new_blocks():
            old = known[begin : begin + new.numel()]
            more, at = _differing(new, old, most - count) if count <= most else (0, None)
            count += more
            if at is None:
                old.copy_(new)
            elif more:
                places.append((at + begin).to(self.index_dtype))
                values.append(new.index_select(0, at))
                old.index_copy_(0, at.to(old.device), values[-1].to(old.device))
            begin += new.numel()
        return count, None if count > most else (self._places(torch.cat(places)), torch.cat(values))

    def _new_blocks(self) -> Iterator[torch.Tensor]:
        """Yield this rank's row in blocks, each as integers and valid until the next one."""
        block = torch.empty(aligned_bytes(self._block_bytes), dtype=torch.uint8, device=self._sources.device)
        for message in self._blocks:
            if message.width <= self._block_bytes:
                pack(message, block)
                yield block[: message.width].view(self.kind)
                continue
            own = block[: self._block_bytes].view(self.dtype)
            for part in message.slots[0].source.plain.reshape(-1).split(own.numel()):
                yield own[: part.numel()].copy_(part).view(self.kind)

    def _places(self, at: torch.Tensor) -> torch.Tensor:
        """Return the places in the bucket of elements ``at`` of the row, ascending, both 1-d and of its index dtype."""
        bounds = torch.searchsorted(at, self._begins.to(at.device))
        places = at + torch.repeat_interleave(self._moves.to(at.device), bounds.diff(), output_size=at.numel())
        ends = bounds.tolist() if self._scattered else []
        for k, place, extent in self._scattered:
            own = slice(ends[k], ends[k + 1])
            places[own] = place + _full_index(at[own] - int(self._begins[k]), extent)
        return places

    def sparse_plan(self, length: int, changes: _Changes | None) -> BucketPlan:
        """Return the plan of a message with room for ``length`` changes of each rank."""

        def write(message: MessageLayout, row: torch.Tensor) -> None:
            assert changes is not None
            count = changes[0].numel()
            for part, given in zip(self._parts_of(row, length), changes, strict=True):
                part[:count].copy_(given)
            self._parts_of(row, length)[0][count:].fill_(self.numel)  # places after the last one are no changes

        width = aligned_bytes(length * self.index_dtype.itemsize) + aligned_bytes(length * self.dtype.itemsize)
        return BucketPlan(self.plan.layout, [MessageLayout(self.route, (), width)] if length else [], (), write)

    def _parts_of(self, rows: torch.Tensor, length: int) -> _Changes:
        """Return where ``length`` places and values are in a row, or in each of several."""
        middle = aligned_bytes(length * self.index_dtype.itemsize)
        places = rows[..., : length * self.index_dtype.itemsize].view(self.index_dtype)
        return places, rows[..., middle : middle + length * self.dtype.itemsize].view(self.kind)

    def merged(self, gather: BucketGather, length: int) -> dict[str, Any]:
        """Return the tensors with changes, and the indices and values of all ranks, in the order of the bucket."""
        rows = gather.take_rows(0) if length else torch.empty(16, dtype=torch.uint8, device=self._sources.device)
        places, values = (part.flatten() for part in self._parts_of(rows.view(-1, rows.shape[-1]), length))
        places, order = _sorted(places)
        bounds = torch.searchsorted(places, self._offsets.to(places.device))
        changed = bounds.diff()
        count = int(bounds[-1])
        places, values = places[:count], values.index_select(0, order[:count])
        places -= torch.repeat_interleave(self._offsets[:-1].to(places.device), changed, output_size=count)
        numbered = zip(self.tensors, changed.tolist(), strict=True)
        tensors = [(name, shape, count) for (name, shape, _), count in numbered if count]
        return {"tensors": tensors, "indices": places, "values": values.view(self.dtype)}


class _ChangedParams:
    """Contents of a stream: the values that changed."""

    def __init__(self, sources: ModelSources, sent: SentParams, whole_above: float) -> None:
        self._sources, self._buckets, self._sent, self._whole_above = sources, sent._buckets, sent, whole_above
        self._key = [(b.dtype, b.tensors, b.plan.layout.aliases, b.extents) for b in self._buckets]
        self._is_whole = sent._needs_all or not sent._is_complete or sent._key != self._key
        self._changes: _Changes | None = None
        """Places and values of this rank's changes in the next bucket to launch, if they are few."""
        self._length = 0
        """The largest number of changes of a rank in the next bucket to launch."""
        self._lengths: dict[int, int] = {}
        """By bucket in flight of which only changes are sent: the changes of each rank that it has room for."""

    def __len__(self) -> int:
        return len(self._buckets)

    def sizes(self) -> object:
        return [bucket.check for bucket in self._buckets], self._whole_above

    def opening(self) -> tuple[int, int]:
        """Return the begin of a new stream if this rank needs one, and its number of changes in the first bucket."""
        if self._is_whole:
            return max(time.time_ns(), self._sent._stream + 1), 0
        self._sent._is_complete = False  # changes are noted from here on, whatever becomes of the agreement
        return 0, self._find(0)

    def agreed(self, first: int, second: int) -> None:
        self._is_whole, self._length = first > 0, second
        sent = self._sent
        if self._is_whole:
            sent._stream, sent._number, sent._key, sent._needs_all = first, 0, self._key, False
            sent._rows = []
        sent._is_complete = False

    def finish(self) -> None:
        self._sent._is_complete = True

    def next_plan(self, number: int, has_left: bool) -> tuple[BucketPlan, int]:
        bucket, changes, following = self._buckets[number], self._changes, 0
        if self._is_whole and not has_left:
            self._sent._rows[number:] = [row := torch.empty(bucket.nbytes, dtype=torch.uint8)]
            bucket.update(row.view(bucket.kind), most=-1)
        elif not has_left:
            following = self._find(number + 1)
        self._lengths.pop(number, None)
        if self._is_whole or self._length * bucket.num_rows > self._whole_above * bucket.numel:
            return bucket.plan, following
        self._lengths[number] = self._length
        return bucket.sparse_plan(self._length, changes), following

    def _find(self, number: int) -> int:
        """Find the changes of a bucket, and note them as sent. Return their number.

        Places are not looked for if the changes of this rank are so many that all values will be sent.
        """
        if number == len(self):
            return 0
        bucket = self._buckets[number]
        most = int(self._whole_above * bucket.numel / bucket.num_rows)
        count, self._changes = bucket.update(self._sent._rows[number].view(bucket.kind), most)
        return count

    def received(self, number: int, gather: BucketGather, *, takes: bool) -> Flush:
        bucket, sent = self._buckets[number], self._sent
        self._length = gather.header[-1]
        at, sent._number, length = sent._number, sent._number + 1, self._lengths.pop(number, None)
        made: dict[str, Any] = {"tensors": bucket.tensors if takes else [], "values": None}
        if takes and length is None:
            made["values"] = gather.unpack()[: bucket.numel * bucket.dtype.itemsize].view(bucket.dtype)
        elif takes and length is not None:
            made = bucket.merged(gather, length)
        names = {name for name, *_ in made["tensors"]}
        aliases = {alias: name for alias, name in bucket.plan.layout.aliases.items() if name in names}
        is_whole = length is None
        return Flush(sent._stream, at, number, len(self), is_whole, bucket.dtype, aliases=aliases, **made)


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
