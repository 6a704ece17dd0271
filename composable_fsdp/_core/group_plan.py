"""The constants of a parameter group between steps, computed by pure functions from shapes, dtypes and options."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from composable_fsdp._core.layout import (
    NEVER_ZERO_COPY,
    GatherLayout,
    ReduceLayout,
    TensorShards,
    aligned_bytes,
    cut_pinned,
    plan_gather,
    plan_reduce,
)
from composable_fsdp.policies import CPUOffloadPolicy, OffloadPolicy

_WIDENED = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
"""Pairs of the dtype of computed gradients and the dtype of their sum."""

_SMALL_FRACTION = 64
"""The smallest parameters that together have less than this fraction (1/64) of a group's bytes delay no other."""

SMALL_BYTES = 1 << 19
"""Size of a group's full parameters up to which latency, not bandwidth, dominates its collectives."""


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """How the bytes of a group are divided into messages.

    Args:
        zero_copy: large parameters have a transfer of their own, without a copy. Otherwise all share one message.
        grad_buckets: the maximum number of gradient buckets. More cost a launch each.
    """

    zero_copy: bool = True
    grad_buckets: int = 4


class GatherClaim(NamedTuple):
    """A gather kind's answer that it makes the bucket of a parameter. Each bucket has parameters of one claim.

    Args:
        kind: the class of the kind.
        key: what parameters of one bucket have in common, beside their dtypes and axes.
        is_gathered: True if an all-gather moves data, and full parameters take memory while they are unsharded.
        packs: True if all shards of a bucket are sent in one message. Otherwise large ones may be zero-copy.
    """

    kind: type
    key: Hashable = None
    is_gathered: bool = True
    packs: bool = True


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The properties of one parameter that a plan depends on.

    Args:
        shape: the shape that the data-parallel axes shard on ``dim``, which counts from the front.
        dtype: dtype of the shard at rest.
        gradient_dtype: dtype of the reduced gradient that users see, or ``None`` for that of autograd's gradients.
        axes: index of the data-parallel axes that shard it, among those of the group.
        gather_claim: that of a gather kind, or ``None`` for a plain bucket.
        reduce_kind: the ``ReduceKind`` of its gradient, which then is summed in fp32; ``None``: the communicator sums.
        summed_before: its gradient may already be a sum over model-parallel ranks, made in ``reduce_dtype``, which a
            narrower dtype on the wire would round.
        offload: the policy of its shard. ``OffloadPolicy()`` if the device of the modules is the host.
        autograd_dtype: dtype of its gradient from autograd, the widest if it varies, or ``None`` for ``compute_dtype``.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype | None
    trainable: bool
    axes: int = 0
    gather_claim: GatherClaim | None = None
    reduce_kind: Hashable | None = None
    summed_before: bool = False
    offload: OffloadPolicy = OffloadPolicy()  # noqa: RUF009 (frozen)
    autograd_dtype: torch.dtype | None = None

    @property
    def arriving_dtype(self) -> torch.dtype:
        """The dtype of the gradient from autograd."""
        return self.autograd_dtype or self.compute_dtype

    @property
    def bucket_key(self) -> tuple[object, ...]:
        return (
            self.axes,
            self.gather_claim,
            self.reduce_kind,
            self.dtype,
            self.compute_dtype,
            self.reduce_dtype,
            self.gradient_dtype,
            self.arriving_dtype,
            self.offload,
        )


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The properties of one pair of data-parallel axes that a plan depends on.

    Args:
        num_shards: ranks of the shard axis.
        zero_copy_min_bytes: full size in bytes from which a zero-copy all-gather beats a copy into the packed message.
        reduce_direct_bytes: the same for a reduce-scatter.
        alias: one rank holds all, so that full parameters may be the shards.
        flags: messages carry a flag per parameter that says if any rank had a gradient. There are none for a large
            parameter that is its group's only trainable one: it is reduced on every rank or on none.
        widens: 16-bit gradients may be summed in fp32 without a cast before the collective.
        grad_bucket_bytes: bytes of gradients from which a gradient bucket is worth a reduction of its own.
        max_grad_buckets: the maximum number of gradient buckets.
        custom: callables of the user move bytes.
    """

    num_shards: int
    zero_copy_min_bytes: int
    reduce_direct_bytes: int
    alias: bool = False
    flags: bool = True
    widens: bool = False
    grad_bucket_bytes: int = NEVER_ZERO_COPY
    max_grad_buckets: int = MessageSizes().grad_buckets
    custom: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The layouts and dtypes of one bucket: the parameters ``indices`` of the group.

    ``is_gathered``: an all-gather moves data, and full parameters take memory while they are unsharded.
    """

    indices: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype | None
    arriving_dtype: torch.dtype
    axes: int
    grad_bucket: int
    gather_claim: GatherClaim | None
    reduce_kind: Hashable | None
    """Sums the gradients, in fp32, all of them packed; ``None``: the communicator does."""
    gather: GatherLayout
    reduce: ReduceLayout
    wire_dtype: torch.dtype
    """dtype of gradients on the wire, unless a kind sums them or they were accumulated in ``sum_dtype`` before."""
    sum_dtype: torch.dtype
    """dtype in which gradients are summed."""
    is_gathered: bool
    offload: OffloadPolicy

    @property
    def pins_memory(self) -> bool:
        """True if shards and reduced gradients are in page-locked memory."""
        return _is_pinned(self.offload)

    @property
    def full_bytes(self) -> int:
        """The size of the full parameters in bytes, in whatever memory."""
        return self.gather.places.numel * self.compute_dtype.itemsize

    @property
    def unsharded_bytes(self) -> int:
        """The memory in bytes that the parameters take while unsharded, beside the shards."""
        return self.full_bytes if self.is_gathered else 0

    @property
    def wire_bytes(self) -> int:
        """The bytes of one all-gather over all ranks, without codecs and hooks."""
        return self.gather.wire_numel * self.compute_dtype.itemsize if self.is_gathered else 0

    @property
    def shard_bytes(self) -> int:
        return self.gather.store.numel * self.dtype.itemsize


