"""All-gathers and reductions of groups, alone or fused, and the launcher by whose verbs a root acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol, cast

import torch
from torch.autograd import Variable

from composable_fsdp import trace
from composable_fsdp._core.comm import Communicator
from composable_fsdp._core.gather import AllGather, reduce_scatter_wire_bytes
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import HELD_GRADIENTS, describe_groups, plan_group
from composable_fsdp._core.memory import CommStreams, InFlight
from composable_fsdp._core.params import accept_gradients
from composable_fsdp._core.reduce import BucketReducer, BucketReduction, ReducedBucket, stages_of

_is_offloaded, _gradient_bytes = attrgetter("is_offloaded"), attrgetter("plan.gradient_bytes")


def reduce_together(
    members: Sequence[ParamGroup],
    streams: CommStreams,
    fused_buckets: FusedBuckets | None = None,
    *,
    is_partial: bool = False,
) -> GroupReduction | None:
    """Return the reduction of all gradients of ``members``. Groups without gradients are skipped; ``None`` if all are.

    Args:
        members: the groups.
        streams: the streams to launch on.
        fused_buckets: fuses the messages of several groups if possible.
        is_partial: reduce over the shard axis only, and keep the sum, in the reduce dtype, for a later reduction.
    """
    taken = [member for member in members if member.start_reducing()]
    return GroupReduction(taken, streams, fused_buckets, is_partial=is_partial) if taken else None


class GroupReduction:
    """A reduction of :func:`reduce_together`: launched once, and then completed. The queue that completes it owns it.

    Attributes:
        nbytes: the gradient bytes, in the dtype of the sum.
    """

    __slots__ = ("_fused_buckets", "_pending", "_streams", "is_partial", "members", "nbytes")
    _pending: InFlight[list[ReducedBucket]]

    def __init__(
        self,
        members: Sequence[ParamGroup],
        streams: CommStreams,
        fused_buckets: FusedBuckets | None,
        *,
        is_partial: bool,
    ) -> None:
        self.members, self.is_partial = members, is_partial
        self._streams, self._fused_buckets = streams, fused_buckets
        self.nbytes: int = sum(map(_gradient_bytes, members))

    def run(self) -> None:
        """Take the gradients and launch their reduction: its first stage, if it has two."""
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            begin = trace.now() if trace.listeners else None
            members, pending = self.members, cast("InFlight[Any] | None", None)
            # Take the gradients, of all members in fused messages if these can share them.
            first, fused = members[0], self._fused_buckets if len(members) > 1 and not self.is_partial else None
            reductions: list[BucketReduction] = []
            if fused is not None and first.is_reduced_like(members[1:]):
                reductions = first.reductions_of(fused.fuse(members))
            if not reductions:
                for member in members:
                    reductions += member.reductions_of([bucket.reducer for bucket in member.buckets])
            name = first.name if len(members) == 1 else describe_groups([member.name for member in members])
            # Launch the first stage. Later ones are launched once it is done.
            for stage in stages_of(self._streams, reductions, first.axes.device, name, is_partial=self.is_partial):
                pending = stage.stream.run(stage.launch, stage.finish, after=pending)
            assert pending is not None
            self._pending = pending
            for member in members:
                if trace.listeners:
                    moved = reduce_scatter_wire_bytes(member.buckets, were_summed=member.were_summed)
                    stream = self._streams.reduce.name
                    trace.emit(trace.Operation.REDUCE, member.name, moved.bytes, stream, begin, moved.plain_bytes)
                # Each group knows that its gradients are on their way.
                member.begin_reduction(pending, is_partial=self.is_partial)
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def start(self) -> None:
        """Launch the second stage, which waited for the first."""
        self._pending.start()

    def complete(self, unread: list[GroupReduction] | None = None) -> None:
        """Wait, and set the sharded gradients; a partial reduction keeps its sums instead.

        Args:
            unread: earlier reductions that wait for the host. If there are any, or if flags would block the host, only
                the stream waits: this reduction holds no buffers then, and joins them.
        """
        begin = trace.now() if trace.listeners else None
        is_offloaded = any(map(_is_offloaded, self.members))
        reduced = self._pending.synchronize() if is_offloaded else self._pending.wait()
        if unread is not None and (unread or any(bucket.may_come_later for bucket in reduced)):
            unread.append(self)
            return
        # Set the gradients, after the flags are read that say which ones are real.
        try:
            for bucket in reduced:
                if bucket.flags is not None:
                    self._pending.synchronize()
                    bucket = bucket.select()
                accept_gradients(bucket.parameters, bucket.gradients)
        except RuntimeError:
            for parameter in (parameter for bucket in reduced for parameter in bucket.parameters):
                parameter.check_grad_dtype()  # the cause, if that of torch's error
            raise
        # The state tables move on.
        for member in self.members:
            member.end_reduction(is_partial=self.is_partial)
            if trace.listeners and not self.is_partial:
                trace.emit(trace.Operation.REDUCED, member.name, begin=begin)


class FusedBuckets:
    """Creates and caches the fused buckets of groups.

    Invariant: the buckets keep only layouts from step to step, no values.
    """

    def __init__(self) -> None:
        self._known: dict[ParamGroup, tuple[list[object], tuple[BucketReducer, ...]]] = {}
        """The groups, plans and communicators of which buckets are made, and these, by the first group."""

    def fuse(self, members: Sequence[ParamGroup]) -> Sequence[BucketReducer]:
        """Return fused buckets for all parameters of ``members``, or none if these cannot share messages.

        They cannot if their process groups differ, or if gradients have a reduce kind. The result is the same on
        every rank.
        """
        made_of: list[object] = [part for t in members for part in (t, t.plan, t.process_groups[0].scatter)]
        known = self._known.get(members[0])
        if known is None or known[0] != made_of:
            known = self._known[members[0]] = (made_of, _fuse(members))
        return known[1]


def _route(group: ParamGroup) -> tuple[Communicator, Communicator, float | None] | None:
    """Return the communicators and the divisor of all gradients of ``group``, or ``None`` if these have several.

    Gradients with a reduce kind, and those of parameters that a gather may make anew, count as such.
    """
    pgs, *others = group.process_groups
    if others or any(bucket.reducer.own is not None or bucket.creates_parameters for bucket in group.buckets):
        return None
    return pgs.scatter, pgs.axes.replicate, pgs.axes.divide


def _fuse(members: Sequence[ParamGroup]) -> tuple[BucketReducer, ...]:
    first, pgs, routes = members[0], members[0].process_groups[0], [_route(member) for member in members]
    if None in routes or any(route != routes[0] for route in routes):
        return ()
    # One plan for the parameters of all groups, as if they were one group.
    specs = tuple(spec for group in members for spec in group.plan.specs)
    parameters = [parameter for group in members for parameter in group.parameters]
    return tuple(
        BucketReducer(
            plan,
            [parameters[i] for i in plan.indices],
            pgs,
            first.device,
            parameters[plan.indices[0]].local.device,
            pin_memory=plan.pins_memory,
        )
        for plan in plan_group(specs, (pgs.plan_options(),)).buckets
    )


class Launcher(Protocol):
    """The verbs by which a root acts: :class:`StreamLauncher` on a device, and a dry run without one."""

    streams: CommStreams
    has_streams: bool
    """False if the host waits for collectives."""

    def gather(self, groups: Sequence[ParamGroup], label: str) -> None:
        """Launch one all-gather, called ``label`` in errors, of those of ``groups`` that are sharded."""

    def wait(self, group: ParamGroup) -> None:
        """Wait for the all-gather of ``group`` and register its unsharded parameters."""

    def free(self, group: ParamGroup) -> None:
        """Register the sharded parameters of ``group``, and free the unsharded ones."""

    def shrink(self, group: ParamGroup, mesh_size: int) -> None:
        """Free ``group``, but keep a slice from which ``mesh_size`` neighbouring ranks can gather it again."""

    def reduce(self, reduction: GroupReduction) -> None:
        """Launch ``reduction``. If it has two stages, this is the first one."""

    def start(self, reduction: GroupReduction) -> None:
        """Launch the second stage of ``reduction``, if it has one and that is not launched yet."""

    def finish(self, reduction: GroupReduction, unread: list[GroupReduction] | None = None) -> None:
        """Wait for ``reduction``, and set the sharded gradients.

        If the host would wait for flags, or ``unread`` has earlier reductions, append ``reduction`` to it instead.
        """

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when autograd has run the backward that runs now."""


