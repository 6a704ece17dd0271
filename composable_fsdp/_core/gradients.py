"""The gradients of one group: from autograd through their reduction to the optimizer. Fused reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch

from composable_fsdp import trace
from composable_fsdp._core.buckets import ParamGroupBuckets
from composable_fsdp._core.events import (
    GRADIENT_TRANSITIONS,
    LOCAL_GRADIENTS,
    GradientOperation,
    GradientState,
    advance,
    after,
    describe_groups,
)
from composable_fsdp._core.gather import AnyBucket, Gatherable
from composable_fsdp._core.group_plan import GroupPlan, plan_group
from composable_fsdp._core.layout import aligned_bytes, payload_widths, plan_reduction
from composable_fsdp._core.memory import CommStreams, InFlight, group_by_key
from composable_fsdp._core.params import ShardedParameter, accept_gradients
from composable_fsdp._core.reduce import BucketReduceScatter, BucketReduction, ReducedBucket, stages_of


class WireBytes(NamedTuple):
    """The bytes of one collective's messages on one rank: outputs of an all-gather, inputs of a reduction.

    A rank sends, and receives, ``(size - 1) / size`` of these bytes.
    ``plain_bytes`` is the same without codecs and hooks.
    """

    bytes: int
    plain_bytes: int


def all_gather_wire_bytes(buckets: Sequence[Gatherable]) -> WireBytes:
    """Return the bytes of the all-gather over the shard axis, or of slices over a smaller one."""
    total = 0
    for pgs, members in group_by_key([bucket.pgs for bucket in buckets], buckets):
        sent = [bucket.sent_bytes() for bucket in members]
        packed = sum(payload_widths([payload for payloads, _ in sent for payload in payloads]))
        total += pgs.axes.shard.size * (packed + sum(zero_copy for _, zero_copy in sent))
    return WireBytes(total, sum(bucket.plan.wire_bytes for bucket in buckets))


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


_current_task = torch._C._current_graph_task_id

# Up to Python 3.11, a member takes as long as a call to look up on its enum.
_ARRIVING, _ACCUMULATE, _READY = GradientState.ARRIVING, GradientOperation.ACCUMULATE, GradientOperation.READY
_REDUCE, _COMPLETE = GradientOperation.REDUCE, GradientOperation.COMPLETE
_AFTER_ACCUMULATE, _AFTER_READY = after(GRADIENT_TRANSITIONS, _ACCUMULATE), after(GRADIENT_TRANSITIONS, _READY)
_AFTER_REDUCE = after(GRADIENT_TRANSITIONS, _REDUCE)


class AutogradTask:
    """Autograd's current task, one call of its engine, shared by all groups of a root.

    Attributes:
        number: autograd's id of the task, or -1 if there is none.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = -1

    @property
    def is_around_another(self) -> bool:
        """True while autograd runs another backward inside this one, as reentrant checkpoints do."""
        return self.number != -1 and self.number != _current_task()  # a tuple doubles the cost


