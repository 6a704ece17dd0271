"""Gradients of several small groups in one message, planned as if these were one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from composable_fsdp._layout.bucket_layout import NEVER_DIRECT
from composable_fsdp._layout.plan import BucketPlan, plan_group
from composable_fsdp._runtime.collectives.reduce_scatter import BucketReduceScatter
from composable_fsdp._runtime.groups.group_tensors import GroupTensors
from composable_fsdp._sharding.process_groups import ProcessGroups

__all__ = ["JoinedBucket", "Joiner"]


@dataclass(frozen=True, slots=True)
class JoinedBucket:
    """What a reduction needs of the buckets whose gradients it takes at once."""

    plan: BucketPlan
    pgs: ProcessGroups
    scatter: BucketReduceScatter


class _Joined(NamedTuple):
    made_of: list[object]
    """The members, their plans and their communicators then."""
    buckets: tuple[JoinedBucket, ...]


class Joiner:
    """Makes the joined buckets of groups, and has them ready for the next step.

    Invariant: they keep nothing from step to step but where everything lies.
    """

    def __init__(self) -> None:
        self._known: dict[GroupTensors, _Joined] = {}
        """By the first member."""

    def join(self, members: Sequence[GroupTensors]) -> Sequence[JoinedBucket]:
        """Buckets of all parameters of ``members``; none where these cannot go in one message. All ranks find the same.

        They cannot where they travel to different ranks, encoded or by hooks, or rest in different places.
        """
        made_of: list[object] = [each for t in members for each in (t, t.plan, t.process_groups[0].scatter)]
        known = self._known.get(members[0])
        if known is None or known.made_of != made_of:
            known = self._known[members[0]] = _Joined(made_of, _join(members))
        return known.buckets


def _goes_with(first: GroupTensors, other: GroupTensors) -> bool:
    """Whether the gradients of both go the same way between the same places."""
    one, another = first.process_groups[0], other.process_groups[0]
    return (
        one.scatter == another.scatter
        and one.replicate == another.replicate
        and first.rest_device == other.rest_device
        and first.pin_memory == other.pin_memory
    )


def _is_plain(tensors: GroupTensors) -> bool:
    """Whether gradients travel as they are, over one pair of axes."""
    plans = tensors.plan.buckets
    return len(tensors.process_groups) == 1 and not any(plan.gradient_is_encoded or plan.extended for plan in plans)


def _join(members: Sequence[GroupTensors]) -> tuple[JoinedBucket, ...]:
    first, pgs = members[0], members[0].process_groups[0]
    if not all(_goes_with(first, tensors) and _is_plain(tensors) for tensors in members):
        return ()
    specs = tuple(spec for tensors in members for spec in tensors.plan.specs)
    parameters = [parameter for tensors in members for parameter in tensors.parameters]
    options = replace(pgs.plan_options(offloaded=first.is_offloaded), batch_bytes=NEVER_DIRECT)
    return tuple(
        JoinedBucket(
            plan,
            pgs,
            BucketReduceScatter(
                plan,
                [parameters[i] for i in plan.indices],
                pgs,
                first.device,
                first.rest_device,
                pin_memory=first.pin_memory,
            ),
        )
        for plan in plan_group(specs, (options,)).buckets
    )