class StreamLauncher:
    """Launches on ``streams``, those of a device."""

    def __init__(self, streams: CommStreams) -> None:
        self.streams = streams
        self.has_streams = streams.device.has_streams

    def gather(self, groups: Sequence[ParamGroup], label: str) -> None:
        """Launch one all-gather for those of ``groups`` that need it, called ``label`` in errors.

        If this raises, their unsharded memory is freed, unless part of the all-gather is in flight.
        """
        # Apply changes of parameters, and choose the groups.
        needed = []
        for group in groups:
            if group.gradient_state in HELD_GRADIENTS and group.was_flipped:
                held = reduce_together((group,), self.streams)  # first, as the next plan has another layout
                if held is not None:
                    held.run()
                    held.complete()
            if group.needs_gather():
                needed.append(group)
        # Launch, by the last all-gather if that was of the same buckets.
        buckets = [bucket for group in needed for bucket in group.slices or group.buckets]
        pending, begin = None, None
        if buckets:  # not, for example, a root whose parameters all belong to nested modules
            begin = trace.now() if trace.listeners else None
            first = needed[0]
            gather = first.last_gather
            if gather is None or not gather.is_of(buckets):
                gather = AllGather(buckets, first.axes.device)
                if not first.slices:  # slices are new objects in each pass
                    first.last_gather = gather
            gather.begin(label)
            try:
                # Finished by the wait, so that parameters are copied, and take memory, only when a module needs them.
                pending = self.streams.gather.run(
                    gather.launch, gather.finish, allocate=gather.allocate, prepare=gather.prepare, finish_in_wait=True
                )
            except BaseException:
                if not gather.writes_to_places:
                    for bucket in (bucket for group in needed for bucket in group.buckets):
                        bucket.free()
                raise
        for group in needed:
            group.begin_gather(pending, self.streams.gather.name, begin)

    wait = staticmethod(ParamGroup.wait)
    free = staticmethod(ParamGroup.reshard)
    shrink = staticmethod(ParamGroup.shrink)
    reduce = staticmethod(GroupReduction.run)
    start = staticmethod(GroupReduction.start)
    finish = staticmethod(GroupReduction.complete)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        engine: Any = Variable._execution_engine
        engine.queue_callback(callback)
