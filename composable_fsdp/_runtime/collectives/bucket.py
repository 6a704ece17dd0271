"""The tensors of one bucket: sharded parameters, unsharded parameters, and the messages between them.

A bucket is a :class:`Bucket`, with its shards in one flat store, or that of a gather kind. All own a
:class:`~composable_fsdp._runtime.collectives.reduce_scatter.BucketReduceScatter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from composable_fsdp._comm.communicator import Communicator, Transfer
from composable_fsdp._layout.bucket_layout import GatherLayout
from composable_fsdp._layout.pack import take_shard, unpack_parameter
from composable_fsdp._layout.plan import BucketPlan, plan_smaller_mesh
from composable_fsdp._memory.buffers import OwnedBuffer, ShardStore, cast_and_move, view_at
from composable_fsdp._runtime.collectives.reduce_scatter import BucketReduceScatter
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp._sharding.process_groups import ProcessGroups

__all__ = ["AllGatherBuffers", "AnyBucket", "Bucket", "CachedPart", "InPlaceBucket"]


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
    """One bucket of a cached all-gather: ``packed``, 1-d, is cast to ``dtype`` and gathered, one row per rank.

    ``places``, each ``(num_shards, padded_numel)``, begin at ``begins`` of each row, in order.
    """

    packed: torch.Tensor
    dtype: torch.dtype
    buffer: OwnedBuffer
    places: Sequence[torch.Tensor]
    begins: Sequence[int]


class AnyBucket(Protocol):
    """The interface of a bucket that a parameter group uses."""

    plan: BucketPlan
    parameters: list[ShardedParameter]
    pgs: ProcessGroups
    scatter: BucketReduceScatter

    @property
    def creates_parameters(self) -> bool:
        """True if an all-gather may make new unsharded parameters."""
        ...

    @property
    def versioned(self) -> Sequence[torch.Tensor]:
        """The tensors whose version counters together count the in-place changes of the shards that torch sees."""
        ...

    @property
    def unsharded_bytes(self) -> int:
        """The memory in bytes that the full parameters take now, beside the shards."""
        ...

    def sent_bytes(self, num_shards: int | None = None) -> tuple[list[tuple[int, int]], int]:
        """Return the bytes of each payload, and of its elements, in an all-gather, and the zero-copy bytes besides.

        ``num_shards`` is the size of a smaller mesh, where nothing is encoded. Payloads of hooks are known after the
        first all-gather.
        """
        ...

    @property
    def needs_barrier(self) -> bool:
        """True if all ranks must have come to the all-gather before its inputs are prepared. All ranks agree on it."""
        ...

    @property
    def cached_part(self) -> CachedPart | None:
        """The inputs and outputs of an all-gather that never changes, or ``None`` if it takes other work."""
        ...

    def update_plan(self, plan: BucketPlan) -> None:
        """Adopt a plan that differs only in which parameters are trainable."""

    def allocate_gather(self) -> torch.Tensor | None:
        """Allocate the memory that the all-gather writes to directly. Return memory for a cast, if shards need one."""
        ...

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        """Return the inputs of the all-gather. ``cast`` is the result of :meth:`allocate_gather`; ``None`` if that was
        not called.
        """
        ...

    def finish_gather(self, gather: AllGatherBuffers) -> None:
        """Allocate the rest of the unsharded memory and copy the received rows into it."""
        ...

    def free(self) -> None:
        """Free the unsharded parameters. Does nothing if they are free."""
        ...

    def keep_slice(self, smaller: Communicator) -> None:
        """Keep this rank's slice on a smaller mesh, the input of the all-gather in backward."""

    def drop_slice(self) -> None: ...


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
        self._shard = pgs.axes.shard
        self._device = device
        self.buffer = OwnedBuffer(plan.gather.places.numel, plan.compute_dtype, device)
        self._row_places = [self._row_place(plan.gather, i) for i in plan.gather.packed]
        self._slice: tuple[torch.Tensor, GatherLayout] | None = None
        self._layout = plan.gather
        """Layout of the all-gather in flight."""
        self.plan = plan
        rest, pinned = store.flat.device, store.flat.is_pinned()
        self.scatter = BucketReduceScatter(plan, self.parameters, pgs, device, rest, pin_memory=pinned)

    def replace_store(self, store: ShardStore) -> None:
        """Use ``store`` in place of one on the meta device."""
        self.store = store
        self.scatter.rest, self.scatter.pin_memory = store.flat.device, store.flat.is_pinned()
        for parameter, local in zip(self.parameters, store.locals, strict=True):
            parameter.allocate(local)

    @property
    def versioned(self) -> Sequence[torch.Tensor]:
        return [self.store.flat]

    @property
    def unsharded_bytes(self) -> int:
        return self.buffer.nbytes

    def sent_bytes(self, num_shards: int | None = None) -> tuple[list[tuple[int, int]], int]:
        layout, itemsize = self.plan.gather, self.plan.compute_dtype.itemsize
        if num_shards is not None:
            layout = plan_smaller_mesh(self.plan, num_shards, self._shard.traits.zero_copy_min_bytes)
        zero_copy = sum(layout.shards[i].padded_numel for i in layout.zero_copy) * itemsize
        return [(layout.packed_numel * itemsize, itemsize)] if layout.packed_numel else [], zero_copy

    @property
    def cached_part(self) -> CachedPart | None:
        plan, layout, flat = self.plan, self.plan.gather, self.store.flat
        if not layout.packed_numel or layout.zero_copy or flat.device != self._device:
            return None
        if not all(layout.shards[i].concatenates for i in layout.packed):
            return None
        begins = [layout.store.offsets[i] for i in layout.packed]
        return CachedPart(flat[: layout.packed_numel], plan.compute_dtype, self.buffer, self._row_places, begins)

    def update_plan(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.scatter.update_plan(plan)

    def free(self) -> None:
        self.buffer.free()

    def parameter_data(self, k: int) -> torch.Tensor:
        """Return the view of the unsharded buffer for the ``k``-th parameter."""
        return self.buffer.parameter_data(self.plan.gather.places.offsets[k], self.parameters[k].shape)

    # -- shards to full parameters

    def allocate_gather(self) -> torch.Tensor | None:
        layout = self.plan.gather if self._slice is None else self._slice[1]
        if layout.zero_copy:
            self.buffer.allocate()
        flat, dtype = self.store.flat, self.plan.compute_dtype
        if self._slice is not None or flat.dtype == dtype or flat.device != self._device:
            return None
        return torch.empty(flat.numel(), dtype=dtype, device=self._device)

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        if self._slice is not None:
            wire, self._layout = self._slice
        else:
            flat, dtype = self.store.flat, self.plan.compute_dtype
            wire = cast_and_move(flat, dtype, self._device) if cast is None else cast.copy_(flat)
            self._layout = self.plan.gather
        layout, gather = self._layout, AllGatherBuffers([], [])
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
            self._unpack(gather.rows[0], slice(0, self._layout.num_shards))

    def _unpack(self, received: torch.Tensor, ranks: slice) -> None:
        """Copy the rows received from ``ranks`` to their places."""
        layout = self._layout
        is_full_mesh = layout.num_shards == self._shard.size
        rows = received.split_with_sizes(layout.packed_widths, dim=1)
        places, sources = [], []
        for position, (i, row) in enumerate(zip(layout.packed, rows, strict=True)):
            shards = layout.shards[i]
            source = row if row.size(1) == shards.padded_numel else row[:, : shards.padded_numel]
            if shards.concatenates:
                place = self._row_places[position] if is_full_mesh else self._row_place(layout, i)
                places.append(place if source.size(0) == layout.num_shards else place[ranks])
                sources.append(source)
            else:
                unpack_parameter(shards, source, self._row_place(layout, i))
        if places:
            torch._foreach_copy_(places, sources)

    def _row_place(self, layout: GatherLayout, i: int) -> torch.Tensor:
        """Return the memory of the full parameter, as one row per rank if it is the concatenation of its shards."""
        shards = layout.shards[i]
        place = self.buffer.region(layout.places.offsets[i], shards.full_numel)
        return place.view(layout.num_shards, shards.padded_numel) if shards.concatenates else place

    def keep_slice(self, smaller: Communicator) -> None:
        layout = plan_smaller_mesh(self.plan, smaller.size, smaller.traits.zero_copy_min_bytes)
        kept = torch.empty(layout.store.numel, dtype=self.plan.compute_dtype, device=self._device)
        for shards, start, parameter in zip(layout.shards, layout.store.offsets, self.parameters, strict=True):
            take_shard(shards, parameter.full, smaller.rank, kept[start : start + shards.padded_numel])
        self._slice = (kept, layout)

    def drop_slice(self) -> None:
        self._slice = None


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
        self.scatter = BucketReduceScatter(plan, self.parameters, pgs, device, device, pin_memory=False)

    @property
    def needs_barrier(self) -> bool:
        return False

    @property
    def unsharded_bytes(self) -> int:
        return 0

    def parameter_data(self, k: int) -> torch.Tensor:
        assert self.store is not None
        return view_at(self.store.flat.data, self.plan.gather.places.offsets[k], self.parameters[k].shape)

    def sent_bytes(self, num_shards: int | None = None) -> tuple[list[tuple[int, int]], int]:
        return [], 0

    def update_plan(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.scatter.update_plan(plan)

    def allocate_gather(self) -> None: ...

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        return AllGatherBuffers([], [])

    def finish_gather(self, gather: AllGatherBuffers) -> None: ...

    def free(self) -> None: ...

    def keep_slice(self, smaller: Communicator) -> None: ...

    def drop_slice(self) -> None: ...
