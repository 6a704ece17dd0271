"""Bytes that a group's collectives move, with its codecs and hooks and without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from composable_fsdp._layout.bucket_layout import aligned_bytes, payload_widths
from composable_fsdp._layout.plan import plan_smaller_mesh
from composable_fsdp._runtime.collectives.bucket import AnyBucket
from composable_fsdp._sharding.process_groups import group_by_key

__all__ = [
    "WireBytes",
    "all_gather_wire_bytes",
    "all_reduce_wire_bytes",
    "reduce_scatter_wire_bytes",
]


class WireBytes(NamedTuple):
    """The bytes of one collective's messages on one rank: outputs of an all-gather, inputs of a reduction.

    A rank sends, and receives, ``(size - 1) / size`` of these bytes.
    ``plain_bytes`` is the same without codecs and hooks.
    """

    bytes: int
    plain_bytes: int


def all_gather_wire_bytes(buckets: Sequence[AnyBucket], size: int | None = None) -> WireBytes:
    """Return the bytes of the all-gather over the full shard axis, or over ``size`` neighbouring ranks."""
    total = plain = 0
    for pgs, members in group_by_key([bucket.pgs for bucket in buckets], buckets):
        shard = pgs.axes.shard
        smaller = None if size is None else min(size, shard.size)
        sent = [bucket.sent_bytes(smaller) for bucket in members]
        packed = sum(payload_widths([payload for payloads, _ in sent for payload in payloads]))
        total += (smaller or shard.size) * (packed + sum(zero_copy for _, zero_copy in sent))
        for plan in (bucket.plan for bucket in members if bucket.plan.is_gathered):
            direct_from = shard.traits.zero_copy_min_bytes
            layout = plan.gather if smaller is None else plan_smaller_mesh(plan, smaller, direct_from)
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
        plan, own = bucket.plan, bucket.scatter.own
        itemsize = (plan.sum_dtype if were_summed else plan.wire_dtype).itemsize
        row_bytes = None if own is None else own.row_bytes
        if row_bytes is not None:
            total += bucket.pgs.axes.shard.size * aligned_bytes(row_bytes)
        else:
            total += plan.reduce.wire_numel * itemsize
        plain += plan.reduce.wire_numel * (itemsize if own is None else plan.reduce_dtype.itemsize)
    return WireBytes(total, plain)


def all_reduce_wire_bytes(buckets: Sequence[AnyBucket]) -> WireBytes:
    """Return the bytes of the reduction over the replicate axis."""
    total = plain = 0
    for bucket in (bucket for bucket in buckets if bucket.plan.reduce.indices):
        numel, own = bucket.plan.reduce.output.numel, bucket.scatter.own
        own_bytes = None if own is None else own.all_reduce_bytes
        total += 2 * numel * bucket.plan.sum_dtype.itemsize if own_bytes is None else own_bytes
        plain += 2 * numel * bucket.plan.reduce_dtype.itemsize
    return WireBytes(total, plain)
