"""One group: unshard, wait, reshard, reduce. It carries out; what to do when is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import torch

from composable_fsdp import trace
from composable_fsdp.comm.c10d import Together
from composable_fsdp.errors import LifecycleError
from composable_fsdp.grad_mode import without_grad
from composable_fsdp.layout.plan import GroupPlan
from composable_fsdp.layout.reduction import Reduction, plan_reduction
from composable_fsdp.lifecycle import (
    GRADIENT_TRANSITIONS,
    PARAMETER_TRANSITIONS,
    GradientOperation,
    GradientState,
    ParameterOperation,
    ParameterState,
    advance,
)
from composable_fsdp.memory.lanes import Lanes, Pending, Work
from composable_fsdp.mesh import DataParallelAxes
from composable_fsdp.policy import MixedPrecisionPolicy, OffloadPolicy
from composable_fsdp.runtime.bucket import AnyBucket, Gather
from composable_fsdp.runtime.channel import Channel
from composable_fsdp.runtime.messages import pack_messages
from composable_fsdp.runtime.parameter import ParameterSource, ShardedParameter
from composable_fsdp.runtime.reduction import Job, launch_reduction
from composable_fsdp.runtime.scatter import ReducedBucket
from composable_fsdp.runtime.tensors import GroupTensors, take_shards
from composable_fsdp.runtime.traffic import gather_traffic, reduce_traffic, smaller_gather_traffic

__all__ = ["ParameterGroup", "PendingReduction", "no_hook"]


class PendingReduction:
    """Gradients of one group on their way. Owned by the queue that completes it."""

    def __init__(self, group: ParameterGroup, pending: Pending[list[ReducedBucket]], *, is_partial: bool) -> None:
        self._group = group
        self._pending = pending
        self._is_partial = is_partial

    def start(self) -> None:
        """Launches a second stage that had to wait for the first."""
        self._pending.start()

    def complete(self) -> None:
        """Waits, and sets the reduced gradients on the sharded parameters, or keeps them where they are partial."""
        self._group._complete_reduction(self._pending, is_partial=self._is_partial)


class ParameterGroup:
    """Parameters that are communicated together.

    Args:
        name: for messages and the trace, until the group's place in the model is known.
        sources: the parameters as ``fully_shard`` found them, or ``parameters`` that are sharded already.
        axes: where modules compute, and the axes of a group without parameters.

    Invariants: ``parameter_state`` and ``gradient_state`` change only through the tables of ``lifecycle``; a gather is
    pending exactly while the former is UNSHARDING.
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
        self.axes = axes
        self.offload = offload
        if parameters is None:
            parameters = take_shards(sources, offload)
        used = dict.fromkeys(parameter.sharding.axes for parameter in parameters)
        self.channels = [Channel(each) for each in used or (axes,)]
        self.tensors = GroupTensors(parameters, self.channels, axes.device, precision, offload, _gradient_hook(self))
        self.divide_factor: float | None = None
        self.sum_only = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] = no_hook
        self.on_last_gradient: Callable[[], None] = _nothing
        self.parameter_state = ParameterState.SHARDED
        self.gradient_state = GradientState.NONE
        self._ready = 0
        self._pending_gather: Pending[None] | None = None
        self._gathers: list[Gather] = []
        self._pending_partial: Pending[list[ReducedBucket]] | None = None

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
        self.divide_factor, self.sum_only = other.divide_factor, other.sum_only
        self.all_reduce_hook = other.all_reduce_hook
        for channel, original in zip(self.channels, other.channels, strict=True):
            channel.follow(original)
        self.tensors.build()

    def refresh(self) -> None:
        """Follows replaced local tensors and changes of ``requires_grad``, once the parameters are sharded."""
        if self.parameter_state is ParameterState.SHARDED:
            self.tensors.refresh(self.check_nothing_held)

    def rebuild(self) -> None:
        """Makes the tensors anew, after a change of what the plan depends on."""
        self.check_nothing_held()
        self.reshard()
        self.tensors.build()

    def check_nothing_held(self) -> None:
        """New tensors know nothing of gradients that the old ones hold."""
        if self.holds_gradients:
            raise LifecycleError(
                f"{self.name!r} holds gradients that were accumulated and not delivered yet, which this change would "
                "lose. Run a backward outside of no_sync first, or drop them with model.zero_grad()."
            )

    def find_patches(self) -> None:
        """Follows hooks that somebody has hung on local tensors, once the parameters are sharded."""
        if self.parameter_state is ParameterState.SHARDED:
            self.tensors.find_patches()

    # -- parameters

    def unshard(self, lanes: Lanes) -> None:
        """Launches the all-gather, if the parameters are not in memory or on their way."""
        before = self.parameter_state
        if self.holds_gradients:
            self._deliver_before_a_change(lanes)
        self.refresh()
        if not self.tensors.are_placed:
            raise self.tensors.misplaced(self.name)
        after = advance(PARAMETER_TRANSITIONS, before, ParameterOperation.UNSHARD, self.name)
        if after is before:
            return
        begin = trace.now() if trace.listeners else None
        try:
            for bucket in self.buckets:
                bucket.allocate()
            self._pending_gather = lanes.gather.run(self._launch_gather, self._finish_gather)
        except BaseException:
            self._gathers = []
            for bucket in self.buckets:
                bucket.free()
            raise
        self.parameter_state = after
        if trace.listeners:
            trace.emit(trace.Operation.ALLOCATE, self.name, self.plan.unsharded_bytes)
            smaller = self.channels[0].smaller
            moved = smaller_gather_traffic(self.buckets, smaller.size) if smaller else gather_traffic(self.buckets)
            trace.emit(trace.Operation.UNSHARD, self.name, moved.bytes, lanes.gather.name, begin, moved.plain_bytes)

    def _deliver_before_a_change(self, lanes: Lanes) -> None:
        """Reduces what was accumulated before parameters were frozen or thawed: the next plan places other ones."""
        if any(parameter.was_flipped for parameter in self.parameters):
            reduction = self.reduce(lanes)
            if reduction is not None:
                reduction.complete()

    @torch.no_grad()
    def _launch_gather(self) -> Work:
        self._gathers = [bucket.prepare_gather() for bucket in self.buckets]
        works = []
        for channel in self.channels:
            gathers = [g for b, g in zip(self.buckets, self._gathers, strict=True) if b.channel is channel]
            transfers = [transfer for gather in gathers for transfer in gather.direct]
            transfers += pack_messages(gathers, channel.smaller or channel.gather, self.axes.device)
            works.append((channel.smaller or channel.gather).all_gather(transfers))
        return Together(tuple(works))

    @torch.no_grad()
    def _finish_gather(self) -> None:
        for bucket, gather in zip(self.buckets, self._gathers, strict=True):
            bucket.finish_gather(gather)

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
            trace.emit(trace.Operation.WAIT, self.name, 0, "", begin)

    def _end_gather(self) -> None:
        if self._pending_gather is not None:
            pending, self._pending_gather = self._pending_gather, None
            pending.wait()
            # Not before: on a device with streams, what was sent from is in use until the current stream has waited.
            self._gathers = []
            for bucket in self.buckets:
                bucket.drop_slice()
        for channel in self.channels:
            channel.smaller = None

    def reshard(self) -> None:
        """Registers the sharded parameters and frees the unsharded memory."""
        before = self.parameter_state
        self.parameter_state = advance(PARAMETER_TRANSITIONS, before, ParameterOperation.RESHARD, self.name)
        if self.parameter_state is before:
            return
        if before is not ParameterState.UNSHARDED:  # a gather is on its way, or slices are kept for one
            self._end_gather()
            for bucket in self.buckets:
                bucket.drop_slice()
        if before is not ParameterState.SHRUNK:
            self._release()

    @without_grad
    def shrink(self, mesh_size: int) -> None:
        """As :meth:`reshard`, but keeps a slice from which ``mesh_size`` neighbouring ranks can gather again."""
        self.parameter_state = advance(
            PARAMETER_TRANSITIONS, self.parameter_state, ParameterOperation.SHRINK, self.name
        )
        for channel in self.channels:
            channel.smaller = channel.axes.smaller_shard_axis(mesh_size)
        for bucket in self.buckets:
            smaller = bucket.channel.smaller
            assert smaller is not None
            bucket.keep_slice(smaller.size, smaller.rank, smaller.direct_bytes)
        self._release()

    def _release(self) -> None:
        self.tensors.registration.show_sharded()
        for bucket in self.buckets:
            bucket.free()
        if trace.listeners:
            trace.emit(trace.Operation.FREE, self.name, self.plan.unsharded_bytes)
            trace.emit(trace.Operation.RESHARD, self.name)

    # -- gradients

    def on_gradient(self) -> None:
        """Autograd has put a gradient on one of the unsharded parameters."""
        if self._ready == 0:  # with the second, they are LOCAL already
            self._advance_gradients(GradientOperation.ACCUMULATE)
        self._ready += 1
        if self._ready >= self.tensors.plan.num_trainable:
            self._ready = 0
            self.on_last_gradient()

    @property
    def has_new_gradients(self) -> bool:
        """Whether autograd left some gradients, but not all, that were neither held nor reduced since."""
        return self._ready > 0

    def contribute(self) -> None:
        """This rank takes part in the next reduction even if it has no gradient: the others may have some."""
        if self.plan.num_trainable:
            self._advance_gradients(GradientOperation.ACCUMULATE)

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that have not become those of the sharded parameters yet."""
        return self.gradient_state in (GradientState.LOCAL, GradientState.PARTIAL)

    def hold_gradients(self) -> None:
        """Keeps this microbatch's gradients unreduced, summed in the reduce dtype."""
        self._ready = 0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.hold_gradient(bucket.plan.sum_dtype)

    @torch.no_grad()
    def reduce(self, lanes: Lanes, *, partial: bool = False) -> PendingReduction | None:
        """Launches the reduction of whatever gradients there are; ``None`` where there are none.

        Args:
            lanes: where to launch.
            partial: only over the shard axis. The result is kept, in the reduce dtype, and part of a later reduction.
        """
        self._ready = 0
        if self._pending_partial is not None:  # what it keeps is part of this one
            self._pending_partial.wait()
        before = self.gradient_state
        self._advance_gradients(GradientOperation.REDUCE)
        if self.gradient_state is before:
            return None
        begin = trace.now() if trace.listeners else None
        jobs: list[Job] = []
        for bucket in self.buckets:
            reduction = self._reduction(bucket)
            scatter = bucket.scatter.prepare(reduction)
            if scatter is not None:
                jobs.append(Job(bucket, reduction, scatter))
        pending = launch_reduction(lanes, jobs, self.axes.device, self.all_reduce_hook, partial=partial)
        self._pending_partial = pending if partial else None
        if trace.listeners:
            moved = reduce_traffic(self.buckets)
            trace.emit(trace.Operation.REDUCE, self.name, moved.bytes, lanes.reduce.name, begin, moved.plain_bytes)
        return PendingReduction(self, pending, is_partial=partial)

    def _reduction(self, bucket: AnyBucket) -> Reduction:
        return plan_reduction(
            bucket.plan.sum_dtype,
            bucket.channel.axes.num_ranks,
            averages=bucket.channel.averages,
            divide_factor=self.divide_factor,
            sum_only=self.sum_only or bucket.plan.gradient_is_encoded,
        )

    @torch.no_grad()
    def _complete_reduction(self, pending: Pending[list[ReducedBucket]], *, is_partial: bool) -> None:
        reduced = pending.synchronize() if self.tensors.is_offloaded else pending.wait()
        if is_partial:
            self._advance_gradients(GradientOperation.KEEP)
            return
        for bucket in reduced:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                parameter.accept_gradient(gradient)
        self._advance_gradients(GradientOperation.COMPLETE)
        if trace.listeners:
            trace.emit(trace.Operation.REDUCED, self.name)

    def drop_gradients(self) -> None:
        """Forgets gradients that have not been reduced, accumulated microbatches included."""
        self._ready = 0
        for parameter in self.parameters:
            parameter.drop_gradient()
        for bucket in self.buckets:
            bucket.scatter.drop_partial()
        self._pending_partial = None  # complete by now, or ended by an exception, which waiting again would repeat
        self._advance_gradients(GradientOperation.DROP)

    def _advance_gradients(self, operation: GradientOperation) -> GradientState:
        self.gradient_state = advance(GRADIENT_TRANSITIONS, self.gradient_state, operation, self.name)
        return self.gradient_state


def _gradient_hook(group: ParameterGroup) -> Callable[[torch.Tensor], None]:
    """Knows the group weakly: Python's collector does not see what hooks of a tensor hold, so that a group which its
    own parameters held would never be freed.
    """
    weakly = ref(group)

    def hook(_: torch.Tensor) -> None:
        alive = weakly()
        if alive is not None:
            alive.on_gradient()

    return hook


def no_hook(output: torch.Tensor) -> None:
    """The all-reduce hook of a group for which none was set."""


def _nothing() -> None:
    pass
