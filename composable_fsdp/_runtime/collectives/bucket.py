"""The tensors of one bucket: sharded parameters, unsharded parameters, and the messages between them.

A bucket is a :class:`Bucket`, with its shards in one flat store, or an ``ExtendedBucket``, whose tensors have
all-gather hooks. Both own a :class:`~composable_fsdp._runtime.collectives.reduce_scatter.BucketReduceScatter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch

from composable_fsdp._comm.communicator import Transfer
from composable_fsdp._layout.bucket_layout import GatherLayout
from composable_fsdp._layout.pack import take_shard, unpack_parameter
from composable_fsdp._layout.plan import BucketPlan, plan_smaller_mesh
from composable_fsdp._memory.buffers import (
    AliasedBuffer,
    OwnedBuffer,
    ShardStore,
    UnshardedBuffer,
    cast_and_move,
    view_at,
)
from composable_fsdp._runtime.collectives.reduce_scatter import BucketReduceScatter
from composable_fsdp._runtime.collectives.shared_unsharded import SharedUnshardedBuffer
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp._sharding.process_groups import ProcessGroups
from composable_fsdp.codecs._encoder import encode_rows, row_runs
from composable_fsdp.errors import ParameterError

__all__ = ["AllGatherBuffers", "AnyBucket", "Bucket", "CachedPart"]


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
    buffer: UnshardedBuffer
    places: Sequence[torch.Tensor]
    begins: Sequence[int]


class AnyBucket(Protocol):
    """The interface of a bucket that a parameter group uses."""

    plan: BucketPlan
    parameters: list[ShardedParameter]
    pgs: ProcessGroups
    scatter: BucketReduceScatter

    @property
    def versioned(self) -> Sequence[torch.Tensor]:
        """The tensors whose version counters together count the in-place changes of the shards that torch sees."""
        ...

    @property
    def unsharded_bytes(self) -> int:
        """The memory in bytes that the full parameters take now, beside the shards."""
        ...

    @property
    def payload_bytes(self) -> list[tuple[int, int]]:
        """The bytes of each payload of an all-gather, and of its elements. Those of hooks are known after the first."""
        ...

    @property
    def zero_copy_bytes(self) -> int:
        """The zero-copy bytes that this rank sends besides."""
        ...

    def smaller_mesh_bytes(self, num_shards: int, zero_copy_min_bytes: int) -> tuple[list[tuple[int, int]], int]:
        """Return the payload and zero-copy bytes of an all-gather from a smaller mesh, where nothing is encoded."""
        ...

    @property
    def awaits_readers(self) -> bool:
        """True if the all-gather would write to memory that other ranks may still read."""
        ...

    @property
    def cached_part(self) -> CachedPart | None:
        """The inputs and outputs of an all-gather that never changes, or ``None`` if it takes other work."""
        ...

    def update_plan(self, plan: BucketPlan) -> None: ...

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

    def copy_out_shared(self) -> None:
        """Copy full parameters out of shared memory, into memory of this rank that lasts until they are freed."""
        ...

    def keep_slice(self, num_shards: int, rank: int, zero_copy_min_bytes: int) -> None: ...

    def drop_slice(self) -> None: ...


class Bucket:
    """The parameters of one group with the same axes and dtypes.

    Invariant: the local tensor of every parameter is one of ``store``, its unsharded tensor a view of ``buffer``.

    Args:
        plan: which of the group's ``parameters`` are in the bucket, and their offsets.
        store: the shards at rest.
        device: where modules compute.
        common: memory for the full parameters that ranks share, of the plan's compute dtype.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        pgs: ProcessGroups,
        store: ShardStore,
        device: torch.device,
        common: torch.Tensor | None,
    ) -> None:
        self.parameters = [parameters[i] for i in plan.indices]
        self.store = store
        self.pgs = pgs
        self._shard = pgs.axes.shard
        self._device = device
        self._shared_buffer = (
            None if common is None else SharedUnshardedBuffer(plan, self.parameters, store, self._shard.rank, common)
        )
        """Set if ``plan.unsharded_storage`` is ``SHARED``."""
        self._is_shared = store.is_shared or common is not None
        """True if ranks share the memory of the full parameters."""
        self._is_gathered = plan.is_gathered
        self.buffer: UnshardedBuffer = (
            OwnedBuffer(plan.gather.places.numel, plan.compute_dtype, device)
            if self._is_gathered
            else AliasedBuffer(store.flat if common is None else common)
        )
        self._row_places = [self._row_place(plan.gather, i) for i in plan.gather.packed] if self._is_gathered else []
        self._versions: list[int] = []
        """Versions of full parameters in shared memory when they were last freed."""
        self._keeps_values = self._is_shared
        """True if the next all-gather records values in shared memory, to compare them where versions differ: the first
        one, and all others once a version has changed.
        """
        self._was_touched = False
        """True if a version has changed while the parameters were unsharded, whether values did or not."""
        self._recorded: list[list[torch.Tensor]] = []
        """This rank's parts before other ranks could write, and if ``_was_touched`` the full parameters after that."""
        self._own_copy: torch.Tensor | None = None
        """This rank's copy of full parameters in shared memory; modules compute with it while it exists."""
        self._slice: tuple[torch.Tensor, GatherLayout] | None = None
        self._layout = plan.gather
        """Layout of the all-gather in flight."""
        self._decodes = False
        """True if the received rows must be decoded."""
        self.plan = plan
        rest, pinned = store.flat.device, store.flat.is_pinned()
        self.scatter = BucketReduceScatter(plan, self.parameters, pgs, device, rest, pin_memory=pinned)

    def replace_store(self, store: ShardStore) -> None:
        """Use ``store`` in place of one on the meta device. The plan must be gathered, not aliased or shared."""
        self.store = store
        self.scatter.rest, self.scatter.pin_memory = store.flat.device, store.flat.is_pinned()
        for parameter, local in zip(self.parameters, store.locals, strict=True):
            parameter.allocate(local)

    @property
    def versioned(self) -> Sequence[torch.Tensor]:
        return self.store.versioned

    @property
    def unsharded_bytes(self) -> int:
        """The memory in bytes that the full parameters take now, beside the shards."""
        return self.buffer.nbytes + (0 if self._own_copy is None else self._own_copy.nbytes)

    @property
    def payload_bytes(self) -> list[tuple[int, int]]:
        numel, codec = self.plan.gather.packed_numel, self.plan.codec
        if not self._is_gathered or not numel:
            return []
        return [(numel * self._itemsize, self._itemsize) if codec is None else (codec.payload_bytes(numel), 1)]

    @property
    def zero_copy_bytes(self) -> int:
        layout = self.plan.gather
        return sum(layout.shards[i].padded_numel for i in layout.zero_copy) * self._itemsize if self._is_gathered else 0

    @property
    def awaits_readers(self) -> bool:
        return self._shared_buffer is not None and not self._shared_buffer.is_kept and self.pgs.others_may_read

    @property
    def cached_part(self) -> CachedPart | None:
        plan, layout, flat = self.plan, self.plan.gather, self.store.flat
        alone = layout.packed_numel and not layout.zero_copy
        if not (self._is_gathered and alone and plan.codec is None and flat.device == self._device):
            return None
        if not all(layout.shards[i].concatenates for i in layout.packed):
            return None
        begins = [layout.store.offsets[i] for i in layout.packed]
        return CachedPart(flat[: layout.packed_numel], plan.compute_dtype, self.buffer, self._row_places, begins)

    def smaller_mesh_bytes(self, num_shards: int, zero_copy_min_bytes: int) -> tuple[list[tuple[int, int]], int]:
        """Return the payload bytes and zero-copy bytes of an all-gather from a smaller mesh."""
        if not self._is_gathered:
            return [], 0
        layout = plan_smaller_mesh(self.plan, num_shards, zero_copy_min_bytes)
        zero_copy = sum(layout.shards[i].padded_numel for i in layout.zero_copy) * self._itemsize
        return [(layout.packed_numel * self._itemsize, self._itemsize)] if layout.packed_numel else [], zero_copy

    @property
    def _itemsize(self) -> int:
        return self.plan.compute_dtype.itemsize

    def update_plan(self, plan: BucketPlan) -> None:
        """Adopt a plan that differs only in which parameters are trainable."""
        self.plan = plan
        self.scatter.update_plan(plan)

    def free(self) -> None:
        """Free the unsharded parameters. Does nothing if they are free.

        Raises:
            ParameterError: full parameters in memory shared by ranks were changed.
        """
        self.buffer.free()
        if self._own_copy is not None:
            self._own_copy = None
            for k, parameter in enumerate(self.parameters):
                parameter.show(self.parameter_data(k))
            self._versions = [parameter.full._version for parameter in self.parameters]  # writes changed the copy only
        elif self._is_shared:
            self._check_unwritten()

    def copy_out_shared(self) -> None:
        """Copy full parameters out of shared memory, into memory of this rank that lasts until they are freed.

        Needed for parameters that stay unsharded when other ranks may already write to the shared memory.

        Raises:
            ParameterError: full parameters in memory shared by ranks were changed.
        """
        if not self._is_shared or self._own_copy is not None:
            return
        self._check_unwritten()
        with torch.inference_mode(False), torch.no_grad():
            places = self.plan.gather.places
            self._own_copy = copy = self.buffer.region(0, places.numel).clone()
            for parameter, offset in zip(self.parameters, places.offsets, strict=True):
                parameter.show(view_at(copy, offset, parameter.shape))

    @property
    def _own_parts(self) -> list[torch.Tensor]:
        """This rank's parts of the parameters in shared memory."""
        rank = self._shard.rank
        starts = zip(self.plan.shard_offsets(rank), self.plan.gather.shards, strict=True)
        return [self.buffer.region(start, prod(shards.shard_shape(rank))) for start, shards in starts]

    def _check_unwritten(self) -> None:
        """Compare the values of the parameters whose versions have changed with those after the all-gather."""
        versions = [parameter.full._version for parameter in self.parameters]
        recorded, self._recorded = self._recorded, []
        if versions == self._versions:
            self._keeps_values = self._was_touched or (self._keeps_values and not recorded)
            return
        known, self._versions = self._versions, versions
        if not known:
            return
        touched = [k for k, (now, before) in enumerate(zip(versions, known, strict=True)) if now != before]
        if recorded:
            now = (self._own_parts, [parameter.full for parameter in self.parameters])
            touched = [
                k for k in touched if any(not _same_bits(a[k], b[k]) for a, b in zip(recorded, now, strict=False))
            ]
        self._keeps_values = self._was_touched = True
        if touched:
            unknown = (
                " Their values were not recorded in this pass and may be unchanged: if so, call reset_iter_state() on "
                "the root module and continue. Later passes compare them."
            )
            raise ParameterError(
                f"parameters {[self.parameters[k].name for k in touched]} were changed in place while they were "
                "unsharded. Ranks of one host share their memory, so all ranks see the change, once for each rank that "
                "made it. Change the sharded parameters between steps, or write under "
                "unsharded_params(writeback=True). To have such changes dropped, as FSDP2 does, set "
                f"COMPOSABLE_FSDP_SHARED_MEMORY=copy before fully_shard.{'' if recorded else unknown}"
            )

    def parameter_data(self, k: int) -> torch.Tensor:
        """Return the view of the unsharded buffer for the ``k``-th parameter."""
        return self.buffer.parameter_data(self.plan.gather.places.offsets[k], self.parameters[k].shape)

    # -- shards to full parameters

    def allocate_gather(self) -> torch.Tensor | None:
        if not self._is_gathered:
            return None
        layout = self.plan.gather if self._slice is None else self._slice[1]
        if layout.zero_copy:
            self.buffer.allocate()
        flat, dtype = self.store.flat, self.plan.compute_dtype
        if self._slice is not None or flat.dtype == dtype or flat.device != self._device:
            return None
        return torch.empty(flat.numel(), dtype=dtype, device=self._device)

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        """Return the inputs of the all-gather: the shards, encoded if there is a codec, or a smaller mesh's slice."""
        if self._shared_buffer is not None:
            self._shared_buffer.fill()
        if self._keeps_values:
            self._recorded = [_copies(self._own_parts)]
        if not self._is_gathered:
            return AllGatherBuffers([], [])
        self._decodes = self._slice is None and self.plan.codec is not None
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
            packed = wire[: layout.packed_numel]
            codec = self.plan.codec if self._decodes else None
            gather.payloads.append(packed if codec is None else encode_rows(codec, packed.unsqueeze(0)).view(-1))
        return gather

    def finish_gather(self, gather: AllGatherBuffers) -> None:
        """Decode the received rows and copy packed parameters to their places, whose memory is allocated only now."""
        if self._was_touched and self._recorded:
            self._recorded.append(_copies([parameter.full for parameter in self.parameters]))
        if not gather.payloads:
            return
        self.buffer.allocate()
        layout, received = self._layout, gather.rows[0]
        if not self._decodes or self.plan.codec is None:
            self._unpack(received, slice(0, layout.num_shards))
            return
        # Decode the rows of a few ranks at a time, to keep the temporary small; all at once if a parameter is not the
        # concatenation of its rows.
        in_rows = all(layout.shards[i].concatenates for i in layout.packed)
        for run in row_runs(layout.num_shards, layout.packed_numel) if in_rows else (slice(0, layout.num_shards),):
            self._unpack(self.plan.codec.decode(received[run], layout.packed_numel), run)

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

    def keep_slice(self, num_shards: int, rank: int, zero_copy_min_bytes: int) -> None:
        """Keep the slice of ``rank`` on a smaller mesh of ``num_shards``, the input of the all-gather in backward."""
        if self._shared_buffer is not None:
            self._shared_buffer.is_kept = True
        if not self._is_gathered:
            return
        layout = plan_smaller_mesh(self.plan, num_shards, zero_copy_min_bytes)
        kept = torch.empty(layout.store.numel, dtype=self.plan.compute_dtype, device=self._device)
        for shards, start, parameter in zip(layout.shards, layout.store.offsets, self.parameters, strict=True):
            take_shard(shards, parameter.full, rank, kept[start : start + shards.padded_numel])
        self._slice = (kept, layout)

    def drop_slice(self) -> None:
        """Release the slice of :meth:`keep_slice`."""
        self._slice = None
        if self._shared_buffer is not None:
            self._shared_buffer.is_kept = False


@torch.inference_mode(False)
@torch.no_grad()
def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two contiguous tensors have the same bits; as numbers, nan would not equal nan."""
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
