"""One group: unshard, wait, reshard, reduce. It carries out; what to do when is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from composable_fsdp import trace
from composable_fsdp.comm.protocol import Communicator
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
from composable_fsdp.runtime.bucket import Bucket, Gather, ReducedBucket, Scatter
from composable_fsdp.runtime.parameter import ParameterSource, ShardedParameter
from composable_fsdp.runtime.tensors import GroupTensors

__all__ = ["ParameterGroup", "PendingReduction"]


class PendingReduction:
    """Gradients of one group on their way. Owned by the queue that completes it."""

    def __init__(self, group: ParameterGroup, pending: Pending[list[ReducedBucket]]) -> None:
        self._group = group
        self._pending = pending

    def start(self) -> None:
        """Launches a second stage that had to wait for the first."""
        self._pending.start()

    def complete(self) -> None:
        """Waits, and sets the reduced gradients on the sharded parameters."""
        self._group._complete_reduction(self._pending)


class ParameterGroup:
    """Parameters that are communicated together.

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
    ) -> None:
        self.name = name
        self.axes = axes
        self.tensors = GroupTensors(sources, axes, precision, offload, self._on_gradient)
        self.divide_factor: float | None = None
        self.sum_only = False
        self.on_last_gradient: Callable[[], None] = _nothing
        self.parameter_state = ParameterState.SHARDED
        self.gradient_state = GradientState.NONE
        self._ready = 0
        self._pending_gather: Pending[None] | None = None
        self._gathers: list[Gather] = []
        self._smaller: Communicator | None = None

    @property
    def parameters(self) -> list[ShardedParameter]:
        return self.tensors.parameters

    @property
    def buckets(self) -> list[Bucket]:
        return self.tensors.buckets

    @property
    def plan(self) -> GroupPlan:
        return self.tensors.plan

    def refresh(self) -> None:
        """Follows replaced local tensors and changes of ``requires_grad``, once the parameters are sharded."""
        if self.parameter_state is ParameterState.SHARDED:
            self.tensors.refresh()

    # -- parameters

    def unshard(self, lanes: Lanes) -> None:
        """Launches the all-gather, if the parameters are not in memory or on their way."""
        before = self.parameter_state
        self.refresh()
        if not self.tensors.are_placed:
            raise self.tensors.misplaced(self.name)
        self.parameter_state = advance(PARAMETER_TRANSITIONS, before, ParameterOperation.UNSHARD, self.name)
        if self.parameter_state is before:
            return
        begin = trace.now() if trace.listeners else None
        for bucket in self.buckets:
            bucket.buffer.allocate()
        if trace.listeners:
            trace.emit(trace.Operation.ALLOCATE, self.name, self.plan.unsharded_bytes)
        communicator = self._smaller or self.axes.shard
        self._pending_gather = lanes.gather.run(lambda: self._launch_gather(communicator), self._finish_gather)
        if trace.listeners:
            trace.emit(trace.Operation.UNSHARD, self.name, self.plan.wire_bytes, lanes.gather.name, begin)

    @torch.no_grad()
    def _launch_gather(self, communicator: Communicator) -> Work:
        self._gathers = [bucket.prepare_gather() for bucket in self.buckets]
        return communicator.all_gather([t for gather in self._gathers for t in gather.transfers])

    @torch.no_grad()
    def _finish_gather(self) -> None:
        for bucket, gather in zip(self.buckets, self._gathers, strict=True):
            bucket.finish_gather(gather)
        self._gathers = []

    def wait(self) -> None:
        """Makes the unsharded parameters usable and registers them."""
        before = self.parameter_state
        self.parameter_state = advance(PARAMETER_TRANSITIONS, before, ParameterOperation.WAIT, self.name)
        if self.parameter_state is before:
            return
        begin = trace.now() if trace.listeners else None
        self._end_gather()
        for parameter in self.parameters:
            parameter.register_unsharded()
        if trace.listeners:
            trace.emit(trace.Operation.WAIT, self.name, 0, "", begin)

    def _end_gather(self) -> None:
        if self._pending_gather is not None:
            pending, self._pending_gather = self._pending_gather, None
            pending.wait()
        self._smaller = None

    def reshard(self) -> None:
        """Registers the sharded parameters and frees the unsharded memory."""
        before = self.parameter_state
        self.parameter_state = advance(PARAMETER_TRANSITIONS, before, ParameterOperation.RESHARD, self.name)
        if self.parameter_state is before:
            return
        self._end_gather()
        for bucket in self.buckets:
            bucket.drop_slice()
        if before is not ParameterState.SHRUNK:
            self._release()

    @torch.no_grad()
    def shrink(self, mesh_size: int) -> None:
        """As :meth:`reshard`, but keeps a slice from which ``mesh_size`` neighbouring ranks can gather again."""
        self.parameter_state = advance(
            PARAMETER_TRANSITIONS, self.parameter_state, ParameterOperation.SHRINK, self.name
        )
        smaller = self.axes.smaller_shard_axis(mesh_size)
        for bucket in self.buckets:
            bucket.keep_slice(smaller.size, smaller.rank, smaller.direct_bytes)
        self._smaller = smaller
        self._release()

    def _release(self) -> None:
        for parameter in self.parameters:
            parameter.register_sharded()
        for bucket in self.buckets:
            bucket.buffer.free()
        if trace.listeners:
            trace.emit(trace.Operation.FREE, self.name, self.plan.unsharded_bytes)
            trace.emit(trace.Operation.RESHARD, self.name)

    # -- gradients

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._advance_gradients(GradientOperation.ACCUMULATE)
        self._ready += 1
        if self._ready >= self.plan.num_trainable:
            self._ready = 0
            self.on_last_gradient()

    @property
    def has_new_gradients(self) -> bool:
        """Whether autograd left some gradients, but not all, that were neither held nor reduced since."""
        return self._ready > 0

    def hold_gradients(self) -> None:
        """Keeps this microbatch's gradients unreduced, summed in the reduce dtype."""
        self._ready = 0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.hold_gradient(bucket.plan.reduce_dtype)

    @torch.no_grad()
    def reduce(self, lanes: Lanes) -> PendingReduction | None:
        """Launches the reduction of whatever gradients there are; ``None`` where there are none."""
        self._ready = 0
        before = self.gradient_state
        self._advance_gradients(GradientOperation.REDUCE)
        if before is not GradientState.LOCAL:
            return None
        begin = trace.now() if trace.listeners else None
        jobs: list[tuple[Bucket, Reduction, Scatter]] = []
        for bucket in self.buckets:
            reduction = self._reduction(bucket.plan.reduce_dtype)
            scatter = bucket.prepare_scatter(reduction)
            if scatter is not None:
                jobs.append((bucket, reduction, scatter))
        pending = self._launch_reduction(lanes, jobs)
        if trace.listeners:
            trace.emit(trace.Operation.REDUCE, self.name, self.plan.reduce_bytes, lanes.reduce.name, begin)
        return PendingReduction(self, pending)

    def _launch_reduction(
        self, lanes: Lanes, jobs: list[tuple[Bucket, Reduction, Scatter]]
    ) -> Pending[list[ReducedBucket]]:
        """Reduce-scatter over the shard axis, then all-reduce over the replicate axis where there is one."""
        shard, replicate = self.axes.shard, self.axes.replicate

        @torch.no_grad()
        def scatter() -> Work:
            return _Works([shard.reduce_scatter(s.transfers, r.op) for _, r, s in jobs])

        @torch.no_grad()
        def all_reduce() -> Work:
            return _Works([replicate.all_reduce([s.output], r.op) for _, r, s in jobs])

        @torch.no_grad()
        def finish() -> list[ReducedBucket]:
            return [bucket.finish_scatter(s, r) for bucket, r, s in jobs]

        if replicate.size == 1:
            return lanes.reduce.run(scatter, finish)
        scattered = lanes.reduce.run(scatter, _nothing)
        return lanes.replicate.run(all_reduce, finish, after=scattered)

    def _reduction(self, dtype: torch.dtype) -> Reduction:
        return plan_reduction(
            dtype,
            self.axes.num_ranks,
            averages=self.axes.shard.averages and self.axes.replicate.averages,
            divide_factor=self.divide_factor,
            sum_only=self.sum_only,
        )

    @torch.no_grad()
    def _complete_reduction(self, pending: Pending[list[ReducedBucket]]) -> None:
        reduced = pending.synchronize() if self.tensors.is_offloaded else pending.wait()
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
        self._advance_gradients(GradientOperation.DROP)

    def _advance_gradients(self, operation: GradientOperation) -> GradientState:
        self.gradient_state = advance(GRADIENT_TRANSITIONS, self.gradient_state, operation, self.name)
        return self.gradient_state


class _Works:
    """Several collectives as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _nothing() -> None:
    pass
