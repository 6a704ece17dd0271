"""The properties of parameter groups by which the time and the memory of a step are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from composable_fsdp._core.group_plan import GradientMemory, GroupPlan, MessageSizes
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.state import FSDPState
from composable_fsdp.policies import AUTO_RESHARD, Reshard

__all__ = ["GroupSpec", "Specs", "spec_of"]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The properties of one parameter group on which the time and the memory of a step depend.

    Args:
        name: the group.
        unsharded_bytes: the memory that unsharding takes, in bytes.
        full_bytes: the size of the full parameters in bytes, in whatever memory.
        gradient_bytes: the bytes of each bucket of gradients; 0 for a bucket without trainable parameters.
        has_parameters: False for a module whose parameters all belong to nested groups.
        reshard: the setting of resharding after forward, for changes of it.
        axis: the name of the mesh axis that shards it, and ``ranks`` the number of its ranks.
        replicate_axis: the same of the axis over which it is replicated, with ``replicas`` ranks.
        separate_reduce: its reduce-scatters have a process group of their own, and run beside all-gathers.
        gather_messages: the number of messages of its all-gather.
        gather_copied_bytes: the bytes of its all-gather that are copied out of messages.
        gather_sent_bytes: the bytes of this rank's part that are cast beside the messages.
        late_bytes: the part of ``unsharded_bytes`` that is allocated by the wait for the all-gather.
        gradient_messages: the number of messages of the reduction of each bucket; one each by default.
        gradient_memory: the memory of the gradients of each bucket.
        gradients: index and bytes of each unsharded gradient, by bucket.
        early_gradients: the indices of the gradients that precede the backward of nested groups.
    """

    name: str
    unsharded_bytes: int = 0
    full_bytes: int = 0
    gradient_bytes: tuple[int, ...] = ()
    has_parameters: bool = True
    reshard: Reshard = AUTO_RESHARD
    axis: str = ""
    ranks: int = 1
    replicate_axis: str = ""
    replicas: int = 1
    separate_reduce: bool = False
    gather_messages: int = 1
    gather_copied_bytes: int = 0
    gather_sent_bytes: int = 0
    late_bytes: int = 0
    gradient_messages: tuple[int, ...] = ()
    gradient_memory: tuple[GradientMemory, ...] = ()
    gradients: tuple[tuple[tuple[int, int], ...], ...] = ()
    early_gradients: frozenset[int] = frozenset()


Specs: TypeAlias = Mapping[str, GroupSpec]
"""The properties of all groups of a root, by name."""


def spec_of(state: FSDPState, axes: Mapping[DataParallelAxes, tuple[str, str]], sizes: MessageSizes) -> GroupSpec:
    """Return the properties of ``state`` with ``sizes`` of messages. ``axes`` has the names of all mesh axes."""
    pgs = state.group.process_groups[0]
    plan = state.group.plan if sizes == pgs.message_sizes else state.group.tensors.plan_with(sizes)
    shard_axis, replicate_axis = axes[pgs.axes]
    buckets = plan.gradient_messages if plan.in_grad_buckets else (sum(plan.gradient_messages),)
    memory = plan.gradient_memory
    bucket_bytes = [size if count else 0 for size, count in zip(plan.grad_bucket_bytes, plan.grad_buckets, strict=True)]
    return GroupSpec(
        name=state.name,
        unsharded_bytes=plan.unsharded_bytes,
        full_bytes=plan.full_bytes,
        gradient_bytes=tuple(bucket_bytes) if plan.in_grad_buckets else (sum(bucket_bytes),),
        has_parameters=bool(plan.specs),
        reshard=state.options.reshard,
        axis=shard_axis,
        ranks=pgs.axes.shard.size,
        replicate_axis=replicate_axis,
        replicas=pgs.replicate.size,
        separate_reduce=pgs.channels.has_separate_scatter,
        gather_messages=1 if pgs.gather.traits.coalesces else plan.gather_messages,
        gather_copied_bytes=plan.gather_copied_bytes,
        gather_sent_bytes=plan.gather_sent_bytes,
        late_bytes=plan.packed_only_bytes,
        gradient_messages=tuple(map(bool, buckets)) if pgs.scatter.traits.coalesces else buckets,
        gradient_memory=memory if plan.in_grad_buckets else (GradientMemory.total(memory),),
        gradients=_gradients(plan),
        early_gradients=frozenset(state.params_after_nested),
    )


def _gradients(plan: GroupPlan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return index and bytes of each unsharded gradient, by bucket."""
    number = len(plan.grad_buckets) if plan.in_grad_buckets else 1
    found: list[list[tuple[int, int]]] = [[] for _ in range(number)]
    for bucket in plan.buckets:
        of_bucket = found[bucket.grad_bucket if plan.in_grad_buckets else 0]
        of_bucket += [(i, plan.specs[i].gradient_bytes) for i in bucket.indices if plan.specs[i].trainable]
    return tuple(map(tuple, found))
