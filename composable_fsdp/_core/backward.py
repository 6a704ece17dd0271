"""A root's progress through a backward, its reductions and their queue, and the verbs by which it acts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.autograd.graph import Node

from composable_fsdp import trace
from composable_fsdp._core.comm import Communicator
from composable_fsdp._core.gather import reduce_scatter_wire_bytes
from composable_fsdp._core.group import AutogradTask, ParamGroup
from composable_fsdp._core.group_plan import (
    HELD_GRADIENTS,
    LOCAL_GRADIENTS,
    ParameterState,
    describe_groups,
    plan_group,
)
from composable_fsdp._core.memory import CommStreams, InFlight
from composable_fsdp._core.params import accept_gradients
from composable_fsdp._core.reduce import BucketReducer, BucketReduction, ReducedBucket, stages_of
from composable_fsdp._core.schedule import Planner
from composable_fsdp._core.state import Accumulation, ForwardCall, ForwardRecord, FSDPState
from composable_fsdp.errors import LifecycleError


def unwatched_output(state: FSDPState) -> LifecycleError:
    """Return the error for a backward that used parameters of ``state`` while they were sharded."""
    return LifecycleError(
        f"backward reached {state.name!r} through a tensor that its forward did not show, so gradients are wrong. If "
        f"{state.class_name} returns an object of a class of your own, make it a dataclass or register it with "
        "torch.utils._pytree.register_pytree_node; if it hands tensors on in another way, shard it with "
        "reshard_after_forward=False. Then call reset_iter_state() on the root module before the next step."
    )


# Up to Python 3.11, a member takes as long as a call to look up on its enum.
_SUM_UNSHARDED = Accumulation.UNSHARDED
_UNSHARDED = ParameterState.UNSHARDED

_MIN_BYTES_IN_FLIGHT = 1 << 20
"""On streams, the bytes of gradients that may always be in flight: small messages cost latency, not bandwidth."""

_SLACK_DIVISOR = 8
"""On streams, ``1 / _SLACK_DIVISOR`` of the largest group's bytes may be in flight beyond them."""


# Note: ends that no hook sees
#
# The backward of a module ends when the gradients of its inputs are complete. A hook on the nodes of the inputs tells
# so (``await_inputs``). There is none if no input needs a gradient (the first layer), if an input was changed in place,
# or inside of transforms. ``record.ends_without_hook`` has such runs. Hooks of a recomputation that only refills saved
# tensors never fire; it is in a record of its own, whose calls are open only once a gradient enters it.
# What ends them instead, in this order:
#   1. the last gradient of the group, if all of its parameters are trainable: ``Root._is_over_for``;
#   2. else the end of the whole backward, by autograd's callback: ``Root._end_backward_of``.
# 1 holds for a group that contains other groups only once these were reached and are sharded again: a nested module
# could run its backward later, and use parameters of the group around it.


def _may_hold(state: FSDPState) -> bool:
    """Return whether ``state`` may hold gradients of several backwards."""
    has_several = state.group.were_summed or state.options.accumulation is _SUM_UNSHARDED
    return has_several and state.group.plan.num_trainable > 0


def _leaves_of(nodes: Iterable[Node | None]) -> Iterable[object]:
    """Return the tensors whose gradients the graphs below ``nodes`` accumulate, and None for all other nodes."""
    found, left = set[Node](), list(nodes)
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return (getattr(node, "variable", None) for node in found)


