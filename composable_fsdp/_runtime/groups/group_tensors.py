"""What a group owns: its parameters, their buckets, and the plan that says where everything lies.

Complete once made. Made again only when somebody replaced the local tensors (``to_empty``, ``.to(dtype)``, loading with
``assign``) or changed ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_fsdp._comm.communicator import AliasingCommunicator
from composable_fsdp._comm.verify_ranks import check_alike
from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.starting_values import start_of
from composable_fsdp._layout.bucket_layout import FlatLayout
from composable_fsdp._layout.plan import BucketPlan, GroupPlan, ParameterSpec, UnshardedStorage, plan_group
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._memory.shard_store import ShardStore
from composable_fsdp._runtime.collectives.all_gather import GatherCache
from composable_fsdp._runtime.collectives.bucket import AnyBucket, Bucket
from composable_fsdp._runtime.collectives.extension import GatherExtension, PlainExtension, find_extension
from composable_fsdp._runtime.collectives.extension_bucket import ExtendedBucket
from composable_fsdp._runtime.collectives.grad_extension import GradientExtension, find_gradient_extension
from composable_fsdp._runtime.params.registration import Registration
from composable_fsdp._runtime.params.sharded_param import ParameterSource, ShardedParameter, local_part
from composable_fsdp._runtime.params.tensor_subclass import copy_shard, cut_shard, hooks_of, warn_of_lost_hooks
from composable_fsdp._sharding.mesh import DataParallelAxes
from composable_fsdp._sharding.process_groups import ProcessGroups
from composable_fsdp.codecs.communication_policy import EXACT, PLAIN, GradientCodecs
from composable_fsdp.errors import DeviceError
from composable_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["GroupTensors", "rest_device", "shard_of", "take_shards"]


_COMMON_ALIGNMENT = 64
"""Bytes: a cache line."""

_Place: TypeAlias = tuple[tuple[int, ...], torch.dtype, torch.dtype, FlatLayout]


def _place_of(plan: BucketPlan) -> _Place:
    """What must stay as it is for the bucket to keep its place in memory that ranks have in common."""
    return plan.indices, plan.dtype, plan.compute_dtype, plan.gather.places


def _in_common(plan: BucketPlan, process_groups: Sequence[ProcessGroups]) -> bool:
    """Whether the bucket's shards, or what ranks cast from them, lie in memory that ranks have in common."""
    return not plan.is_gathered and process_groups[plan.axes].common_memory is not None


def rest_device(offload: OffloadPolicy, device: torch.device) -> torch.device:
    """Where shards rest whose modules compute on ``device``."""
    return torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device


@torch.inference_mode(False)
@torch.no_grad()
def take_shards(sources: Sequence[ParameterSource], offload: OffloadPolicy) -> list[ShardedParameter]:
    """Cuts this rank's shards out of the parameters as they were found."""
    parameters = []
    is_checked = order_check_from() is not OrderCheck.OFF
    for source in sources:
        axes, full = source.sharding.axes, local_part(source.tensor)
        shards = TensorShards(tuple(full.shape), source.sharding.dim, axes.shard.size)
        device = torch.device("meta") if full.is_meta else rest_device(offload, axes.device)
        if hooks_of(full):
            parameters.append(ShardedParameter(source, cut_shard(source.name, full, shards, axes.shard.rank, device)))
            continue
        padded = torch.empty(shards.padded_numel, dtype=full.dtype, device=device)
        copy_shard(source.name, full, shards, axes.shard.rank, padded)
        shape = shards.shard_shape(axes.shard.rank)
        parameter = ShardedParameter(source, padded[: prod(shape)].view(shape))
        if is_checked and axes.num_ranks > 1:
            parameter.start = start_of(full, parameter.local)
        parameters.append(parameter)
    return parameters


@torch.no_grad()
def shard_of(parameter: ShardedParameter, full: torch.Tensor) -> DTensor:
    """``full``, a plain tensor of the whole parameter, placed as that is: this rank takes its part, and no other's."""
    sharding = parameter.sharding
    if sharding.inner is not None:
        inner = sharding.inner
        full = local_part(distribute_tensor(full, inner.mesh, inner.placements, src_data_rank=None))
    shards = TensorShards(parameter.shape, sharding.dim, sharding.axes.shard.size)
    device = parameter.local.device
    return sharding.wrap_shard(cut_shard(parameter.name, full, shards, sharding.axes.shard.rank, device))


