"""Whether parameters changed where nobody may change them. Reads all shards: for those who look for a mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from composable_fsdp.errors import LifecycleError, ParameterError
from composable_fsdp.runtime.group import ParameterGroup
from composable_fsdp.runtime.parameter import ShardedParameter

__all__ = ["ChangeCheck", "Seen"]

Seen: TypeAlias = tuple[object, ...]
"""What one forward found of each parameter."""


class ChangeCheck:
    """Tells of changes between a forward and its backward, and of ``p.data = ...``, which a DTensor does not follow.

    Optimizers that are fused or foreach, and writes through ``.data``, leave torch's versions as they are, so sums of
    the shards are compared besides those.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group
        self._note_storages()

    def _note_storages(self) -> None:
        self._registration = self._group.tensors.registration
        self._storages = {p: _storage_of(p) for p in self._group.parameters}

    def in_forward(self) -> Seen:
        """What the parameters are now.

        Raises:
            ParameterError: one was given other data. Named in the text.
        """
        if self._group.tensors.registration is not self._registration:  # the group took over a conversion, as ``to``
            self._note_storages()
        for parameter in self._group.parameters:
            if self._storages[parameter] != _storage_of(parameter):
                raise ParameterError(
                    f"parameter {parameter.name!r} of {self._group.name!r} was given other values with p.data = ..., "
                    "which a sharded parameter does not follow. Change it in place: p.copy_(...) under "
                    "torch.no_grad(), or p.to_local().copy_(...) for this rank's shard."
                )
        return _seen(self._group.parameters)

    def in_backward(self, seen: Seen) -> None:
        """
        Raises:
            LifecycleError: parameters are not what they were in the forward that found ``seen``. Named in the text.
        """
        pairs = zip(self._group.parameters, seen, _seen(self._group.parameters), strict=True)
        changed = [parameter.name for parameter, then, now in pairs if then != now]
        if changed:
            raise LifecycleError(
                f"parameters of {self._group.name!r} were changed between forward and backward: {changed}, so that "
                "gradients would be of a model that never ran. Step the optimizer, or load, after backward only. Then "
                "call reset_iter_state() on the root module before the next step."
            )


def _storage_of(parameter: ShardedParameter) -> int:
    handle: Any = parameter.sharded.untyped_storage()
    return int(handle._cdata)


@torch.no_grad()
def _seen(parameters: Sequence[ShardedParameter]) -> Seen:
    return tuple(map(_seen_of, parameters))


def _seen_of(parameter: ShardedParameter) -> object:
    local = parameter.local
    versions = parameter.sharded._version, local._version
    if type(local) is not torch.Tensor:  # a class of its own, which may not know how to add up
        return versions
    return *versions, local.sum(dtype=torch.promote_types(local.dtype, torch.float64)).item()
