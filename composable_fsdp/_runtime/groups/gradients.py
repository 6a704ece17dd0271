"""The gradients of one group, from autograd's to those of the sharded parameters.

They travel in *batches*, each as soon as its gradients are there, so that a large group need not have all its gradients
in memory at once. The order of batches is part of the plan. A batch goes once those before it went, or at the end:
every rank makes the same launches in the same order, whichever parameters it used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from composable_fsdp import trace
from composable_fsdp._layout.grad_scaling import Reduction, plan_reduction
from composable_fsdp._memory.streams import CommStreams, InFlight
from composable_fsdp._runtime.collectives.grad_mode import without_grad
from composable_fsdp._runtime.collectives.packing import describe_groups
from composable_fsdp._runtime.collectives.reduce import BucketReduction, ReducibleBucket, launch_reduction
from composable_fsdp._runtime.collectives.reduce_scatter import ReducedBucket
from composable_fsdp._runtime.collectives.wire_bytes import WireBytes, reduce_scatter_wire_bytes
from composable_fsdp._runtime.groups.fused_reduce import Joiner
from composable_fsdp._runtime.groups.group_tensors import GroupTensors
from composable_fsdp._runtime.groups.profiling import labelled
from composable_fsdp._runtime.groups.state_machine import (
    GRADIENT_TRANSITIONS,
    GradientOperation,
    GradientState,
    advance,
)
from composable_fsdp._runtime.params.sharded_param import plain_access

__all__ = ["AutogradRun", "GroupGradients", "Launch", "PendingReduction", "reduce_together"]


class AutogradRun:
    """The run of autograd that is the backward under way, shared by all groups of a root.

    Attributes:
        number: autograd's own; -1 if none is known.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = -1

    @property
    def is_around_another(self) -> bool:
        """Whether autograd now runs another one, within it: reentrant checkpoints begin one each."""
        return self.number != -1 and self.number != torch._C._current_graph_task_id()  # a tuple costs as much again


