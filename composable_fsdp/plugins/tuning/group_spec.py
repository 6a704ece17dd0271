"""The properties of parameter groups by which the time and the memory of a step are predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

from composable_fsdp._core.comm import Communicator
from composable_fsdp._core.group_plan import BucketPlan, GroupPlan, MessageSizes
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.state import FSDPState
from composable_fsdp.policies import AUTO_RESHARD, Reshard

__all__ = ["GradientMemory", "GroupSpec", "Specs", "axis_names", "gather_messages", "gradient_messages", "spec_of"]


class GradientMemory(NamedTuple):
    """The bytes that gradients take on their way, one stage after the other.

    Args:
        arrived: the unsharded gradients, before their reduction.
        launched: the most while the messages are filled, gradients included.
        in_flight: the messages and the results.
        sharded: the sharded gradients.
    """

    arrived: int = 0
    launched: int = 0
    in_flight: int = 0
    sharded: int = 0

    @staticmethod
    def total(of: Iterable[GradientMemory]) -> GradientMemory:
        """Return the memory of several reductions, prepared one after the other, that are launched together."""
        arrived = launched = in_flight = sharded = 0
        for each in of:
            launched = max(launched + each.arrived, in_flight + each.launched)
            arrived, in_flight = arrived + each.arrived, in_flight + each.in_flight
            sharded += each.sharded
        return GradientMemory(arrived, launched, in_flight, sharded)


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
    messages, memory = gradient_messages(plan), gradient_memory(plan)
    buckets = messages if plan.in_grad_buckets else (sum(messages),)
    gathered = [bucket for bucket in plan.buckets if bucket.is_gathered]
    packed_only = [bucket for bucket in gathered if not bucket.gather.zero_copy]
    cast = [] if len(packed_only) == len(gathered) else [b for b in gathered if b.dtype != b.compute_dtype]
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
        gather_messages=1 if pgs.gather.traits.coalesces else gather_messages(plan),
        gather_copied_bytes=sum(
            b.gather.num_shards * b.gather.packed_numel * b.compute_dtype.itemsize for b in gathered
        ),
        gather_sent_bytes=sum(b.gather.store.numel * b.compute_dtype.itemsize for b in cast),
        late_bytes=sum(b.full_bytes for b in packed_only),
        gradient_messages=tuple(map(bool, buckets)) if pgs.scatter.traits.coalesces else buckets,
        gradient_memory=memory if plan.in_grad_buckets else (GradientMemory.total(memory),),
        gradients=_gradients(plan),
        early_gradients=frozenset(state.params_after_nested),
    )


def gather_messages(plan: GroupPlan) -> int:
    """Return the number of transfers of one all-gather. Those that share a message count once."""
    gathers = [bucket.gather for bucket in plan.buckets if bucket.is_gathered]
    return any(each.packed for each in gathers) + sum(len(each.zero_copy) for each in gathers)


def gradient_messages(plan: GroupPlan) -> tuple[int, ...]:
    """Return the number of transfers of the reduction of each gradient bucket."""
    counts = [0] * len(plan.grad_buckets)
    for bucket in plan.buckets:
        counts[bucket.grad_bucket] += bool(bucket.reduce.packed) + len(bucket.reduce.zero_copy)
    return tuple(counts)


def gradient_memory(plan: GroupPlan) -> tuple[GradientMemory, ...]:
    """Return the memory of each gradient bucket, if no kind sums the gradients."""
    return tuple(
        GradientMemory.total(_memory(bucket) for bucket in plan.buckets if bucket.grad_bucket == number)
        for number in range(len(plan.grad_buckets))
    )


def _memory(bucket: BucketPlan) -> GradientMemory:
    layout, itemsize, sum_itemsize = bucket.reduce, bucket.arriving_dtype.itemsize, bucket.sum_dtype.itemsize
    if not layout.indices:
        return GradientMemory()
    arrived = sum(shards.numel for shards in layout.shards) * itemsize
    packed = layout.shards[0].num_shards * layout.packed_numel * bucket.wire_dtype.itemsize
    left = arrived - sum(layout.shards[k].numel for k in layout.packed) * itemsize
    sent = sum(layout.shards[k].numel for k in layout.zero_copy) * bucket.wire_dtype.itemsize
    cast = sent if bucket.wire_dtype != bucket.arriving_dtype else 0
    others = layout.output.numel * sum_itemsize
    gradient_dtype = bucket.gradient_dtype or bucket.sum_dtype
    sharded = layout.output.numel * gradient_dtype.itemsize
    in_flight = packed + sent + others + (sharded if gradient_dtype != bucket.sum_dtype else 0)
    return GradientMemory(arrived, max(arrived + packed, packed + left + cast + others), in_flight, sharded)


def _gradients(plan: GroupPlan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return index and bytes of each unsharded gradient, by bucket."""
    number = len(plan.grad_buckets) if plan.in_grad_buckets else 1
    found: list[list[tuple[int, int]]] = [[] for _ in range(number)]
    for bucket in plan.buckets:
        of_bucket = found[bucket.grad_bucket if plan.in_grad_buckets else 0]
        itemsize = bucket.arriving_dtype.itemsize
        of_bucket += [(i, prod(plan.specs[i].shape) * itemsize) for i in bucket.indices if plan.specs[i].trainable]
    return tuple(map(tuple, found))


def axis_names(meshes: Iterable[DataParallelAxes]) -> dict[DataParallelAxes, tuple[str, str]]:
    """Return the names of the shard axis and of the replicate axis of each mesh, for tables of costs.

    Axes with one name and different process groups are numbered in the order of ``meshes``: "shard", "shard 2".
    """
    known: dict[str, list[Communicator]] = {}
    found = {}
    for mesh in meshes:
        names = []
        for name, communicator in zip(mesh.names, (mesh.shard, mesh.replicate), strict=True):
            same = known.setdefault(name, [])
            if communicator.size > 1 and communicator not in same:
                same.append(communicator)
            number = same.index(communicator) if communicator.size > 1 else 0
            names.append(f"{name} {number + 1}" if number else name)
        found[mesh] = names[0], names[1]
    return found