class GroupTensors:
    """The tensors of one group.

    Args:
        parameters: what the group holds; their local tensors are copied into the group's stores.
        process_groups: one for each pair of axes that the parameters are sharded over.
        device: where modules compute.
        precision: which dtypes the plan is made for.
        offload: where shards rest.
        on_gradient: makes, for a batch, the hook that autograd calls when a parameter's full gradient is there.
        in_common: memory that ranks have in common may be used, where it can: all ranks make these tensors.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        process_groups: Sequence[ProcessGroups],
        device: torch.device,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        on_gradient: Callable[[int], Callable[[torch.Tensor], None]],
        *,
        in_common: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.buckets: list[AnyBucket] = []
        self.process_groups = process_groups
        self._axes = [pgs.axes for pgs in process_groups]
        self.device = device
        self._precision = precision
        self._on_gradient = on_gradient
        self.rest_device = rest_device(offload, device)
        self.is_offloaded = self.rest_device != device
        """Whether shards rest elsewhere than where modules compute."""
        self._common_places: dict[_Place, int] = {}
        self.pin_memory = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and self.is_offloaded
        if in_common:
            self._take_common_memory()
        self.build()

    @property
    def version(self) -> int:
        """Changes when parameters are frozen or thawed, and with in-place changes of shards that torch counts.

        It does not count those of fused and foreach optimizers.
        """
        memory = sum(tensor._version for bucket in self.buckets for tensor in bucket.versioned)
        return memory + sum(p.sharded._version + p.was_flipped for p in self.parameters)

    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self) -> None:
        """Stores, buffers and unsharded parameters for the local tensors that the parameters have now."""
        self._find_hooks()
        self.last_gather = GatherCache()
        """That began with these, of one group or several."""
        self.plan = self._make_plan()
        moved = [
            p
            for p in self.plan.buckets
            if _in_common(p, self.process_groups) and _place_of(p) not in self._common_places
        ]
        for plan in moved:  # written to elsewhere, their memory would change under ranks that still read it
            self.process_groups[plan.axes].common_memory = None
        if moved:
            self.plan = self._make_plan()
        self.are_placed = self._placed([p.local for p in self.parameters])
        self.buckets = []
        for plan in self.plan.buckets:
            locals_ = [self.parameters[i].local for i in plan.indices]
            pgs = self.process_groups[plan.axes]
            if plan.extended:
                self.buckets.append(self._extended(plan, pgs))
                continue
            on_meta = any(local.is_meta for local in locals_)
            store = self._store(plan, pgs, torch.device("meta") if on_meta else locals_[0].device)
            common = self._common_place(plan) if plan.unsharded_storage is UnshardedStorage.SHARED else None
            bucket = Bucket(plan, self.parameters, pgs, store, self.device, common)
            for k, (parameter, local) in enumerate(zip(bucket.parameters, locals_, strict=True)):
                if on_meta and not local.is_meta:  # it keeps its values where they are until the others have some
                    continue
                store.locals[k].copy_(local)
                parameter.set_local(store.locals[k])
                parameter.build_unsharded(bucket.parameter_data(k), self._on_gradient(plan.batch))
            bucket.free()
            self.buckets.append(bucket)
        self.register()

    def _find_hooks(self) -> None:
        self._hooks = {p: hooks for p in self.parameters if (hooks := hooks_of(p.local))}
        self._gradient_extensions = self._find_gradient_extensions()
        self._extensions = self._find_extensions()

    def _store(self, plan: BucketPlan, pgs: ProcessGroups, device: torch.device) -> ShardStore:
        rank = pgs.axes.shard.rank
        layout = plan.store_layout(rank)
        in_common = plan.aliased and _in_common(plan, self.process_groups) and device.type == "cpu"
        if in_common:
            flat = self._common_place(plan)
        else:
            pinned = self.pin_memory and device.type != "meta"
            flat = torch.zeros(layout.numel, dtype=plan.dtype, device=device, pin_memory=pinned)
        return ShardStore(plan.gather.shards, layout, rank, flat, is_shared=in_common)

    def _common_place(self, plan: BucketPlan) -> torch.Tensor:
        """The full parameters of the bucket in memory that ranks have in common, 1-d, of the compute dtype."""
        memory = self.process_groups[plan.axes].common_memory
        assert memory is not None
        begin = self._common_places[_place_of(plan)]
        return memory[begin : begin + plan.full_bytes].view(plan.compute_dtype)

    def _take_common_memory(self) -> None:
        """Where ranks can have memory in common, reserves what all full parameters of the group take, whether or not
        they have values already. All ranks do, together; memory is taken where it is written.
        """
        able = [c for c in self.process_groups if c.gather.aliases and c.gather.size > 1 and not self.is_offloaded]
        if not able:
            return
        if order_check_from() is not OrderCheck.OFF:
            self._check_alike(able)
        for pgs in able:
            pgs.common_memory = torch.empty(0, dtype=torch.uint8)  # the plan is then one for common memory
        self._find_hooks()
        ends = dict.fromkeys(self.process_groups, 0)
        for bucket in self._make_plan().buckets:
            if _in_common(bucket, self.process_groups):
                pgs = self.process_groups[bucket.axes]
                self._common_places[_place_of(bucket)] = ends[pgs]
                ends[pgs] += -(-bucket.full_bytes // _COMMON_ALIGNMENT) * _COMMON_ALIGNMENT
        for pgs in able:
            communicator = cast(AliasingCommunicator, pgs.gather)
            pgs.common_memory = communicator.share(ends[pgs]) if ends[pgs] else None

    def _check_alike(self, process_groups: Sequence[ProcessGroups]) -> None:
        """All ranks are about to take the same memory, and so must have the same parameters."""
        for pgs in process_groups:
            lines = [f"parameter {p.name!r}: {p.description}" for p in self.parameters if p.sharding.axes == pgs.axes]
            check_alike(
                [*lines, str(self._precision)], (pgs.axes.shard,), self.device, "a group that fully_shard makes"
            )

    def register(self) -> None:
        """Puts the sharded parameters on all their owners, and notes where these are."""
        self._note_registration()
        self.registration.show_sharded()

    def _note_registration(self) -> None:
        memory = [tensor for bucket in self.buckets for tensor in bucket.versioned]
        extended = any(plan.extended for plan in self.plan.buckets)
        self.registration = Registration(self.parameters, memory, gathers_make=extended)

    def _extended(self, plan: BucketPlan, pgs: ProcessGroups) -> ExtendedBucket:
        """Parameters that decide by themselves how they travel keep their local tensors as they are."""
        members = [self.parameters[i] for i in plan.indices]
        found = [self._extensions[parameter] for parameter in members]
        of_gradients = [self._gradient_extensions[parameter] for parameter in members if plan.gradient_extended]
        return ExtendedBucket(
            plan, self.parameters, found, of_gradients, pgs, self.device, self._on_gradient(plan.batch)
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
                self._precision,
            )
            if extension is not None:
                extensions[parameter] = extension
        return extensions

    def _find_extensions(self) -> dict[ShardedParameter, GatherExtension]:
        extensions: dict[ShardedParameter, GatherExtension] = {}
        for parameter in self._hooks:
            axes = parameter.sharding.axes
            padded = TensorShards(parameter.shape, parameter.dim, axes.shard.size).padded_shape
            extension = find_extension(
                parameter.name,
                parameter.local,
                axes.shard_mesh,
                parameter.shape,
                padded,
                parameter.dim,
                parameter.owners[0][0],
                self._precision,
            )
            dtype = parameter.compute_dtype(self._precision)
            plain = PlainExtension(parameter.name, parameter.local, parameter.dim, dtype)
            extensions[parameter] = plain if extension is None else extension
        return extensions

    def find_patches(self) -> None:
        """Follow hooks set on local tensors, and dtypes given to running statistics, since the tensors were made."""
        hooks = [hooks_of(p.local) != self._hooks.get(p, frozenset()) for p in self.parameters]
        if any(hooks) or self._compute_dtypes != [p.compute_dtype(self._precision) for p in self.parameters]:
            self.build()

    def _make_plan(self) -> GroupPlan:
        precision, encodable = self._precision, self._encodable()
        self._compute_dtypes = [p.compute_dtype(precision) for p in self.parameters]
        legs = self._encoded_legs(encodable)
        specs = []
        for p, compute_dtype in zip(self.parameters, self._compute_dtypes, strict=True):
            extended = p in self._gradient_extensions
            codecs = p.gradient_codecs if p in encodable else PLAIN
            if p.dtype.itemsize <= torch.float32.itemsize:
                codecs = codecs.alongside(legs[p.sharding.axes])
            if extended:  # hooks of the tensor come before a codec
                codecs = replace(codecs, shard=None)
            reduce_dtype = precision.gradient_reduce_dtype(compute_dtype)
            specs.append(
                ParameterSpec(
                    name=p.name,
                    shape=p.shape,
                    dim=p.dim,
                    dtype=p.dtype,
                    compute_dtype=compute_dtype,
                    reduce_dtype=reduce_dtype,
                    gradient_dtype=p.gradient_dtype(reduce_dtype),
                    trainable=p.sharded.requires_grad,
                    axes=self._axes.index(p.sharding.axes),
                    extended=p in self._extensions,
                    codec=p.gather_codec if p in encodable and p not in self._extensions else None,
                    gradient_codecs=codecs,
                    gradient_extended=extended,
                    alone=p in encodable and p.travels_alone,
                    summed_before=p.sharding.inner is not None and p.sharding.inner.may_leave_sums,
                )
            )
        return plan_group(tuple(specs), tuple(c.plan_options(offloaded=self.is_offloaded) for c in self.process_groups))

    def _encodable(self) -> set[ShardedParameter]:
        """The parameters that are cut by all other axes by which any of the group is.

        Codecs round what lies beside each other together. Ranks with copies of one parameter but different parts of its
        neighbours would come to differ, and their copies to drift apart in training.
        """
        cut_by = frozenset[str | int]().union(*(p.cut_by for p in self.parameters))
        return {p for p in self.parameters if p.cut_by == cut_by}

    def _encoded_legs(self, encodable: Collection[ShardedParameter]) -> dict[DataParallelAxes, GradientCodecs]:
        """For each pair of axes some codec on each leg on which any gradient travels encoded: others join it there."""
        legs: dict[DataParallelAxes, GradientCodecs] = {}
        for parameter in self.parameters:
            axes, own = parameter.sharding.axes, parameter.gradient_codecs if parameter in encodable else PLAIN
            if parameter in self._gradient_extensions:
                own = replace(own, shard=EXACT)
            known = legs.get(axes, PLAIN)
            legs[axes] = GradientCodecs(known.shard or own.shard, known.replicate or own.replicate)
        return legs

    def refresh(self, before_build: Callable[[], None]) -> None:
        """Follows what happened to the sharded parameters since the tensors were made. For where their registration is
        no longer current.

        Args:
            before_build: called before tensors are made anew; may refuse.

        Raises:
            ParameterError: a parameter was replaced by something that is not sharded as it was. Named in the text.
        """
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self.parameters:
                parameter.adopt_replacement()
            locals_ = self._locals()
            are_kept = all(local is p.local for local, p in zip(locals_, self.parameters, strict=True))
            if are_kept and not self.registration.given_local_data():
                self._follow_requires_grad()
                return
            self.are_placed = self._placed(locals_)
            if len({local.is_meta for local in locals_}) > 1:
                return  # half-way through materialisation: the rest is still to come
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

    def _placed(self, locals_: Sequence[torch.Tensor]) -> bool:
        return all(local.device.type == self.rest_device.type for local in locals_)

    def _follow_requires_grad(self) -> None:
        for plan in self.plan.buckets:
            for i in plan.indices:
                self.parameters[i].follow_requires_grad(self._on_gradient(plan.batch))
        self.plan = self._make_plan()
        for bucket, plan in zip(self.buckets, self.plan.buckets, strict=True):
            bucket.update_plan(plan)
        self._note_registration()

    def misplaced(self, group: str) -> DeviceError:
        """The error that names the parameters whose shards are not where those of ``group`` rest."""
        devices = {p.name: local.device for p, local in zip(self.parameters, self._locals(), strict=True)}
        on_meta = [name for name, device in devices.items() if device.type == "meta"]
        if on_meta:
            return DeviceError(
                f"parameters of {group!r} are still on the meta device: {on_meta}. Before the first forward, "
                "initialise them by composable_fsdp.initialize(model, seed=...); or call "
                "composable_fsdp.to_empty(model, device=...) and load a state dict."
            )
        rest = self.rest_device.type
        elsewhere = {name: str(device) for name, device in devices.items() if device.type != rest}
        why = "are offloaded to CPU" if self.is_offloaded else f"rest on {rest}, the device of the mesh"
        return DeviceError(
            f"shards of {group!r} {why}, but these parameters are elsewhere: {elsewhere}. "
            f"Move them with model.to({rest!r})."
        )
