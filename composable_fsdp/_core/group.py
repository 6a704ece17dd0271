"""One parameter group: its states, its memory, and what it gathers, frees and reduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import nn

from composable_fsdp import trace
from composable_fsdp._core.gather import AllGather, AnyBucket, Bucket, Gatherable, InPlaceBucket, all_gather_wire_bytes
from composable_fsdp._core.group_plan import (
    GRADIENT_TRANSITIONS,
    HELD_GRADIENTS,
    LOCAL_GRADIENTS,
    PARAMETER_TRANSITIONS,
    BucketPlan,
    Event,
    GatherClaim,
    GradientOperation,
    GradientState,
    GroupPlan,
    Hook,
    ParameterOperation,
    ParameterSpec,
    ParameterState,
    advance,
    after,
    plan_group,
    promoted,
)
from composable_fsdp._core.layout import TensorShards, plan_division
from composable_fsdp._core.memory import InFlight, ShardStore, is_host, without_grad, zero_padding
from composable_fsdp._core.mesh import DataParallelAxes, ProcessGroups
from composable_fsdp._core.params import ParameterSource, ShardedParameter, local_part
from composable_fsdp._core.reduce import (
    BucketReducer,
    BucketReduction,
    ReducedBucket,
    ReductionSettings,
    reduce_kinds_of,
)
from composable_fsdp._core.registration import Registration, plain_shard
from composable_fsdp.errors import DeviceError, LifecycleError, ParameterError
from composable_fsdp.policies import CPUOffloadPolicy, OffloadPolicy

_reduction_of = attrgetter("reduction", "were_summed")
"""The settings in which gradients that are reduced together must agree."""

UNSHARD_STARTED = frozenset({ParameterState.UNSHARDING, ParameterState.UNSHARDED})
"""The states in which an all-gather is in flight or done."""

# Up to Python 3.11, a member takes as long as a call to look up on its enum.
_UNSHARD, _WAIT, _RESHARD = ParameterOperation.UNSHARD, ParameterOperation.WAIT, ParameterOperation.RESHARD
_AFTER_UNSHARD, _AFTER_WAIT, _AFTER_RESHARD = (after(PARAMETER_TRANSITIONS, op) for op in (_UNSHARD, _WAIT, _RESHARD))
_UNSHARDED, _SHRUNK = ParameterState.UNSHARDED, ParameterState.SHRUNK
_ARRIVING, _ACCUMULATE, _READY = GradientState.ARRIVING, GradientOperation.ACCUMULATE, GradientOperation.READY
_REDUCE, _COMPLETE = GradientOperation.REDUCE, GradientOperation.COMPLETE
_AFTER_ACCUMULATE, _AFTER_READY = after(GRADIENT_TRANSITIONS, _ACCUMULATE), after(GRADIENT_TRANSITIONS, _READY)
_AFTER_REDUCE, _AFTER_COMPLETE = after(GRADIENT_TRANSITIONS, _REDUCE), after(GRADIENT_TRANSITIONS, _COMPLETE)


def _nobody() -> None:
    return None


class GatherKind:
    """A way for full parameters to come into memory: it claims parameters of one group, and makes their buckets.

    Append a class to :data:`GATHER_KINDS`: each group makes one object. The first kind that claims a parameter has it.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = ref(group)  # the group owns its kinds

    @property
    def group(self) -> ParamGroup:
        group = self._group()
        assert group is not None
        return group

    def reserve(self) -> None:
        """Prepare a group that all ranks make together. They may communicate."""

    def find(self) -> None:
        """Look at the parameters before buckets are made. Their local tensors may have been replaced."""

    def claim(self, parameter: ShardedParameter) -> GatherClaim | None:
        """Return the claim on ``parameter``, the same on all ranks, or ``None`` if this kind does not serve it."""
        return None

    def make(self, plan: BucketPlan) -> AnyBucket:
        """Make the bucket of parameters that this kind has claimed."""
        raise NotImplementedError

    def has_changed(self) -> bool:
        """Return True if the local tensors, as they are, need other buckets."""
        return False

    def before_replacement(self, parameter: ShardedParameter, local: torch.Tensor) -> None:
        """Note that the user has replaced the local tensor of ``parameter`` by ``local``."""

    @staticmethod
    def cut(
        name: str, full: torch.Tensor, shards: TensorShards, rank: int, device: torch.device
    ) -> torch.Tensor | None:
        """Return the shard of ``rank`` of parameter ``name``, or ``None`` if it may be a plain tensor."""
        return None

    @staticmethod
    def check_copy(name: str, local: torch.Tensor, copy: torch.Tensor) -> None:
        """Raise an error if a copied group cannot use ``copy`` of the local tensor of parameter ``name``."""


