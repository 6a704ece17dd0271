"""Bytes that a group's collectives move, with its codecs and hooks and without them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from composable_fsdp._layout.bucket_layout import aligned_bytes, payload_widths
from composable_fsdp._layout.plan import plan_smaller_mesh
from composable_fsdp._runtime.collectives.bucket import AnyBucket
from composable_fsdp._sharding.process_groups import ProcessGroups

__all__ = [
    "WireBytes",
    "all_gather_wire_bytes",
    "all_reduce_wire_bytes",
    "by_process_groups",
    "reduce_scatter_wire_bytes",
    "smaller_mesh_wire_bytes",
]


class WireBytes(NamedTuple):
    """The bytes of one collective's messages on one rank: outputs of an all-gather, inputs of a reduction.

    A rank sends, and receives, ``(size - 1) / size`` of these bytes.
    ``plain_bytes`` is the same without codecs and hooks.
    """

    bytes: int
    plain_bytes: int


def all_gather_wire_bytes(buckets: Sequence[AnyBucket]) -> WireBytes:
    """Return the bytes of the all-gather over the full shard axis."""
    total = 0
    for pgs, members in by_process_groups(buckets):
        packed = sum(payload_widths([payload for bucket in members for payload in bucket.payload_bytes]))
        total += pgs.axes.shard.size * (packed + sum(bucket.zero_copy_bytes for bucket in members))
    return WireBytes(total, sum(bucket.plan.wire_bytes for bucket in buckets))


def smaller_mesh_wire_bytes(buckets: Sequence[AnyBucket], size: int) -> WireBytes:
    """Return the bytes of the all-gather over ``size`` neighbouring ranks, where nothing is encoded."""
    total = plain = 0
    for pgs, members in by_process_groups(buckets):
        num_shards, direct_from = min(size, pgs.axes.shard.size), pgs.axes.shard.traits.zero_copy_min_bytes
        slices = [bucket.smaller_mesh_bytes(num_shards, direct_from) for bucket in members]
        packed = sum(payload_widths([payload for of_bucket, _ in slices for payload in of_bucket]))
        total += num_shards * (packed + sum(zero_copy for _, zero_copy in slices))
        for plan in (bucket.plan for bucket in members if bucket.plan.is_gathered):
            layout = plan_smaller_mesh(plan, num_shards, direct_from)
            plain += layout.wire_numel * plan.compute_dtype.itemsize
    return WireBytes(total, plain)


def reduce_scatter_wire_bytes(buckets: Sequence[AnyBucket], *, were_summed: bool = False) -> WireBytes:
    """Return the bytes of the reduction over the shard axis.

    Args:
        buckets: the buckets to reduce.
        were_summed: the gradients were accumulated before, in the dtype of the sum.
    """
    total = plain = 0
    for bucket in (bucket for bucket in buckets if bucket.plan.reduce.indices):
        plan = bucket.plan
        itemsize = (plan.sum_dtype if were_summed else plan.wire_dtype).itemsize
        if plan.encodes_reduce_scatter:
            total += bucket.pgs.axes.shard.size * aligned_bytes(bucket.scatter.row_bytes)
        else:
            total += plan.reduce.wire_numel * itemsize
        plain += plan.reduce.wire_numel * (plan.reduce_dtype.itemsize if plan.gradient_is_encoded else itemsize)
    return WireBytes(total, plain)


def all_reduce_wire_bytes(buckets: Sequence[AnyBucket]) -> WireBytes:
    """Return the bytes of the reduction over the replicate axis."""
    total = plain = 0
    for bucket in (bucket for bucket in buckets if bucket.plan.reduce.indices):
        num_replicas, numel = bucket.pgs.replicate.size, bucket.plan.reduce.output.numel
        encoders = bucket.scatter.encoders
        if "pieces" in encoders:
            flags = bucket.plan.reduce.num_flags
            total += num_replicas * (aligned_bytes(encoders["pieces"].row_bytes + flags) + encoders["sums"].row_bytes)
        else:
            total += 2 * numel * bucket.plan.sum_dtype.itemsize
        plain += 2 * numel * bucket.plan.reduce_dtype.itemsize
    return WireBytes(total, plain)


def by_process_groups(buckets: Iterable[AnyBucket]) -> list[tuple[ProcessGroups, list[AnyBucket]]]:
    """Return the buckets of each set of process groups."""
    together: dict[ProcessGroups, list[AnyBucket]] = {}
    for bucket in buckets:
        together.setdefault(bucket.pgs, []).append(bucket)
    return list(together.items())
