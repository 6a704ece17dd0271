"""Which tensors are registered on a group's modules: the sharded ones at rest, the unsharded while modules compute.

They come and go together, several times in a step, so all their places are listed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from composable_fsdp.runtime.parameter import ShardedParameter

__all__ = ["Registration"]

Place = tuple[dict[str, nn.Parameter | None], str, ShardedParameter]


class Registration:
    """The places of ``parameters`` on their owners, complete once made: a new owner needs a new one.

    Invariant: what was shown last, sharded or unsharded, is registered on all owners, unless somebody replaced it.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self._parameters = tuple(parameters)
        owned = [(module, name, parameter) for parameter in parameters for module, name in parameter.owners]
        self._places: list[Place] = [(m._parameters, name, parameter) for m, name, parameter in owned]
        self._slots: list[Place] = [(m._parameters, name, p) for m, name, p in owned if not _intercepts(m)]
        self._intercepting = [(m, name, p) for m, name, p in owned if _intercepts(m)]

    def show_sharded(self) -> None:
        """Registers the sharded parameters. Who froze or thawed what was registered until now meant these."""
        for parameter in self._parameters:
            if parameter.unsharded.requires_grad != parameter.trainable:
                parameter.sharded.requires_grad_(parameter.unsharded.requires_grad)
        for registered, name, parameter in self._slots:
            registered[name] = parameter.sharded
        for module, name, parameter in self._intercepting:
            setattr(module, name, parameter.sharded)

    def show_unsharded(self) -> None:
        """Registers the parameters that modules compute with."""
        for registered, name, parameter in self._slots:
            registered[name] = parameter.unsharded
        for module, name, parameter in self._intercepting:
            setattr(module, name, parameter.unsharded)

    @property
    def is_current(self) -> bool:
        """Whether the sharded parameters, their memory and ``requires_grad`` are what the group was built from, and
        are what is registered. Who changed the unsharded ones was heard when these were taken off.
        """
        for parameter in self._parameters:
            sharded: Any = parameter.sharded
            if sharded._local_tensor is not parameter.local or sharded.requires_grad != parameter.trainable:
                return False
        return all(registered.get(name) is parameter.sharded for registered, name, parameter in self._places)


def _intercepts(module: nn.Module) -> bool:
    """Whether the module's class wants to see parameters being set, as ``nn.LSTM`` does; others skip that cost."""
    return type(module).__setattr__ is not nn.Module.__setattr__
