"""The parameters, buckets and plan of one parameter group.

They are rebuilt if a user replaced local tensors (``to_empty``, ``.to(dtype)``, ``load_state_dict(assign=True)``).
A change of ``requires_grad`` only updates the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import compress
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_fsdp._comm.communicator import AliasingCommunicator
from composable_fsdp._layout.bucket_layout import FlatLayout
from composable_fsdp._layout.plan import (
    BucketPlan,
    GroupPlan,
    MessageSizes,
    ParameterSpec,
    UnshardedStorage,
    plan_group,
)
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._memory.buffers import ShardStore, zero_padding
from composable_fsdp._memory.device_capabilities import is_host
from composable_fsdp._runtime.collectives.all_gather import GatherCache
from composable_fsdp._runtime.collectives.bucket import AnyBucket, Bucket
from composable_fsdp._runtime.collectives.extension import GatherExtension, PlainExtension, find_extension, find_view
from composable_fsdp._runtime.collectives.extension_bucket import ExtendedBucket
from composable_fsdp._runtime.collectives.grad_extension import GradientExtension, find_gradient_extension
from composable_fsdp._runtime.groups.callers_context import runs_outside
from composable_fsdp._runtime.params.registration import Registration
from composable_fsdp._runtime.params.sharded_param import ParameterSource, ShardedParameter, local_part
from composable_fsdp._runtime.params.tensor_subclass import (
    VIEW_HOOK,
    copy_shard,
    cut_shard,
    hooks_of,
    is_wrapper,
    keeps_class,
    warn_of_lost_hooks,
)
from composable_fsdp._sharding.mesh import DataParallelAxes
from composable_fsdp._sharding.process_groups import ProcessGroups
from composable_fsdp.codecs.communication_policy import EXACT, PLAIN, GradientCodecs
from composable_fsdp.errors import DeviceError, ParameterError
from composable_fsdp.policies import CPUOffloadPolicy, OffloadPolicy

__all__ = ["BEFORE_SHARING", "ParamGroupBuckets", "rest_device", "shard_full_tensor", "shard_parameters"]


_SHARED_ALIGNMENT = 64
"""The alignment of buckets in shared memory: the bytes of a cache line."""

_SharedKey: TypeAlias = tuple[tuple[int, ...], torch.dtype, torch.dtype, FlatLayout]


def _shared_key(plan: BucketPlan) -> _SharedKey:
    """Return the properties that decide the bucket's offset in shared memory."""
    return plan.indices, plan.dtype, plan.compute_dtype, plan.gather.places


def _uses_shared_memory(plan: BucketPlan, process_groups: Sequence[ProcessGroups]) -> bool:
    """Return True if the bucket's shards, or the parameters cast from them, are in memory shared between ranks."""
    return not plan.is_gathered and process_groups[plan.axes].shared_memory is not None


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
        if keeps_class(full):
            local = cut_shard(source.name, full, shards, axes.shard.rank, device)
            parameters.append(ShardedParameter(source, local))
            continue
        shape = shards.shard_shape(axes.shard.rank)
        if full.is_meta:
            local = torch.empty(shape, dtype=full.dtype, device=device)
            parameters.append(ShardedParameter(source, local))
            continue
        padded = torch.empty(shards.padded_numel, dtype=full.dtype, device=device)
        copy_shard(source.name, full, shards, axes.shard.rank, padded)
        parameters.append(ShardedParameter(source, padded[: prod(shape)].view(shape)))
    return parameters


@torch.no_grad()
def shard_full_tensor(parameter: ShardedParameter, full: torch.Tensor) -> DTensor:
    """Return the DTensor with this rank's shard of ``full``, a plain tensor of the full parameter."""
    sharding = parameter.sharding
    if sharding.inner is not None:
        inner = sharding.inner
        full = local_part(distribute_tensor(full, inner.mesh, inner.placements, src_data_rank=None))
    shards = TensorShards(parameter.shape, sharding.dim, sharding.axes.shard.size)
    device = parameter.local.device
    return sharding.wrap_shard(cut_shard(parameter.name, full, shards, sharding.axes.shard.rank, device))


