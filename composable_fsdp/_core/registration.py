"""The registration of parameters on their modules, sharded or unsharded; and plain shards of full parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_fsdp._core.layout import TensorShards
from composable_fsdp._core.params import (
    ShardedParameter,
    copy_shard,
    local_part,
    without_torch_function,
)


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
        self.shows_tensors_of_user = False
        """True if modules compute with other tensors than the unsharded parameters, which a user has registered."""
        self._collect_tensors()
        self._counted = [*self._sharded, *memory]
        self._stored = [*self._sharded, *self._locals]
        with without_torch_function():
            self._storages = list(map(_storage, self._stored))

    def _collect_tensors(self) -> None:
        # Flat lists, over which one C call goes for all parameters.
        parameters = self._parameters
        self._sharded = [p.sharded for p in parameters]
        self._unsharded = [p.unsharded for p in parameters]
        with without_torch_function():  # a DTensor has a storage of its own, without memory
            self._unsharded_memory = [
                (local_part(p.unsharded), _storage(p.unsharded) if isinstance(p.unsharded, DTensor) else p.full)
                for p in parameters
            ]
        self._locals = [p.local for p in parameters]
        self._trainable = [p.trainable for p in parameters]
        owned = [(module, name, p) for p in parameters for module, name in p.owners]
        self._registered = [module._parameters for module, _, _ in owned]
        self._names = [name for _, name, _ in owned]
        self._shown = [p.sharded for _, _, p in owned]
        self._shown_unsharded = [p.unsharded for _, _, p in owned]
        self._with_setattr = [(ref(module), name, p) for module, name, p in owned if _overrides_setattr(module)]
        # By module, one update of a dict shows all of its parameters.
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
        # ``requires_grad`` that was changed on the unsharded form.
        if list(map(_requires_grad, self._unsharded)) != self._trainable:
            for parameter in self._parameters:
                if parameter.unsharded.requires_grad != parameter.trainable:
                    parameter.sharded.requires_grad_(parameter.unsharded.requires_grad)
                    parameter.unsharded.requires_grad_(parameter.trainable)  # until the next all-gather follows it
        # A tensor of the user stays where it was registered.
        if self._shows_unsharded:
            self._shows_unsharded = self.shows_tensors_of_user = False
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
            self.shows_tensors_of_user = True
            for place, name, parameter in self._owned:
                _replace(place, name, parameter.sharded, parameter.unsharded)
            return
        for owner in self._owners:
            owner.registered.update(owner.unsharded)
        for known, name, parameter in self._with_setattr:
            if (module := known()) is not None:
                setattr(module, name, parameter.unsharded)

    def find_others(self) -> bool:
        """Set ``shows_tensors_of_user`` by what is registered now, and return it. For groups that stayed unsharded."""
        registered: Any = map(_get, self._registered, self._names)
        self.shows_tensors_of_user = self._shows_unsharded and not all(map(is_, registered, self._shown_unsharded))
        return self.shows_tensors_of_user

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
        """The version counters of the unsharded parameters, to which those of their local tensors are added.

        A write to ``to_local()`` of a DTensor moves the second alone.
        """
        with without_torch_function():
            return [
                u._version + local._version
                for u, (local, _) in zip(self._unsharded, self._unsharded_memory, strict=True)
            ]

    def replaced_unsharded_data(self) -> list[ShardedParameter]:
        """Return the parameters whose unsharded tensors a user gave other memory, which their group does not know."""
        if self._created_by_gather:
            return []
        with without_torch_function():
            known = [_storage(m) if isinstance(m, torch.Tensor) else m for _, m in self._unsharded_memory]
            return [p for p, m in zip(self._parameters, known, strict=True) if _storage(p.unsharded) is not m]

    def replaced_data(self) -> list[ShardedParameter]:
        """Return the parameters whose ``.data`` was assigned, which does not change their local tensors."""
        with without_torch_function():
            storages = list(map(_storage, self._sharded))
        if all(map(is_, storages, self._storages)):  # which has those of the local tensors too, last
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
