"""One parameter group: gather, wait, free and reduce; and the verbs by which a root acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from composable_fsdp import trace
from composable_fsdp._core.buckets import ParamGroupBuckets, shard_parameters
from composable_fsdp._core.events import (
    HELD_GRADIENTS,
    PARAMETER_TRANSITIONS,
    Event,
    Hook,
    ParameterOperation,
    ParameterState,
    advance,
    after,
)
from composable_fsdp._core.gather import AllGather, AnyBucket, Gatherable
from composable_fsdp._core.gradients import (
    ParamGroupGradients,
    PendingReduction,
    ReductionLaunch,
    all_gather_wire_bytes,
    gradient_hook,
    reduce_together,
)
from composable_fsdp._core.group_plan import GroupPlan
from composable_fsdp._core.memory import CommStreams, InFlight, without_grad
from composable_fsdp._core.mesh import DataParallelAxes, ProcessGroups
from composable_fsdp._core.params import ParameterSource, ShardedParameter
from composable_fsdp.errors import LifecycleError, ParameterError

UNSHARD_STARTED = frozenset({ParameterState.UNSHARDING, ParameterState.UNSHARDED})
"""The states in which an all-gather is in flight or done."""

# Up to Python 3.11, a member takes as long as a call to look up on its enum.
_UNSHARD, _WAIT, _RESHARD = ParameterOperation.UNSHARD, ParameterOperation.WAIT, ParameterOperation.RESHARD
_AFTER_UNSHARD, _AFTER_WAIT, _AFTER_RESHARD = (after(PARAMETER_TRANSITIONS, op) for op in (_UNSHARD, _WAIT, _RESHARD))
_UNSHARDED, _SHRUNK = ParameterState.UNSHARDED, ParameterState.SHRUNK


class ParamGroup:
    """Parameters that are unsharded, freed and reduced together.

    It consists of its buckets (:class:`ParamGroupBuckets`) and its gradients (:class:`ParamGroupGradients`).

    Args:
        name: the name in errors and traces, until :meth:`rename` gives the qualified name.
        sources: the parameters as ``fully_shard`` found them; ignored if ``parameters`` has sharded ones.
        axes: the mesh axes and device of the modules.

    Invariants: ``parameter_state`` changes only through ``PARAMETER_TRANSITIONS``. An all-gather is pending only in
    UNSHARDING.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[ParameterSource],
        axes: DataParallelAxes,
        *,
        parameters: Sequence[ShardedParameter] | None = None,
    ) -> None:
        self.axes = axes
        is_new = parameters is None
        if parameters is None:
            parameters = shard_parameters(sources)
        used = dict.fromkeys(parameter.sharding.axes for parameter in parameters)
        self.process_groups = [ProcessGroups(mesh_axes) for mesh_axes in used or (axes,)]
        self.tensors = ParamGroupBuckets(
            parameters,
            self.process_groups,
            axes.device,
            gradient_hook(self),
            is_new=is_new,
        )
        self.gradients = ParamGroupGradients(name, self.tensors)
        self.rename(name)
        self.parameter_state = ParameterState.SHARDED
        self._pending_gather: InFlight[None] | None = None
        self.cut: Callable[[AnyBucket, int], Gatherable] | None = None
        """Makes the slices of a bucket from which some neighbouring ranks can gather it again."""
        self.slices: Sequence[Gatherable] = ()
        """The slices for the next all-gather, in SHRUNK and until it is done."""
        self._may_be_written = False
        """True if a failed all-gather may still write to the unsharded memory, which then must not be freed."""
        self._noted_bytes = 0
        """The unsharded bytes that were last reported to the trace."""

    def rename(self, name: str) -> None:
        """Set the name, once the module's path in the model is known or has changed."""
        self.name = self.gradients.name = name
        self.pre_forward_event = Event(Hook.PRE_FORWARD, name)
        self.post_forward_event = Event(Hook.POST_FORWARD, name)

    @property
    def parameters(self) -> list[ShardedParameter]:
        return self.tensors.parameters

    @property
    def buckets(self) -> list[AnyBucket]:
        return self.tensors.buckets

    @property
    def plan(self) -> GroupPlan:
        return self.tensors.plan

    @property
    def was_flipped(self) -> bool:
        """True if ``requires_grad`` of a parameter has changed since the plan was made."""
        return any(parameter.was_flipped for parameter in self.tensors.parameters)

    def copy_settings(self, other: ParamGroup) -> None:
        """Copy the settings and communicators of ``other``, of which this is a copy."""
        self.gradients.copy_settings(other.gradients)
        self.cut = other.cut
        for pgs, original in zip(self.process_groups, other.process_groups, strict=True):
            pgs.follow(original)
        self.tensors.build()

    def refresh(self) -> None:
        """Update after replaced local tensors and changes of ``requires_grad``, if the parameters are sharded.

        Does nothing while gradients in the old layout are held: the next all-gather reduces them first.
        """
        if self.parameter_state is not ParameterState.SHARDED or self.tensors.registration.is_current:
            return
        self.check_data()
        if self.gradients.state in HELD_GRADIENTS and any(parameter.was_flipped for parameter in self.parameters):
            return
        self.tensors.refresh(self.check_nothing_held)

    def allocate(self, device: torch.device | None) -> bool:
        """Allocate shards that are on the meta device, on ``device`` or where they rest, without values.

        Returns False if this changed nothing.
        """
        is_free = self.parameter_state is ParameterState.SHARDED and self.gradients.state not in HELD_GRADIENTS
        return is_free and self.tensors.allocate(device)

    def check_data(self) -> None:
        """Raise a ``ParameterError`` that names the parameters whose ``p.data`` was assigned, if there are any."""
        given = [parameter.name for parameter in self.tensors.registration.replaced_data()]
        if given:
            raise ParameterError(
                f"parameters {given} of {self.name!r} were given other values by p.data = ..., which a sharded "
                "parameter does not follow, as its values are in its local tensor. Change it in place: p.copy_(...) "
                "under torch.no_grad(), or p.to_local().copy_(...) for the shard of this rank."
            )

    def rebuild(self) -> None:
        """Reshard and rebuild the tensors, after a change that the plan depends on."""
        self.check_nothing_held()
        self.reshard()
        former = [bucket.scatter for bucket in self.buckets]
        self.tensors.build()
        for bucket in self.buckets:
            for scatter in former:
                bucket.scatter.continue_from(scatter)

    def give_up(self, parameter: ShardedParameter) -> None:
        """Remove ``parameter``, whose places now hold a parameter of another group."""
        self.check_nothing_held()
        self.reshard()
        self.tensors.parameters.remove(parameter)
        parameter.state_ref = None
        self.tensors.build()

    def register_at(self, parameter: ShardedParameter, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Register ``parameter`` of this group on more modules."""
        self.reshard()
        parameter.owners = (*parameter.owners, *places)
        self.tensors.register()

    def check_nothing_held(self) -> None:
        """Raise ``LifecycleError`` if gradients are held, since new tensors would lose them."""
        if self.gradients.state in HELD_GRADIENTS:
            raise LifecycleError(
                f"{self.name!r} holds gradients that were accumulated and not delivered yet, which this change would "
                "lose. Run a backward outside of no_sync first, or drop them with model.zero_grad()."
            )

    def check_grad_dtypes(self) -> None:
        """Raise ``LifecycleError`` if the user has changed ``grad_dtype`` of a parameter after sharding."""
        for parameter in self.parameters:
            parameter.check_grad_dtype()

    def note_reduce_dtypes(self) -> None:
        """Log once where another version of torch would reduce gradients in another dtype."""
        for p in self.parameters:
            if p.sharded.requires_grad:
                p.precision.note_reduce_dtype(f"{p.name!r} of group {self.name!r}", p.compute_dtype, p.grad_dtype)

    def follow_patches(self) -> None:
        """Update after hooks were set on local tensors, if the parameters are sharded."""
        if self.parameter_state is ParameterState.SHARDED:
            self.tensors.follow_patches()

    # -- parameters

    def advance(self, operation: ParameterOperation) -> ParameterState:
        """Set ``parameter_state`` to that after ``operation``, or raise a ``LifecycleError`` if it is not legal."""
        self.parameter_state = advance(PARAMETER_TRANSITIONS, self.parameter_state, operation, self.name)
        return self.parameter_state

    def unshard(self, streams: CommStreams) -> None:
        """Launch the all-gather, unless it is in flight or done."""
        unshard_together(streams, (self,), f"all-gather of {self.name}")

    @property
    def unshard_started(self) -> bool:
        """True if the all-gather is in flight or done."""
        return self.parameter_state in UNSHARD_STARTED

    @property
    def can_skip_unshard(self) -> bool:
        """True if the all-gather is in flight or done, and :meth:`unshard` has nothing else to do."""
        return self.parameter_state in UNSHARD_STARTED and self.gradients.state not in HELD_GRADIENTS

    def _needs_gather(self, streams: CommStreams) -> bool:
        """Apply changes to the parameters, and return True if no all-gather is in flight or done."""
        if self.gradients.state in HELD_GRADIENTS:
            self._reduce_before_change(streams)
        if not self.tensors.registration.is_current:
            self.refresh()
        if not self.tensors.are_on_rest_device:
            raise self.tensors.device_error(self.name)
        return self.parameter_state not in UNSHARD_STARTED

    def _begin_gather(self, pending: InFlight[None] | None, stream: str, begin: float | None) -> None:
        """Record the all-gather ``pending``, or ``None`` for a group without parameters."""
        self._pending_gather, self._may_be_written = pending, False
        self.parameter_state = _AFTER_UNSHARD.get(self.parameter_state) or self.advance(_UNSHARD)
        if trace.listeners:
            self.note_memory()
            moved = all_gather_wire_bytes(self.slices or self.buckets)
            trace.emit(trace.Operation.UNSHARD, self.name, moved.bytes, stream, begin, moved.plain_bytes)

    def _reduce_before_change(self, streams: CommStreams) -> None:
        """Reduce accumulated gradients if ``requires_grad`` has changed, since the next plan has another layout."""
        if any(parameter.was_flipped for parameter in self.parameters):
            launch = reduce_together((self.gradients,), streams)
            if launch is not None:
                launch.run().complete()

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters."""
        before = self.parameter_state
        self.parameter_state = _AFTER_WAIT.get(before) or self.advance(_WAIT)
        if self.parameter_state is before:
            return
        begin = trace.now() if trace.listeners else None
        self.finish_gather()
        self.tensors.registration.show_unsharded()
        if trace.listeners:
            self.note_memory()
            trace.emit(trace.Operation.WAIT, self.name, 0, "", begin)

    def finish_gather(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self._pending_gather is not None:
            pending, self._pending_gather = self._pending_gather, None
            try:
                pending.wait()
            except BaseException:
                self._may_be_written = not pending.has_arrived
                raise
        self.slices = ()  # only after the wait: until then, the streams of a device may still read them

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded memory."""
        before = self.parameter_state
        self.parameter_state = _AFTER_RESHARD.get(before) or self.advance(_RESHARD)
        if self.parameter_state is before:
            return
        if before is not _UNSHARDED:  # an all-gather is in flight, or slices are kept for one
            self.finish_gather()
        if before is not _SHRUNK:
            self._release()

    def abandon(self) -> None:
        """Reshard without waiting for an all-gather that failed.

        Its connections must be closed, so that nothing writes to the unsharded memory any more.
        """
        self._pending_gather, self._may_be_written, self.tensors.last_gather = None, False, None
        self.reshard()
        for bucket in self.tensors.buckets:
            bucket.free()

    @without_grad
    def shrink(self, mesh_size: int) -> None:
        """Reshard, but keep a slice from which ``mesh_size`` neighbouring ranks can all-gather again."""
        self.advance(ParameterOperation.SHRINK)
        assert self.cut is not None
        self.slices = [self.cut(bucket, mesh_size) for bucket in self.buckets]
        self._release()

    def _release(self) -> None:
        self.tensors.registration.show_sharded()
        if not self._may_be_written:
            for bucket in self.tensors.buckets:
                bucket.free()
        if trace.listeners:
            self.note_memory()
            trace.emit(trace.Operation.RESHARD, self.name)

    def note_memory(self) -> None:
        """Tell listeners if the unsharded parameters take another amount of memory than before."""
        held = sum(bucket.unsharded_bytes for bucket in self.buckets)
        if held != self._noted_bytes:
            operation = trace.Operation.ALLOCATE if held > self._noted_bytes else trace.Operation.FREE
            trace.emit(operation, self.name, abs(held - self._noted_bytes))
        self._noted_bytes = held


def unshard_together(streams: CommStreams, groups: Sequence[ParamGroup], label: str) -> None:
    """Launch one all-gather for those of ``groups`` that need it, called ``label`` in errors.

    If this raises, their unsharded memory is freed, unless part of the all-gather is in flight.
    """
    needed = [group for group in groups if group._needs_gather(streams)]
    buckets = [bucket for group in needed for bucket in group.slices or group.tensors.buckets]
    pending, begin = None, None
    if buckets:  # not, for example, a root whose parameters all belong to nested modules
        begin = trace.now() if trace.listeners else None
        first = needed[0]
        gather = first.tensors.last_gather
        if gather is None or not gather.is_of(buckets):
            gather = AllGather(buckets, first.axes.device)
            if not first.slices:  # these are others each time
                first.tensors.last_gather = gather
        gather.begin(label)
        try:
            # Finished by the wait, so that parameters are copied, and take memory, only when a module needs them.
            pending = streams.gather.run(
                gather.launch, gather.finish, allocate=gather.allocate, prepare=gather.prepare, finish_in_wait=True
            )
        except BaseException:
            if not gather.writes_to_places:
                for bucket in (bucket for group in needed for bucket in group.tensors.buckets):
                    bucket.free()
            raise
    for group in needed:
        group._begin_gather(pending, streams.gather.name, begin)


class Launcher(Protocol):
    """The verbs by which a root acts.

    Those of a device are ``unshard_together`` (gather), ``ParamGroup.wait``, ``ParamGroup.reshard`` (free),
    ``ParamGroup.shrink``, ``ReductionLaunch.run`` (reduce), and ``start`` and ``complete`` (finish) of
    ``PendingReduction``.
    """

    streams: CommStreams
    has_streams: bool
    """False if the host waits for collectives."""

    def gather(self, groups: Sequence[ParamGroup], label: str) -> None:
        """Launch one all-gather, called ``label`` in errors, of those of ``groups`` that are sharded."""
        ...

    def wait(self, group: ParamGroup) -> None:
        """Wait for the all-gather of ``group`` and register its unsharded parameters."""
        ...

    def free(self, group: ParamGroup) -> None:
        """Register the sharded parameters of ``group``, and free the unsharded ones."""
        ...

    def shrink(self, group: ParamGroup, mesh_size: int) -> None:
        """Free ``group``, but keep a slice from which ``mesh_size`` neighbouring ranks can gather it again."""
        ...

    def reduce(self, launch: ReductionLaunch) -> PendingReduction:
        """Launch a reduction. If it has two stages, this is the first one."""
        ...

    def start(self, reduction: PendingReduction) -> None:
        """Launch the second stage of ``reduction``, if it has one and that is not launched yet."""
        ...

    def finish(self, reduction: PendingReduction, unread: list[PendingReduction] | None = None) -> None:
        """Wait for ``reduction``, and set the sharded gradients.

        If the host would wait for flags, or ``unread`` has earlier reductions, append ``reduction`` to it instead.
        """
        ...

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when autograd has run the backward that runs now."""
        ...


class StreamLauncher:
    """Launches on the streams of a device."""

    def __init__(self, streams: CommStreams) -> None:
        self.has_streams = streams.device.has_streams
        self._streams = streams
        self.wrap_verbs(None)

    @property
    def streams(self) -> CommStreams:
        return self._streams

    @streams.setter
    def streams(self, streams: CommStreams) -> None:
        self._streams = streams
        self.wrap_verbs(self._wrap)

    def wrap_verbs(self, wrap: Callable[[str, Any], Any] | None) -> None:
        """Let verbs be what ``wrap`` returns for their names and functions, or themselves."""
        self._wrap, wrapped = wrap, wrap or (lambda _, verb: verb)
        self.gather = wrapped("gather", partial(unshard_together, self._streams))
        self.wait = wrapped("wait", ParamGroup.wait)
        self.free = wrapped("free", ParamGroup.reshard)
        self.reduce = wrapped("reduce", ReductionLaunch.run)
        self.finish = wrapped("finish", PendingReduction.complete)

    shrink = staticmethod(ParamGroup.shrink)
    start = staticmethod(PendingReduction.start)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        engine: Any = Variable._execution_engine
        engine.queue_callback(callback)
