"""How many bytes a group's collectives move, with codecs and hooks and as it would be without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from composable_fsdp._layout.bucket_layout import aligned_bytes
from composable_fsdp._layout.plan import plan_smaller
from composable_fsdp._runtime.collectives.bucket import AnyBucket
from composable_fsdp._sharding.process_groups import ProcessGroups

__all__ = [
    "WireBytes",
    "all_reduce_traffic",
    "by_process_groups",
    "gather_traffic",
    "reduce_traffic",
    "smaller_gather_traffic",
]


class WireBytes(NamedTuple):
    """Bytes of the messages of one collective on one rank: what an all-gather puts out, what goes into a reduction.

    What a tensor takes that is reduced in place counts twice, since it travels twice: so of each of these a rank sends,
    and receives, ``(size - 1) / size``. ``plain_bytes`` is the same without codecs and hooks.
    """

    bytes: int
    plain_bytes: int


def gather_traffic(buckets: Sequence[AnyBucket]) -> WireBytes:
    """Of the all-gather over the whole shard axis."""
    total = 0
    for pgs, members in by_process_groups(buckets):
        payloads = [nbytes for bucket in members for nbytes in bucket.payload_bytes]
        total += pgs.axes.shard.size * (_packed(payloads) + sum(bucket.direct_bytes for bucket in members))
        total += sum(2 * bucket.plan.whole_bytes for bucket in members)
    return WireBytes(total, sum(bucket.plan.wire_bytes for bucket in buckets))


def smaller_gather_traffic(buckets: Sequence[AnyBucket], size: int) -> WireBytes:
    """Of the all-gather over ``size`` neighbouring ranks, from slices in which nothing is encoded."""
    total = plain = 0
    for pgs, members in by_process_groups(buckets):
        num_shards, direct_from = min(size, pgs.axes.shard.size), pgs.axes.shard.direct_bytes
        slices = [bucket.smaller_bytes(num_shards, direct_from) for bucket in members]
        payloads = [nbytes for of_bucket, _ in slices for nbytes in of_bucket]
        total += num_shards * (_packed(payloads) + sum(direct for _, direct in slices))
        for plan in (bucket.plan for bucket in members if bucket.plan.travels):
            layout = plan_smaller(plan, num_shards, direct_from)
            plain += layout.wire_numel * plan.compute_dtype.itemsize
            total += 2 * layout.whole_numel * plan.compute_dtype.itemsize
    return WireBytes(total, plain)


def _packed(payloads: Sequence[int]) -> int:
    """Bytes of the message that holds them: a single one is sent from where it lies."""
    return sum(payloads) if len(payloads) == 1 else sum(map(aligned_bytes, payloads))


def reduce_traffic(buckets: Sequence[AnyBucket], *, were_summed: bool = False) -> WireBytes:
    """Of the reduction over the shard axis; of gradients that ``were_summed`` before they travel, if so."""
    total = plain = 0
    for bucket in (bucket for bucket in buckets if bucket.plan.reduce.indices):
        plan = bucket.plan
        itemsize = (plan.sum_dtype if were_summed else plan.wire_dtype).itemsize
        if plan.exchanges:
            total += bucket.pgs.axes.shard.size * aligned_bytes(bucket.scatter.row_bytes)
        else:
            total += plan.reduce.wire_numel * itemsize
        plain += plan.reduce.wire_numel * (plan.reduce_dtype.itemsize if plan.gradient_is_encoded else itemsize)
    return WireBytes(total, plain)


def all_reduce_traffic(buckets: Sequence[AnyBucket]) -> WireBytes:
    """Of the reduction over the replicate axis."""
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
    """The buckets over each channel."""
    together: dict[ProcessGroups, list[AnyBucket]] = {}
    for bucket in buckets:
        together.setdefault(bucket.pgs, []).append(bucket)
    return list(together.items())