class GroupGradients:
    """What became of the gradients of ``tensors``.

    Invariants: ``state`` changes only through the table of ``lifecycle``. The first ``_launched`` batches of the plan's
    order have been launched in this round; a round ends when the last one has.
    """

    def __init__(self, name: str, tensors: GroupTensors) -> None:
        self.name = name
        self.divide_factor: float | None = None
        self.sum_only = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.on_batch: Callable[[], None] = _nothing
        """Called when the next batch, not the last one, is complete."""
        self.on_last: Callable[[], None] = _nothing
        """Called when all gradients of the group are there."""
        self.state = GradientState.NONE
        self.are_held = False
        """Whether there are gradients that have not become those of the sharded parameters yet. Follows from ``state``,
        with which it changes: every hook asks, some several times.
        """
        self.run = AutogradRun()
        self.is_new = False
        """Whether autograd left some gradients, but not all, that were neither held nor reduced since."""
        self._tensors = tensors
        self._ready = 0
        self._arrived: list[int] = []
        """Gradients of each batch that are there and have not been launched, but for those of runs within this one."""
        self._launched = 0
        self.were_summed = False
        """Whether any rank may hold sums of several microbatches."""
        self._pending_partial: InFlight[list[ReducedBucket]] | None = None
        self._keeps_partial = False
        """Whether the next reduction has sums over the shard axis to add."""
        self.version_before_step: int | None = None
        """That of the shards at the first reduction of the step, where that changed what codecs remember."""

    def follow_choices(self, other: GroupGradients) -> None:
        """Takes over what was chosen for ``other``."""
        self.divide_factor, self.sum_only = other.divide_factor, other.sum_only
        self.all_reduce_hook = other.all_reduce_hook

    def arrive(self, batch: int) -> None:
        """Autograd has put a gradient on an unsharded parameter of ``batch``."""
        plan = self._tensors.plan
        if not self.is_new:  # with the second, they are LOCAL already
            self.is_new = True
            self._advance(GradientOperation.ACCUMULATE)
            if self._launched == 0:
                self._arrived = [0] * len(plan.batches)
        run = self.run.number
        # What :attr:`AutogradRun.is_around_another` says, without a call for each parameter.
        if run != -1 and run != torch._C._current_graph_task_id():  # a reentrant checkpoint's, which may come again
            if batch < self._launched:
                self._arrived[batch] += 1
            return
        self._ready += 1
        self._arrived[batch] += 1
        if self._ready >= plan.num_trainable:
            self._ready, self.is_new = 0, False
            self.on_last()
        elif plan.in_batches:
            batch = self._next
            if self._arrived[batch] >= plan.batches[batch] and any(plan.batches[batch + 1 :]):
                self.on_batch()

    @property
    def _next(self) -> int:
        """The batch that goes next: those of which nothing is trained are left out."""
        batches = self._tensors.plan.batches
        for k in range(self._launched, len(batches)):
            if batches[k]:
                return k
        return len(batches) - 1

    def contribute(self) -> None:
        """This rank takes part in the next reduction even if it has no gradient: the others may have some."""
        if self._tensors.plan.num_trainable:
            self._advance(GradientOperation.ACCUMULATE)

    def notice(self) -> None:
        """Counts gradients that lie on unsharded parameters and came there without autograd's accumulation."""
        parameters = (p for p in self._tensors.parameters if p.unsharded is not p.sharded)
        if any(parameter.unsharded.grad is not None for parameter in parameters):
            self.contribute()

    def note_sums(self) -> None:
        """A backward ended whose gradients are held, on this rank or on others."""
        self.were_summed = True

    def hold(self) -> None:
        """Keeps this microbatch's gradients unreduced, summed in the reduce dtype."""
        self._end_round()
        for bucket in self._tensors.buckets:
            for parameter in bucket.parameters:
                parameter.hold_gradient(bucket.plan.sum_dtype)

    def drop(self) -> None:
        """Forgets gradients that have not been reduced, accumulated microbatches included."""
        self._end_round()
        for parameter in self._tensors.parameters:
            parameter.drop_gradient()
        for bucket in self._tensors.buckets:
            bucket.scatter.drop_partial()
        self._keeps_partial = False
        self._pending_partial = None  # complete by now, or ended by an exception, which waiting again would repeat
        self.were_summed = False
        self._advance(GradientOperation.DROP)

    # -- residuals of error feedback

    @property
    def shards_changed(self) -> bool:
        """Whether the shards were changed in place since the first reduction of the step."""
        return self._tensors.version != self.version_before_step

    @property
    def are_waiting(self) -> bool:
        """Whether gradients wait for an optimizer, on sharded parameters, or for a later reduction."""
        return self.are_held or any(parameter.sharded.grad is not None for parameter in self._tensors.parameters)

    def commit_residuals(self) -> None:
        """The step has ended: what codecs remember of it is final."""
        self.version_before_step = None
        for bucket in self._tensors.buckets:
            bucket.scatter.commit()

    def roll_back_residuals(self) -> None:
        """The step has failed: codecs remember what they did before it."""
        self.version_before_step = None
        for bucket in self._tensors.buckets:
            bucket.scatter.roll_back()

    def _end_round(self) -> None:
        self._ready = self._launched = 0
        self._arrived, self.is_new = [], False

    # -- reductions

    def take_batch(self, streams: CommStreams) -> Launch:
        """The next batch, to be launched ahead of the others, which are not complete yet."""
        self._await_partial()
        batch = self._next
        self._launched = batch + 1
        self._arrived[batch] = 0
        return Launch([(self, [batch])], streams, None, partial=False, ends_round=False)

    def take_rest(self) -> list[int]:
        """Begins the end of a round: the batches still to go, the late ones last; none where nothing was there."""
        self._await_partial()
        before = self.state
        if self._advance(GradientOperation.REDUCE) is before:
            self._end_round()
            return []
        batches = self._tensors.plan.batches
        rest = [batch for batch in range(self._next, len(batches)) if batches[batch]]
        rest += [late for late in range(self._launched) if self._arrived[late]]
        self._end_round()
        return rest

    def _await_partial(self) -> None:
        """What an earlier reduction over the shard axis alone keeps is part of the next one."""
        pending, self._pending_partial = self._pending_partial, None
        if pending is not None:
            pending.wait()

    def jobs_of(self, batches: Sequence[int]) -> list[BucketReduction]:
        """What is to be reduced of ``batches``. Takes the gradients."""
        return self._jobs([bucket for bucket in self._tensors.buckets if bucket.plan.batch in batches])

    def jobs_with(self, others: Sequence[GroupGradients], joiner: Joiner) -> list[BucketReduction]:
        """The same of all of this group and of ``others`` in one message; none where they cannot share one."""
        choices = self._choices
        if self._keeps_partial or self.all_reduce_hook is not None or any(o._choices != choices for o in others):
            return []
        return self._jobs(joiner.join([self._tensors, *(other._tensors for other in others)]))

    @property
    def _choices(self) -> tuple[object, ...]:
        return self.divide_factor, self.sum_only, self.were_summed, self._keeps_partial, self.all_reduce_hook

    def _jobs(self, buckets: Sequence[ReducibleBucket]) -> list[BucketReduction]:
        jobs = []
        for bucket in buckets:
            reduction = self._reduction(bucket)
            if bucket.scatter.encoders and self.version_before_step is None:
                self.version_before_step = self._tensors.version
            scatter = bucket.scatter.prepare(reduction, were_summed=self.were_summed)
            if scatter is not None:
                divides_first = not self.sum_only and reduction.pre_divide == 1.0  # as FSDP2 does
                jobs.append(BucketReduction(bucket, reduction, scatter, self.all_reduce_hook, divides_first))
        return jobs

    def _reduction(self, bucket: ReducibleBucket) -> Reduction:
        return plan_reduction(
            bucket.plan.sum_dtype,
            bucket.pgs.axes.num_ranks,
            averages=bucket.pgs.averages,
            divide_factor=self.divide_factor,
            sum_only=self.sum_only or bucket.plan.gradient_is_encoded,
        )

    def begin_reduction(self, pending: InFlight[list[ReducedBucket]], *, partial: bool, ends_round: bool) -> None:
        """``pending`` has been launched."""
        if ends_round:
            self.were_summed = False
            self._keeps_partial = partial
        if partial:
            self._pending_partial = pending

    def end_reduction(self, *, partial: bool) -> None:
        """All that was launched in a round has come."""
        self._advance(GradientOperation.KEEP if partial else GradientOperation.COMPLETE)

    @property
    def device(self) -> torch.device:
        """Where modules compute."""
        return self._tensors.device

    @property
    def in_batches(self) -> bool:
        """Whether batches are worth reductions of their own."""
        return self._tensors.plan.in_batches

    @property
    def batch_bytes(self) -> Sequence[int]:
        """Of each batch's gradients, in the dtype in which they are added up."""
        return self._tensors.plan.batch_bytes

    def traffic_of(self, batches: Sequence[int]) -> WireBytes:
        """What the reduction of ``batches`` moves."""
        own = [bucket for bucket in self._tensors.buckets if bucket.plan.batch in batches]
        return reduce_scatter_wire_bytes(own, were_summed=self.were_summed)

    @property
    def is_offloaded(self) -> bool:
        """Whether reduced gradients end elsewhere than where modules compute."""
        return self._tensors.is_offloaded

    def _advance(self, operation: GradientOperation) -> GradientState:
        state = self.state = advance(GRADIENT_TRANSITIONS, self.state, operation, self.name)
        self.are_held = state is GradientState.LOCAL or state is GradientState.PARTIAL
        return state


