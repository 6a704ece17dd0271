"""Checks of writes: to parameters between a forward and its backward, and to unsharded ones between passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import increment_version

from composable_fsdp._core.events import ParameterState, Pass, RunningPass
from composable_fsdp._core.gather import AnyBucket
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.memory import Work
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.registration import Registration, plain_shard
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import ForwardCall, FSDPState
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError

# -- Parameters that change between a forward and its backward, which would give wrong gradients
#
# Torch counts in-place changes, as autograd does for saved tensors. It misses those of foreach and fused optimizers on
# DTensors, which ``optimizer_steps`` adds, and writes through ``.data``, which only reading the shards can find.

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
            registration = group.registration
            call.run.seen = registration, registration.versions, _sums(group) if reads else None

    def enter_backward(self, root: ObservedRoot, call: ForwardCall) -> None:
        seen: _Seen | None = call.run.seen
        if seen is not None:
            registration, versions, sums = seen
            is_registered = registration is call.state.group.registration
            if sums is not None or not is_registered or registration.versions != versions:
                _compare(call.state.group, seen)


def _compare(group: ParamGroup, seen: _Seen) -> None:
    """Compare the parameters of ``group`` with ``seen``, those in forward.

    Raises:
        LifecycleError: parameters have changed since. The error names them.
    """
    registration, versions, sums = seen
    registration_now = group.registration
    versions_now, sums_now = registration_now.versions, _sums(group) if sums is not None else None
    if registration_now is not registration:  # tensors were rebuilt, or requires_grad was changed
        versions_now = versions
    if (versions, sums) == (versions_now, sums_now):
        return
    parameters = group.parameters
    changed = _changed(group, versions, versions_now)
    if sums is not None and sums_now is not None:
        changed |= _changed(group, sums, sums_now)
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


def _changed(group: ParamGroup, then: Sequence[object], now: Sequence[object]) -> set[ShardedParameter]:
    return {p for p, before, after in zip(group.parameters, then, now, strict=False) if before != after}


def _sum_of(parameter: ShardedParameter) -> list[int]:
    local = parameter.local
    if type(local) is not torch.Tensor:  # a tensor subclass, which may not implement sum
        return []
    total = local.sum(dtype=torch.promote_types(local.dtype, torch.float64))
    bits: list[int] = total.reshape(1).view(torch.int64).tolist()
    return bits


# -- Writes between passes to parameters that stay unsharded: kept in the shards, or refused
#
# A user holds unsharded parameters after ``unshard()``, after a forward that keeps them, and after a backward that
# does. Freeing them would drop what was written to them. Each rank keeps its own rows: all ranks must write the same
# values.
#
# Torch's version counters show writes. What modules write during a pass is dropped, as by FSDP2. Writes through
# ``.data`` move no counter. They are found by comparing values when the parameters are freed between passes. Passes
# compare only counters, and drop such writes: a comparison of values at each forward would read all shards.

_UNSHARDED = ParameterState.UNSHARDED


class _Known:
    """The version counters of the unsharded parameters of ``registration`` when the last pass ended.

    Attributes:
        by_modules: the indices of parameters that modules have written in a pass, so that values may differ.
    """

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.versions = [0] * len(registration.unsharded_versions)
        self.by_modules: set[int] = set()

    @property
    def shows_writes(self) -> bool:
        """True if version counters have moved, or parameters have other memory."""
        registration = self.registration
        return registration.unsharded_versions != self.versions or bool(registration.replaced_unsharded_data())

    def changed(self) -> set[int]:
        """Return the indices of the parameters with other version counters, and record these."""
        known, self.versions = self.versions, self.registration.unsharded_versions
        return {k for k, (now, before) in enumerate(zip(self.versions, known, strict=True)) if now != before}


class UnshardedWrites(Observer):
    """Copies what was written to unsharded parameters between passes to the shards.

    One for all roots: a group that was unsharded on its own belongs to another root once its parent is used.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[FSDPState, _Known] = WeakKeyDictionary()
        self._refused: list[ParameterError] = []

    def begin_pass(self, root: ObservedRoot, running: RunningPass) -> None:
        errors = []
        for state in root.states.values():
            if state.kept is not None and state.group.parameter_state is _UNSHARDED:
                known = self._known.get(state)
                if known is not None and known.shows_writes:
                    errors.append(_keep_writes(root, state, known, compares_values=False))
        _raise(*errors)  # once all groups have their own values

    def before_end(self, root: ObservedRoot, which: Pass) -> Sequence[Work]:
        for state in root.states.values():
            if state.kept is not None and state.group.parameter_state is _UNSHARDED:
                self._note(state)
        return ()

    def unsharded(self, root: ObservedRoot, state: FSDPState) -> None:
        self._note(state)

    def before_reshard(self, root: ObservedRoot, state: FSDPState) -> None:
        _raise(self._keep(root, state))

    def reset(self, root: ObservedRoot) -> bool:
        if root.current_pass is Pass.IDLE:  # what was written in a pass that failed is dropped
            errors = (self._keep(root, state) for state in root.states.values())
            self._refused = [error for error in errors if error is not None]
        return False

    def after_reset(self, root: ObservedRoot) -> None:
        refused, self._refused = self._refused, []
        _raise(*refused)

    def _keep(self, root: ObservedRoot, state: FSDPState) -> ParameterError | None:
        known = self._known.get(state)
        if known is None or state.kept is None or state.group.parameter_state is not _UNSHARDED:
            return None
        return _keep_writes(root, state, known, compares_values=True)

    def _note(self, state: FSDPState) -> None:
        registration, known = state.group.registration, self._known.get(state)
        if known is None or known.registration is not registration:
            known = self._known[state] = _Known(registration)
        if known.versions != registration.unsharded_versions:
            known.by_modules |= known.changed()


