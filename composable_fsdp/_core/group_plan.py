"""The states of a parameter group, and its constants, computed by pure functions from shapes, dtypes and options."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property, lru_cache
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

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
from composable_fsdp._core.memory import group_by_key
from composable_fsdp.errors import LifecycleError
from composable_fsdp.policies import CPUOffloadPolicy, OffloadPolicy

_WIDENED = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
"""Pairs of the dtype of computed gradients and the dtype of their sum."""

SMALL_BYTES = 1 << 19
"""Size of a group's full parameters up to which latency, not bandwidth, dominates its collectives."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTraits:
    """The properties that all parameters of a bucket share, and by which a group is divided into buckets.

    Args:
        dtype: dtype of the shard at rest.
        compute_dtype: dtype of the full parameter.
        reduce_dtype: dtype in which its gradients are reduced.
        gradient_dtype: dtype of the reduced gradient that users see, or ``None`` for that of autograd's gradients.
        arriving_dtype: dtype of the gradient from autograd, the widest if it varies.
        axes: index of the data-parallel axes that shard it, among those of the group.
        gather_claim: that of a gather kind, or ``None`` for a plain bucket.
        reduce_kind: the ``ReduceKind`` that sums gradients, in fp32, all of them packed; ``None``: the communicator.
        offload: the policy of the shard. ``OffloadPolicy()`` if the device of the modules is the host.
    """

    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype | None
    arriving_dtype: torch.dtype
    axes: int = 0
    gather_claim: GatherClaim | None = None
    reduce_kind: Hashable | None = None
    offload: OffloadPolicy = OffloadPolicy()  # noqa: RUF009 (frozen)


_TRAITS = tuple(each.name for each in fields(BucketTraits))
traits_of: Callable[[BucketTraits], tuple[Any, ...]] = attrgetter(*_TRAITS)
"""Returns the traits of a parameter or bucket, which compare equal for parameters of one bucket."""


@dataclass(frozen=True, slots=True)
class ParameterSpec(BucketTraits):
    """The properties of one parameter that a plan depends on.

    Args:
        shape: the shape that the data-parallel axes shard on ``dim``, which counts from the front.
        summed_before: its gradient may already be a sum over model-parallel ranks, made in ``reduce_dtype``, which a
            narrower dtype on the wire would round.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    trainable: bool
    summed_before: bool = False


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
        custom: callables of the user move bytes.
    """

    num_shards: int
    zero_copy_min_bytes: int
    reduce_direct_bytes: int
    alias: bool = False
    flags: bool = True
    widens: bool = False
    custom: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlan(BucketTraits):
    """The layouts and dtypes of one bucket: the parameters ``indices`` of the group.

    ``is_gathered``: an all-gather moves data, and full parameters take memory while they are unsharded.
    """

    indices: tuple[int, ...]
    gather: GatherLayout
    reduce: ReduceLayout
    wire_dtype: torch.dtype
    """dtype of gradients on the wire, unless a kind sums them or they were accumulated in ``sum_dtype`` before."""
    sum_dtype: torch.dtype
    """dtype in which gradients are summed."""
    is_gathered: bool

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

    Invariant: every parameter of the group is in exactly one bucket.
    """

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketPlan, ...]
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
    def gradient_bytes(self) -> int:
        """The bytes of the gradients over all ranks, in the dtype in which they are summed."""
        return sum(bucket.reduce.wire_numel * bucket.sum_dtype.itemsize for bucket in self.buckets)

    @cached_property
    def unsharded_bytes(self) -> int:
        return sum(bucket.unsharded_bytes for bucket in self.buckets)


def promoted(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Return ``specs`` with one reduce dtype for each pair of axes, to which those of trainable ones are promoted."""
    widest: dict[int, torch.dtype] = {}
    for spec in specs:
        dtype = spec.reduce_dtype
        if spec.trainable and dtype.is_floating_point:
            widest[spec.axes] = torch.promote_types(widest.get(spec.axes, dtype), dtype)
    return [
        replace(spec, reduce_dtype=widest[spec.axes])
        if spec.axes in widest and spec.reduce_dtype.is_floating_point
        else spec
        for spec in specs
    ]


@lru_cache(maxsize=1024)
def plan_group(specs: tuple[ParameterSpec, ...], options: tuple[PlanOptions, ...]) -> GroupPlan:
    """Return the plan of one group. Cached, as ``requires_grad`` may flip back and forth.

    Args:
        specs: the parameters.
        options: the options of each of the group's pairs of axes.
    """
    # Parameters with equal keys share a bucket, cut where that saves page-locked memory.
    members = group_by_key(map(traits_of, specs), range(len(specs)))
    num_trainable, is_custom = sum(spec.trainable for spec in specs), any(option.custom for option in options)
    buckets = tuple(
        _plan_bucket(specs, run, options, num_trainable)
        for _, indices in members
        for run in _runs(specs, tuple(indices), options)
    )
    return GroupPlan(specs, buckets, num_trainable, is_custom)


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


