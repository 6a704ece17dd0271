"""Full parameters in memory that the ranks of a host share: nothing is staged, sent or copied out.

A rank keeps its shards in that memory, or casts them there if modules compute in another dtype. A barrier completes the
all-gather. Each parameter has a place of its own, with room for the padded shards of all ranks.

A barrier ends each epoch, too; the communicator counts them. It is launched when a pass has launched all else, so that
there is one wait, and before an optimizer's step if a forward left parameters in use. Into a place to which shards are
cast, a rank writes its part only while that is *private*: from the end of the epoch in which the rank freed the full
parameters until it launches their next all-gather. An all-gather in the same epoch, as when a module runs twice in one
forward or after ``unshard()``, starts with a barrier, so that all ranks have freed the parameters before any of them
writes.

The memory is allocated at the first write and released with the groups of all ranks. It is not freed in between,
because page faults would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast
from weakref import ref

import torch

from composable_fsdp import trace
from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.verify_ranks import verify_same
from composable_fsdp._core.comm import Collective
from composable_fsdp._core.gather import AllGatherBuffers, InPlaceBucket
from composable_fsdp._core.group import GatherKind, ParamGroup
from composable_fsdp._core.group_plan import BucketPlan, GatherClaim, ParameterState, Pass
from composable_fsdp._core.layout import TensorShards
from composable_fsdp._core.memory import ShardStore, Work, contiguous_strides, is_host, view_at
from composable_fsdp._core.mesh import ProcessGroups
from composable_fsdp._core.params import ShardedParameter, optimizer_steps
from composable_fsdp._core.seams import OBSERVERS, ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState, state_of_parameter
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.shared_memory.shm_communicator import SharedMemoryCommunicator

_ALIGNMENT = 64
"""The alignment of parameters in shared memory: the bytes of a cache line."""


class SharedParameters(GatherKind):
    """Keeps the full parameters of a group in shared memory, if :class:`Epochs` observes."""

    def __init__(self, group: ParamGroup) -> None:
        super().__init__(group)
        self.segments: dict[ProcessGroups, Segment] = {}
        self._places: dict[ShardedParameter, tuple[int, torch.dtype, torch.dtype]] = {}
        """The first byte of each parameter, and the dtypes at rest and of computation that its place is for."""

    def reserve(self) -> None:
        group = self.group
        pairs = [each for each in group.process_groups if each.gather.traits.aliases and each.gather.size > 1]
        if not pairs or group.is_offloaded or not any(isinstance(each, Epochs) for each in OBSERVERS):
            return
        for pgs in pairs if order_check_from() is not OrderCheck.OFF else ():
            lines = [f"parameter {p.name!r}: {p.description}" for p in group.parameters if p.sharding.axes == pgs.axes]
            verify_same(lines, (pgs.axes.shard,), group.device, "a group that fully_shard makes")
        group.find()
        for pgs in pairs:
            members = [p for p in group.parameters if p.sharding.axes == pgs.axes and group.claim(p) is None]
            shards = [TensorShards(p.shape, p.dim, pgs.axes.shard.size) for p in members]
            if not members or not all(each.concatenates for each in shards):
                continue
            end, places = 0, {}
            for parameter, each in zip(members, shards, strict=True):
                places[parameter] = end, parameter.dtype, parameter.compute_dtype
                nbytes = each.full_numel * parameter.compute_dtype.itemsize
                end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            if end:
                axis = cast(SharedMemoryCommunicator, pgs.axes.shard)
                self.segments[pgs] = Segment(axis, axis.share(end))
                self._places.update(places)

    def claim(self, parameter: ShardedParameter) -> GatherClaim | None:
        place = self._places.get(parameter)
        if place is None or place[1:] != (parameter.dtype, parameter.compute_dtype):
            return None  # other ranks may still read the place, which values of other dtypes would overwrite
        pgs = next(each for each in self.segments if each.axes == parameter.sharding.axes)
        # Custom collectives, which users may set later, are called for all bytes.
        fits = pgs.gather.traits.aliases and (parameter.local.is_meta or is_host(parameter.local.device))
        return GatherClaim(SharedParameters, is_gathered=False, packs=False) if fits else None

    def make(self, plan: BucketPlan) -> SharedBucket:
        group, pgs = self.group, self.group.process_groups[plan.axes]
        members = [group.parameters[i] for i in plan.indices]
        segment, on_meta = self.segments[pgs], any(parameter.local.is_meta for parameter in members)
        memory = torch.empty_like(segment.memory, device="meta") if on_meta else segment.memory
        places = []
        for parameter, shards in zip(members, plan.gather.shards, strict=True):
            begin, nbytes = self._places[parameter][0], shards.full_numel * plan.compute_dtype.itemsize
            places.append(memory[begin : begin + nbytes].view(plan.compute_dtype))
        store = None if plan.dtype == plan.compute_dtype else group.make_store(plan)
        bucket = SharedBucket(plan, group.parameters, pgs, segment, places, store, group.device)
        group.fill(bucket, bucket.shards, [bucket.parameter_data(k) for k in range(len(members))])
        bucket.free()
        return bucket


@dataclass
class Segment:
    """The memory that the ranks of one shard axis share for one group.

    Args:
        axis: the communicator of the axis, or a decorator of it.
        awaits_epoch_end: true if this rank may have read the memory in this epoch. It is the same on all ranks, because
            they all-gather and end epochs together.
        released_at: the epoch when this rank last freed the full parameters. Until that ends, others may read them.
    """

    axis: SharedMemoryCommunicator
    memory: torch.Tensor
    awaits_epoch_end: bool = False
    released_at: int = -1


class SharedBucket(InPlaceBucket):
    """A bucket whose full parameters are in shared memory.

    Args:
        places: the memory of each full parameter, 1-d, with padding.
        store: the shards at rest, which are cast, or ``None`` if they are parts of ``places``.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        pgs: ProcessGroups,
        segment: Segment,
        places: Sequence[torch.Tensor],
        store: ShardStore | None,
        device: torch.device,
    ) -> None:
        super().__init__(plan, parameters, pgs, store, device)
        rank, shards = pgs.axes.shard.rank, plan.gather.shards
        self._segment = segment
        self._places = places
        self._casts = store is not None
        parts = [p.data[rank * s.padded_numel :][: s.padded_numel] for p, s in zip(places, shards, strict=True)]
        self._parts = parts
        """This rank's parts, with padding. Writing to them changes no version counter of the parameters."""
        shapes = [each.shard_shape(rank) for each in shards]
        if store is None:
            self.shards = [_part_of_storage(part, shape) for part, shape in zip(parts, shapes, strict=True)]
            self.versioned = self.shards
        else:
            self.shards = store.locals
            offsets = zip(plan.gather.store.offsets, shards, strict=True)
            self._at_rest = [store.flat[begin : begin + each.padded_numel] for begin, each in offsets]
        self._cast_from: tuple[int, int] | None = None
        """Version counters and optimizer steps at the last cast of the shards."""
        self._is_used = False
        """True from an all-gather until the full parameters are freed."""
        self.own_copy: torch.Tensor | None = None
        """This rank's copy of the full parameters; modules compute with it while it exists."""
        self._versions: list[int] = []
        """Versions of the full parameters when they were last freed."""
        self._keeps_values = True
        """True if the next all-gather records values, to compare them where versions differ: the first one, and all
        others once a version has changed.
        """
        self._was_touched = False
        """True if a version has changed while the parameters were unsharded, whether values did or not."""
        self._recorded: list[list[torch.Tensor]] = []
        """This rank's parts before other ranks could write, and if ``_was_touched`` the full parameters after that."""

    def parameter_data(self, k: int) -> torch.Tensor:
        return view_at(self._places[k].data, 0, self.parameters[k].shape)

    @property
    def unsharded_bytes(self) -> int:
        return 0 if self.own_copy is None else self.own_copy.nbytes

    @property
    def needs_barrier(self) -> bool:
        """True if casts would write to memory that other ranks may still read."""
        return self._casts and self._segment.released_at == self._segment.axis.epoch

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        if self._casts:
            self._fill()
        return self.use()

    def use(self) -> AllGatherBuffers:
        if self._keeps_values:
            self._recorded = [_copies(self._parts)]
        self._segment.awaits_epoch_end = self._is_used = True
        return AllGatherBuffers([], [])

    def _fill(self) -> None:
        """Cast the shards to their places.

        In backward only if their version counters changed: other changes, such as through ``.data``, take effect in the
        next forward.
        """
        tensors = [*(parameter.sharded for parameter in self.parameters), *self.versioned]
        changes = sum(tensor._version for tensor in tensors), optimizer_steps()
        if changes == self._cast_from and torch._C._current_graph_task_id() != -1:
            return
        torch._foreach_copy_(self._parts, self._at_rest)
        self._cast_from = changes

    def finish_gather(self, gather: AllGatherBuffers) -> None:
        if self._was_touched and self._recorded:
            self._recorded.append(_copies([parameter.full for parameter in self.parameters]))

    def free(self) -> None:
        """Note that modules no longer use the full parameters.

        Raises:
            ParameterError: full parameters in memory shared by ranks were changed.
        """
        if self._is_used:
            self._is_used = False
            self._segment.released_at = self._segment.axis.epoch
        if self.own_copy is None:
            self._check_unwritten()
            return
        self.own_copy = None
        for k, parameter in enumerate(self.parameters):
            parameter.show(self.parameter_data(k))
        self._versions = [parameter.full._version for parameter in self.parameters]  # writes changed the copy only

    def copy_out(self) -> None:
        """Copy the full parameters into memory of this rank that lasts until they are freed.

        Needed for parameters that stay unsharded when other ranks may already write to the shared memory. Raises as
        :meth:`free` does.
        """
        if self.own_copy is not None:
            return
        self._check_unwritten()
        with torch.inference_mode(False), torch.no_grad():
            layout = self.plan.gather.places
            self.own_copy = torch.empty(layout.numel, dtype=self.plan.compute_dtype)
            for parameter, offset in zip(self.parameters, layout.offsets, strict=True):
                parameter.show(view_at(self.own_copy, offset, parameter.shape).copy_(parameter.full))

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
            now = (self._parts, [parameter.full for parameter in self.parameters])
            pairs = list(zip(recorded, now, strict=False))
            touched = [k for k in touched if any(not _same_bits(before[k], after[k]) for before, after in pairs)]
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