GATHER_KINDS: list[type[GatherKind]] = []
"""The gather kinds of all groups that are made from now on."""


def rest_device(offload: OffloadPolicy, device: torch.device) -> torch.device:
    """Return the device of the shards of modules that compute on ``device``."""
    return torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device


@torch.inference_mode(False)
@torch.no_grad()
def shard_parameters(sources: Sequence[ParameterSource]) -> list[ShardedParameter]:
    """Copy this rank's shards out of the original parameters."""
    parameters = []
    for source in sources:
        axes, full = source.sharding.axes, local_part(source.tensor)
        shards = TensorShards(tuple(full.shape), source.sharding.dim, axes.shard.size)
        device = torch.device("meta") if full.is_meta else rest_device(source.offload, axes.device)
        cuts = (kind.cut(source.name, full, shards, axes.shard.rank, device) for kind in GATHER_KINDS)
        cut = next((found for found in cuts if found is not None), None)
        local = plain_shard(source.name, full, shards, axes.shard.rank, device) if cut is None else cut
        parameters.append(ShardedParameter(source, local))
    return parameters


_current_task = torch._C._current_graph_task_id


class AutogradTask:
    """Autograd's current task, one call of its engine, shared by all groups of a root."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = -1
        """Autograd's id of the task, or -1 if there is none."""

    @property
    def is_around_another(self) -> bool:
        """True while autograd runs another backward inside this one, as reentrant checkpoints do."""
        return self.number != -1 and self.number != _current_task()  # a tuple doubles the cost

    @property
    def is_outside(self) -> bool:
        """True if what runs now is no part of a backward."""
        return _current_task() == -1


