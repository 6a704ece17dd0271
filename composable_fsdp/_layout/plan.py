"""Everything about a group that is constant between steps, made by pure functions from shapes, dtypes and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import TypeAlias

import torch

from composable_fsdp._layout.bucket_layout import (
    NEVER_DIRECT,
    FlatLayout,
    GatherLayout,
    ReduceLayout,
    plan_gather,
    plan_reduce,
    worth_whole,
)
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp.codecs.communication_policy import PLAIN, GradientCodecs
from composable_fsdp.codecs.protocol import Codec

__all__ = [
    "SMALL_BYTES",
    "BucketPlan",
    "GroupPlan",
    "ParameterSpec",
    "PlanOptions",
    "Residence",
    "plan_group",
    "plan_smaller",
]


_WIDENED = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
"""Pairs of dtypes in which gradients come, and are added up."""

_MOST_BATCHES = 4
"""Of a group: more would cost more than the memory is worth."""

_SMALL_PART = 64
"""Of a group's bytes: the smallest parameters that have less together are not waited for."""

SMALL_BYTES = 1 << 19
"""Of a group's full parameters, up to which its collectives cost more by their number than by their bytes."""


class Residence(Enum):
    """Where the full parameters of a bucket are while modules compute with them."""

    BUFFER = "buffer"
    """In memory of this rank's own, into which all shards travel."""
    SHARDS = "shards"
    """Where the shards rest: one rank has all, or ranks have that memory in common and their shards lie end to end."""
    COMMON = "common"
    """In memory that ranks have in common, where each casts its own shards to their places."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the plan needs to know of one parameter.

    Args:
        shape: of what the data-parallel axes cut, on ``dim``, counted from the front.
        dtype: in which the shard rests.
        gradient_dtype: of the reduced gradient that users see.
        axes: index of the data-parallel axes that cut it, among those of the group.
        extended: its local tensor decides by itself how it travels.
        codec: how its shards travel, if not in ``compute_dtype``.
        gradient_codecs: how its gradient travels, if not in ``reduce_dtype``.
        gradient_extended: its local tensor decides by itself how its gradient travels.
        alone: nothing else may be encoded together with it.
        summed_before: its gradient may be a sum over model-parallel ranks already, made in ``reduce_dtype``, which a
            narrower dtype on the wire would round.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype
    trainable: bool
    axes: int = 0
    extended: bool = False
    codec: Codec | None = None
    gradient_codecs: GradientCodecs = PLAIN
    gradient_extended: bool = False
    alone: bool = False
    summed_before: bool = False

    @property
    def bucket_key(self) -> BucketKey:
        return (
            self.axes,
            self.extended,
            self.codec,
            self.gradient_codecs,
            self.gradient_extended,
            self.dtype,
            self.compute_dtype,
            self.reduce_dtype,
            self.gradient_dtype,
            self.name if self.alone else "",
        )


BucketKey: TypeAlias = tuple[
    int, bool, Codec | None, GradientCodecs, bool, torch.dtype, torch.dtype, torch.dtype, torch.dtype, str
]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the plan needs to know of one pair of data-parallel axes.

    Args:
        num_shards: ranks of the shard axis.
        direct_bytes: full size from which an all-gather of its own beats a copy into a packed one.
        reduce_direct_bytes: the same for a reduce-scatter.
        alias: memory is common to all ranks of the axis, so that a gather need not move anything.
        flags: messages say which parameters had a gradient on any rank. Not those of a large parameter that is its
            group's only trainable one, which is reduced where its gradient is, or not at all.
        widens: 16-bit gradients may be added up in fp32 without being cast before they travel.
        batch_bytes: of some parameters' gradients, from which on they are worth a reduction of their own.
        whole_bytes: padding from which it is worth a launch that what causes it travels whole in an all-gather.
        reduce_whole_bytes: the same for a reduce-scatter.
    """

    num_shards: int
    direct_bytes: int
    reduce_direct_bytes: int
    alias: bool = False
    flags: bool = True
    widens: bool = False
    batch_bytes: int = NEVER_DIRECT
    whole_bytes: int = NEVER_DIRECT
    reduce_whole_bytes: int = NEVER_DIRECT


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The parameters ``indices`` of the group, which share their axes and dtypes, and where their bytes lie.

    Invariant: ``residence`` is ``BUFFER`` unless all ranks' shards, one after the other, are the full parameter.
    """

    indices: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype
    axes: int
    batch: int
    extended: bool
    codec: Codec | None
    gradient_codecs: GradientCodecs
    gradient_extended: bool
    gather: GatherLayout
    reduce: ReduceLayout
    wire_dtype: torch.dtype
    """In which gradients travel that are not encoded, unless they were summed in ``sum_dtype`` before."""
    residence: Residence

    @property
    def aliased(self) -> bool:
        """Whether full parameters are views of the shards."""
        return self.residence is Residence.SHARDS

    @property
    def travels(self) -> bool:
        """Whether a gather moves anything, and full parameters take memory for as long as they are needed."""
        return self.residence is Residence.BUFFER

    def own_places(self, rank: int) -> tuple[int, ...]:
        """Where the shards of ``rank`` begin, in elements, among full parameters that lie one after the other."""
        starts = zip(self.gather.places.offsets, self.gather.shards, strict=True)
        return tuple(offset + rank * shards.padded_numel for offset, shards in starts)

    def store_layout(self, rank: int) -> FlatLayout:
        """Where the shards of ``rank`` lie: by themselves, or where full parameters lie that ranks have in common."""
        if not self.aliased:
            return self.gather.store
        return FlatLayout(self.own_places(rank), self.gather.places.numel)

    @property
    def full_bytes(self) -> int:
        """Of the full parameters, wherever they lie."""
        return self.gather.places.numel * self.compute_dtype.itemsize

    @property
    def unsharded_bytes(self) -> int:
        """Memory that the unsharded parameters take while they are there."""
        return self.full_bytes if self.travels else 0

    @property
    def wire_bytes(self) -> int:
        """Bytes of one all-gather without codecs and hooks, all ranks' shares together."""
        return self.gather.wire_numel * self.compute_dtype.itemsize if self.travels else 0

    @property
    def whole_bytes(self) -> int:
        """Bytes of parameters that travel whole."""
        return self.gather.whole_numel * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.gather.store.numel * self.dtype.itemsize

    @property
    def exchanges(self) -> bool:
        """Whether gradients travel over the shard axis in an all-to-all, to be added up where they arrive."""
        return self.gradient_codecs.shard is not None or self.gradient_extended

    @property
    def gradient_is_encoded(self) -> bool:
        """Whether gradients travel encoded over any axis, and so are added up in fp32."""
        return self.gradient_codecs != PLAIN or self.gradient_extended

    @property
    def sum_dtype(self) -> torch.dtype:
        """dtype in which gradients are added up."""
        return torch.float32 if self.gradient_is_encoded else self.reduce_dtype


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's buckets, and how many trainable parameters each batch of them has, in the order in which batches are
    reduced. Invariant: every parameter of the group is in exactly one bucket.
    """

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketPlan, ...]
    batches: tuple[int, ...]
    batch_bytes: tuple[int, ...]
    """Of each batch's gradients in the dtype in which they are added up, all ranks' parts together."""
    in_batches: bool
    """Whether batches are worth reductions of their own: not where most of their parameters are frozen."""
    num_trainable: int

    @property
    def full_bytes(self) -> int:
        """Of the full parameters, wherever they lie."""
        return sum(bucket.full_bytes for bucket in self.buckets)

    @property
    def is_small(self) -> bool:
        """Whether it is worth while to send it together with others: if it is sent at all."""
        return self.full_bytes <= SMALL_BYTES and any(bucket.gather.num_shards > 1 for bucket in self.buckets)

    @property
    def unsharded_bytes(self) -> int:
        return sum(bucket.unsharded_bytes for bucket in self.buckets)

    @property
    def wire_bytes(self) -> int:
        return sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def shard_bytes(self) -> int:
        return sum(bucket.shard_bytes for bucket in self.buckets)


@lru_cache(maxsize=1024)
def plan_group(specs: tuple[ParameterSpec, ...], options: tuple[PlanOptions, ...]) -> GroupPlan:
    """The plan for one group; cheap to ask for again when ``requires_grad`` flips back and forth.

    Args:
        specs: the parameters.
        options: of each of the group's pairs of axes.
    """
    batch_of = _batches(specs, options)
    members: dict[tuple[int, BucketKey], list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault((batch_of[index], spec.bucket_key), []).append(index)
    batches = [0] * (1 + max(batch_of, default=0))
    for batch, spec in zip(batch_of, specs, strict=True):
        batches[batch] += spec.trainable
    buckets = tuple(
        _plan_bucket(specs, tuple(indices), options, batch, sum(batches)) for (batch, _), indices in members.items()
    )
    batch_bytes = [0] * len(batches)
    for bucket in buckets:
        batch_bytes[bucket.batch] += bucket.reduce.wire_numel * bucket.sum_dtype.itemsize
    least = max(option.batch_bytes for option in options)
    in_batches = len(batches) > 1 and all(nbytes >= least for nbytes in batch_bytes if nbytes)
    return GroupPlan(specs, buckets, tuple(batches), tuple(batch_bytes), in_batches, sum(batches))


def _batches(specs: Sequence[ParameterSpec], options: Sequence[PlanOptions]) -> list[int]:
    """The batch of each parameter: runs of as many bytes as are worth it, the last parameters in the first batch.

    A batch has at least a quarter of the large parameters' bytes; the last may have half of that.

    Backward comes to parameters in about that order. Not to norms and biases, which modules often register after what
    comes later in forward: such small ones go with the last batch, so that no other has to wait for them. What is
    encoded stays together, as codecs work on whole messages.
    """
    batch_of = [0] * len(specs)
    if any(spec.extended or spec.codec or spec.gradient_codecs != PLAIN or spec.gradient_extended for spec in specs):
        return batch_of
    least = max(option.batch_bytes for option in options)
    sizes = [prod(spec.shape) * _wire_dtype(spec, options[spec.axes]).itemsize for spec in specs]
    small_bytes = _small_bytes(sizes)
    is_small = [size <= small_bytes for size in sizes]
    batch, filled, left = 0, 0, sum(size for size in sizes if size > small_bytes)
    share = max(least, left // _MOST_BATCHES)
    for index in reversed(range(len(specs))):
        if is_small[index]:
            continue
        batch_of[index] = batch
        filled, left = filled + sizes[index], left - sizes[index]
        if filled >= share and left >= max(least, share // 2):
            batch, filled = batch + 1, 0
    return [batch if small else of for small, of in zip(is_small, batch_of, strict=True)]


def _wire_dtype(spec: ParameterSpec, axes: PlanOptions) -> torch.dtype:
    """In which the gradient of ``spec`` travels unless it is encoded."""
    pair = (spec.compute_dtype, spec.reduce_dtype)
    return spec.compute_dtype if axes.widens and pair in _WIDENED and not spec.summed_before else spec.reduce_dtype


def _small_bytes(sizes: Sequence[int]) -> int:
    """The most that the smallest parameters have, all of which together are a small part of ``sizes``."""
    small = filled = 0
    for size, same in groupby(sorted(sizes)):
        filled += sum(same)
        if filled * _SMALL_PART > sum(sizes):
            break
        small = size
    return small


def _plan_bucket(
    specs: Sequence[ParameterSpec],
    indices: tuple[int, ...],
    options: Sequence[PlanOptions],
    batch: int,
    group_trainable: int,
) -> BucketPlan:
    first = specs[indices[0]]
    axes = options[first.axes]
    shards = [TensorShards(specs[i].shape, specs[i].dim, axes.num_shards) for i in indices]
    trainable = [k for k, i in enumerate(indices) if specs[i].trainable]
    is_small = sum(prod(spec.shape) * spec.compute_dtype.itemsize for spec in specs) <= SMALL_BYTES
    itemsize = first.compute_dtype.itemsize
    as_values = not first.extended and first.codec is None
    aliased = (
        axes.alias
        and first.dtype == first.compute_dtype
        and as_values
        and (axes.num_shards == 1 or all(s.concatenates for s in shards))
    )
    whole_bytes = axes.whole_bytes if as_values and not aliased else NEVER_DIRECT
    gather = plan_gather(
        shards,
        itemsize=itemsize,
        direct_bytes=axes.direct_bytes if first.codec is None else NEVER_DIRECT,
        whole=worth_whole(shards, itemsize=itemsize, whole_bytes=whole_bytes),
    )
    encoded = first.gradient_codecs != PLAIN or first.gradient_extended
    sum_dtype = torch.float32 if encoded else first.reduce_dtype
    widest = next((specs[i] for i in indices if specs[i].summed_before), first)  # all of a bucket travel in one dtype
    wire_dtype = sum_dtype if encoded else _wire_dtype(widest, axes)
    as_it_is = wire_dtype == first.compute_dtype and not encoded
    reduce = plan_reduce(
        shards,
        trainable,
        itemsize=wire_dtype.itemsize,
        direct_bytes=axes.reduce_direct_bytes if as_it_is else NEVER_DIRECT,
        flags=axes.flags and (group_trainable > 1 or is_small),
        # An all-reduce does not widen.
        whole_bytes=NEVER_DIRECT if encoded or wire_dtype != sum_dtype else axes.reduce_whole_bytes,
    )
    return BucketPlan(
        indices,
        first.dtype,
        first.compute_dtype,
        first.reduce_dtype,
        first.gradient_dtype,
        first.axes,
        batch,
        first.extended,
        first.codec,
        first.gradient_codecs,
        first.gradient_extended,
        gather,
        reduce,
        wire_dtype,
        _residence(first, axes, shards),
    )


def _residence(spec: ParameterSpec, axes: PlanOptions, shards: Sequence[TensorShards]) -> Residence:
    """Of parameters like ``spec``. What one rank alone casts is freed between uses, like what travels."""
    if not axes.alias or spec.extended or spec.codec is not None:
        return Residence.BUFFER
    if axes.num_shards > 1 and not all(s.concatenates for s in shards):
        return Residence.BUFFER
    if spec.dtype == spec.compute_dtype:
        return Residence.SHARDS
    return Residence.COMMON if axes.num_shards > 1 else Residence.BUFFER


def plan_smaller(bucket: BucketPlan, num_shards: int, direct_bytes: int) -> GatherLayout:
    """The gather of the same bucket from a smaller mesh, into the unsharded buffer that is there.

    A multiple of the larger number of shards is also one of the smaller, so the padded places always fit. Places
    without padding fit where the smaller number divides the rows; elsewhere what travels whole does so here too.
    """
    shards = [TensorShards(s.shape, s.dim, num_shards) for s in bucket.gather.shards]
    whole = [i for i in bucket.gather.whole if shards[i].full_numel > shards[i].numel]
    return plan_gather(
        shards,
        itemsize=bucket.compute_dtype.itemsize,
        direct_bytes=direct_bytes,
        places=bucket.gather.places,
        whole=whole,
    )