@torch.inference_mode(False)
@torch.no_grad()
def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two contiguous tensors have the same bits; as numbers, nan would not equal nan."""
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _part_of_storage(part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the beginning of ``part`` as a tensor of ``shape`` with a storage that holds nothing else.

    Saving a tensor saves its storage. The storage keeps all of the memory alive.
    """
    if part.is_meta:
        return torch.empty(shape, dtype=part.dtype, device=part.device)
    begin = part.storage_offset() * part.itemsize
    storage = part.untyped_storage()[begin : begin + prod(shape) * part.itemsize]
    return torch.empty(0, dtype=part.dtype).set_(storage, 0, shape, contiguous_strides(shape))


class Epochs(Observer):
    """Ends the epochs of roots with parameters in shared memory."""

    def __init__(self) -> None:
        self._of_roots: tuple[ref[_EpochsOfRoot], ...] = ()
        """The epochs of all roots, oldest first: in the same order on every rank, as barriers are."""

    def for_root(self, root: ObservedRoot) -> Observer | None:
        axes = (pgs.axes.shard for state in root.states.values() for pgs in state.group.process_groups)
        aliasing = [cast(SharedMemoryCommunicator, c) for c in dict.fromkeys(axes) if c.traits.aliases and c.size > 1]
        if not aliasing:
            return None
        known = _EpochsOfRoot(root, aliasing)
        self._of_roots = (*(each for each in self._of_roots if each() is not None), ref(known))
        return known

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait until no rank reads shared memory that ``optimizer`` will write. It is looked up only if needed."""
        known_roots = [known for each in self._of_roots if (known := each()) is not None]
        awaiting = [known for known in known_roots if known.is_idle and known.awaited]
        if awaiting:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            own = {state for p in parameters if (state := state_of_parameter(p)) is not None}
            for known in awaiting:
                if not own.isdisjoint(known.states):
                    _wait_for(known.end("optimizer step", known.awaited))


class _EpochsOfRoot(Observer):
    """The epochs of one root. ``communicators`` are the shard axes over which parameters may be in shared memory."""

    def __init__(self, root: ObservedRoot, communicators: Sequence[SharedMemoryCommunicator]) -> None:
        self._root = ref(root)
        self._communicators = communicators
        self.states = root.states.values()

    @property
    def is_idle(self) -> bool:
        root = self._root()
        return root is not None and root.current_pass is Pass.IDLE

    @property
    def awaited(self) -> set[SharedMemoryCommunicator]:
        """The axes over which ranks may read shared memory: the same on every rank."""
        segments = (segment for state in self.states for segment in _segments_of(state))
        return {segment.axis for segment in segments if segment.awaits_epoch_end}

    def end(self, occasion: str, awaited: Collection[SharedMemoryCommunicator]) -> list[Work]:
        """Launch the end of the epoch: this rank reads nothing in it until the next all-gather.

        Once the returned works are done, no rank reads there, and each may write.

        Args:
            occasion: name of the event in errors.
            awaited: communicators over which ranks have read since the epoch began. The others need no synchronization.
        """
        ended = [each for each in self._communicators if each in awaited]
        for each in ended:
            each.end_epoch()
        works = [each.launch(Collective.BARRIER, (), occasion) for each in ended]
        for state in self.states if works else ():
            _note_epoch_end(state)
        return works

    def before_end(self, root: ObservedRoot, which: Pass) -> Sequence[Work]:
        if which is Pass.BACKWARD:
            return self.end("end of backward", self._communicators)
        if not root.planner.runs_on_all_ranks:
            return ()  # a forward that gathered nothing must not change what ranks do together
        for state in self.states:  # a user may write to kept parameters, and use them in forwards of this rank only
            _copy_out(state)
        return self.end("end of forward", self.awaited)

    def kept(self, root: ObservedRoot, state: FSDPState) -> None:
        """Use a copy: other ranks may update their shards while forwards here still use the parameters."""
        _copy_out(state)

    def unsharded(self, root: ObservedRoot, state: FSDPState) -> None:
        """Use a copy at once: other ranks may change their shards, and may not run the forwards that use it."""
        awaited = dict.fromkeys(segment.axis for segment in _segments_of(state) if segment.awaits_epoch_end)
        if awaited:
            _copy_out(state)
            _wait_for([each.launch(Collective.BARRIER, (), f"unshard() of {state.name}") for each in awaited])
            _note_epoch_end(state)

    def have_met(self, root: ObservedRoot) -> None:
        for state in self.states:
            _note_epoch_end(state)


def _segments_of(state: FSDPState) -> Iterator[Segment]:
    kind = state.group.kinds.get(SharedParameters)
    return iter(kind.segments.values() if isinstance(kind, SharedParameters) else ())


def _shared_buckets(state: FSDPState) -> list[SharedBucket]:
    return [bucket for bucket in state.group.buckets if isinstance(bucket, SharedBucket)]


def _copy_out(state: FSDPState) -> None:
    """Continue with private copies of full parameters that are in shared memory, after the all-gather if needed.

    After the next barrier other ranks may write to their shards while modules here still use the copies.
    """
    group, shared = state.group, _shared_buckets(state)
    if shared and group.unshard_started:
        if group.parameter_state is ParameterState.UNSHARDING:
            group.finish_gather()
        for bucket in shared:
            bucket.copy_out()
        if trace.listeners:
            group.note_memory()


def _note_epoch_end(state: FSDPState) -> None:
    """Record a barrier of all ranks. Another is needed if full parameters in shared memory are still in use."""
    is_free = state.group.parameter_state is ParameterState.SHARDED
    stays = not is_free and any(bucket.own_copy is None for bucket in _shared_buckets(state))
    for segment in _segments_of(state):
        segment.awaits_epoch_end = segment.awaits_epoch_end and stays


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