class Progress:
    """The current or last backward of one root, and the forwards that may get one.

    Attributes:
        number: the number of this backward; between backwards, of the next one. Calls store it when backward reaches
            them.
        reached: the states that this backward, or the last one, reached through an output with a hook. After
            the end, states that may hold sums stay in it only if this backward used a parameter of theirs: a missing
            gradient is then a loss, of which ``notice_gradients`` warns.
        current: the state below the root that this backward, or the last one, reached last. ``None`` before the first.
        is_in_context: its last pre-backward was in a context of the caller.
        task: autograd's task, inside which reentrant checkpoints begin others.
        forwards: the states that ran in each forward that may get a backward.
    """

    def __init__(self, states: Iterable[FSDPState], task: AutogradTask) -> None:
        self.number = 0
        self.reached: set[FSDPState] = set()
        self.current: FSDPState | None = None
        self.is_in_context = True
        self.task = task
        self.forwards: dict[ForwardRecord, set[FSDPState]] = {}
        self._reached_forwards: set[ForwardRecord] = set()
        self._exits_before_entry: list[ForwardCall] = []
        """Calls whose input gradients were complete before a hook saw any output gradient."""
        self._entered_at: dict[FSDPState, list[Node | None]] = {}
        """The nodes of the outputs at which this backward entered states that may hold gradients of several ones."""
        for state in states:
            state.group.task = task

    # -- this backward

    def begin(self) -> None:
        self.reached.clear()
        self.current = None
        self.task.number = torch._C._current_graph_task_id()

    def enter(self, call: ForwardCall) -> None:
        """Note that a gradient reached an output of ``call``."""
        call.entered = self.number
        if call.run.record not in self._reached_forwards:
            self._reach(call.run.record)
        self.reached.add(call.state)
        if call.state.owner_states:
            self.reached.update(call.state.owner_states)
        if _may_hold(call.state):
            for state in (call.state, *call.state.owner_states):
                self._entered_at.setdefault(state, []).append(torch._C._current_autograd_node())

    def leave(self, call: ForwardCall) -> None:
        """Note that the gradients of ``call``'s inputs are complete."""
        # If a call's output is its input, the output's hook follows at once.
        # The first question saves a call of has_entered, which asks it too.
        if call.state not in self.reached and not self.has_entered(call.state):
            self._exits_before_entry.append(call)
        if call.run.record not in self._reached_forwards:
            self._reach(call.run.record)
        call.run.awaited -= 1
        call.state.open_calls -= 1

    def _reach(self, record: ForwardRecord) -> None:
        """Note that this backward goes through a forward. All calls of that are open now, and of no other one."""
        self._reached_forwards.add(record)
        for state, number in record.awaited.items():
            state.open_calls += number

    def may_come_later(self, state: FSDPState) -> bool:
        """Return whether gradients of ``state`` may still arrive from a forward that this backward has not reached.

        Backward goes through forwards from the last to the first. Those after the ones reached get another backward.
        """
        older = takewhile(lambda record: record not in self._reached_forwards, self.forwards)
        return any(state in record.awaited for record in older)

    def end(self) -> None:
        """End the backward.

        Raises:
            LifecycleError: gradients entered a module through an output that its hooks did not see.
        """
        # A call that was left and never entered had an output that no hook saw.
        for call in self._exits_before_entry:
            if call.entered != self.number:
                raise unwatched_output(call.state)
        for record in self._reached_forwards:
            self.forwards.pop(record, None)
        self.forget()

    def leave_out_unused(self) -> None:
        """Take those states out of ``reached`` that this backward passed without using a parameter of theirs.

        Of the others without gradients, a backward that was asked for gradients of inputs alone has lost them.
        """
        for state, nodes in self._entered_at.items():
            if _may_hold(state) and state.group.gradient_state not in HELD_GRADIENTS:
                leaves: list[Any] = [parameter.unsharded for parameter in state.group.parameters if parameter.trainable]
                # A graph refers to its leaves, so that most states are told without a walk through it.
                used = {id(leaf) for leaf in leaves if leaf._use_count() > 1}
                if not used or used.isdisjoint(map(id, _leaves_of(nodes))):
                    self.reached.discard(state)

    def forget(self) -> None:
        """Forget the backward, which is over or failed. What follows belongs to the next one."""
        self.number += 1
        self._entered_at.clear()
        self._exits_before_entry.clear()
        self._reached_forwards.clear()
        self.task.number = -1

    def has_entered(self, state: FSDPState) -> bool:
        """Return whether backward reached ``state`` through an output that its hooks saw, or did not need to."""
        is_reached = state in self.reached or not state.options.unshard_in_backward
        return is_reached or state.group.parameter_state is _UNSHARDED


# -- Reductions of groups, alone or fused, and their queue

_is_offloaded, _gradient_bytes = attrgetter("is_offloaded"), attrgetter("plan.gradient_bytes")


def reduce_together(
    members: Sequence[ParamGroup],
    streams: CommStreams,
    fused_buckets: FusedBuckets | None = None,
    *,
    is_partial: bool = False,
) -> GroupReduction | None:
    """Return the reduction of all gradients of ``members``. Groups without gradients are skipped; ``None`` if all are.

    Args:
        members: the groups.
        streams: the streams to launch on.
        fused_buckets: the known ones; ``None`` if the messages of several groups are not to be fused.
        is_partial: reduce over the shard axis only, and keep the sum, in the reduce dtype, for a later reduction.
    """
    taken = [member for member in members if member.start_reducing()]
    return GroupReduction(taken, streams, fused_buckets, is_partial) if taken else None


