"""Writes between passes to parameters that stay unsharded: kept in the shards, or refused.

A user holds unsharded parameters after ``unshard()``, after a forward that keeps them, and after a backward that does.
Freeing them would drop what was written to them. Each rank keeps its own rows: all ranks must write the same values.

Torch's version counters show writes. What modules write during a pass is dropped, as by FSDP2. Writes through ``.data``
move no counter. They are found by comparing values when the parameters are freed between passes. Passes compare only
counters, and drop such writes: a comparison of values at each forward would read all shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from composable_fsdp._core.buckets import Registration, plain_shard
from composable_fsdp._core.events import ParameterState, Pass, RunningPass
from composable_fsdp._core.gather import AnyBucket
from composable_fsdp._core.memory import Work
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState
from composable_fsdp.errors import ParameterError

__all__ = ["UnshardedWrites"]

_UNSHARDED = ParameterState.UNSHARDED


class UnshardedWrites(Observer):
    """Copies what was written to unsharded parameters between passes to the shards."""

    def for_root(self, root: ObservedRoot) -> Observer:
        return _WritesOfRoot()


class _Known:
    """The version counters of the unsharded parameters of ``registration`` when the last pass ended.

    Attributes:
        by_modules: the indices of parameters that modules have written in a pass, so that values may differ.
    """

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.versions = [0] * len(registration.unsharded_versions)
        self.by_modules: set[int] = set()

    def changed(self) -> set[int]:
        """Return the indices of the parameters with other version counters, and record these."""
        known, self.versions = self.versions, self.registration.unsharded_versions
        return {k for k, (now, before) in enumerate(zip(self.versions, known, strict=True)) if now != before}


class _WritesOfRoot(Observer):
    def __init__(self) -> None:
        self._known: dict[FSDPState, _Known] = {}

    def begin_pass(self, root: ObservedRoot, running: RunningPass) -> None:
        for state in root.states.values():
            if state.kept is not None and state.group.parameter_state is _UNSHARDED:
                known = self._known.get(state)
                if known is not None and known.registration.unsharded_versions != known.versions:
                    _keep_writes(root, state, known, compares_values=False)

    def before_end(self, root: ObservedRoot, which: Pass) -> Sequence[Work]:
        for state in root.states.values():
            if state.kept is not None and state.group.parameter_state is _UNSHARDED:
                self._note(state)
        return ()

    def unsharded(self, root: ObservedRoot, state: FSDPState) -> None:
        self._note(state)

    def before_reshard(self, root: ObservedRoot, state: FSDPState) -> None:
        known = self._known.get(state)
        if known is not None and state.kept is not None and state.group.parameter_state is _UNSHARDED:
            _keep_writes(root, state, known, compares_values=True)

    def _note(self, state: FSDPState) -> None:
        registration, known = state.group.tensors.registration, self._known.get(state)
        if known is None or known.registration is not registration:
            known = self._known[state] = _Known(registration)
        if known.versions != registration.unsharded_versions:
            known.by_modules |= known.changed()


@torch.inference_mode(False)
@torch.no_grad()
def _keep_writes(root: ObservedRoot, state: FSDPState, known: _Known, *, compares_values: bool) -> None:
    """Copy what was written to unsharded parameters of ``state`` since the last pass to this rank's shards.

    Args:
        compares_values: also look for changes that torch has not counted.

    Raises:
        ParameterError: a change cannot be kept. It is dropped, and the error names the parameter and the reason.
    """
    group = state.group
    written = {group.parameters[k] for k in known.changed()}
    unlike = {group.parameters[k] for k in known.by_modules}
    shards_changed, refused = root.plans.is_stale(state), dict[str, str]()
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
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in refused.items())
        raise ParameterError(
            f"parameters {[*refused]} of {state.name!r} were changed while they were unsharded, and the change cannot "
            f"be kept: {reasons}. It was dropped. Change the sharded parameters, after module.reshard(), or write "
            "under unsharded_params(writeback=True)."
        )
    if state.kept is not None and not shards_changed:
        state.note_kept(state.kept.steps)  # the shards have changed, but the full parameters too


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
        return "or its shard was written through .data, which torch does not count: either may be newer"
    if rows.dtype != local.dtype:
        return f"is unsharded in {rows.dtype}, and its shard is in {local.dtype}"
    local.copy_(rows)
    increment_version(parameter.sharded)
    return ""


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits; as numbers, nan would not equal nan."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