class ParamGroupGradients:
    """The gradients of one :class:`ParamGroup`: their state, their buckets, and pending reductions.

    Invariant: ``state`` changes only through ``GRADIENT_TRANSITIONS``.
    """

    def __init__(self, name: str, tensors: ParamGroupBuckets) -> None:
        self.name = name
        self.divide_factor: float | None = None
        self.sum_only = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.owner: Callable[[], Any] = _nobody
        """Returns the FSDP state, whose root is told of complete gradients, or ``None``."""
        self.state = GradientState.NONE
        self.task = AutogradTask()
        self._tensors = tensors
        self.device = tensors.device
        """The device on which modules compute."""
        self.is_offloaded = tensors.is_offloaded
        """True if reduced gradients are moved to another device."""
        self._num_ready = 0
        """The number of gradients that have arrived since the last reduction or :meth:`hold`, and of ``_ahead``."""
        self._ahead = 0
        """The number of gradients whose arrival will change nothing else, so that their hooks only count them."""
        self.were_summed = False
        """True if any rank may hold sums of several microbatches."""
        self._are_set = False
        """True if gradients were ever set without autograd's accumulation."""
        self._partial: InFlight[list[ReducedBucket]] | None = None
        """The partial reduction over the shard axis, in flight or done, whose sum the next reduction includes."""

    def copy_settings(self, other: ParamGroupGradients) -> None:
        """Copy the settings of ``other``."""
        self.divide_factor, self.sum_only = other.divide_factor, other.sum_only
        self.all_reduce_hook = other.all_reduce_hook

    def holds(self, parameter: ShardedParameter) -> bool:
        """Return whether ``parameter`` has a gradient that is not in its sharded one yet, after a backward."""
        if self.state is GradientState.PARTIAL:
            return parameter.trainable
        own = parameter.accumulated is not None or parameter.unsharded.grad is not None
        return self.state is GradientState.LOCAL and own

    def arrive(self, *, is_nested: bool) -> bool:
        """Handle a new gradient of an unsharded parameter, except those counted by their hooks.

        With ``is_nested`` it comes from an autograd run inside that of the backward, as reentrant checkpoints have.
        Return whether all gradients have arrived, in LOCAL.
        """
        if self.state is not _ARRIVING:
            self.state = _AFTER_ACCUMULATE[self.state]
        if is_nested:  # more gradients may follow
            return False
        num_trainable = self._tensors.plan.num_trainable
        self._num_ready += 1
        if self._num_ready >= num_trainable:
            self._num_ready = 0
            self.state = _AFTER_READY[self.state]
            return True
        self._ahead = num_trainable - 1 - self._num_ready
        self._num_ready += self._ahead
        return False

    def complete(self) -> None:
        """Note that all gradients of this backward have arrived."""
        self._num_ready = 0
        self._advance(GradientOperation.READY)

    @property
    def has_partial(self) -> bool:
        """True if the next reduction includes sums over the shard axis."""
        return self._partial is not None

    def restore_partial(self, partial: InFlight[list[ReducedBucket]] | None) -> None:
        self._partial = partial

    @property
    def sums_are_in_flight(self) -> bool:
        """True if the last reduction is one over the shard axis only, and not complete."""
        return self._partial is not None and self.state is GradientState.REDUCING

    def contribute(self) -> None:
        """Take part in the next reduction even without gradients, since other ranks may have some."""
        if self._tensors.plan.num_trainable and self.state is not GradientState.ARRIVING:
            self._advance(GradientOperation.READY)

    def notice(self) -> None:
        """Take part in the next reduction if a gradient was set without autograd's accumulation.

        Pipelines that split backward add the gradients of weights to ``grad`` themselves.
        """
        parameters = (p for p in self._tensors.parameters if p.unsharded is not p.sharded)
        if any(parameter.unsharded.grad is not None for parameter in parameters):
            self._are_set = True
            self.contribute()

    def hold_set(self) -> None:
        """Keep gradients that were set since the last backward, before autograd adds to them in their own dtype."""
        if self.state not in LOCAL_GRADIENTS:
            self.notice()
        if self._are_set:
            self._accumulate()

    def note_sums(self) -> None:
        """Record the end of a backward without gradient synchronization, on this rank or on others."""
        self.were_summed = True

    def hold(self) -> None:
        """Keep this microbatch's gradients without reducing them, summed in the reduce dtype."""
        self._reset_counters()
        if self.state is GradientState.ARRIVING:
            self._advance(GradientOperation.READY)
        self._accumulate()

    def _accumulate(self) -> None:
        for bucket in self._tensors.buckets:
            for parameter in bucket.parameters:
                parameter.accumulate_gradient(bucket.plan.sum_dtype)

    def held(self) -> dict[ShardedParameter, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return what is not in the sharded gradient yet, by parameter: the full gradient, and the shard of sums.

        Either is ``None`` where there is none. Neither communicates, and both may be changed in place.
        """
        if self._partial is not None:
            self._partial.wait()
        if self.state is not GradientState.ARRIVING:
            self._accumulate()  # what was set since the last backward
        sums: dict[ShardedParameter, torch.Tensor] = {}
        for bucket in self._tensors.buckets:
            sums |= bucket.scatter.partial_shards()
        found = {parameter: (parameter.held_gradient, sums.get(parameter)) for parameter in self._tensors.parameters}
        return {parameter: parts for parameter, parts in found.items() if any(part is not None for part in parts)}

    def zero(self, parameters: Sequence[ShardedParameter], *, set_to_none: bool) -> None:
        """Set gradients of ``parameters`` that were not reduced to zero, or drop them with ``set_to_none``."""
        held = self.held()
        for parameter in parameters:
            for part in held.get(parameter, ()):
                if part is not None:
                    part.zero_()
            if set_to_none:
                parameter.drop_gradient()
        if set_to_none:
            for bucket in self._tensors.buckets:
                bucket.scatter.drop_partial_of(parameters)

    def drop(self) -> None:
        """Drop gradients that were not reduced, accumulated microbatches included."""
        self._reset_counters()
        for parameter in self._tensors.parameters:
            parameter.drop_gradient()
        for bucket in self._tensors.buckets:
            bucket.scatter.drop_partial()
        self._partial = None  # done, or failed: waiting again would raise again
        self.were_summed = False
        self._advance(GradientOperation.DROP)

    def _reset_counters(self) -> None:
        self._num_ready = self._ahead = 0

    # -- reductions

    def take(self) -> bool:
        """Reset the counters for a reduction of the gradients. Return False if there are none."""
        if self._partial is not None:
            self._partial.wait()  # the reduction includes its result
        before = self.state
        self._reset_counters()
        self.state = _AFTER_REDUCE[before]
        return self.state is not before

    def scatters_with(
        self, others: Sequence[ParamGroupGradients], fused_buckets: FusedBuckets
    ) -> Sequence[BucketReduceScatter]:
        """Return the fused buckets of this group and ``others``, or none if they cannot be reduced together."""
        if self._partial is not None or self.all_reduce_hook is not None:
            return ()
        if any(map(_settings_of(self).__ne__, map(_settings_of, others))):
            return ()
        return fused_buckets.fuse([self._tensors, *(other._tensors for other in others)])

    def reductions_of(self, scatters: Sequence[BucketReduceScatter]) -> list[BucketReduction]:
        """Take the gradients of ``scatters``, and return their reductions."""
        reductions = []
        for scatter in scatters:
            pgs = scatter.pgs
            reduction = plan_reduction(
                scatter.plan.sum_dtype,
                pgs.axes.num_ranks,
                averages=pgs.averages,
                divide_factor=self.divide_factor if pgs.axes.divide is None else pgs.axes.divide,
                sum_only=self.sum_only or scatter.own is not None,
            )
            buffers = scatter.prepare(reduction, were_summed=self.were_summed)
            if buffers is not None:
                divides_first = not self.sum_only and reduction.pre_divide == 1.0  # as FSDP2 does
                reductions.append(BucketReduction(scatter, reduction, buffers, self.all_reduce_hook, divides_first))
        return reductions

    def begin_reduction(self, pending: InFlight[list[ReducedBucket]], *, partial: bool) -> None:
        """Record the launch of ``pending``, the reduction of a backward."""
        self.were_summed = False
        self._partial = pending if partial else None

    def end_reduction(self, *, partial: bool) -> None:
        """Change the state after the reduction of a backward is done."""
        operation = GradientOperation.KEEP if partial else _COMPLETE
        self.state = advance(GRADIENT_TRANSITIONS, self.state, operation, self.name)

    @property
    def plan(self) -> GroupPlan:
        return self._tensors.plan

    @property
    def traffic(self) -> WireBytes:
        """The bytes that the reduction sends."""
        return reduce_scatter_wire_bytes(self._tensors.buckets, were_summed=self.were_summed)

    @property
    def scatters(self) -> list[BucketReduceScatter]:
        return [bucket.scatter for bucket in self._tensors.buckets]

    def _advance(self, operation: GradientOperation) -> None:
        self.state = advance(GRADIENT_TRANSITIONS, self.state, operation, self.name)


class HasGradients(Protocol):
    """A parameter group, as the hooks of its gradients refer to it."""

    gradients: ParamGroupGradients


def gradient_hook(group: HasGradients) -> Callable[[torch.Tensor], None]:
    """Return the hook for gradients of ``group``.

    It references the group weakly: Python's garbage collector does not see references held by tensor hooks, so a cycle
    through them would never be freed.
    """
    known = ref(group)

    def hook(_: torch.Tensor) -> None:
        group = known()
        if group is None:
            return
        gradients = group.gradients
        task = gradients.task.number
        if gradients._ahead and (task == _current_task() or task == -1):  # without a call per parameter
            gradients._ahead -= 1
        elif gradients.arrive(is_nested=task != -1 and task != _current_task()):
            state = gradients.owner()
            root = None if state is None else state.root
            if root is not None:
                root.gradient_ready(state)

    return hook


_is_offloaded = attrgetter("is_offloaded")
_settings_of = attrgetter("divide_factor", "sum_only", "were_summed", "_partial", "all_reduce_hook")
"""The settings in which gradients that are reduced together must agree."""


def reduce_together(
    members: Sequence[ParamGroupGradients],
    streams: CommStreams,
    fused_buckets: FusedBuckets | None = None,
    *,
    partial: bool = False,
) -> ReductionLaunch | None:
    """Return the reduction of all gradients of ``members``. Groups without gradients are skipped; ``None`` if all are.

    Args:
        members: the groups.
        streams: the streams to launch on.
        fused_buckets: fuses the messages of several groups if possible.
        partial: reduce over the shard axis only, and keep the sum, in the reduce dtype, for a later reduction.
    """
    taken = [member for member in members if member.take()]
    return ReductionLaunch(taken, streams, fused_buckets, partial=partial) if taken else None


class ReductionLaunch:
    """A reduction that can be launched, with the arguments of :func:`reduce_together`.

    Attributes:
        nbytes: the gradient bytes, in the dtype of the sum.
    """

    __slots__ = ("_fused_buckets", "_streams", "members", "nbytes", "partial")

    def __init__(
        self,
        members: Sequence[ParamGroupGradients],
        streams: CommStreams,
        fused_buckets: FusedBuckets | None,
        *,
        partial: bool,
    ) -> None:
        self.members, self.partial = members, partial
        self._streams, self._fused_buckets = streams, fused_buckets
        self.nbytes = sum(member.plan.gradient_bytes for member in members)

    def run(self) -> PendingReduction:
        """Take the gradients and launch their reduction. May be called once."""
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            begin = trace.now() if trace.listeners else None
            first, name = self.members[0], describe_groups([member.name for member in self.members])
            pending: InFlight[Any] | None = None
            for stage in stages_of(self._streams, self._reductions(), first.device, name, partial=self.partial):
                pending = stage.stream.run(stage.launch, stage.finish, after=pending)
            assert pending is not None
            for member in self.members:
                if trace.listeners:
                    moved, stream = member.traffic, self._streams.reduce.name
                    trace.emit(trace.Operation.REDUCE, member.name, moved.bytes, stream, begin, moved.plain_bytes)
                member.begin_reduction(pending, partial=self.partial)
            return PendingReduction(self, pending)
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def _reductions(self) -> list[BucketReduction]:
        first, *others = self.members
        if others and self._fused_buckets is not None and not self.partial:
            fused = first.reductions_of(first.scatters_with(others, self._fused_buckets))
            if fused:
                return fused
        reductions: list[BucketReduction] = []
        for member in self.members:  # no comprehension: it is a frame on the way of each step up to Python 3.11
            reductions += member.reductions_of(member.scatters)
        return reductions


class PendingReduction:
    """A reduction in flight. The queue that completes it owns it."""

    def __init__(self, launch: ReductionLaunch, pending: InFlight[list[ReducedBucket]]) -> None:
        self.launch = launch
        self._pending = pending

    def start(self) -> None:
        """Launch the second stage, which waited for the first."""
        self._pending.start()

    def complete(self, unread: list[PendingReduction] | None = None) -> None:
        """Wait, and set the sharded gradients; a partial reduction keeps its sums instead.

        Args:
            unread: earlier reductions that wait for the host. If there are any, or if flags would block the host, only
                the stream waits: this reduction holds no buffers then, and joins them.
        """
        launch, begin = self.launch, trace.now() if trace.listeners else None
        offloaded = any(map(_is_offloaded, launch.members))
        reduced = self._pending.synchronize() if offloaded else self._pending.wait()
        if unread is not None and (unread or any(bucket.may_come_later for bucket in reduced)):
            unread.append(self)
            return
        try:
            for bucket in reduced:
                if bucket.flags is not None:
                    self._pending.synchronize()
                    bucket = bucket.select()
                accept_gradients(bucket.parameters, bucket.gradients)
        except RuntimeError:
            for parameter in (parameter for bucket in reduced for parameter in bucket.parameters):
                parameter.check_grad_dtype()  # the cause, if that of torch's error
            raise
        for member in launch.members:
            member.end_reduction(partial=launch.partial)
            if trace.listeners and not launch.partial:
                trace.emit(trace.Operation.REDUCED, member.name, begin=begin)


def _nobody() -> None:
    return None


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
        made_of: list[object] = [part for t in members for part in (t, t.plan, t.process_groups[0].scatter)]
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
    return tuple(
        BucketReduceScatter(
            plan,
            [parameters[i] for i in plan.indices],
            pgs,
            first.device,
            parameters[plan.indices[0]].local.device,
            pin_memory=plan.pins_memory,
        )
        for plan in plan_group(specs, (pgs.plan_options(),)).buckets
    )