@dataclass(slots=True, eq=False)
class GroupReduction:
    """A reduction of :func:`reduce_together`: launched once, then completed. The queue that completes it owns it."""

    members: Sequence[ParamGroup]
    streams: CommStreams
    fused_buckets: FusedBuckets | None
    is_partial: bool
    _pending: InFlight[list[ReducedBucket]] = field(init=False)

    @property
    def nbytes(self) -> int:
        """The gradient bytes, in the dtype of the sum."""
        return sum(map(_gradient_bytes, self.members))

    def run(self) -> None:
        """Take the gradients and launch their reduction: its first stage, if it has several."""
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            begin = trace.now() if trace.listeners else None
            members, pending = self.members, cast("InFlight[Any] | None", None)
            # Take the gradients, of all members in fused messages if these can share them.
            first, fused = members[0], self.fused_buckets if len(members) > 1 and not self.is_partial else None
            reductions: list[BucketReduction] = []
            if fused is not None and first.is_reduced_like(members[1:]):
                reductions = first.reductions_of(_fused_buckets(members, fused))
            if not reductions:
                for member in members:
                    reductions += member.reductions_of([bucket.reducer for bucket in member.buckets])
            name = first.name if len(members) == 1 else describe_groups([member.name for member in members])
            # Launch the first stage. Later ones are launched once it is done.
            for stage in stages_of(self.streams, reductions, first.axes.device, name, is_partial=self.is_partial):
                pending = stage.stream.run(stage.launch, stage.finish, after=pending)
            assert pending is not None
            self._pending = pending
            for member in members:
                if trace.listeners:
                    moved = reduce_scatter_wire_bytes(member.buckets, were_summed=member.were_summed)
                    stream = self.streams.reduce.name
                    trace.emit(trace.Operation.REDUCE, member.name, moved.bytes, stream, begin, moved.plain_bytes)
                # Each group knows that its gradients are on their way.
                member.begin_reduction(pending, is_partial=self.is_partial)
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def start(self) -> None:
        """Launch the last stage, which waited for those before it."""
        self._pending.start()

    def complete(self, unread: list[GroupReduction] | None = None) -> None:
        """Wait, and set the sharded gradients; a partial reduction keeps its sums instead.

        Args:
            unread: earlier reductions that wait for the host. If there are any, or if flags would block the host, only
                the stream waits: this reduction holds no buffers then, and joins them.
        """
        begin = trace.now() if trace.listeners else None
        is_offloaded = any(map(_is_offloaded, self.members))
        reduced = self._pending.synchronize() if is_offloaded else self._pending.wait()
        if unread is not None and (unread or any(bucket.may_come_later for bucket in reduced)):
            unread.append(self)  # not complete: the queue completes it again later, without a list
            return
        # Set the gradients, after the flags are read that say which ones are real.
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
        # The state tables move on.
        for member in self.members:
            member.end_reduction(self._pending, is_partial=self.is_partial)
            if trace.listeners and not self.is_partial:
                trace.emit(trace.Operation.REDUCED, member.name, begin=begin)


FusedBuckets: TypeAlias = dict[ParamGroup, tuple[list[object], tuple[BucketReducer, ...]]]
"""The fused buckets of several groups by the first of them, with the groups, plans and communicators of all."""


def _fused_buckets(members: Sequence[ParamGroup], known: FusedBuckets) -> Sequence[BucketReducer]:
    """Return fused buckets for all parameters of ``members``, or none if these cannot share messages.

    They cannot if their process groups differ, or if gradients have a reduce kind. The result is the same on every
    rank. Buckets are kept in ``known``; they hold layouts only, no values.
    """
    made_of: list[object] = [part for t in members for part in (t, t.plan, t.process_groups[0].scatter)]
    found = known.get(members[0])
    if found is None or found[0] != made_of:
        found = known[members[0]] = (made_of, _fuse(members))
    return found[1]


def _route(group: ParamGroup) -> tuple[Communicator, Communicator, float | None] | None:
    """Return the communicators and the divisor of all gradients of ``group``, or ``None`` if these have several.

    Gradients with a reduce kind, and those of parameters that a gather may make anew, count as such.
    """
    pgs, *others = group.process_groups
    if others or any(bucket.reducer.own is not None or bucket.creates_parameters for bucket in group.buckets):
        return None
    return pgs.scatter, pgs.axes.replicate, pgs.axes.divide


