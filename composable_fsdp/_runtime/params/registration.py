"""Which tensors are registered on a group's modules: the sharded ones at rest, the unsharded while modules compute.

They come and go together, several times in a step, so all that is written and compared is listed beforehand, and the
lists are walked by builtins: a loop in Python costs three times as much for each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch import nn

from composable_fsdp._runtime.params.sharded_param import ShardedParameter, local_part, plain_access

__all__ = ["Registration"]

_local_tensor = attrgetter("_local_tensor")
_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")
_storage: Any = torch.Tensor.untyped_storage


@dataclass(slots=True)
class _Owner:
    """One module's parameters of the group, in both forms."""

    registered: dict[str, nn.Parameter | None]
    sharded: dict[str, nn.Parameter] = field(default_factory=dict)
    unsharded: dict[str, nn.Parameter] = field(default_factory=dict)


class Registration:
    """The places of ``parameters`` on their owners, complete once made: a new owner, a new form of a parameter or a
    change of what is trainable needs a new one.

    Args:
        parameters: of one group.
        memory: tensors whose versions count what is written to the parameters' local tensors.
        gathers_make: some unsharded forms are made by gathers, and so are looked up after each.

    Invariant: what was shown last, sharded or unsharded, is registered on all owners, unless somebody replaced it.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], memory: Sequence[torch.Tensor], *, gathers_make: bool
    ) -> None:
        self._parameters = tuple(parameters)
        self._gathers_make = gathers_make
        self._shows_unsharded = False
        self._note_forms()
        self._counted = [*self._sharded, *memory]
        self._stored = [*self._sharded, *self._locals]
        with plain_access():
            self._storages = list(map(_storage, self._stored))

    def _note_forms(self) -> None:
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
        self._intercepting = [(ref(module), name, p) for module, name, p in owned if _intercepts(module)]
        owners: dict[int, _Owner] = {}
        for module, name, parameter in owned:
            if not _intercepts(module):
                owner = owners.setdefault(id(module), _Owner(module._parameters))
                owner.sharded[name], owner.unsharded[name] = parameter.sharded, parameter.unsharded
        self._owners = tuple(owners.values())

    def show_sharded(self) -> None:
        """Registers the sharded parameters. Who froze or thawed what was registered until now meant these."""
        if list(map(_requires_grad, self._unsharded)) != self._trainable:
            for parameter in self._parameters:
                if parameter.unsharded.requires_grad != parameter.trainable:
                    parameter.sharded.requires_grad_(parameter.unsharded.requires_grad)
        if self._shows_unsharded:
            self._shows_unsharded = False
            if not all(map(is_, map(dict.get, self._registered, self._names), self._shown_unsharded)):
                self._show_sharded_beside_others()
                return
        for owner in self._owners:
            owner.registered.update(owner.sharded)
        for known, name, parameter in self._intercepting:
            if (module := known()) is not None:
                setattr(module, name, parameter.sharded)

    def _show_sharded_beside_others(self) -> None:
        """What somebody put in a parameter's place stays there, so that the next gather finds it, and raises."""
        owned = [(module, name, p) for p in self._parameters for module, name in p.owners]
        for module, name, parameter in owned:
            if module._parameters.get(name) is parameter.unsharded:
                setattr(module, name, parameter.sharded)

    def show_unsharded(self) -> None:
        """Registers the parameters that modules compute with."""
        if self._gathers_make:
            self._note_forms()
        self._shows_unsharded = True
        for owner in self._owners:
            owner.registered.update(owner.unsharded)
        for known, name, parameter in self._intercepting:
            if (module := known()) is not None:
                setattr(module, name, parameter.unsharded)

    @property
    def is_current(self) -> bool:
        """Whether the sharded parameters, their memory and ``requires_grad`` are what the group was built from, and
        are what is registered. Who changed the unsharded ones was heard when these were taken off.
        """
        registered: Any = map(dict.get, self._registered, self._names)
        with plain_access():
            return (
                all(map(is_, map(_local_tensor, self._sharded), self._locals))
                and list(map(_requires_grad, self._sharded)) == self._trainable
                and all(map(is_, registered, self._shown))
                and all(map(is_, map(_storage, self._stored), self._storages))
            )

    @property
    def versions(self) -> list[int]:
        """How often each sharded parameter, and then each part of the memory, was changed in place, as torch counts."""
        with plain_access():
            return list(map(_version, self._counted))

    def given_data(self) -> list[ShardedParameter]:
        """Parameters to which somebody assigned ``p.data``, which their local tensors do not follow."""
        return [
            p
            for p, local, storage in zip(self._parameters, self._locals, self._storages, strict=False)
            if p.sharded.untyped_storage() is not storage and local_part(p.sharded) is local
        ]

    def given_local_data(self) -> list[ShardedParameter]:
        """Parameters whose local tensors have other memory than the group gave them."""
        return [
            p
            for p, local, storage in zip(
                self._parameters, self._locals, self._storages[len(self._locals) :], strict=True
            )
            if local.untyped_storage() is not storage
        ]


def _intercepts(module: nn.Module) -> bool:
    """Whether the module's class wants to see parameters being set, as ``nn.LSTM`` does; others skip that cost."""
    return type(module).__setattr__ is not nn.Module.__setattr__