def _plan_bucket(
    specs: Sequence[ParameterSpec], indices: tuple[int, ...], options: Sequence[PlanOptions], group_trainable: int
) -> BucketPlan:
    first = specs[indices[0]]
    axes = options[first.axes]
    # The parameters of the bucket, and which of them have gradients.
    shards = [TensorShards(specs[i].shape, specs[i].dim, axes.num_shards) for i in indices]
    trainable = [k for k, i in enumerate(indices) if specs[i].trainable]
    is_small = sum(prod(spec.shape) * spec.compute_dtype.itemsize for spec in specs) <= SMALL_BYTES
    itemsize = first.compute_dtype.itemsize
    packs = first.gather_claim is not None and first.gather_claim.packs
    # The all-gather: in the dtype of computation.
    gather = plan_gather(
        shards,
        itemsize=itemsize,
        zero_copy_min_bytes=NEVER_ZERO_COPY if packs else axes.zero_copy_min_bytes,
        encoded=packs,
    )
    # The reduction: summed in the reduce dtype, and sent in a narrower one if the backend widens it.
    is_claimed = first.reduce_kind is not None
    sum_dtype = torch.float32 if is_claimed else first.reduce_dtype
    widest = next((specs[i] for i in indices if specs[i].summed_before), first)  # a bucket has one wire dtype
    wire_dtype = sum_dtype if is_claimed else _wire_dtype(widest, axes)
    # Gradients that need no cast may be sent from where they are.
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
        **dict(zip(_TRAITS, traits_of(first), strict=True)),
        indices=indices,
        gather=gather,
        reduce=reduce,
        wire_dtype=wire_dtype,
        sum_dtype=sum_dtype,
        is_gathered=_is_gathered(first, axes),
    )


def _is_gathered(spec: ParameterSpec, axes: PlanOptions) -> bool:
    """Return False if full parameters like ``spec`` are the shards. What a single rank casts is freed between uses."""
    if spec.gather_claim is not None:
        return spec.gather_claim.is_gathered
    return not axes.alias or spec.dtype != spec.compute_dtype or isinstance(spec.offload, CPUOffloadPolicy)


# -- The states of a group's parameters and gradients, and the events of a step


class Key(Enum):
    """An ``Enum`` hashed by identity, which is faster: ``Enum`` hashes member names in Python."""

    __hash__ = object.__hash__


class Pass(Key):
    """The pass that a root is in."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ParameterState(Key):
    """The state of a group's parameters."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"
    SHRUNK = "SHRUNK"
    """Resharded after forward to a smaller mesh: the sharded parameters are registered, and a larger slice is kept."""


class ParameterOperation(Key):
    """The operations on a group's parameters."""

    UNSHARD = "UNSHARD"
    WAIT = "WAIT"
    RESHARD = "RESHARD"
    SHRINK = "SHRINK"


class GradientState(Key):
    """The state of a group's gradients."""

    NONE = "NONE"
    ARRIVING = "ARRIVING"
    """Some gradients, but not all, have arrived in this backward. They are not yet reduced."""
    LOCAL = "LOCAL"
    """All gradients that this backward gives have arrived, or earlier ones are held. They are not yet reduced."""
    REDUCING = "REDUCING"
    PARTIAL = "PARTIAL"
    """Reduced over the shard axis and kept for a later reduction."""
    REDUCED = "REDUCED"


class GradientOperation(Key):
    """The operations on a group's gradients."""

    ACCUMULATE = "ACCUMULATE"
    """A gradient arrived."""
    READY = "READY"
    """All gradients have arrived, or this rank contributes or holds those that it has."""
    REDUCE = "REDUCE"
    KEEP = "KEEP"
    COMPLETE = "COMPLETE"
    DROP = "DROP"