def _raise(*errors: ParameterError | None) -> None:
    for error in errors:
        if error is not None:
            raise error


@torch.inference_mode(False)
@torch.no_grad()
def _keep_writes(
    root: ObservedRoot, state: FSDPState, known: _Known, *, compares_values: bool
) -> ParameterError | None:
    """Copy what was written to unsharded parameters of ``state`` since the last pass to this rank's shards.

    A change that cannot be kept is dropped; the error that is returned then names the parameter and the reason.

    Args:
        compares_values: also look for changes that torch has not counted.
    """
    group = state.group
    written = {group.parameters[k] for k in known.changed()}
    unlike = {group.parameters[k] for k in known.by_modules}
    shards_changed, replaced = root.plans.is_stale(state), group.registration.replaced_unsharded_data()
    refused = {p.name: "was given another tensor, as p.data = ..., set_() and swap_tensors() do" for p in replaced}
    for bucket in group.buckets:
        for k, parameter in enumerate(bucket.parameters):
            is_counted = parameter in written
            if is_counted or (compares_values and not shards_changed and parameter not in unlike):
                reason = _keep(bucket, k, parameter, is_counted=is_counted, shards_changed=shards_changed)
                if reason:
                    refused[parameter.name] = reason
    if refused:
        group.reshard()
        state.kept = None
        if replaced:
            group.renew_unsharded(replaced)
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in refused.items())
        return ParameterError(
            f"parameters {[*refused]} of {state.name!r} were changed while they were unsharded, and the change cannot "
            f"be kept: {reasons}. It was dropped. Change the sharded parameters, after module.reshard(), or write "
            "under unsharded_params(writeback=True)."
        )
    if state.kept is not None and not shards_changed:
        state.note_kept(state.kept.steps)  # the shards have changed, but the full parameters too
    return None


def _keep(bucket: AnyBucket, k: int, parameter: ShardedParameter, *, is_counted: bool, shards_changed: bool) -> str:
    """Copy this rank's rows of ``parameter``, the ``k``-th of ``bucket``, to its shard, or return why it cannot."""
    plan, local = bucket.plan, parameter.local
    if bucket.creates_parameters:  # the tensor's own hooks write to it, at any wait
        return ""
    if plan.gather_claim is not None and plan.is_gathered:
        return "is gathered in another form than that of its shard" if is_counted else ""
    rows = plain_shard(parameter.name, parameter.full, plan.gather.shards[k], bucket.pgs.axes.shard.rank, local.device)
    if _same_bits(rows, local.to(rows.dtype)):
        return ""
    if shards_changed:
        return "has a shard that has changed since, for example by an optimizer's step"
    if not is_counted:
        return "or its shard was written in a way that torch does not count, such as .data: either may be newer"
    if rows.dtype != local.dtype:
        return f"is unsharded in {rows.dtype}, and its shard is in {local.dtype}"
    local.copy_(rows)
    increment_version(parameter.sharded)
    return ""


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits; as numbers, nan would not equal nan."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
