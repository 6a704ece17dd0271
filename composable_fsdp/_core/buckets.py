"""The parameters, buckets and plan of one group, and what is registered on its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from math import prod
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_fsdp._core.gather import AllGather, AnyBucket, Bucket, InPlaceBucket
from composable_fsdp._core.group_plan import BucketPlan, GatherClaim, GroupPlan, ParameterSpec, plan_group
from composable_fsdp._core.layout import TensorShards
from composable_fsdp._core.memory import ShardStore, is_host, zero_padding
from composable_fsdp._core.mesh import ProcessGroups
from composable_fsdp._core.params import (
    ParameterSource,
    ShardedParameter,
    copy_shard,
    local_part,
    without_torch_function,
)
from composable_fsdp._core.reduce import reduce_kinds_of
from composable_fsdp.errors import DeviceError
from composable_fsdp.policies import CPUOffloadPolicy, OffloadPolicy


@dataclass(eq=False)
class ParamPlace:
    """A parameter, its first qualified name, and every (module, attribute) under which it is registered."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def current(self) -> object:
        """Return the attribute at the first place, or ``None`` if there is none."""
        module, attribute = self.places[0]
        return getattr(module, attribute, None)

    def put(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` at all places; the order of a module's parameters stays."""
        for module, attribute in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__ and attribute in module._parameters:
                module._parameters[attribute] = parameter
            else:  # the class overrides __setattr__, as nn.LSTM, or the attribute was deleted or replaced
                vars(module).pop(attribute, None)
                setattr(module, attribute, parameter)


def registered_parameters(module: nn.Module) -> list[ParamPlace]:
    """Return the places of each parameter of ``module`` and its submodules."""
    found: dict[int, ParamPlace] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                name = f"{path}.{attribute}" if path else attribute
                found.setdefault(id(parameter), ParamPlace(name, parameter)).places.append((owner, attribute))
    return list(found.values())


def registered_buffers(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the (module, attribute) pairs of each buffer of ``module`` and its submodules."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((owner, name))
    return list(places.values())


_local_tensor = attrgetter("_local_tensor")
_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")
_storage: Any = torch.Tensor.untyped_storage
_get = dict.get


@dataclass(slots=True)
class _Owner:
    """The parameters of the group on one module, sharded and unsharded."""

    registered: dict[str, nn.Parameter | None]
    sharded: dict[str, nn.Parameter] = field(default_factory=dict)
    unsharded: dict[str, nn.Parameter] = field(default_factory=dict)


class Registration:
    """The registration of ``parameters`` on their modules.

    A new owner, a replaced tensor or a change of ``requires_grad`` needs a new object.

    Args:
        parameters: the parameters of one group.
        memory: tensors whose version counters cover in-place writes to the local shards.
        created_by_gather: True if an all-gather makes new unsharded parameters, which are looked up after each.

    Invariant: the tensors shown last, sharded or unsharded, are registered on all owners, unless a user replaced them.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], memory: Sequence[torch.Tensor], *, created_by_gather: bool
    ) -> None:
        self._parameters = tuple(parameters)
        self._created_by_gather = created_by_gather
        self._shows_unsharded = self._is_hidden = False
        self.shows_others = False
        """True if modules compute with other tensors than the unsharded parameters, which a user has registered."""
        self._collect_tensors()
        self._counted = [*self._sharded, *memory]
        self._stored = [*self._sharded, *self._locals]
        with without_torch_function():
            self._storages = list(map(_storage, self._stored))

    def _collect_tensors(self) -> None:
        parameters = self._parameters
        self._sharded = [p.sharded for p in parameters]
        self._unsharded = [p.unsharded for p in parameters]
        self._locals = [p.local for p in parameters]
        self._trainable = [p.trainable for p in parameters]
        owned = [(module, name, p) for p in parameters for module, name in p.owners]
        self._registered = [module._parameters for module, _, _ in owned]
        self._names = [name for _, name, _ in owned]
        self._shown = [p.sharded for _, _, p in owned]
        self._shown_unsharded = [p.unsharded for _, _, p in owned]
        self._with_setattr = [(ref(module), name, p) for module, name, p in owned if _overrides_setattr(module)]
        owners: dict[int, _Owner] = {}
        for module, name, parameter in owned:
            if not _overrides_setattr(module):
                owner = owners.setdefault(id(module), _Owner(module._parameters))
                owner.sharded[name], owner.unsharded[name] = parameter.sharded, parameter.unsharded
        self._owners = tuple(owners.values())

    def show_sharded(self) -> None:
        """Register the sharded parameters. A change of ``requires_grad`` of the unsharded ones is applied to them.

        Tensors that a user has registered stay, and the next all-gather raises.
        """
        if list(map(_requires_grad, self._unsharded)) != self._trainable:
            for parameter in self._parameters:
                if parameter.unsharded.requires_grad != parameter.trainable:
                    parameter.sharded.requires_grad_(parameter.unsharded.requires_grad)
        if self._shows_unsharded:
            self._shows_unsharded = self.shows_others = False
            if not all(map(is_, map(_get, self._registered, self._names), self._shown_unsharded)):
                for place, name, parameter in self._owned:
                    _replace(place, name, parameter.unsharded, parameter.sharded)
                return
        for owner in self._owners:
            owner.registered.update(owner.sharded)
        for known, name, parameter in self._with_setattr:
            if (module := known()) is not None:
                setattr(module, name, parameter.sharded)

    @property
    def _owned(self) -> Iterator[tuple[nn.Module, str, ShardedParameter]]:
        return ((module, name, p) for p in self._parameters for module, name in p.owners)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Register no parameters in this context, so that ``nn.Module._apply`` leaves them out.

        The modules must not override ``__setattr__``.
        """
        self._is_hidden = True
        for owner in self._owners:
            owner.registered.update(dict.fromkeys(owner.sharded))
        try:
            yield
        finally:
            self._is_hidden = False
            for owner in self._owners:
                owner.registered.update(owner.sharded)

    def show_unsharded(self) -> None:
        """Register the unsharded parameters. Tensors that were registered in place of the sharded ones stay."""
        if self._created_by_gather:
            self._collect_tensors()
        self._shows_unsharded = True
        if not all(map(is_, map(_get, self._registered, self._names), self._shown)):
            self.shows_others = True
            for place, name, parameter in self._owned:
                _replace(place, name, parameter.sharded, parameter.unsharded)
            return
        for owner in self._owners:
            owner.registered.update(owner.unsharded)
        for known, name, parameter in self._with_setattr:
            if (module := known()) is not None:
                setattr(module, name, parameter.unsharded)

    def find_others(self) -> bool:
        """Set ``shows_others`` by what is registered now, and return it. For groups that stayed unsharded."""
        registered: Any = map(_get, self._registered, self._names)
        self.shows_others = self._shows_unsharded and not all(map(is_, registered, self._shown_unsharded))
        return self.shows_others

    @property
    def is_current(self) -> bool:
        """True if the sharded parameters, their memory and ``requires_grad`` are unchanged, and registered or hidden.

        :meth:`show_sharded` handles changes of the unsharded parameters.
        """
        if self._is_hidden:
            return True
        registered: Any = map(_get, self._registered, self._names)
        with without_torch_function():
            return (
                all(map(is_, map(_local_tensor, self._sharded), self._locals))
                and list(map(_requires_grad, self._sharded)) == self._trainable
                and all(map(is_, registered, self._shown))
                and list(map(_storage, self._stored)) == self._storages  # compares identities first
            )

    @property
    def versions(self) -> list[int]:
        """The version counters of the sharded parameters, then of ``memory``."""
        with without_torch_function():
            return list(map(_version, self._counted))

    @property
    def unsharded_versions(self) -> list[int]:
        """The version counters of the unsharded parameters."""
        with without_torch_function():
            return list(map(_version, self._unsharded))

    def replaced_data(self) -> list[ShardedParameter]:
        """Return the parameters whose ``.data`` was assigned, which does not change their local tensors."""
        with without_torch_function():
            storages = list(map(_storage, self._sharded))
        if all(map(is_, storages, self._storages)):
            return []
        return [
            p
            for p, now, local, storage in zip(self._parameters, storages, self._locals, self._storages, strict=False)
            if now is not storage and local_part(p.sharded) is local
        ]

    def replaced_local_data(self) -> list[ShardedParameter]:
        """Return the parameters whose local tensors no longer have the memory that the group allocated."""
        return [
            p
            for p, local, storage in zip(
                self._parameters, self._locals, self._storages[len(self._locals) :], strict=True
            )
            if local.untyped_storage() is not storage
        ]


def _replace(module: nn.Module, name: str, shown: nn.Parameter, new: nn.Parameter) -> None:
    """Register ``new`` if ``shown`` is registered, and not a tensor of the user."""
    if module._parameters.get(name) is shown:
        setattr(module, name, new)


def _overrides_setattr(module: nn.Module) -> bool:
    """Return True if the module's class overrides ``__setattr__``, as ``nn.LSTM`` does. Others skip its cost."""
    return type(module).__setattr__ is not nn.Module.__setattr__


class GatherKind:
    """A way for full parameters to come into memory: it claims parameters of one group, and makes their buckets.

    Derive from it, and append the class to :data:`GATHER_KINDS`. Each group makes one object. The first kind that
    claims a parameter has it; :class:`Bucket` has those that none claims.
    """

    def __init__(self, group: ParamGroupBuckets) -> None:
        self._group = ref(group)  # the group owns its kinds

    @property
    def group(self) -> ParamGroupBuckets:
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


def plain_shard(name: str, full: torch.Tensor, shards: TensorShards, rank: int, device: torch.device) -> torch.Tensor:
    """Return a copy of the shard of ``rank`` of the full parameter ``name``, on ``device``."""
    shape = shards.shard_shape(rank)
    padded = torch.empty(prod(shape) if full.is_meta else shards.padded_numel, dtype=full.dtype, device=device)
    if not full.is_meta:
        copy_shard(name, full, shards, rank, padded)
    return padded[: prod(shape)].view(shape)


@torch.no_grad()
def shard_full_tensor(parameter: ShardedParameter, full: torch.Tensor) -> DTensor:
    """Return the DTensor with this rank's shard of ``full``, a plain tensor of the full parameter."""
    sharding = parameter.sharding
    if sharding.inner is not None:
        inner = sharding.inner
        full = local_part(distribute_tensor(full, inner.mesh, inner.placements, src_data_rank=None))
    shards = TensorShards(parameter.shape, sharding.dim, sharding.axes.shard.size)
    device = parameter.local.device
    return sharding.wrap_shard(plain_shard(parameter.name, full, shards, sharding.axes.shard.rank, device))


class ParamGroupBuckets:
    """The buckets of one :class:`ParamGroup`: their plan, process groups and tensors.

    Args:
        parameters: the parameters of the group. Their local tensors are copied into the shard stores.
        process_groups: one for each pair of mesh axes that shard the parameters.
        device: the device on which modules compute.
        on_gradient: the hook that autograd calls when a full gradient is ready.
        is_new: True if all ranks make the group together, and not a copy of one.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        process_groups: Sequence[ProcessGroups],
        device: torch.device,
        on_gradient: Callable[[torch.Tensor], None],
        *,
        is_new: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.buckets: list[AnyBucket] = []
        self.process_groups = process_groups
        self._axes = [pgs.axes for pgs in process_groups]
        self.device = device
        self.on_gradient = on_gradient
        self.kinds = {kind: kind(self) for kind in GATHER_KINDS}
        self.is_offloaded = any(self.rest_device_of(p) != device for p in self.parameters)
        """True if any shard is on another device than that of the modules."""
        if is_new:
            for kind in self.kinds.values():
                kind.reserve()
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
        self.find()
        self.last_gather: AllGather | None = None
        """The most recent all-gather of this group, or of several groups of which it is the first."""
        self.plan = self._make_plan()
        self.are_on_rest_device = not self._misplaced([p.local for p in self.parameters])
        self.buckets = []  # frees their memory first
        made_by = ((plan, plan.gather_claim) for plan in self.plan.buckets)
        self.buckets = [self.kinds[c.kind].make(plan) if c else self.make_plain(plan) for plan, c in made_by]
        self.register()

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
        for parameter, shard, full in zip(bucket.parameters, shards, fulls, strict=True):
            if shard.is_meta and not parameter.local.is_meta:  # it stays until the others are materialized
                continue
            if not shard.is_meta:
                shard.copy_(parameter.local)
            parameter.set_local(shard)
            parameter.build_unsharded(full, self.on_gradient)

    def allocate(self, device: torch.device | None) -> bool:
        """Allocate the shards, without values, if all are on the meta device, as one tensor for each bucket.

        ``None`` is the rest device of each. Returns False if that is not possible: parameters must be replaced one by
        one, and :meth:`refresh` follows.
        """
        plain = all(isinstance(bucket, Bucket) for bucket in self.buckets)
        blank = all(p.local.is_meta and p.sharded.grad is None for p in self.parameters)
        devices = {p: device or self.rest_device_of(p) for p in self.parameters}
        at_rest = all(self.rest_device_of(p).type == chosen.type for p, chosen in devices.items())
        if not (at_rest and plain and blank and self.registration.is_current):
            return False
        with torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                assert isinstance(bucket, Bucket)
                bucket.replace_store(self.make_store(bucket.plan, devices[bucket.parameters[0]]))
        self.last_gather = None
        self.are_on_rest_device = True
        self.register()
        return True

    def find(self) -> None:
        self._reduce_kinds = reduce_kinds_of(self.parameters)
        for kind in self.kinds.values():
            kind.find()

    def claim(self, parameter: ShardedParameter) -> GatherClaim | None:
        claims = (kind.claim(parameter) for kind in self.kinds.values())
        return next((claim for claim in claims if claim is not None), None)

    def make_store(self, plan: BucketPlan, device: torch.device | None = None) -> ShardStore:
        """Return memory on ``device`` for the shards of a bucket. ``None``: where they are, or on meta if any is."""
        locals_, rank = [self.parameters[i].local for i in plan.indices], self.process_groups[plan.axes].axes.shard.rank
        layout = plan.gather.store if plan.is_gathered or plan.gather_claim is not None else plan.gather.places
        at = device or next((local.device for local in locals_ if local.is_meta), locals_[0].device)
        flat = torch.empty(layout.numel, dtype=plan.dtype, device=at, pin_memory=plan.pins_memory and is_host(at))
        if not flat.is_meta:
            zero_padding(flat, layout, plan.gather.shards, rank)
        return ShardStore(plan.gather.shards, layout, rank, flat)

    def register(self) -> None:
        """Register the sharded parameters on their owners."""
        self._note_registration()
        self.registration.show_sharded()

    def _note_registration(self) -> None:
        memory = [tensor for bucket in self.buckets for tensor in bucket.versioned]
        created = any(bucket.creates_parameters for bucket in self.buckets)
        self.registration = Registration(self.parameters, memory, created_by_gather=created)

    def follow_patches(self) -> None:
        """Rebuild if hooks were set on local tensors, or running statistics got another dtype, since the last build."""
        changed = any(kind.has_changed() for kind in self.kinds.values())
        if changed or self._compute_dtypes != [p.compute_dtype for p in self.parameters]:
            self.build()

    def _make_plan(self) -> GroupPlan:
        self._compute_dtypes = [p.compute_dtype for p in self.parameters]
        specs = []
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
                    axes=self._axes.index(p.sharding.axes),
                    gather_claim=self.claim(p),
                    reduce_kind=self._reduce_kinds.get(p),
                    summed_before=p.sharding.inner is not None and p.sharding.inner.may_leave_sums,
                    offload=p.offload if self.rest_device_of(p) != self.device else OffloadPolicy(),
                    autograd_dtype=p.grad_dtype or reduce_dtype if p.has_grad_dtype else None,
                )
            )
        specs = _promoted(specs) if all(p.precision.promotes for p in self.parameters) else specs
        return plan_group(tuple(specs), tuple(pgs.plan_options() for pgs in self.process_groups))

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
            self._follow_changes(before_build)
            for (registered, name), value in zip(places, values, strict=True):
                registered[name] = value

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
            if local is not parameter.local:
                for kind in self.kinds.values():
                    kind.before_replacement(parameter, local)
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
                self.parameters[i].sync_requires_grad(self.on_gradient)
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