Portion: TypeAlias = Sequence[tuple[GroupGradients, Sequence[int]]]
"""Batches of some groups that are reduced at once."""


def reduce_together(
    members: Sequence[GroupGradients], streams: CommStreams, joiner: Joiner | None = None, *, partial: bool = False
) -> list[Launch]:
    """Ends this round: what launches the gradients that are left of it, to be run one after the other.

    Args:
        members: of one group, batch by batch; of several, all at once. Those that have no gradients take no part.
        streams: where to launch.
        joiner: what several go in one message with, where they can.
        partial: only over the shard axis, all at once. The result is kept, in the reduce dtype, and part of a later
            reduction.
    """
    taken = [(member, rest) for member in members if (rest := member.take_rest())]
    if not taken:
        return []
    portions = [taken]
    if len(taken) == 1 and not partial and taken[0][0].in_batches:
        ((member, rest),) = taken
        portions = [[(member, [batch])] for batch in rest]
    return [
        Launch(portion, streams, joiner, partial=partial, ends_round=portion is portions[-1]) for portion in portions
    ]


class Launch:
    """A reduction to be launched. Final.

    Args:
        portion: what is reduced.
        streams: where.
        joiner: as in :func:`reduce_together`.
        partial: as there.
        ends_round: whether nothing is left of the round afterwards.
    """

    __slots__ = ("_joiner", "_streams", "ends_round", "members", "nbytes", "partial", "portion", "round_bytes")

    def __init__(
        self, portion: Portion, streams: CommStreams, joiner: Joiner | None, *, partial: bool, ends_round: bool
    ) -> None:
        self.portion, self.partial, self.ends_round = portion, partial, ends_round
        self.members = [member for member, _ in portion]
        self._streams, self._joiner = streams, joiner
        self.nbytes = sum(member.batch_bytes[batch] for member, batches in portion for batch in batches)
        """Of the gradients, in the dtype in which they are added up."""
        self.round_bytes = sum(sum(member.batch_bytes) for member in self.members)
        """The same of all batches of its groups together."""

    @labelled("post_backward_reduce", lambda self: describe_groups([member.name for member in self.members]))
    @without_grad
    def run(self) -> PendingReduction:
        """Takes the gradients and launches. Once."""
        begin = trace.now() if trace.listeners else None
        first, name = self.members[0], describe_groups([member.name for member in self.members])
        pending = launch_reduction(self._streams, self._jobs(), first.device, name, partial=self.partial)
        for member, batches in self.portion:
            if trace.listeners:
                moved = member.traffic_of(batches)
                stream = self._streams.reduce.name
                trace.emit(trace.Operation.REDUCE, member.name, moved.bytes, stream, begin, moved.plain_bytes)
            member.begin_reduction(pending, partial=self.partial, ends_round=self.ends_round)
        return PendingReduction(self, pending)

    def _jobs(self) -> list[BucketReduction]:
        first, *others = self.members
        if others and self._joiner is not None and not self.partial:
            joined = first.jobs_with(others, self._joiner)
            if joined:
                return joined
        return [job for member, batches in self.portion for job in member.jobs_of(batches)]


