"""One group: unshard, wait, reshard, reduce. It carries out; what to do when is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from composable_fsdp import trace
from composable_fsdp.comm.protocol import Communicator, Work
from composable_fsdp.errors import ParameterError
from composable_fsdp.layout.plan import GroupPlan, ParameterSpec, PlanOptions, plan_group
from composable_fsdp.layout.placement import data_parallel_placements
from composable_fsdp.layout.pack import take_shard
from composable_fsdp.layout.reduction import Reduction, plan_reduction
from composable_fsdp.layout.shard import TensorShards
from composable_fsdp.lifecycle import (
    GRADIENT_TRANSITIONS,
    PARAMETER_TRANSITIONS,
    GradientOperation,
    GradientState,
    ParameterOperation,
    ParameterState,
    advance,
)
from composable_fsdp.memory.lanes import Lanes, Pending
from composable_fsdp.memory.store import ShardStore
from composable_fsdp.mesh import DataParallelAxes
from composable_fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from composable_fsdp.runtime.bucket import Bucket, Gather, ReducedBucket, Scatter
from composable_fsdp.runtime.parameter import ParameterSource, ShardedParameter

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

    Complete once constructed: store, buffers and unsharded parameters exist. They are made again only when somebody
    replaces the local tensors or changes ``requires_grad``.
    """

    def __init__(
        self, name: str, sources: Sequence[ParameterSource], axes: DataParallelAxes, precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
    ) -> None:
        self.name = name
        self.axes = axes
        self.precision = precision
        self._pin_memory = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and axes.device.type != "cpu"
        self._rest_device = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else axes.device
        self.divide_factor: float | None = None
        self.sum_only = False
        self.on_last_gradient: Callable[[], None] = _nothing
        self.parameter_state = ParameterState.SHARDED
        self.gradient_state = GradientState.NONE
        self._ready = 0
        self._pending_gather: Pending[None] | None = None
        self._gathers: list[Gather] = []
        self._smaller: Communicator | None = None
        self.parameters: list[ShardedParameter] = []
        self.buckets: list[Bucket] = []
        with torch.inference_mode(False), torch.no_grad():
            self._shard_sources(sources)
            self._build()

    # -- construction

    def _shard_sources(self, sources: Sequence[ParameterSource]) -> None:
        """Cuts this rank's shards out of the parameters as they were found."""
        shard = self.axes.shard
        for source in sources:
            placements = data_parallel_placements(self.axes.mesh.ndim, source.dim)
            shards = TensorShards(tuple(source.tensor.shape), source.dim, shard.size)
            device = torch.device("meta") if source.tensor.is_meta else self._rest_device
            padded = torch.empty(shards.padded_numel, dtype=source.tensor.dtype, device=device)
            take_shard(shards, source.tensor.data, shard.rank, padded)
            shape = shards.shard_shape(shard.rank)
            local = padded[: _numel(shape)].view(shape)
            self.parameters.append(ShardedParameter(source, local, self.axes.mesh, placements))

    def _build(self) -> None:
        """Stores, buffers and unsharded parameters for the local tensors that the parameters have now."""
        self.plan = self._make_plan()
        self.buckets = []
        for bucket_plan in self.plan.buckets:
            locals_ = [self.parameters[i].local for i in bucket_plan.indices]
            store = ShardStore(
                bucket_plan.gather.shards, bucket_plan.gather.store, self.axes.shard.rank, bucket_plan.dtype,
                locals_[0].device, pin_memory=self._pin_memory and not locals_[0].is_meta,
            )
            bucket = Bucket(bucket_plan, self.parameters, self.axes.shard, store, self.axes.device)
            for k, (parameter, local) in enumerate(zip(bucket.parameters, locals_, strict=True)):
                store.local(k).copy_(local)
                parameter.set_local(store.local(k))
                parameter.build_unsharded(bucket.parameter_data(k), self._on_gradient)
                parameter.register_sharded()
            bucket.buffer.free()
            self.buckets.append(bucket)

    def _make_plan(self) -> GroupPlan:
        precision = self.precision
        specs = tuple(
            ParameterSpec(
                name=p.name,
                shape=p.shape,
                dim=p.dim,
                dtype=p.dtype,
                compute_dtype=precision.compute_dtype(p.dtype),
                reduce_dtype=precision.gradient_reduce_dtype(p.dtype),
                trainable=p.sharded.requires_grad,
            )
            for p in self.parameters
        )
        shard = self.axes.shard
        alias = shard.aliases and self._rest_device == self.axes.device
        return plan_group(specs, PlanOptions(shard.size, shard.direct_bytes, alias))

    def refresh(self) -> None:
        """Follows what happened to the sharded parameters since the group was built. Cheap when nothing did.

        Raises:
            ParameterError: a parameter was replaced by something else, is still on the meta device, or is on a device
                where the group's shards do not rest. Names the parameters.
        """
        if all(p.is_current for p in self.parameters) or self.parameter_state is not ParameterState.SHARDED:
            return
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self.parameters:
                parameter.adopt_replacement()
            locals_ = [p.sharded._local_tensor for p in self.parameters]  # type: ignore[attr-defined]
            if all(local is p.local for local, p in zip(locals_, self.parameters, strict=True)):
                self._follow_requires_grad()
                return
            if any(local.is_meta for local in locals_) and not all(local.is_meta for local in locals_):
                return  # half-way through materialisation; check_materialised tells whoever runs it now
            for local, parameter in zip(locals_, self.parameters, strict=True):
                parameter.local = local
            self._build()

    def _follow_requires_grad(self) -> None:
        for parameter in self.parameters:
            parameter.follow_requires_grad(self._on_gradient)
        self.plan = self._make_plan()
        for bucket, plan in zip(self.buckets, self.plan.buckets, strict=True):
            bucket.plan = plan

    def check_placed(self) -> None:
        """Raises ``ParameterError`` naming the parameters whose shards are not where the group's shards rest."""
        locals_ = {p.name: p.sharded._local_tensor.device for p in self.parameters}  # type: ignore[attr-defined]
        on_meta = [name for name, device in locals_.items() if device.type == "meta"]
        if on_meta:
            raise ParameterError(
                f"parameters of {self.name!r} are still on the meta device: {on_meta}. Before the first forward, call "
                "model.to_empty(device=...) and initialise them (reset_parameters(), or load a state dict)."
            )
        elsewhere = {name: str(device) for name, device in locals_.items() if device.type != self._rest_device.type}
        if elsewhere:
            offloaded = self._rest_device.type != self.axes.device.type
            why = "are offloaded to CPU" if offloaded else f"rest on {self._rest_device.type}, the mesh's device"
            raise ParameterError(
                f"shards of {self.name!r} {why}, but these parameters are elsewhere: {elsewhere}. "
                f"Move them with model.to({self._rest_device.type!r})."
            )

    @property
    def version(self) -> int:
        """Grows with in-place changes of the shards that torch counts (fused and foreach optimizers are not among them)."""
        return sum(p.sharded._version for p in self.parameters) + sum(b.store.flat._version for b in self.buckets)

    # -- parameters

    def unshard(self, lanes: Lanes) -> None:
        """Launches the all-gather, if the parameters are not in memory or on their way."""
        before = self.parameter_state
        if before in (ParameterState.SHARDED, ParameterState.SHRUNK):
            self.refresh()
            self.check_placed()
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
        offloaded = self._rest_device != self.axes.device
        reduced = pending.synchronize() if offloaded else pending.wait()
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


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel
