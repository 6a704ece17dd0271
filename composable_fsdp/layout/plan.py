"""Everything about a group that is constant between steps, made by pure functions from shapes, dtypes and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from composable_fsdp.layout.bucket import GatherLayout, ReduceLayout, plan_gather, plan_reduce
from composable_fsdp.layout.shard import TensorShards

__all__ = ["BucketPlan", "GroupPlan", "ParameterSpec", "PlanOptions", "plan_group", "plan_smaller"]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the plan needs to know of one parameter. ``dim`` is the sharded dim, counted from the front."""

    name: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trainable: bool

    @property
    def bucket_key(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return (self.dtype, self.compute_dtype, self.reduce_dtype)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """``alias`` says that a gather over this axis moves nothing, so full parameters may be views of their shards."""

    num_shards: int
    direct_bytes: int
    alias: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The parameters ``indices`` of the group, which share their dtypes, and where their bytes lie.

    Invariant: ``aliased`` only where shard and full parameter have one dtype and one size.
    """

    indices: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gather: GatherLayout
    reduce: ReduceLayout
    aliased: bool

    @property
    def unsharded_bytes(self) -> int:
        """Memory that the unsharded parameters take beside the shards."""
        return 0 if self.aliased else self.gather.places.numel * self.compute_dtype.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes of one all-gather, all ranks' shares together."""
        return 0 if self.aliased else self.gather.wire_numel * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.gather.store.numel * self.dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        return sum(s.padded_numel * s.num_shards for s in self.reduce.shards) * self.reduce_dtype.itemsize


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's buckets. Invariant: every parameter of the group is in exactly one of them."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketPlan, ...]
    num_trainable: int

    @property
    def unsharded_bytes(self) -> int:
        return sum(bucket.unsharded_bytes for bucket in self.buckets)

    @property
    def wire_bytes(self) -> int:
        return sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def shard_bytes(self) -> int:
        return sum(bucket.shard_bytes for bucket in self.buckets)

    @property
    def reduce_bytes(self) -> int:
        return sum(bucket.reduce_bytes for bucket in self.buckets)


@lru_cache(maxsize=1024)
def plan_group(specs: tuple[ParameterSpec, ...], options: PlanOptions) -> GroupPlan:
    """The plan for one group; cheap to ask for again when ``requires_grad`` flips back and forth."""
    members: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault(spec.bucket_key, []).append(index)
    buckets = tuple(_plan_bucket(specs, tuple(indices), options) for indices in members.values())
    return GroupPlan(specs, buckets, num_trainable=sum(spec.trainable for spec in specs))


def _plan_bucket(specs: Sequence[ParameterSpec], indices: tuple[int, ...], options: PlanOptions) -> BucketPlan:
    first = specs[indices[0]]
    shards = [TensorShards(specs[i].shape, specs[i].dim, options.num_shards) for i in indices]
    trainable = [k for k, i in enumerate(indices) if specs[i].trainable]
    gather = plan_gather(shards, itemsize=first.compute_dtype.itemsize, direct_bytes=options.direct_bytes)
    same_dtype = first.reduce_dtype == first.compute_dtype
    reduce = plan_reduce(
        shards,
        trainable,
        itemsize=first.reduce_dtype.itemsize,
        direct_bytes=options.direct_bytes if same_dtype else _NEVER,
    )
    aliased = options.alias and first.dtype == first.compute_dtype
    return BucketPlan(indices, first.dtype, first.compute_dtype, first.reduce_dtype, gather, reduce, aliased)


def plan_smaller(bucket: BucketPlan, num_shards: int, direct_bytes: int) -> GatherLayout:
    """The gather of the same bucket from a smaller mesh, into the unsharded buffer that is there.

    A multiple of the larger number of shards is also one of the smaller, so the padded places always fit.
    """
    shards = [TensorShards(s.shape, s.dim, num_shards) for s in bucket.gather.shards]
    itemsize = bucket.compute_dtype.itemsize
    return plan_gather(shards, itemsize=itemsize, direct_bytes=direct_bytes, places=bucket.gather.places)


_NEVER = 1 << 62
"""More bytes than any parameter has: a gradient that must be cast cannot travel straight from where it lies."""