class PendingReduction:
    """Gradients of some groups on their way, as ``launch`` says. Owned by the queue that completes it."""

    def __init__(self, launch: Launch, pending: InFlight[list[ReducedBucket]]) -> None:
        self.launch = launch
        self._pending = pending

    def has(self, gradients: GroupGradients, batch: int) -> bool:
        """Whether ``batch`` of ``gradients`` is part of it."""
        return any(member is gradients and batch in batches for member, batches in self.launch.portion)

    def start(self) -> None:
        """Launches a second stage that had to wait for the first."""
        self._pending.start()

    @labelled("post_backward_rs_wait", lambda self: describe_groups([member.name for member in self.launch.members]))
    @without_grad
    def complete(self) -> None:
        """Waits, and sets the reduced gradients on the sharded parameters, or keeps them where they are partial."""
        launch = self.launch
        offloaded = any(member.is_offloaded for member in launch.members)
        reduced = self._pending.synchronize() if offloaded else self._pending.wait()
        with plain_access():
            for bucket in reduced:
                for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                    parameter.accept_gradient(gradient)
        for member in launch.members:
            if launch.ends_round:
                member.end_reduction(partial=launch.partial)
            if trace.listeners and not launch.partial:
                trace.emit(trace.Operation.REDUCED, member.name)


def _nothing() -> None:
    pass