_P, _PO = ParameterState, ParameterOperation
PARAMETER_TRANSITIONS: Mapping[tuple[ParameterState, ParameterOperation], ParameterState] = {
    (_P.SHARDED, _PO.UNSHARD): _P.UNSHARDING,
    (_P.SHARDED, _PO.RESHARD): _P.SHARDED,
    (_P.UNSHARDING, _PO.UNSHARD): _P.UNSHARDING,  # already prefetched
    (_P.UNSHARDING, _PO.WAIT): _P.UNSHARDED,
    (_P.UNSHARDING, _PO.RESHARD): _P.SHARDED,  # prefetched, never used
    (_P.UNSHARDED, _PO.UNSHARD): _P.UNSHARDED,
    (_P.UNSHARDED, _PO.WAIT): _P.UNSHARDED,
    (_P.UNSHARDED, _PO.RESHARD): _P.SHARDED,
    (_P.UNSHARDED, _PO.SHRINK): _P.SHRUNK,
    (_P.SHRUNK, _PO.UNSHARD): _P.UNSHARDING,  # from the smaller mesh
    (_P.SHRUNK, _PO.RESHARD): _P.SHARDED,
}

_G, _GO = GradientState, GradientOperation
GRADIENT_TRANSITIONS: Mapping[tuple[GradientState, GradientOperation], GradientState] = {
    **{(state, _GO.ACCUMULATE): _G.ARRIVING for state in _G},
    **{(state, _GO.READY): _G.LOCAL for state in _G},
    (_G.NONE, _GO.REDUCE): _G.NONE,  # not used in this backward
    (_G.ARRIVING, _GO.REDUCE): _G.REDUCING,  # the other gradients do not come in this backward
    (_G.ARRIVING, _GO.COMPLETE): _G.ARRIVING,  # an earlier reduction ended after new gradients arrived
    (_G.ARRIVING, _GO.KEEP): _G.ARRIVING,
    (_G.LOCAL, _GO.REDUCE): _G.REDUCING,
    (_G.LOCAL, _GO.COMPLETE): _G.LOCAL,
    (_G.LOCAL, _GO.KEEP): _G.LOCAL,
    (_G.REDUCING, _GO.REDUCE): _G.REDUCING,
    (_G.REDUCING, _GO.COMPLETE): _G.REDUCED,
    (_G.REDUCING, _GO.KEEP): _G.PARTIAL,
    (_G.PARTIAL, _GO.REDUCE): _G.REDUCING,  # used in an earlier backward, but not in the last
    (_G.PARTIAL, _GO.KEEP): _G.PARTIAL,  # the earlier of two reductions in flight
    (_G.PARTIAL, _GO.COMPLETE): _G.PARTIAL,
    (_G.REDUCED, _GO.REDUCE): _G.REDUCED,
    (_G.REDUCED, _GO.COMPLETE): _G.REDUCED,  # the earlier of two reductions in flight
    (_G.REDUCED, _GO.KEEP): _G.PARTIAL,  # this reduction is partial, an earlier one was not
    **{(state, _GO.DROP): _G.NONE for state in _G},
}

LOCAL_GRADIENTS = frozenset({_G.ARRIVING, _G.LOCAL})
"""The states with gradients that are not yet reduced."""
HELD_GRADIENTS = LOCAL_GRADIENTS | {_G.PARTIAL}
"""The states with gradients that are not yet in the sharded ones."""

S = TypeVar("S", bound=Key)
Op = TypeVar("Op", bound=Key)


def after(table: Mapping[tuple[S, Op], S], operation: Op) -> Mapping[S, S]:
    """Return the states after ``operation`` by those before it. Hot code uses them, and :func:`advance` to raise."""
    return {state: table[state, op] for state, op in table if op is operation}


def advance(table: Mapping[tuple[S, Op], S], state: S, operation: Op, group: str) -> S:
    """Return the state after ``operation``, or raise a ``LifecycleError`` with the legal operations of ``group``."""
    try:
        return table[state, operation]
    except KeyError:
        legal = ", ".join(o.name for s, o in table if s is state)
        raise LifecycleError(
            f"group {group!r} is {state.name}: {operation.name} is not legal here (legal: {legal}). "
            "After an exception in forward or backward, call reset_iter_state() on the root module."
        ) from None


def describe_groups(names: Sequence[str]) -> str:
    """Return the name in errors of several groups that share a collective."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} groups)"


class Hook(Key):
    """A hook of the runtime that fires for a group, or for the whole root."""

    PRE_FORWARD = "pre-forward"
    POST_FORWARD = "post-forward"
    END_FORWARD = "end of forward"
    PRE_BACKWARD = "pre-backward"
    GRAD_READY = "gradients ready"
    POST_BACKWARD = "post-backward"
    END_BACKWARD = "end of backward"


class Event(NamedTuple):
    """One firing of a hook. ``group`` is empty for the ends of passes."""

    hook: Hook
    group: str = ""

    def __str__(self) -> str:
        return f"{self.hook.value} {self.group}".rstrip()