def _fuse(members: Sequence[ParamGroup]) -> tuple[BucketReducer, ...]:
    first, pgs, routes = members[0], members[0].process_groups[0], [_route(member) for member in members]
    if None in routes or any(route != routes[0] for route in routes):
        return ()
    # One plan for the parameters of all groups, as if they were one group.
    specs = tuple(spec for group in members for spec in group.plan.specs)
    parameters = [parameter for group in members for parameter in group.parameters]
    return tuple(
        BucketReducer(
            plan,
            [parameters[i] for i in plan.indices],
            pgs,
            first.device,
            parameters[plan.indices[0]].local.device,
            pin_memory=plan.pins_memory,
        )
        for plan in plan_group(specs, (pgs.plan_options(),)).buckets
    )


class Launcher(Protocol):
    """The verbs by which a root acts: :class:`StreamLauncher` on a device, and a dry run without one."""

    streams: CommStreams
    has_streams: bool
    """False if the host waits for collectives."""

    def gather(self, groups: Sequence[ParamGroup], label: str) -> None:
        """Launch one all-gather, called ``label`` in errors, of those of ``groups`` that are sharded.

        Gradients in the layout before a change of ``requires_grad`` are reduced first.
        """

    def wait(self, group: ParamGroup) -> None:
        """Wait for the all-gather of ``group`` and register its unsharded parameters."""

    def free(self, group: ParamGroup) -> None:
        """Register the sharded parameters of ``group``, and free the unsharded ones."""

    def shrink(self, group: ParamGroup, mesh_size: int) -> None:
        """Free ``group``, but keep a slice from which ``mesh_size`` neighbouring ranks can gather it again."""

    def reduce(self, reduction: GroupReduction) -> None:
        """Launch ``reduction``. If it has several stages, this is the first one."""

    def start(self, reduction: GroupReduction) -> None:
        """Launch the later stages of ``reduction``, if it has any that are not launched yet."""

    def finish(self, reduction: GroupReduction, unread: list[GroupReduction] | None = None) -> None:
        """Wait for ``reduction``, and set the sharded gradients.

        If the host would wait for flags, or ``unread`` has earlier reductions, append ``reduction`` to it instead.
        """

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when autograd has run the backward that runs now."""


class ReductionQueue:
    """The reductions of one root, in the order of their launch. Each holds memory until it is finished."""

    def __init__(self, planner: Planner, launcher: Launcher) -> None:
        self._planner, self.launcher = planner, launcher
        self._in_flight: deque[GroupReduction] = deque()
        self._unread: list[GroupReduction] = []
        """Reductions before those in flight, which hold no buffers any more. Flags of the first block the host."""
        self._limit: int | None = 1
        """The number of reductions in flight; ``None`` limits their bytes instead."""
        self.waiting: set[FSDPState] = set()
        """States whose gradients are complete and wait for those of their fusion."""
        self._fused_buckets: FusedBuckets = {}
        self._fusions: dict[FSDPState, Sequence[FSDPState]] = {}
        """The fused reductions, by state. Kept because finding one takes a look at every member."""
        self._fusions_for: object = None

    def begin_backward(self) -> None:
        # The largest number that a user has set. Else 1 on the host, which waits for each; on streams, bytes count.
        limits = [n for state in self._planner.states.values() if (n := state.options.reductions_in_flight)]
        self._limit = max(limits, default=None if self.launcher.has_streams else 1)
        if self._fusions_for != self._planner.fused_for:
            self._fusions_for = self._planner.fused_for
            self._fusions.clear()

    def send(self, state: FSDPState, *, at_end: bool = False, is_held: bool = False) -> None:
        """Reduce or hold the gradients of ``state``, as its settings say.

        Args:
            state: the owner of the gradients.
            at_end: backward is over, so do not wait for other groups.
            is_held: reduce those that earlier backwards have left, alone and over all axes, whatever settings say.
        """
        # Without gradient synchronization, gradients stay here.
        if not is_held and state.options.accumulation is _SUM_UNSHARDED:
            state.group.hold_gradients()
            return
        # Choose the groups that are reduced together.
        members = [state.group] if is_held else self._ready_with(state, at_end=at_end)
        # Groups without gradients drop out. The launch takes the gradients.
        launcher, is_partial = self.launcher, not is_held and state.keeps_partial
        reduction = reduce_together(members, launcher.streams, self._fused_buckets, is_partial=is_partial)
        if reduction is None:
            return
        # Make room before the launch takes memory. The host does not wait for flags to make room.
        while self._in_flight and self._is_full(reduction):
            launcher.finish(self._in_flight.popleft(), self._unread if launcher.has_streams else None)
        launcher.reduce(reduction)
        self._start()
        self._in_flight.append(reduction)

    def _ready_with(self, state: FSDPState, *, at_end: bool) -> list[ParamGroup]:
        """Return the groups to reduce now that ``state`` is complete; none while others of its fusion are to come."""
        fusion = self._fusions.get(state)
        if fusion is None:
            fusion = self._find_fusion(state)
        # More gradients may follow a backward inside this one: a fusion would change the order of their sum.
        if state in fusion and state.group.task.is_around_another:
            self.waiting.discard(state)
            self._fusions.update(dict.fromkeys(fusion, ()))
            self._fusions_for = None  # the next backward finds them anew
            fusion = ()
        if state not in fusion:
            return [state.group]
        # The last one takes all of its fusion along.
        self.waiting.add(state)
        if not at_end and not self.waiting.issuperset(fusion):
            return []
        self.waiting.difference_update(fusion)
        for member in fusion:
            if member.group.gradient_state not in LOCAL_GRADIENTS:
                member.group.contribute()
        return [member.group for member in fusion]

    def send_held(self, states: Iterable[FSDPState]) -> None:
        """Launch the reductions of the gradients that ``states`` hold after backward, whatever their settings say."""
        if any(reduction.is_partial for reduction in (*self._unread, *self._in_flight)):
            self.drain()  # the sums are held only then
        for state in states:
            self.send(state, is_held=True)

    @property
    def are_in_flight(self) -> bool:
        """True if reduced gradients remain to be set."""
        return bool(self._unread or self._in_flight)

    def drain(self) -> None:
        """Wait for all reductions and set their gradients."""
        # Second stages first, so that they overlap with the waits for earlier reductions.
        self._start()
        self._in_flight.extendleft(reversed(self._unread))
        self._unread.clear()
        while self._in_flight:
            self.launcher.finish(self._in_flight.popleft())

    def abandon(self) -> None:
        """Forget all reductions in flight, which will not complete."""
        self._in_flight.clear()
        self._unread.clear()

    def _find_fusion(self, state: FSDPState) -> Sequence[FSDPState]:
        """Return and note the states whose reductions are fused with those of ``state`` in this backward."""
        members = [self._planner.states[name] for name in self._planner.fused.get(state.group.name, ())]
        fusion = [
            member
            for member in members
            if member.group.plan.num_trainable and member.can_be_fused and member.is_synchronized
        ]
        self._fusions.update(dict.fromkeys((state, *members), fusion))
        return fusion

    def _is_full(self, reduction: GroupReduction) -> bool:
        """Return whether the reductions in flight leave no room for ``reduction``: each holds memory for its message.

        Without a limit on their number, as on streams, the limit is in bytes: hardly more than those of the largest
        group in flight. So groups of equal size wait for each other, while a small group after a large one follows
        without waiting.
        """
        # On the host the number counts: 1 by default, since the host waits for each of them anyway.
        if self._limit is not None:
            return len(self._in_flight) >= self._limit
        # On streams the bytes count: each message is held until its wait.
        sizes = [reduction.nbytes, *(launched.nbytes for launched in self._in_flight)]
        largest = max(_MIN_BYTES_IN_FLIGHT, *sizes)
        return sum(sizes) > largest + largest // _SLACK_DIVISOR

    def _start(self) -> None:
        """Launch second stages. On null streams this waits for their first stages.

        One that raises, for example in a codec, is dropped: recovery would only raise again.
        """
        for _ in range(len(self._in_flight)):
            reduction = self._in_flight.popleft()  # if its start raises, it is gone
            self.launcher.start(reduction)
            self._in_flight.append(reduction)


@dataclass(slots=True)
class Finalization:
    """The state of manual finalization of a root's backwards."""

    is_manual: bool = False
    """Backwards leave their last reductions in flight."""
    is_last_backward: bool = True
    """The next backward is the last one of its step, and waits for the reductions of all."""
    is_due: bool = False
    """True if a backward has ended since the last finalization."""
    in_flight: object = None
    """The token of the finalization whose reductions the user has not waited for."""