@dataclass(frozen=True)
class GroupPlan:
    """The buckets of one parameter group.

    ``grad_buckets`` has the number of trainable parameters of each gradient bucket, in the order in which gradient
    buckets are reduced. Invariant: every parameter of the group is in exactly one bucket.
    """

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketPlan, ...]
    grad_buckets: tuple[int, ...]
    grad_bucket_bytes: tuple[int, ...]
    """Bytes of each gradient bucket's gradients over all ranks, in the dtype in which they are summed."""
    in_grad_buckets: bool
    """True if gradient buckets are worth reductions of their own. False if most of their parameters are frozen."""
    num_trainable: int
    is_custom: bool
    """True if callables of the user move bytes: then no collective is fused with those of other groups."""

    @cached_property
    def full_bytes(self) -> int:
        """The size of the full parameters in bytes, in whatever memory."""
        return sum(bucket.full_bytes for bucket in self.buckets)

    @cached_property
    def is_sent(self) -> bool:
        """True if a mesh axis with several ranks shards the group."""
        return any(bucket.gather.num_shards > 1 for bucket in self.buckets)

    @cached_property
    def trainable_buckets(self) -> list[int]:
        """The gradient buckets with trainable parameters."""
        return [number for number, trainable in enumerate(self.grad_buckets) if trainable]

    @cached_property
    def is_small(self) -> bool:
        """True if the group is sent at all and is small enough to share collectives with other groups."""
        return self.full_bytes <= SMALL_BYTES and self.is_sent

    @cached_property
    def unsharded_bytes(self) -> int:
        return sum(bucket.unsharded_bytes for bucket in self.buckets)


