"""Checks of writes: to parameters between a forward and its backward, and to unsharded ones between passes."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.autograd.graph import increment_version

from composable_fsdp._core.gather import AnyBucket
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import ParameterState, Pass
from composable_fsdp._core.memory import Work
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.registration import Registration, plain_shard
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import ForwardCall, FSDPState
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError

# -- Parameters that change between a forward and its backward, which would give wrong gradients
#
# Torch counts in-place changes, as autograd does for saved tensors. It misses those of foreach and fused optimizers on
# DTensors, which ``optimizer_steps`` adds, and writes through ``.data``.

unchecked: WeakSet[FSDPState] = WeakSet()
"""The states for which the user has turned the check off."""
_is_set = False  # True once the user has set any: a truth test of the set takes three calls


def set_in_place_check(states: Sequence[FSDPState], level: str) -> None:
    """Set what is compared of ``states``: nothing, or what torch counts."""
    global _is_set
    if level not in ("off", "counted"):
        raise ConfigurationError(
            f"set_in_place_check takes 'counted' or 'off', not {level!r}. ('all' is gone: writes through .data are not "
            "found. Write in place under torch.no_grad(), which torch counts.)"
        )
    _is_set = True
    (unchecked.update if level == "off" else unchecked.difference_update)(states)


class VersionCheck(Observer):
    """Compares the parameters of a group in backward with those in forward."""

    def after_copy(self, state: FSDPState, clone: FSDPState) -> None:
        if state in unchecked:
            unchecked.add(clone)

    def enter_forward(self, root: ObservedRoot, call: ForwardCall) -> None:
        if torch.is_grad_enabled() and not (_is_set and call.state in unchecked):
            registration = call.state.group.registration
            call.run.versions = registration, registration.versions

    def enter_backward(self, root: ObservedRoot, call: ForwardCall) -> None:
        seen: tuple[Registration, list[int]] | None = call.run.versions
        if seen is not None:
            registration, versions = seen
            # Another registration has other counters: tensors were rebuilt, or requires_grad was changed.
            if registration is call.state.group.registration and registration.versions != versions:
                raise _changed_error(call.state.group, versions)


def _changed_error(group: ParamGroup, versions: Sequence[int]) -> LifecycleError:
    """Return the error for parameters of ``group`` that have changed since their ``versions`` in forward."""
    parameters, versions_now = group.parameters, group.registration.versions
    pairs = zip(parameters, versions, versions_now, strict=False)
    changed = {p for p, before, after in pairs if before != after}
    if not changed:  # changed through the local tensors, which share one version counter per bucket
        sharing = [bucket.parameters for bucket in group.buckets for _ in bucket.versioned]
        memory, memory_now = versions[len(parameters) :], versions_now[len(parameters) :]
        changed = {p for ps, then, at in zip(sharing, memory, memory_now, strict=True) if then != at for p in ps}
    names = [p.name for p in parameters if p in changed]
    return LifecycleError(
        f"parameters of {group.name!r} were changed in place between forward and backward: {names}. Their gradients "
        "would be those of a model that never ran. Step the optimizer, or load values, after backward only. Then call "
        "reset_iter_state() on the root module before the next step. model.set_in_place_check('off') turns this "
        "check off."
    )


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
        self._refused: list[ParameterError | None] = []

    def begin_pass(self, root: ObservedRoot, which: Pass) -> None:
        kept = (state for state in root.states.values() if state.kept is not None)
        _raise(*[self._keep(root, state, compares_values=False) for state in kept])  # once all have their own values

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
            self._refused = [self._keep(root, state) for state in root.states.values()]
        return False

    def after_reset(self, root: ObservedRoot) -> None:
        refused, self._refused = self._refused, []
        _raise(*refused)

    def _keep(self, root: ObservedRoot, state: FSDPState, *, compares_values: bool = True) -> ParameterError | None:
        known = self._known.get(state)
        if known is None or state.kept is None or state.group.parameter_state is not _UNSHARDED:
            return None
        if not (compares_values or known.shows_writes):
            return None
        return _keep_writes(root, state, known, compares_values=compares_values)

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
    shards_changed, replaced = root.planner.is_stale(state), group.registration.replaced_unsharded_data()
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
