"""Parameters that change between a forward and its backward, so that gradients would be of a model that never ran.

Torch counts changes in place, as autograd does for tensors that it saves. It does not count those of foreach and fused
optimizers on DTensors, so ``runtime.steps`` does. It does not count writes through ``.data``: only reading the shards
finds these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from composable_fsdp._runtime.groups.param_group import ParameterGroup
from composable_fsdp._runtime.params.registration import Registration
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp.errors import LifecycleError

__all__ = ["Seen", "VersionCheck"]


Seen: TypeAlias = tuple[Registration, list[int], list[list[int]] | None]
"""The parameters of a group in one forward: its registration, their versions, which are comparable only while that is
the same, and the bits of the sums of their shards, where these are read. As numbers, sums that are nan would differ.
"""


class VersionCheck:
    """Compares the parameters of ``group`` in backward with those of the forward.

    Args:
        group: whose parameters.
        reads_shards: also add up all shards, in forward and in backward, and have the host wait for that.
    """

    def __init__(self, group: ParameterGroup, *, reads_shards: bool) -> None:
        self._group = group
        self._reads_shards = reads_shards

    def in_forward(self) -> Seen:
        """The parameters as they are now."""
        registration = self._group.tensors.registration
        return registration, registration.versions, self._sums() if self._reads_shards else None

    def in_backward(self, seen: Seen) -> None:
        """
        Raises:
            LifecycleError: parameters are not what they were in the forward that found ``seen``. Named in the text.
        """
        now = self.in_forward()
        if now == seen:
            return
        (registration, versions, sums), (registration_now, versions_now, sums_now) = seen, now
        if registration_now is not registration:  # tensors were made anew, or some were frozen
            versions_now = versions
        if sums is None or sums_now is None:
            sums = sums_now = None
        if (versions, sums) == (versions_now, sums_now):
            return
        parameters = self._group.parameters
        changed = _changed(parameters, versions, versions_now)
        if sums is not None and sums_now is not None:
            changed |= _changed(parameters, sums, sums_now)
        if not changed:  # through the local tensors, of which torch counts all that share memory together
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
    if type(local) is not torch.Tensor:  # a class of its own, which may not know how to add up
        return []
    total = local.sum(dtype=torch.promote_types(local.dtype, torch.float64))
    bits: list[int] = total.reshape(1).view(torch.int64).tolist()
    return bits