@lru_cache(maxsize=1024)
def plan_group(specs: tuple[ParameterSpec, ...], options: tuple[PlanOptions, ...]) -> GroupPlan:
    """Return the plan of one group. Cached, as ``requires_grad`` may flip back and forth.

    Args:
        specs: the parameters.
        options: the options of each of the group's pairs of axes.
    """
    grad_bucket_of = _grad_buckets(specs, options)
    members: dict[tuple[int, object], list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault((grad_bucket_of[index], spec.bucket_key), []).append(index)
    grad_buckets = [0] * (1 + max(grad_bucket_of, default=0))
    for grad_bucket, spec in zip(grad_bucket_of, specs, strict=True):
        grad_buckets[grad_bucket] += spec.trainable
    buckets = tuple(
        _plan_bucket(specs, run, options, grad_bucket, sum(grad_buckets))
        for (grad_bucket, _), indices in members.items()
        for run in _runs(specs, tuple(indices), options)
    )
    grad_bucket_bytes = [0] * len(grad_buckets)
    for bucket in buckets:
        grad_bucket_bytes[bucket.grad_bucket] += bucket.reduce.wire_numel * bucket.sum_dtype.itemsize
    least = max(option.grad_bucket_bytes for option in options)
    in_grad_buckets = len(grad_buckets) > 1 and all(nbytes >= least for nbytes in grad_bucket_bytes if nbytes)
    num_trainable, is_custom = sum(grad_buckets), any(option.custom for option in options)
    sizes = tuple(grad_buckets), tuple(grad_bucket_bytes)
    return GroupPlan(specs, buckets, *sizes, in_grad_buckets, num_trainable, is_custom)


def _grad_buckets(specs: Sequence[ParameterSpec], options: Sequence[PlanOptions]) -> list[int]:
    """Return the gradient bucket of each parameter; the last parameters are in the first gradient bucket.

    A gradient bucket has at least an equal share of the large parameters' bytes; the last may have half of that.

    Backward reaches parameters roughly in that order. Norms and biases are an exception: modules often register them
    after parameters that forward uses later. Such small ones are in the last gradient bucket, so that no other gradient
    bucket waits for them. Claimed parameters are not split: their kinds take whole messages.
    """
    grad_bucket_of = [0] * len(specs)
    gathered = any(spec.gather_claim is not None and spec.gather_claim.is_gathered for spec in specs)
    if gathered or any(spec.reduce_kind is not None for spec in specs):
        return grad_bucket_of
    least = max(option.grad_bucket_bytes for option in options)
    sizes = [prod(spec.shape) * _wire_dtype(spec, options[spec.axes]).itemsize for spec in specs]
    small_bytes = _small_bytes(sizes)
    is_small = [size <= small_bytes for size in sizes]
    grad_bucket, filled, left = 0, 0, sum(size for size in sizes if size > small_bytes)
    share = max(least, left // max(1, min(option.max_grad_buckets for option in options)))
    for index in reversed(range(len(specs))):
        if is_small[index]:
            continue
        grad_bucket_of[index] = grad_bucket
        filled, left = filled + sizes[index], left - sizes[index]
        if filled >= share and left >= max(least, share // 2):
            grad_bucket, filled = grad_bucket + 1, 0
    return [grad_bucket if small else of for small, of in zip(is_small, grad_bucket_of, strict=True)]


def _is_pinned(offload: OffloadPolicy) -> bool:
    return isinstance(offload, CPUOffloadPolicy) and offload.pin_memory


def _runs(
    specs: Sequence[ParameterSpec], indices: tuple[int, ...], options: Sequence[PlanOptions]
) -> list[tuple[int, ...]]:
    """Cut the parameters ``indices``, which could share a bucket, where that saves page-locked memory.

    Claimed parameters are not cut: their kinds take whole messages.
    """
    first = specs[indices[0]]
    if not _is_pinned(first.offload) or first.gather_claim or first.reduce_kind is not None:
        return [indices]
    sizes = []
    for spec in map(specs.__getitem__, indices):
        numel = TensorShards(spec.shape, spec.dim, options[spec.axes].num_shards).padded_numel
        gradient_dtype = spec.gradient_dtype or spec.reduce_dtype
        gradient = aligned_bytes(numel * gradient_dtype.itemsize) if spec.trainable else 0
        sizes.append((aligned_bytes(numel * spec.dtype.itemsize), gradient))
    return [indices[run.start : run.stop] for run in cut_pinned(tuple(sizes))]


def _wire_dtype(spec: ParameterSpec, axes: PlanOptions) -> torch.dtype:
    """Return the dtype of the gradient of ``spec`` on the wire unless a kind sums it."""
    pair = (spec.arriving_dtype, spec.reduce_dtype)
    return spec.arriving_dtype if axes.widens and pair in _WIDENED and not spec.summed_before else spec.reduce_dtype


def _small_bytes(sizes: Sequence[int]) -> int:
    """Return the largest size such that all parameters up to it are together a small part of ``sizes``."""
    small = filled = 0
    for size, same in groupby(sorted(sizes)):
        filled += sum(same)
        if filled * _SMALL_FRACTION > sum(sizes):
            break
        small = size
    return small


def _plan_bucket(
    specs: Sequence[ParameterSpec],
    indices: tuple[int, ...],
    options: Sequence[PlanOptions],
    grad_bucket: int,
    group_trainable: int,
) -> BucketPlan:
    first = specs[indices[0]]
    axes = options[first.axes]
    shards = [TensorShards(specs[i].shape, specs[i].dim, axes.num_shards) for i in indices]
    trainable = [k for k, i in enumerate(indices) if specs[i].trainable]
    is_small = sum(prod(spec.shape) * spec.compute_dtype.itemsize for spec in specs) <= SMALL_BYTES
    itemsize = first.compute_dtype.itemsize
    packs = first.gather_claim is not None and first.gather_claim.packs
    gather = plan_gather(
        shards,
        itemsize=itemsize,
        zero_copy_min_bytes=NEVER_ZERO_COPY if packs else axes.zero_copy_min_bytes,
        encoded=packs,
    )
    is_claimed = first.reduce_kind is not None
    sum_dtype = torch.float32 if is_claimed else first.reduce_dtype
    widest = next((specs[i] for i in indices if specs[i].summed_before), first)  # a bucket has one wire dtype
    wire_dtype = sum_dtype if is_claimed else _wire_dtype(widest, axes)
    as_it_is = wire_dtype == first.arriving_dtype and not is_claimed
    reduce = plan_reduce(
        shards,
        trainable,
        itemsize=wire_dtype.itemsize,
        zero_copy_min_bytes=axes.reduce_direct_bytes if as_it_is else NEVER_ZERO_COPY,
        flags=axes.flags and (group_trainable > 1 or is_small),
        encoded=is_claimed,
    )
    return BucketPlan(
        indices,
        first.dtype,
        first.compute_dtype,
        first.reduce_dtype,
        first.gradient_dtype,
        first.arriving_dtype,
        first.axes,
        grad_bucket,
        first.gather_claim,
        first.reduce_kind,
        gather,
        reduce,
        wire_dtype,
        sum_dtype,
        _is_gathered(first, axes),
        first.offload,
    )


def _is_gathered(spec: ParameterSpec, axes: PlanOptions) -> bool:
    """Return False if full parameters like ``spec`` are the shards. What a single rank casts is freed between uses."""
    if spec.gather_claim is not None:
        return spec.gather_claim.is_gathered
    return not axes.alias or spec.dtype != spec.compute_dtype or isinstance(spec.offload, CPUOffloadPolicy)
