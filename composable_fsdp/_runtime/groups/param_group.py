"""One group: unshard, wait, reshard; ``gradients`` has the way back. What to do when is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import nn

from composable_fsdp import trace
from composable_fsdp._layout.plan import GroupPlan
from composable_fsdp._memory.streams import CommStreams, InFlight
from composable_fsdp._runtime.collectives.all_gather import launch_gather
from composable_fsdp._runtime.collectives.bucket import AnyBucket
from composable_fsdp._runtime.collectives.grad_mode import without_grad
from composable_fsdp._runtime.collectives.packing import describe_groups
from composable_fsdp._runtime.collectives.wire_bytes import all_gather_wire_bytes, smaller_mesh_wire_bytes
from composable_fsdp._runtime.groups.gradients import GroupGradients, reduce_together
from composable_fsdp._runtime.groups.group_tensors import GroupTensors, take_shards
from composable_fsdp._runtime.groups.profiling import labelled
from composable_fsdp._runtime.groups.state_machine import (
    PARAMETER_TRANSITIONS,
    ParameterOperation,
    ParameterState,
    advance,
)
from composable_fsdp._runtime.params.sharded_param import ParameterSource, ShardedParameter
from composable_fsdp._sharding.mesh import DataParallelAxes
from composable_fsdp._sharding.process_groups import ProcessGroups
from composable_fsdp.errors import LifecycleError, ParameterError
from composable_fsdp.policies import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["ParameterGroup", "unshard_together"]

_HERE_OR_COMING = frozenset(
    before
    for (before, operation), after in PARAMETER_TRANSITIONS.items()
    if operation is ParameterOperation.UNSHARD and after is before
)
"""In which parameters are in memory or on their way."""


class ParameterGroup:
    """Parameters that are communicated together.

    Args:
        name: for messages and the trace, until the group's place in the model is known.
        sources: the parameters as ``fully_shard`` found them, or ``parameters`` that are sharded already.
        axes: where modules compute, and the axes of a group without parameters.

    Invariants: ``parameter_state`` changes only through the table of ``lifecycle``; a gather is pending only while
    that is UNSHARDING.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[ParameterSource],
        axes: DataParallelAxes,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        *,
        parameters: Sequence[ShardedParameter] | None = None,
    ) -> None:
        self.name = name
        """For messages and the trace."""
        self.axes = axes
        self.offload = offload
        is_new = parameters is None
        if parameters is None:
            parameters = take_shards(sources, offload)
        used = dict.fromkeys(parameter.sharding.axes for parameter in parameters)
        self.process_groups = [ProcessGroups(each) for each in used or (axes,)]
        self.tensors = GroupTensors(
            parameters,
            self.process_groups,
            axes.device,
            precision,
            offload,
            _gradient_hooks(self),
            in_common=is_new,
        )
        self.gradients = GroupGradients(name, self.tensors)
        self.parameter_state = ParameterState.SHARDED
        self._pending_gather: InFlight[None] | None = None
        self._is_written_to = False
        """Whether a gather that was given up may still write to the unsharded memory, which stays until it cannot."""
        self._noted_bytes = 0
        """Unsharded memory as the trace knows it."""
        self._has_own_copy = False
        """Whether nothing that modules compute with lies in memory that ranks have in common."""

    def rename(self, name: str) -> None:
        """The group's place in the model is known, or has changed."""
        self.name = self.gradients.name = name

    @property
    def parameters(self) -> list[ShardedParameter]:
        return self.tensors.parameters

    @property
    def buckets(self) -> list[AnyBucket]:
        return self.tensors.buckets

    @property
    def plan(self) -> GroupPlan:
        return self.tensors.plan

    def follow_choices(self, other: ParameterGroup) -> None:
        """Takes over what was chosen for ``other``, of which this is a copy, communicators included."""
        self.gradients.follow_choices(other.gradients)
        for pgs, original in zip(self.process_groups, other.process_groups, strict=True):
            pgs.follow(original)
        self.tensors.build()

    def refresh(self) -> None:
        """Follows replaced local tensors and changes of ``requires_grad``, once the parameters are sharded.

        Not while gradients are held that lie as the plan has it: the next gather delivers them first.
        """
        if self.parameter_state is not ParameterState.SHARDED or self.tensors.registration.is_current:
            return
        self.check_data()
        if self.gradients.are_held and any(parameter.was_flipped for parameter in self.parameters):
            return
        self.tensors.refresh(self.check_nothing_held)

    def check_data(self) -> None:
        """
        Raises:
            ParameterError: somebody assigned ``p.data``. Parameters and group are named in the text.
        """
        given = [parameter.name for parameter in self.tensors.registration.given_data()]
        if given:
            raise ParameterError(
                f"parameters {given} of {self.name!r} were given other values by p.data = ..., which a sharded "
                "parameter does not follow, as its values are in its local tensor. Change it in place: p.copy_(...) "
                "under torch.no_grad(), or p.to_local().copy_(...) for the shard of this rank."
            )

    def rebuild(self) -> None:
        """Makes the tensors anew, after a change of what the plan depends on."""
        self.check_nothing_held()
        self.reshard()
        self.tensors.build()

    def give_up(self, parameter: ShardedParameter) -> None:
        """Goes on without ``parameter``, whose places are no longer its own."""
        self.check_nothing_held()
        self.reshard()
        self.tensors.parameters.remove(parameter)
        parameter.held_by = None
        self.tensors.build()

    def register_at(self, parameter: ShardedParameter, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Registers ``parameter`` of this group also at these modules, under these names."""
        self.reshard()
        parameter.owners = (*parameter.owners, *places)
        self.tensors.register()

    def check_nothing_held(self) -> None:
        """New tensors know nothing of gradients that the old ones hold."""
        if self.gradients.are_held:
            raise LifecycleError(
                f"{self.name!r} holds gradients that were accumulated and not delivered yet, which this change would "
                "lose. Run a backward outside of no_sync first, or drop them with model.zero_grad()."
            )

    def find_patches(self) -> None:
        """Follows hooks that somebody has hung on local tensors, once the parameters are sharded."""
        if self.parameter_state is ParameterState.SHARDED:
            self.tensors.find_patches()

    # -- parameters

    def unshard(self, streams: CommStreams) -> None:
        """Launches the all-gather, if the parameters are not in memory or on their way."""
        unshard_together((self,), streams, f"all-gather of {self.name}")

    @contextmanager
    def unshard_async_op(self, async_op: bool) -> Iterator[None]:
        """Inside, custom all-gathers of the group are called with ``async_op``."""
        before = [pgs.unshard_async_op for pgs in self.process_groups]
        for pgs in self.process_groups:
            pgs.unshard_async_op = async_op
        try:
            yield
        finally:
            for pgs, usual in zip(self.process_groups, before, strict=True):
                pgs.unshard_async_op = usual

    @property
    def is_coming(self) -> bool:
        """Whether the parameters are in memory or on their way, and :meth:`unshard` has nothing else to do either."""
        return self.parameter_state in _HERE_OR_COMING and not self.gradients.are_held

    def _needs_gather(self, streams: CommStreams) -> bool:
        """Whether the parameters are neither in memory nor on their way."""
        if self.gradients.are_held:
            self._deliver_before_a_change(streams)
        if not self.tensors.registration.is_current:
            self.refresh()
        if not self.tensors.are_placed:
            raise self.tensors.misplaced(self.name)
        return self.parameter_state not in _HERE_OR_COMING

    def _await_gather(self, pending: InFlight[None] | None, stream: str, begin: float | None) -> None:
        """``pending`` brings the parameters; ``None`` where there are none."""
        self._pending_gather, self._is_written_to = pending, False
        for pgs in self.process_groups:
            pgs.awaits_parting = pgs.common_memory is not None
        self.parameter_state = advance(
            PARAMETER_TRANSITIONS, self.parameter_state, ParameterOperation.UNSHARD, self.name
        )
        if trace.listeners:
            self._note_memory()
            smaller = self.process_groups[0].smaller
            moved = (
                smaller_mesh_wire_bytes(self.buckets, smaller.size) if smaller else all_gather_wire_bytes(self.buckets)
            )
            trace.emit(trace.Operation.UNSHARD, self.name, moved.bytes, stream, begin, moved.plain_bytes)

    def _deliver_before_a_change(self, streams: CommStreams) -> None:
        """Reduces what was accumulated before parameters were frozen or thawed: the next plan places other ones."""
        if any(parameter.was_flipped for parameter in self.parameters):
            for launch in reduce_together((self.gradients,), streams):
                launch.run().complete()

    def wait(self) -> None:
        """Makes the unsharded parameters usable and registers them."""
        before = self.parameter_state
        self.parameter_state = advance(PARAMETER_TRANSITIONS, before, ParameterOperation.WAIT, self.name)
        if self.parameter_state is before:
            return
        begin = trace.now() if trace.listeners else None
        self._end_gather()
        self.tensors.registration.show_unsharded()
        if trace.listeners:
            self._note_memory()
            trace.emit(trace.Operation.WAIT, self.name, 0, "", begin)

    @labelled("all_gather_copy_out", lambda self: self.name)
    def _end_gather(self) -> None:
        if self._pending_gather is not None:
            pending, self._pending_gather = self._pending_gather, None
            try:
                pending.wait()
            except BaseException:
                self._is_written_to = not pending.has_arrived
                raise
        # Not before: on a device with streams, what was sent from is in use until the current stream has waited.
        if self.process_groups[0].smaller is not None:
            self._drop_slices()

    def _drop_slices(self) -> None:
        """The next gather comes from the whole shard axis again."""
        for bucket in self.tensors.buckets:
            bucket.drop_slice()
        for pgs in self.process_groups:
            pgs.smaller = None

    def reshard(self) -> None:
        """Registers the sharded parameters and frees the unsharded memory."""
        before = self.parameter_state
        self.parameter_state = advance(PARAMETER_TRANSITIONS, before, ParameterOperation.RESHARD, self.name)
        if self.parameter_state is before:
            return
        if before is not ParameterState.UNSHARDED:  # a gather is on its way, or slices are kept for one
            self._end_gather()
        if before is not ParameterState.SHRUNK:
            self._release()

    def copy_out_shared(self) -> None:
        """Goes on with a copy of this rank's own where full parameters lie in memory that ranks have in common. Once
        all have met after that, each may write to its shards while modules here still compute with the copy.
        """
        if self.parameter_state is not ParameterState.UNSHARDED:
            return
        for bucket in self.buckets:
            bucket.copy_out_shared()
        self._has_own_copy = True
        if trace.listeners:
            self._note_memory()

    def has_parted(self) -> None:
        """All ranks have met. They must meet again if full parameters still lie in memory that they have in common."""
        stays = self.parameter_state is not ParameterState.SHARDED and not self._has_own_copy
        for pgs in self.process_groups:
            pgs.awaits_parting = pgs.awaits_parting and stays

    def abandon(self) -> None:
        """As :meth:`reshard`, without waiting for a gather that will never come to its end, once its connections are
        closed: nothing writes to the unsharded memory any more.
        """
        self._pending_gather, self._is_written_to = None, False
        self.reshard()
        for bucket in self.tensors.buckets:
            bucket.free()

    @without_grad
    def shrink(self, mesh_size: int) -> None:
        """As :meth:`reshard`, but keeps a slice from which ``mesh_size`` neighbouring ranks can gather again."""
        self.parameter_state = advance(
            PARAMETER_TRANSITIONS, self.parameter_state, ParameterOperation.SHRINK, self.name
        )
        for pgs in self.process_groups:
            pgs.smaller = pgs.axes.smaller_shard_axis(mesh_size)
        for bucket in self.buckets:
            smaller = bucket.pgs.smaller
            assert smaller is not None
            bucket.keep_slice(smaller.size, smaller.rank, smaller.direct_bytes)
        self._release()

    def _release(self) -> None:
        self.tensors.registration.show_sharded()
        self._has_own_copy = False
        for pgs in self.process_groups:
            if pgs.common_memory is not None:
                pgs.note_release()
        if not self._is_written_to:
            for bucket in self.tensors.buckets:
                bucket.free()
        if trace.listeners:
            self._note_memory()
            trace.emit(trace.Operation.RESHARD, self.name)

    def _note_memory(self) -> None:
        held = sum(bucket.unsharded_bytes for bucket in self.buckets)
        if held != self._noted_bytes:
            operation = trace.Operation.ALLOCATE if held > self._noted_bytes else trace.Operation.FREE
            trace.emit(operation, self.name, abs(held - self._noted_bytes))
        self._noted_bytes = held


def unshard_together(groups: Sequence[ParameterGroup], streams: CommStreams, label: str) -> None:
    """Launches one all-gather, for which ``label`` is what errors call it, for those of ``groups`` whose parameters are
    not in memory or on their way.
    """
    needed = [group for group in groups if group._needs_gather(streams)]
    if any(group.buckets for group in needed):
        _launch(needed, streams, label)
    else:  # as a root whose parameters are all those of modules inside
        for group in needed:
            group._await_gather(None, streams.gather.name, None)


@labelled("all_gather", lambda groups, streams, label: describe_groups([group.name for group in groups]))
def _launch(needed: Sequence[ParameterGroup], streams: CommStreams, label: str) -> None:
    begin = trace.now() if trace.listeners else None
    buckets = [bucket for group in needed for bucket in group.tensors.buckets]
    pending = launch_gather(streams, buckets, needed[0].axes.device, label, needed[0].tensors.last_gather)
    for group in needed:
        group._await_gather(pending, streams.gather.name, begin)


def _gradient_hooks(group: ParameterGroup) -> Callable[[int], Callable[[torch.Tensor], None]]:
    """Makes the hooks of parameters of a batch. They know the group weakly: Python's collector does not see what hooks
    of a tensor hold, so that a group which its own parameters held would never be freed.
    """
    weakly = ref(group)

    def hook_of(batch: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            alive = weakly()
            if alive is not None:
                alive.gradients.arrive(batch)

        return hook

    return hook_of