class ParamGroup:
    """Parameters that are unsharded, freed and reduced together: their tensors, both state tables and their reduction.

    Args:
        name: the name in errors and traces, until :meth:`rename` gives the qualified name.
        sources: the parameters as ``fully_shard`` found them; ignored if ``parameters`` has sharded ones.
        axes: the mesh axes and device of the modules.

    Invariants: ``parameter_state`` changes only through ``PARAMETER_TRANSITIONS``, ``gradient_state`` only through
    ``GRADIENT_TRANSITIONS``. An all-gather is pending only in UNSHARDING; one that failed, until
    the next wait or :meth:`abandon`.
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
        self.rename(name)
        is_new = parameters is None
        self.parameters = shard_parameters(sources) if parameters is None else list(parameters)
        # Experts have axes of their own: one set of process groups for each.
        used = dict.fromkeys(parameter.sharding.axes for parameter in self.parameters)
        self.process_groups = [ProcessGroups(mesh_axes) for mesh_axes in used or (axes,)]

        # Of the full parameters.
        self.parameter_state = ParameterState.SHARDED
        self._pending_gather: InFlight[None] | None = None
        """The all-gather in flight, or one that failed, which may still write to the unsharded memory."""
        self.cut: Callable[[AnyBucket, int], Gatherable] | None = None
        """Makes the slices of a bucket from which some neighbouring ranks can gather it again."""
        self.slices: Sequence[Gatherable] = ()
        """The slices for the next all-gather, in SHRUNK and until it is done."""
        self.is_lent = False
        """True while other full parameters, which the user may change, are registered in place of the sharded ones."""
        self._noted_bytes = 0
        """The unsharded bytes that were last reported to the trace."""

        # Of the gradients.
        self.gradient_state = GradientState.NONE
        self.reduction = ReductionSettings()
        self.owner: Callable[[], Any] = _nobody
        """Returns the FSDP state, whose root is told of complete gradients, or ``None``."""
        self.task = AutogradTask()
        self._num_ready = 0
        """The number of gradients that have come since the last reduction or hold, and of the ``_ahead`` next ones."""
        self._ahead = 0
        """The number of gradients whose arrival will change nothing else, so that their hooks only count them."""
        self.were_summed = False
        """True if any rank may hold sums of several microbatches."""
        self._gradients_set = False
        """True if gradients were ever set without autograd's accumulation."""
        self.partial_reduction: InFlight[list[ReducedBucket]] | None = None
        """The partial reduction over the shard axis, in flight or done, whose sum the next reduction includes."""

        # Buckets, which the gather kinds make.
        self.buckets: list[AnyBucket] = []
        self.last_gather: AllGather | None = None
        """The most recent all-gather of this group, or of several groups of which it is the first."""
        self.kinds = {kind: kind(self) for kind in GATHER_KINDS}
        self.is_offloaded = any(self.rest_device_of(p) != axes.device for p in self.parameters)
        """True if any shard, and so its reduced gradient, is on another device than that of the modules."""
        # Ranks make new groups together, so that kinds may communicate here.
        if is_new:  # else it is a copy, which ranks do not make together
            for kind in self.kinds.values():
                kind.reserve()
        self.build()

    def rename(self, name: str) -> None:
        """Set the name, once the module's path in the model is known or has changed."""
        self.name = name
        self.pre_forward_event = Event(Hook.PRE_FORWARD, name)
        self.post_forward_event = Event(Hook.POST_FORWARD, name)

    @property
    def device(self) -> torch.device:
        """The device on which modules compute."""
        return self.axes.device

    @property
    def on_gradient(self) -> Callable[[torch.Tensor], None]:
        """The hook that autograd calls when a full gradient is ready.

        Its reference is weak: Python's garbage collector does not see those of tensor hooks, nor a cycle through them.
        """
        known = ref(self)

        def hook(_: torch.Tensor) -> None:
            group = known()
            if group is None:
                return
            task = group.task.number
            if group._ahead and (task == _current_task() or task == -1):  # without a call per parameter
                group._ahead -= 1
            elif group.arrive(is_nested=task != -1 and task != _current_task()):
                state = group.owner()
                root = None if state is None else state._root()
                if root is not None:
                    root.gradient_ready(state)

        return hook

    @property
    def was_flipped(self) -> bool:
        """True if ``requires_grad`` of a parameter has changed since the plan was made."""
        return any(parameter.was_flipped for parameter in self.parameters)

    def copy_settings(self, other: ParamGroup) -> None:
        """Copy the settings and communicators of ``other``, of which this is a copy."""
        self.reduction, self.cut = other.reduction, other.cut
        for pgs, original in zip(self.process_groups, other.process_groups, strict=True):
            pgs.follow(original)
        self.build()

    def refresh(self) -> None:
        """Update after replaced local tensors and changes of ``requires_grad``, if the parameters are sharded.

        Does nothing while gradients in the old layout are held: the next all-gather reduces them first.

        Raises:
            ParameterError: a parameter was replaced by a tensor with another sharding. The error names it.
        """
        if self.parameter_state is not ParameterState.SHARDED or self.registration.is_current:
            return
        self.check_data()
        if self.gradient_state in HELD_GRADIENTS and self.was_flipped:
            return
        # Values that functional_call was given stay registered, until the sharded parameters are shown.
        with torch.inference_mode(False), torch.no_grad():
            given = [parameter for parameter in self.parameters if parameter.adopt_replacement()]
            places = [(module._parameters, name) for parameter in given for module, name in parameter.owners]
            values = [registered[name] for registered, name in places]
            self._follow_changes()  # may show the sharded parameters: the values are put back
            for (registered, name), value in zip(places, values, strict=True):
                registered[name] = value

    def check_data(self) -> None:
        """Raise a ``ParameterError`` that names the parameters whose ``p.data`` was assigned, if there are any."""
        given = [parameter.name for parameter in self.registration.replaced_data()]
        if given:
            raise ParameterError(
                f"parameters {given} of {self.name!r} were given other values by p.data = ..., which a sharded "
                "parameter does not follow, as its values are in its local tensor. Change it in place: p.copy_(...) "
                "under torch.no_grad(), or p.to_local().copy_(...) for the shard of this rank."
            )

    def rebuild(self) -> None:
        """Rebuild the tensors, which are sharded, after a change that the plan depends on."""
        self.check_nothing_held()
        former = [bucket.reducer for bucket in self.buckets]
        self.build()
        for bucket in self.buckets:
            for reducer in former:
                bucket.reducer.continue_from(reducer)

    def give_up(self, parameter: ShardedParameter) -> None:
        """Remove ``parameter``, which is sharded and whose places now hold a parameter of another group."""
        self.check_nothing_held()
        self.parameters.remove(parameter)
        parameter.state_ref = None
        self.build()

    def register_at(self, parameter: ShardedParameter, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Register ``parameter`` of this group, which is sharded, on more modules."""
        parameter.owners = (*parameter.owners, *places)
        self.register()

    def check_nothing_held(self) -> None:
        """Raise ``LifecycleError`` if gradients are held, since new tensors would lose them."""
        if self.gradient_state in HELD_GRADIENTS:
            raise LifecycleError(
                f"{self.name!r} holds gradients that were accumulated and not delivered yet, which this change would "
                "lose. Run a backward outside of no_sync first, or drop them with model.zero_grad()."
            )

    def check_grad_dtypes(self) -> None:
        """Raise ``LifecycleError`` if the user has changed ``grad_dtype`` of a parameter after sharding."""
        for parameter in self.parameters:
            parameter.check_grad_dtype()

    def follow_patches(self) -> None:
        """Rebuild if hooks were set on local tensors, or running statistics got another dtype, since the last build."""
        if self.parameter_state is not ParameterState.SHARDED:
            return
        changed = any(kind.has_changed() for kind in self.kinds.values())
        if changed or self._compute_dtypes != [p.compute_dtype for p in self.parameters]:
            self.build()

    # -- buckets

    def rest_device_of(self, parameter: ShardedParameter) -> torch.device:
        """Return the device of the shard of ``parameter`` between steps."""
        return rest_device(parameter.offload, self.device)

    @property
    def version(self) -> int:
        """A number that changes with ``requires_grad`` and with in-place changes of shards that torch counts."""
        memory = sum(tensor._version for bucket in self.buckets for tensor in bucket.versioned)
        return memory + sum(p.sharded._version + p.was_flipped for p in self.parameters)

    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self) -> None:
        """Create shard stores, buckets and unsharded parameters for the current local tensors."""
        self.find()
        self.last_gather = None
        self.plan = self._make_plan()
        self.are_on_rest_device = not self._misplaced()
        self.buckets = []  # frees their memory first
        made_by = ((plan, plan.gather_claim) for plan in self.plan.buckets)
        self.buckets = [self.kinds[c.kind].make(plan) if c else self.make_plain(plan) for plan, c in made_by]
        self.register()

    def find(self) -> None:
        """Let the kinds look at the parameters, before they are asked for claims."""
        for kind in self.kinds.values():
            kind.find()

    def make_plain(self, plan: BucketPlan, kind: type[Bucket] = Bucket) -> Bucket | InPlaceBucket:
        """Make a bucket with a store of its shards: of class ``kind`` if it is gathered."""
        store = self.make_store(plan)
        chosen = kind if plan.is_gathered else InPlaceBucket
        bucket = chosen(plan, self.parameters, self.process_groups[plan.axes], store, self.device)
        self.fill(bucket, store.locals, [bucket.parameter_data(k) for k in range(len(plan.indices))])
        bucket.free()
        return bucket

    def fill(self, bucket: AnyBucket, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> None:
        """Move the local tensors of a new bucket's parameters to ``shards``, and make unsharded ones of ``fulls``."""
        on_gradient = self.on_gradient
        for parameter, shard, full in zip(bucket.parameters, shards, fulls, strict=True):
            if shard.is_meta and not parameter.local.is_meta:  # it stays until the others are materialized
                continue
            if not shard.is_meta:
                shard.copy_(parameter.local)
            parameter.set_local(shard)
            parameter.build_unsharded(full, on_gradient)

    def claim(self, parameter: ShardedParameter) -> GatherClaim | None:
        claims = (kind.claim(parameter) for kind in self.kinds.values())
        return next((claim for claim in claims if claim is not None), None)

    def make_store(self, plan: BucketPlan) -> ShardStore:
        """Return memory for the shards of a bucket: where they are, or on meta if any is."""
        locals_, rank = [self.parameters[i].local for i in plan.indices], self.process_groups[plan.axes].axes.shard.rank
        layout = plan.gather.store if plan.is_gathered or plan.gather_claim is not None else plan.gather.places
        at = next((local.device for local in locals_ if local.is_meta), locals_[0].device)
        flat = torch.empty(layout.numel, dtype=plan.dtype, device=at, pin_memory=plan.pins_memory and is_host(at))
        if not flat.is_meta:
            zero_padding(flat, layout, plan.gather.shards, rank)
        return ShardStore(plan.gather.shards, layout, rank, flat)

    def register(self) -> None:
        """Register the sharded parameters on their owners."""
        self._note_registration()
        self.registration.show_sharded()

    def renew_unsharded(self, parameters: Sequence[ShardedParameter]) -> None:
        """Make new unsharded tensors of ``parameters``, which are sharded, in place of those that a user replaced."""
        for parameter in parameters:
            gradient = parameter.unsharded.grad
            parameter.build_unsharded(parameter.full, self.on_gradient)
            parameter.unsharded.grad = gradient
        self.register()

    def _note_registration(self) -> None:
        memory = [tensor for bucket in self.buckets for tensor in bucket.versioned]
        created = any(bucket.creates_parameters for bucket in self.buckets)
        self.registration = Registration(self.parameters, memory, created_by_gather=created)

    def _make_plan(self) -> GroupPlan:
        # A parameter as numbers: equal specs give the same plan, which is cached.
        self._compute_dtypes = [p.compute_dtype for p in self.parameters]
        specs, reduce_kinds = [], reduce_kinds_of(self.parameters)
        axes = [pgs.axes for pgs in self.process_groups]
        for p, compute_dtype in zip(self.parameters, self._compute_dtypes, strict=True):
            reduce_dtype = p.precision.gradient_reduce_dtype(compute_dtype, p.grad_dtype)
            specs.append(
                ParameterSpec(
                    name=p.name,
                    shape=p.shape,
                    dim=p.dim,
                    dtype=p.dtype,
                    compute_dtype=compute_dtype,
                    reduce_dtype=reduce_dtype,
                    gradient_dtype=p.grad_dtype or p.precision.reduce_dtype,
                    trainable=p.sharded.requires_grad,
                    axes=axes.index(p.sharding.axes),
                    gather_claim=self.claim(p),
                    reduce_kind=reduce_kinds.get(p),
                    summed_before=p.sharding.inner is not None and bool(p.sharding.inner.model_axes),
                    offload=p.offload if self.rest_device_of(p) != self.device else OffloadPolicy(),
                    arriving_dtype=p.grad_dtype or reduce_dtype if p.has_grad_dtype else compute_dtype,
                )
            )
        # FSDP2 reduces a group in one dtype.
        specs = promoted(specs) if all(p.precision.promotes for p in self.parameters) else specs
        return plan_group(tuple(specs), tuple(pgs.plan_options() for pgs in self.process_groups))

    def _follow_changes(self) -> None:
        # Only ``requires_grad`` has changed: new layouts of reductions, the same memory.
        locals_ = [local_part(p.sharded) for p in self.parameters]
        are_kept = all(local is p.local for local, p in zip(locals_, self.parameters, strict=True))
        if are_kept and not self.registration.replaced_local_data() and self._sync_requires_grad():
            return
        # Local tensors were replaced: build everything anew, once all are materialized.
        self.are_on_rest_device = not self._misplaced()
        if len({local.is_meta for local in locals_}) > 1:
            return  # some parameters are not materialized yet
        self.check_nothing_held()
        for local, parameter in zip(locals_, self.parameters, strict=True):
            if local is not parameter.local:
                for kind in self.kinds.values():
                    kind.before_replacement(parameter, local)
            parameter.local = local
        self.build()

    def _misplaced(self) -> dict[str, str]:
        """Return the device of each shard that is not where it rests, and where that is, by name."""
        found = ((p.name, local_part(p.sharded).device, self.rest_device_of(p)) for p in self.parameters)
        return {
            name: f"{device}, not {rest_device.type}"
            for name, device, rest_device in found
            if device.type != rest_device.type
        }

    def _sync_requires_grad(self) -> bool:
        """Update the plan, unless it needs other buckets, as ``promoted`` may say; return whether it did."""
        changed = self._make_plan()
        if [plan.indices for plan in changed.buckets] != [plan.indices for plan in self.plan.buckets]:
            return False
        self.plan, on_gradient = changed, self.on_gradient
        for plan in self.plan.buckets:
            for i in plan.indices:
                self.parameters[i].sync_requires_grad(on_gradient)
        for bucket, plan in zip(self.buckets, self.plan.buckets, strict=True):
            bucket.update_plan(plan)
        self._note_registration()
        return True

    def _device_error(self) -> DeviceError:
        """Return the error that names the parameters whose shards are on a wrong device."""
        # No values yet?
        on_meta = [p.name for p in self.parameters if local_part(p.sharded).is_meta]
        if on_meta:
            return DeviceError(
                f"parameters of {self.name!r} are still on the meta device: {on_meta}. Before the first forward, "
                "initialise them by composable_fsdp.initialize(model, seed=...); or call "
                "composable_fsdp.to_empty(model, device=...) and load a state dict."
            )
        # Values elsewhere, by name, and where they should be.
        rests = {self.rest_device_of(p).type for p in self.parameters}
        move = "Leave out model.to(...)" if len(rests) > 1 else f"Move them with model.to({rests.pop()!r})"
        return DeviceError(
            f"shards of {self.name!r} are elsewhere than on the device of the mesh, or on CPU if they are offloaded: "
            f"{self._misplaced()}. {move}: fully_shard puts each where it belongs."
        )

    # -- parameters

    def advance(self, operation: ParameterOperation) -> ParameterState:
        """Set ``parameter_state`` to that after ``operation``, or raise a ``LifecycleError`` if it is not legal."""
        self.parameter_state = advance(PARAMETER_TRANSITIONS, self.parameter_state, operation, self.name)
        return self.parameter_state

    @property
    def unshard_started(self) -> bool:
        """True if the all-gather is in flight or done."""
        return self.parameter_state in UNSHARD_STARTED

    @property
    def can_skip_unshard(self) -> bool:
        """True if the all-gather is in flight or done, and :meth:`unshard` has nothing else to do."""
        return self.parameter_state in UNSHARD_STARTED and self.gradient_state not in HELD_GRADIENTS

    def needs_gather(self) -> bool:
        """Apply changes to the parameters, and return True if no all-gather is in flight or done."""
        if not self.registration.is_current:
            if self.parameter_state is _SHRUNK:
                self.reshard()  # its slices are of parameters before the change
            self.refresh()
        if not self.are_on_rest_device:
            raise self._device_error()
        return self.parameter_state not in UNSHARD_STARTED

    def begin_gather(self, pending: InFlight[None] | None, stream: str, begin: float | None) -> None:
        """Record the all-gather ``pending``, or ``None`` for a group without parameters."""
        self._pending_gather = pending
        self.parameter_state = _AFTER_UNSHARD[self.parameter_state]
        if trace.listeners:
            self.note_memory()
            moved = all_gather_wire_bytes(self.slices or self.buckets)
            trace.emit(trace.Operation.UNSHARD, self.name, moved.bytes, stream, begin, moved.plain_bytes)

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters."""
        before = self.parameter_state
        self.parameter_state = _AFTER_WAIT.get(before) or self.advance(_WAIT)
        if self.parameter_state is before:
            return
        begin = trace.now() if trace.listeners else None
        if self._pending_gather is not None:
            self._pending_gather.wait()
        self._pending_gather, self.slices = None, ()  # only after the wait: streams of a device may still read slices
        self.registration.show_unsharded()
        if trace.listeners:
            self.note_memory()
            trace.emit(trace.Operation.WAIT, self.name, 0, "", begin)

    def finish_gather(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self._pending_gather is not None:
            self._pending_gather.wait()
        self._pending_gather, self.slices = None, ()

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded memory."""
        # The tables say whether there is anything to do.
        before = self.parameter_state
        self.parameter_state = _AFTER_RESHARD[before]
        if self.parameter_state is before:
            return
        # The memory may be freed only after the last write to it.
        if before is not _UNSHARDED:  # an all-gather is in flight, or slices are kept for one
            self.finish_gather()
        if before is not _SHRUNK:
            self._release()

    def abandon(self) -> None:
        """Reshard without waiting for an all-gather that failed, once nothing can write to the memory any more."""
        self._pending_gather = self.last_gather = None
        self.reshard()
        for bucket in self.buckets:
            bucket.free()

    @without_grad
    def shrink(self, mesh_size: int) -> None:
        """Reshard, but keep a slice from which ``mesh_size`` neighbouring ranks can all-gather again."""
        self.advance(ParameterOperation.SHRINK)
        assert self.cut is not None
        self.slices = [self.cut(bucket, mesh_size) for bucket in self.buckets]
        self._release()

    def _release(self) -> None:
        self.registration.show_sharded()
        if self._pending_gather is None or self._pending_gather.has_arrived:
            for bucket in self.buckets:
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

    # -- gradients

    # Note: gradients without a reduction
    #
    # ``contribute``: take part in a reduction, if need be with zeros. ``notice_gradients``: the same, if other code
    # than autograd has set some. ``hold_set_gradients``: those are summed before a backward adds to them.
    # ``hold_gradients``: a backward without synchronization has left some. ``held_gradients``: all of these, to be read
    # or changed.

    def arrive(self, *, is_nested: bool) -> bool:
        """Handle a new gradient of an unsharded parameter. Return whether all gradients have arrived, in LOCAL.

        With ``is_nested`` it comes from an autograd run inside that of the backward, as reentrant checkpoints have.
        """
        if self.gradient_state is not _ARRIVING:
            self.gradient_state = _AFTER_ACCUMULATE[self.gradient_state]
        # A backward inside this one: its end is not the end of this one.
        if is_nested:  # more gradients may follow
            return False
        # The last gradient ends the group. Count all others in advance: their hooks only decrement ``_ahead``. Of
        # 4, the 1st sets ``_ahead = 2`` and ``_num_ready = 3``, the 2nd and 3rd decrement, the 4th comes here again.
        num_trainable = self.plan.num_trainable
        self._num_ready += 1
        if self._num_ready >= num_trainable:
            self._num_ready = 0
            self.gradient_state = _AFTER_READY[self.gradient_state]
            return True
        self._ahead = num_trainable - 1 - self._num_ready
        self._num_ready += self._ahead
        return False

    def contribute(self) -> None:
        """Take part in the next reduction even without gradients, since other ranks may have some."""
        if self.plan.num_trainable and self.gradient_state is not GradientState.ARRIVING:
            self._advance_gradients(GradientOperation.READY)

    def notice_gradients(self) -> None:
        """Take part in the next reduction if a gradient was set by other code than autograd, such as a pipeline."""
        parameters = (p for p in self.parameters if p.unsharded is not p.sharded)
        if any(parameter.unsharded.grad is not None for parameter in parameters):
            self._gradients_set = True
            self.contribute()

    def hold_set_gradients(self) -> None:
        """Keep gradients that were set since the last backward, before autograd adds to them in their own dtype."""
        if self.gradient_state not in LOCAL_GRADIENTS:
            self.notice_gradients()
        if self._gradients_set:
            self._accumulate()

    def hold_gradients(self) -> None:
        """Keep this microbatch's gradients without reducing them, summed in the reduce dtype."""
        self._num_ready = self._ahead = 0
        if self.gradient_state is GradientState.ARRIVING:
            self._advance_gradients(GradientOperation.READY)
        self._accumulate()

    def _accumulate(self) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.accumulate_gradient(bucket.plan.sum_dtype)

    def held_gradients(self) -> dict[ShardedParameter, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return what is not in the sharded gradient yet, by parameter: the full gradient, and the shard of sums.

        Either is ``None`` where there is none. Both may be changed in place.
        """
        if self.partial_reduction is not None:
            self.partial_reduction.wait()
        if self.gradient_state is not GradientState.ARRIVING:
            self._accumulate()  # what was set since the last backward
        sums: dict[ShardedParameter, torch.Tensor] = {}
        for bucket in self.buckets:
            sums |= bucket.reducer.partial_sum_shards()
        found = {parameter: (parameter.held_gradient, sums.get(parameter)) for parameter in self.parameters}
        return {parameter: parts for parameter, parts in found.items() if any(part is not None for part in parts)}

    def zero_gradients(self, parameters: Sequence[ShardedParameter], *, set_to_none: bool) -> None:
        """Set gradients of ``parameters`` that were not reduced to zero, or drop them with ``set_to_none``."""
        held = self.held_gradients()
        for parameter in parameters:
            for part in held.get(parameter, ()):
                if part is not None:
                    part.zero_()
            if set_to_none:
                parameter.drop_gradient()
        if set_to_none:
            for bucket in self.buckets:
                bucket.reducer.drop_from_partial_sum(parameters)

    def drop_gradients(self) -> None:
        """Drop gradients that were not reduced, accumulated microbatches included."""
        self._num_ready = self._ahead = 0
        for parameter in self.parameters:
            parameter.drop_gradient()
        for bucket in self.buckets:
            bucket.reducer.partial_sum = None
        self.partial_reduction = None  # done, or failed: waiting again would raise again
        self.were_summed = False
        self._advance_gradients(GradientOperation.DROP)

    # -- reductions

    def start_reducing(self) -> bool:
        """Reset the counters for a reduction of the gradients. Return False if there are none."""
        # The sum of earlier reductions over the shard axis goes into this one, which decides the state from now on.
        if self.partial_reduction is not None:
            self.partial_reduction.wait()
            self.partial_reduction = None
        before = self.gradient_state
        self._num_ready = self._ahead = 0
        self.gradient_state = _AFTER_REDUCE[before]
        return self.gradient_state is not before

    def is_reduced_like(self, others: Sequence[ParamGroup]) -> bool:
        """Return True if one message may have the gradients of this group and ``others``, by their settings."""
        has_sums = (bucket.reducer.partial_sum is not None for group in (self, *others) for bucket in group.buckets)
        if self.reduction.all_reduce_hook is not None or any(has_sums):
            return False
        return not any(map(_reduction_of(self).__ne__, map(_reduction_of, others)))

    def reductions_of(self, reducers: Sequence[BucketReducer]) -> list[BucketReduction]:
        """Take the gradients of ``reducers``, and return their reductions."""
        reductions = []
        for reducer in reducers:
            pgs = reducer.pgs
            reduction = plan_division(
                reducer.plan.sum_dtype,
                pgs.axes.num_ranks,
                averages=pgs.scatter.traits.averages and pgs.axes.replicate.traits.averages,
                divide_factor=self.reduction.divide_factor if pgs.axes.divide is None else pgs.axes.divide,
                sum_only=self.reduction.sum_only or reducer.own is not None,
            )
            # Pack the gradients, which frees them.
            buffers = reducer.prepare(reduction, were_summed=self.were_summed)
            if buffers is not None:
                divides_first = not self.reduction.sum_only and reduction.pre_divide == 1.0  # as FSDP2 does
                reductions.append(
                    BucketReduction(reducer, reduction, buffers, self.reduction.all_reduce_hook, divides_first)
                )
        return reductions

    def begin_reduction(self, pending: InFlight[list[ReducedBucket]], *, is_partial: bool) -> None:
        """Record the launch of ``pending``, the reduction of a backward."""
        self.were_summed = False
        self.partial_reduction = pending if is_partial else None

    def end_reduction(self, pending: InFlight[list[ReducedBucket]], *, is_partial: bool) -> None:
        """Change the state after ``pending`` is done, unless a later reduction has taken its sum."""
        if not is_partial:
            self.gradient_state = _AFTER_COMPLETE.get(self.gradient_state) or self._advance_gradients(_COMPLETE)
        elif pending is self.partial_reduction:
            self._advance_gradients(GradientOperation.KEEP)

    def _advance_gradients(self, operation: GradientOperation) -> GradientState:
        self.gradient_state = advance(GRADIENT_TRANSITIONS, self.gradient_state, operation, self.name)
        return self.gradient_state