class ParamGroupBuckets:
    """The buckets of one :class:`ParamGroup`: their plan, process groups and tensors.

    Args:
        parameters: the parameters of the group. Their local tensors are copied into the shard stores.
        process_groups: one for each pair of mesh axes that shard the parameters.
        device: the device on which modules compute.
        on_gradient: returns, for a gradient bucket, the hook that autograd calls when a full gradient is ready.
        in_common: True if memory shared between ranks may be used. All ranks must then create these tensors together.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        process_groups: Sequence[ProcessGroups],
        device: torch.device,
        on_gradient: Callable[[int], Callable[[torch.Tensor], None]],
        *,
        in_common: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.buckets: list[AnyBucket] = []
        self.process_groups = process_groups
        self._axes = [pgs.axes for pgs in process_groups]
        self.device = device
        self._on_gradient = on_gradient
        self.is_offloaded = any(self.rest_device_of(p) != device for p in self.parameters)
        """True if any shard is on another device than that of the modules."""
        self._shared_offsets: dict[_SharedKey, int] = {}
        if in_common:
            self._reserve_shared_memory()
        self.build()

    def rest_device_of(self, parameter: ShardedParameter) -> torch.device:
        """Return the device of the shard of ``parameter`` between steps."""
        return rest_device(parameter.offload, self.device)

    @property
    def version(self) -> int:
        """A number that changes with ``requires_grad`` and with in-place changes of shards that torch counts.

        Torch does not count those of fused and foreach optimizers.
        """
        memory = sum(tensor._version for bucket in self.buckets for tensor in bucket.versioned)
        return memory + sum(p.sharded._version + p.was_flipped for p in self.parameters)

    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self) -> None:
        """Create shard stores, buckets and unsharded parameters for the current local tensors."""
        self._find_hooks()
        self.last_gather = GatherCache()
        """The cached all-gather of this group, or of several groups of which it is the first."""
        self.plan = self._make_plan()
        moved = [
            p
            for p in self.plan.buckets
            if _uses_shared_memory(p, self.process_groups) and _shared_key(p) not in self._shared_offsets
        ]
        for plan in moved:  # ranks may still read their shared memory, which a new layout would overwrite
            self.process_groups[plan.axes].shared_memory = None
        if moved:
            self.plan = self._make_plan()
        self.are_on_rest_device = not self._misplaced([p.local for p in self.parameters])
        self.buckets = []
        for plan in self.plan.buckets:
            locals_ = [self.parameters[i].local for i in plan.indices]
            pgs = self.process_groups[plan.axes]
            if plan.extended:
                self.buckets.append(self._extended_bucket(plan, pgs))
                continue
            on_meta = any(local.is_meta for local in locals_)
            store = self._store(plan, pgs, torch.device("meta") if on_meta else locals_[0].device)
            common = self._shared_buffer(plan) if plan.unsharded_storage is UnshardedStorage.SHARED else None
            bucket = Bucket(plan, self.parameters, pgs, store, self.device, common)
            for k, (parameter, local) in enumerate(zip(bucket.parameters, locals_, strict=True)):
                if on_meta and not local.is_meta:  # it stays where it is until the others are materialized
                    continue
                if not on_meta:
                    store.locals[k].copy_(local)
                parameter.set_local(store.locals[k])
                parameter.build_unsharded(bucket.parameter_data(k), self._on_gradient(plan.grad_bucket))
            bucket.free()
            self.buckets.append(bucket)
        self.register()

    def allocate(self, device: torch.device | None) -> bool:
        """Allocate the shards, without values, if all are on the meta device, as one tensor for each bucket.

        ``None`` is the rest device of each. Returns False if that is not possible: parameters must be replaced one by
        one, and :meth:`refresh` follows.
        """
        plain = all(plan.is_gathered and not plan.extended for plan in self.plan.buckets)
        blank = all(p.local.is_meta and p.sharded.grad is None for p in self.parameters)
        devices = {p: device or self.rest_device_of(p) for p in self.parameters}
        at_rest = all(self.rest_device_of(p).type == chosen.type for p, chosen in devices.items())
        if not (at_rest and plain and blank and self.registration.is_current):
            return False
        with torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                assert isinstance(bucket, Bucket)
                bucket.replace_store(self._store(bucket.plan, bucket.pgs, devices[bucket.parameters[0]]))
        self.last_gather = GatherCache()
        self.are_on_rest_device = True
        self.register()
        return True

    def _find_hooks(self) -> None:
        self._hooks = {p: hooks_of(p.local) for p in self.parameters if keeps_class(p.local)}
        self._gradient_extensions = self._find_gradient_extensions()
        self._extensions = self._find_extensions()

    def _store(self, plan: BucketPlan, pgs: ProcessGroups, device: torch.device) -> ShardStore:
        rank = pgs.axes.shard.rank
        layout = plan.store_layout(rank)
        in_common = plan.aliased and _uses_shared_memory(plan, self.process_groups) and is_host(device)
        if in_common:
            flat = self._shared_buffer(plan)
        else:
            pinned = plan.pins_memory and is_host(device)
            flat = torch.empty(layout.numel, dtype=plan.dtype, device=device, pin_memory=pinned)
            if not flat.is_meta:
                zero_padding(flat, layout, plan.gather.shards, rank)
        return ShardStore(plan.gather.shards, layout, rank, flat, is_shared=in_common)

    def _shared_buffer(self, plan: BucketPlan) -> torch.Tensor:
        """Return the bucket's full parameters in shared memory, 1-d, in the compute dtype."""
        memory = self.process_groups[plan.axes].shared_memory
        assert memory is not None
        begin = self._shared_offsets[_shared_key(plan)]
        return memory[begin : begin + plan.full_bytes].view(plan.compute_dtype)

    def _reserve_shared_memory(self) -> None:
        """Reserve shared memory for all full parameters of the group, if the communicators support it.

        All ranks must call this together. The operating system allocates pages when they are written.
        """
        able = [
            c for c in self.process_groups if c.gather.traits.aliases and c.gather.size > 1 and not self.is_offloaded
        ]
        if not able:
            return
        for check in BEFORE_SHARING:
            check(self, able)
        for pgs in able:
            pgs.shared_memory = torch.empty(0, dtype=torch.uint8)  # a marker with which the plan assumes shared memory
        self._find_hooks()
        ends = dict.fromkeys(self.process_groups, 0)
        for bucket in self._make_plan().buckets:
            if _uses_shared_memory(bucket, self.process_groups):
                pgs = self.process_groups[bucket.axes]
                self._shared_offsets[_shared_key(bucket)] = ends[pgs]
                ends[pgs] += -(-bucket.full_bytes // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT
        for pgs in able:
            communicator = cast(AliasingCommunicator, pgs.gather)
            pgs.shared_memory = communicator.share(ends[pgs]) if ends[pgs] else None

    def register(self) -> None:
        """Register the sharded parameters on their owners."""
        self._note_registration()
        self.registration.show_sharded()

    def _note_registration(self) -> None:
        memory = [tensor for bucket in self.buckets for tensor in bucket.versioned]
        extended = any(plan.extended for plan in self.plan.buckets)
        self.registration = Registration(self.parameters, memory, created_by_gather=extended)

    def _extended_bucket(self, plan: BucketPlan, pgs: ProcessGroups) -> ExtendedBucket:
        """Return the bucket of parameters with FSDP hooks, which keep their local tensors."""
        members = [self.parameters[i] for i in plan.indices]
        found = [self._extensions[parameter] for parameter in members]
        of_gradients = [self._gradient_extensions[parameter] for parameter in members if plan.gradient_extended]
        return ExtendedBucket(
            plan, self.parameters, found, of_gradients, pgs, self.device, self._on_gradient(plan.grad_bucket)
        )

    def _find_gradient_extensions(self) -> dict[ShardedParameter, GradientExtension]:
        extensions = {}
        for parameter in self._hooks:
            axes = parameter.sharding.axes
            extension = find_gradient_extension(
                parameter.name,
                parameter.local,
                axes.shard_mesh,
                axes.shard,
                TensorShards(parameter.shape, parameter.dim, axes.shard.size).padded_shape,
                parameter.owners[0][0],
                parameter.precision,
            )
            if extension is not None:
                extensions[parameter] = extension
        return extensions

    def _find_extensions(self) -> dict[ShardedParameter, GatherExtension]:
        extensions: dict[ShardedParameter, GatherExtension] = {}
        for p, hooks in self._hooks.items():
            axes, module, dtype = p.sharding.axes, p.owners[0][0], p.compute_dtype
            is_alone = axes.shard.size == 1 and dtype == p.dtype and self.rest_device_of(p) == self.device
            may_view = is_alone and not p.sharded.requires_grad
            view = None
            if may_view and not p.local.is_meta:
                view = find_view(p.name, p.local, axes.shard_mesh, module, p.precision)
            padded = TensorShards(p.shape, p.dim, axes.shard.size).padded_shape
            extension = view or find_extension(
                p.name, p.local, axes.shard_mesh, p.shape, padded, p.dim, module, p.precision
            )
            if extension is None and VIEW_HOOK in hooks and is_wrapper(p.local) and not (may_view and p.local.is_meta):
                raise ParameterError(
                    f"parameter {p.name!r} is a {type(p.local).__name__} with fsdp_get_unsharded_view, which serves "
                    "frozen parameters on one rank, in their own dtype and not offloaded, if it does not return None. "
                    "Let it bring fsdp_pre_all_gather and fsdp_post_all_gather too, which serve all others."
                )
            extensions[p] = extension or PlainExtension(p.name, p.local, p.dim, dtype)
        return extensions

    def follow_patches(self) -> None:
        """Rebuild if hooks were set on local tensors, or running statistics got another dtype, since the last build."""
        hooks = [hooks_of(p.local) != self._hooks.get(p, frozenset()) for p in self.parameters]
        if any(hooks) or self._compute_dtypes != [p.compute_dtype for p in self.parameters]:
            self.build()

    def plan_with(self, sizes: MessageSizes) -> GroupPlan:
        """Return the plan that the group would have with messages of other ``sizes``."""
        return plan_group(self.plan.specs, tuple(pgs.plan_options(sizes) for pgs in self.process_groups))

    def _make_plan(self) -> GroupPlan:
        encodable = self._encodable()
        self._compute_dtypes = [p.compute_dtype for p in self.parameters]
        stages = self._codecs_by_axes(encodable)
        specs = []
        for p, compute_dtype in zip(self.parameters, self._compute_dtypes, strict=True):
            extended = p in self._gradient_extensions
            codecs = p.gradient_codecs if p in encodable else PLAIN
            if p.dtype.itemsize <= torch.float32.itemsize:
                codecs = codecs.alongside(stages[p.sharding.axes])
            if extended:  # the tensor's hooks replace the codec
                codecs = replace(codecs, shard=None)
            reduce_dtype = p.precision.gradient_reduce_dtype(compute_dtype, p.grad_dtype)
            if p.sharded.requires_grad:
                p.precision.note_reduce_dtype(compute_dtype, p.grad_dtype)
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
                    axes=self._axes.index(p.sharding.axes),
                    extended=p in self._extensions,
                    codec=p.gather_codec if p in encodable and p not in self._extensions else None,
                    gradient_codecs=codecs,
                    gradient_extended=extended,
                    alone=p in encodable and p.needs_own_bucket,
                    summed_before=p.sharding.inner is not None and p.sharding.inner.may_leave_sums,
                    offload=p.offload if self.rest_device_of(p) != self.device else OffloadPolicy(),
                    autograd_dtype=p.grad_dtype or reduce_dtype if p.has_grad_dtype else None,
                )
            )
        specs = _promoted(specs) if all(p.precision.promotes for p in self.parameters) else specs
        return plan_group(tuple(specs), tuple(pgs.plan_options() for pgs in self.process_groups))

    def _encodable(self) -> set[ShardedParameter]:
        """Return the parameters that are sharded over every model-parallel axis that shards any of the group.

        A codec rounds neighbouring values together. Ranks with replicas of one parameter but different shards of its
        neighbours would round the replicas differently, and these would drift apart.
        """
        model_parallel_axes = frozenset[str | int]().union(*(p.model_parallel_axes for p in self.parameters))
        return {p for p in self.parameters if p.model_parallel_axes == model_parallel_axes}

    def _codecs_by_axes(self, encodable: Collection[ShardedParameter]) -> dict[DataParallelAxes, GradientCodecs]:
        """Return a codec for each stage with encoded gradients, by pair of axes. Other gradients use it there too."""
        stages: dict[DataParallelAxes, GradientCodecs] = {}
        for parameter in self.parameters:
            axes, own = parameter.sharding.axes, parameter.gradient_codecs if parameter in encodable else PLAIN
            if parameter in self._gradient_extensions:
                own = replace(own, shard=EXACT)
            known = stages.get(axes, PLAIN)
            stages[axes] = GradientCodecs(known.shard or own.shard, known.replicate or own.replicate)
        return stages

    def refresh(self, before_build: Callable[[], None]) -> None:
        """Update after changes of the sharded parameters. To be called if the registration is no longer current.

        Values that ``functional_call`` was given stay registered, until the sharded parameters are shown.

        Args:
            before_build: called before tensors are rebuilt; may raise.

        Raises:
            ParameterError: a parameter was replaced by a tensor with another sharding. The error names it.
        """
        with torch.inference_mode(False), torch.no_grad():
            given = [parameter for parameter in self.parameters if parameter.adopt_replacement()]
            places = [(module._parameters, name) for parameter in given for module, name in parameter.owners]
            values = [registered[name] for registered, name in places]
            was_unsharded = self.registration.was_unsharded
            self._follow_changes(before_build)
            for (registered, name), value in zip(places, values, strict=True):
                registered[name] = value
            self.registration.was_unsharded = was_unsharded and bool(given)

    @runs_outside
    def gather_given(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Register the full values of sharded ones that ``functional_call`` was given. Return these with their places.

        All ranks must call this together.
        """
        given: list[tuple[dict[str, Any], str, Any]] = []
        fulls: dict[int, Any] = {}  # tied weights have one value
        for parameter, dtype in zip(self.parameters, self._compute_dtypes, strict=True):
            for module, name in parameter.owners:
                value = module._parameters.get(name)
                if value is None or value is parameter.unsharded:
                    continue
                if id(value) not in fulls:
                    with temporarily_clear_interpreter_stack():  # DTensor's functions refuse to run in transforms
                        fulls[id(value)] = parameter.full_of_given(value, dtype, self.device)
                if fulls[id(value)] is not value:
                    given.append((module._parameters, name, value))
                    module._parameters[name] = fulls[id(value)]
        return given

    def _follow_changes(self, before_build: Callable[[], None]) -> None:
        locals_ = self._locals()
        are_kept = all(local is p.local for local, p in zip(locals_, self.parameters, strict=True))
        if are_kept and not self.registration.replaced_local_data() and self._sync_requires_grad():
            return
        self.are_on_rest_device = not self._misplaced(locals_)
        if len({local.is_meta for local in locals_}) > 1:
            return  # some parameters are not materialized yet
        before_build()
        for local, parameter in zip(locals_, self.parameters, strict=True):
            lost = self._hooks.get(parameter, frozenset()) - hooks_of(local)
            if lost and local is not parameter.local:
                how = "it was replaced after fully_shard (to_empty, to or load_state_dict(assign=True)) by"
                warn_of_lost_hooks(parameter.name, parameter.local, local, lost, how)
            parameter.local = local
        self.build()

    def _locals(self) -> list[torch.Tensor]:
        return [local_part(p.sharded) for p in self.parameters]

    def _misplaced(self, locals_: Sequence[torch.Tensor]) -> dict[str, tuple[torch.device, torch.device]]:
        """Return the device and the rest device of each shard that is not where it rests, by name."""
        devices = {
            p.name: (local.device, self.rest_device_of(p)) for p, local in zip(self.parameters, locals_, strict=True)
        }
        return {
            name: (device, rest_device)
            for name, (device, rest_device) in devices.items()
            if device.type != rest_device.type
        }

    def _sync_requires_grad(self) -> bool:
        """Update the plan, unless it needs other buckets, as it may if ``_promoted`` changed; return whether it did."""
        changed = self._make_plan()
        if [plan.indices for plan in changed.buckets] != [plan.indices for plan in self.plan.buckets]:
            return False
        self.plan = changed
        for plan in self.plan.buckets:
            for i in plan.indices:
                self.parameters[i].sync_requires_grad(self._on_gradient(plan.grad_bucket))
        for bucket, plan in zip(self.buckets, self.plan.buckets, strict=True):
            bucket.update_plan(plan)
        self._note_registration()
        return True

    def device_error(self, group: str) -> DeviceError:
        """Return the error that names the parameters of ``group`` whose shards are on a wrong device."""
        on_meta = [p.name for p, local in zip(self.parameters, self._locals(), strict=True) if local.is_meta]
        if on_meta:
            return DeviceError(
                f"parameters of {group!r} are still on the meta device: {on_meta}. Before the first forward, "
                "initialise them by composable_fsdp.initialize(model, seed=...); or call "
                "composable_fsdp.to_empty(model, device=...) and load a state dict."
            )
        misplaced = self._misplaced(self._locals())
        elsewhere = {name: str(device) for name, (device, _) in misplaced.items()}
        if len({self.rest_device_of(p) for p in self.parameters}) > 1:
            at_rest = {name: rest.type for name, (_, rest) in misplaced.items()}
            return DeviceError(
                f"shards of {group!r} are elsewhere than their offload policies say: {elsewhere}, not {at_rest}. Leave "
                "out model.to(...): fully_shard has put each where it belongs."
            )
        rest = self.rest_device_of(self.parameters[0])
        why = "are offloaded to CPU" if self.is_offloaded else f"rest on {rest.type}, the device of the mesh"
        return DeviceError(
            f"shards of {group!r} {why}, but these parameters are elsewhere: {elsewhere}. "
            f"Move them with model.to({rest.type!r})."
        )


BEFORE_SHARING: list[Callable[[ParamGroupBuckets, Sequence[ProcessGroups]], None]] = []
"""Called before the ranks of these process groups share the memory of a new group, by all of them together."""


def _promoted(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Return ``specs`` with one reduce dtype for each pair of axes, to which those of trainable ones are promoted."""
    widest: dict[int, torch.dtype] = {}
    real = [spec.reduce_dtype.is_floating_point for spec in specs]
    for spec in compress(specs, real):
        if spec.trainable:
            widest[spec.axes] = torch.promote_types(widest.get(spec.axes, spec.reduce_dtype), spec.reduce_dtype)
    return [
        replace(spec, reduce_dtype=widest.get(spec.axes, spec.reduce_dtype)) if is_real else spec
        for spec, is_real in zip(specs, real, strict=True)
    ]
