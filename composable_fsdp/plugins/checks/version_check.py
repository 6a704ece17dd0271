"""Detection of parameters that change between a forward and its backward, which would give wrong gradients.

Torch counts in-place changes, as autograd does for saved tensors. It misses those of foreach and fused optimizers on
DTensors, which ``optimizer_steps`` adds, and writes through ``.data``, which only reading the shards can find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from composable_fsdp._core.buckets import Registration
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import ForwardCall, FSDPState
from composable_fsdp.errors import ConfigurationError, LifecycleError

__all__ = ["VersionCheck", "reads_shards", "set_in_place_check"]

_Seen: TypeAlias = tuple[Registration, list[int], list[list[int]] | None]
"""A group's registration, versions and, if shards are read, the bits of their sums: as floats, nan would not equal nan.

Versions of different registrations are not comparable.
"""

_reads_shards: WeakKeyDictionary[FSDPState, bool | None] = WeakKeyDictionary()
"""For states of which the user has set it: the sums of all shards are compared too; ``None`` compares nothing."""
_LEVELS = {"off": None, "counted": False, "all": True}
_is_set = False  # True once the user has set any: a truth test of the dictionary takes three calls


def set_in_place_check(states: Sequence[FSDPState], level: str) -> None:
    """Set what is compared of ``states``: nothing, what torch counts, or the values of shards too."""
    global _is_set
    if level not in _LEVELS:
        raise ConfigurationError(f"set_in_place_check takes one of {[*_LEVELS]}, not {level!r}.")
    _is_set = True
    _reads_shards.update(dict.fromkeys(states, _LEVELS[level]))


def reads_shards(state: FSDPState) -> bool | None:
    """Return whether the values of the shards of ``state`` are compared too, or ``None`` if nothing is."""
    return _reads_shards.get(state, False)


class VersionCheck(Observer):
    """Compares the parameters of a group in backward with those in forward."""

    def after_copy(self, state: FSDPState, clone: FSDPState) -> None:
        if state in _reads_shards:
            _reads_shards[clone] = _reads_shards[state]

    def enter_forward(self, root: ObservedRoot, call: ForwardCall) -> None:
        reads = reads_shards(call.state) if _is_set else False
        if reads is not None and torch.is_grad_enabled():
            group = call.state.group
            registration = group.tensors.registration
            call.seen = registration, registration.versions, _sums(group) if reads else None

    def enter_backward(self, root: ObservedRoot, call: ForwardCall) -> None:
        seen: _Seen | None = (call.first or call).seen
        if seen is not None:
            registration, versions, sums = seen
            is_registered = registration is call.state.group.tensors.registration
            if sums is not None or not is_registered or registration.versions != versions:
                _compare(call.state.group, seen)


def _compare(group: ParamGroup, seen: _Seen) -> None:
    """Compare the parameters of ``group`` with ``seen``, those in forward.

    Raises:
        LifecycleError: parameters have changed since. The error names them.
    """
    registration, versions, sums = seen
    registration_now = group.tensors.registration
    versions_now, sums_now = registration_now.versions, _sums(group) if sums is not None else None
    if registration_now is not registration:  # tensors were rebuilt, or requires_grad was changed
        versions_now = versions
    if (versions, sums) == (versions_now, sums_now):
        return
    parameters = group.parameters
    changed = _changed(parameters, versions, versions_now)
    if sums is not None and sums_now is not None:
        changed |= _changed(parameters, sums, sums_now)
    if not changed:  # changed through the local tensors, which share one version counter per bucket
        sharing = [bucket.parameters for bucket in group.buckets for _ in bucket.versioned]
        memory, memory_now = versions[len(parameters) :], versions_now[len(parameters) :]
        changed = {p for ps, then, at in zip(sharing, memory, memory_now, strict=True) if then != at for p in ps}
    names = [p.name for p in parameters if p in changed]
    raise LifecycleError(
        f"parameters of {group.name!r} were changed in place between forward and backward: {names}. Their gradients "
        "would be those of a model that never ran. Step the optimizer, or load values, after backward only. Then call "
        "reset_iter_state() on the root module before the next step. model.set_in_place_check('off') turns this "
        "check off."
    )


@torch.no_grad()
def _sums(group: ParamGroup) -> list[list[int]]:
    return [_sum_of(parameter) for parameter in group.parameters]


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
