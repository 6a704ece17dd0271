"""Fusion of the gradients of several small parameter groups into one message, planned as one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from composable_fsdp._layout.bucket_layout import NEVER_ZERO_COPY
from composable_fsdp._layout.plan import plan_group
from composable_fsdp._runtime.collectives.reduce_scatter import BucketReduceScatter
from composable_fsdp._runtime.groups.param_group_buckets import ParamGroupBuckets

__all__ = ["FusedBuckets"]


class FusedBuckets:
    """Creates and caches the fused buckets of groups.

    Invariant: the buckets keep only layouts from step to step, no values.
    """

    def __init__(self) -> None:
        self._known: dict[ParamGroupBuckets, tuple[list[object], tuple[BucketReduceScatter, ...]]] = {}
        """The groups, plans and communicators of which buckets are made, and these, by the first group."""

    def fuse(self, members: Sequence[ParamGroupBuckets]) -> Sequence[BucketReduceScatter]:
        """Return fused buckets for all parameters of ``members``, or none if these cannot share messages.

        They cannot if their process groups differ, or if gradients have a reduce kind. The result is the same on
        every rank.
        """
        made_of: list[object] = [each for t in members for each in (t, t.plan, t.process_groups[0].scatter)]
        known = self._known.get(members[0])
        if known is None or known[0] != made_of:
            known = self._known[members[0]] = (made_of, _fuse(members))
        return known[1]


def _has_same_route(first: ParamGroupBuckets, other: ParamGroupBuckets) -> bool:
    """Return True if the gradients of both groups have the same communicators."""
    one, another = first.process_groups[0], other.process_groups[0]
    return (
        one.scatter == another.scatter and one.replicate == another.replicate and one.axes.divide == another.axes.divide
    )


def _is_plain(tensors: ParamGroupBuckets) -> bool:
    """Return True if no gradient has a kind or hooks, and all have the same pair of mesh axes."""
    one_pair = len(tensors.process_groups) == 1
    return one_pair and not any(b.scatter.own is not None or b.creates_parameters for b in tensors.buckets)


def _fuse(members: Sequence[ParamGroupBuckets]) -> tuple[BucketReduceScatter, ...]:
    first, pgs = members[0], members[0].process_groups[0]
    if not all(_has_same_route(first, tensors) and _is_plain(tensors) for tensors in members):
        return ()
    specs = tuple(spec for tensors in members for spec in tensors.plan.specs)
    parameters = [parameter for tensors in members for parameter in tensors.parameters]
    options = replace(pgs.plan_options(), grad_bucket_bytes=NEVER_ZERO_COPY)
    return tuple(
        BucketReduceScatter(
            plan,
            [parameters[i] for i in plan.indices],
            pgs,
            first.device,
            parameters[plan.indices[0]].local.device,
            pin_memory=plan.pins_memory,
        )
        for plan in plan_group(specs, (options,)).buckets
    )
