"""Parameters that change between a forward and its backward, so that gradients would be of a model that never ran.

Torch counts changes in place, as autograd does for tensors that it saves. It does not count those of foreach and fused
optimizers on DTensors, so ``runtime.steps`` does. It does not count writes through ``.data``: only reading the shards
finds these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from composable_fsdp.errors import LifecycleError
from composable_fsdp.runtime.group import ParameterGroup
from composable_fsdp.runtime.parameter import ShardedParameter
from composable_fsdp.runtime.registration import Registration

__all__ = ["ChangeCheck", "Seen"]


class Seen(NamedTuple):
    """The parameters of a group in one forward.

    Attributes:
        registration: of the group. Versions are comparable only while it is the same.
        versions: of the sharded parameters.
        shard_versions: of the memory of each bucket.
        sums: bits of the sums of the shards, where these are read. As numbers, sums that are nan would differ.
    """

    registration: Registration
    versions: list[int]
    shard_versions: list[int]
    sums: list[list[int]] | None


class ChangeCheck:
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
        tensors = self._group.tensors
        return Seen(
            tensors.registration,
            tensors.registration.versions,
            [bucket.version for bucket in tensors.buckets],
            self._sums() if self._reads_shards else None,
        )

    def in_backward(self, seen: Seen) -> None:
        """
        Raises:
            LifecycleError: parameters are not what they were in the forward that found ``seen``. Named in the text.
        """
        now = self.in_forward()
        if now == seen:
            return
        if now.registration is not seen.registration:  # tensors were made anew, or some were frozen
            now_versions, now_shards = seen.versions, seen.shard_versions
        else:
            now_versions, now_shards = now.versions, now.shard_versions
        is_counted = now_versions == seen.versions and now_shards == seen.shard_versions
        if is_counted and (seen.sums is None or now.sums is None or seen.sums == now.sums):
            return
        parameters = self._group.parameters
        changed = {p.name for p, then, at in zip(parameters, seen.versions, now_versions, strict=True) if then != at}
        if seen.sums is not None and now.sums is not None:
            changed |= {p.name for p, then, at in zip(parameters, seen.sums, now.sums, strict=True) if then != at}
        if not changed:  # through the local tensors, of which torch counts all that share memory together
            buckets = zip(self._group.buckets, seen.shard_versions, now_shards, strict=True)
            changed = {p.name for bucket, then, at in buckets if then != at for p in bucket.parameters}
        names = [p.name for p in parameters if p.name in changed]
        raise LifecycleError(
            f"parameters of {self._group.name!r} were changed in place between forward and backward: {names}. Their "
            "gradients would be those of a model that never ran. Step the optimizer, or load values, after backward "
            "only. Then call reset_iter_state() on the root module before the next step. "
            "model.set_version_check(False) turns this check off."
        )

    @torch.no_grad()
    def _sums(self) -> list[list[int]]:
        return [_sum_of(parameter) for parameter in self._group.parameters]


def _sum_of(parameter: ShardedParameter) -> list[int]:
    local = parameter.local
    if type(local) is not torch.Tensor:  # a class of its own, which may not know how to add up
        return []
    total = local.sum(dtype=torch.promote_types(local.dtype, torch.float64))
    bits: list[int] = total.reshape(1).view(torch.int64).tolist()
    return bits
