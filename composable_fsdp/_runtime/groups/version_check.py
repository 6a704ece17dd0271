"""Detection of parameters that change between a forward and its backward, which would give wrong gradients.

Torch counts in-place changes, as autograd does for saved tensors. It misses those of foreach and fused optimizers on
DTensors, which ``optimizer_steps`` adds, and writes through ``.data``, which only reading the shards can find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from composable_fsdp._runtime.groups.param_group import ParamGroup
from composable_fsdp._runtime.params.registration import Registration
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp.errors import LifecycleError

__all__ = ["Seen", "VersionCheck"]


Seen: TypeAlias = tuple[Registration, list[int], list[list[int]] | None]
"""A group's registration, versions and, if shards are read, the bits of their sums: as floats, nan would not equal nan.

Versions of different registrations are not comparable.
"""


class VersionCheck:
    """Compares the parameters of ``group`` in backward with those in forward.

    Args:
        group: the group to check.
        reads_shards: True to compare the sums of all shards too, for which the host waits.
    """

    def __init__(self, group: ParamGroup, *, reads_shards: bool) -> None:
        self._group = group
        self._reads_shards = reads_shards

    def copy_for(self, group: ParamGroup) -> VersionCheck:
        """Return the same check of ``group``, a copy of this one's."""
        return VersionCheck(group, reads_shards=self._reads_shards)

    def in_forward(self) -> Seen:
        """Return the current versions, and sums if they are read."""
        registration = self._group.tensors.registration
        return registration, registration.versions, self._sums() if self._reads_shards else None

    def in_backward(self, seen: Seen) -> None:
        """Compare with ``seen``, the result of :meth:`in_forward`.

        Raises:
            LifecycleError: parameters have changed since. The error names them.
        """
        registration, versions, sums = seen
        if sums is None and registration is self._group.tensors.registration and registration.versions == versions:
            return
        registration_now, versions_now, sums_now = self.in_forward()
        if registration_now is not registration:  # tensors were rebuilt, or requires_grad was changed
            versions_now = versions
        if sums is None or sums_now is None:
            sums = sums_now = None
        if (versions, sums) == (versions_now, sums_now):
            return
        parameters = self._group.parameters
        changed = _changed(parameters, versions, versions_now)
        if sums is not None and sums_now is not None:
            changed |= _changed(parameters, sums, sums_now)
        if not changed:  # changed through the local tensors, which share one version counter per bucket
            sharing = [bucket.parameters for bucket in self._group.buckets for _ in bucket.versioned]
            memory, memory_now = versions[len(parameters) :], versions_now[len(parameters) :]
            changed = {p for ps, then, at in zip(sharing, memory, memory_now, strict=True) if then != at for p in ps}
        names = [p.name for p in parameters if p in changed]
        raise LifecycleError(
            f"parameters of {self._group.name!r} were changed in place between forward and backward: {names}. Their "
            "gradients would be those of a model that never ran. Step the optimizer, or load values, after backward "
            "only. Then call reset_iter_state() on the root module before the next step. "
            "model.set_version_check(False) turns this check off."
        )

    @torch.no_grad()
    def _sums(self) -> list[list[int]]:
        return [_sum_of(parameter) for parameter in self._group.parameters]


def _changed(
    parameters: Sequence[ShardedParameter], then: Sequence[object], now: Sequence[object]
) -> set[ShardedParameter]:
    return {p for p, before, after in zip(parameters, then, now, strict=False) if before != after}


def _sum_of(parameter: ShardedParameter) -> list[int]:
    local = parameter.local
    if type(local) is not torch.Tensor:  # a tensor subclass, which may not implement sum
        return []
    total = local.sum(dtype=torch.promote_types(local.dtype, torch.float64))
    bits: list[int] = total.reshape(1).view(torch.int64).tolist()
    return bits
