"""A root's progress through a backward, its queue of reductions, and what it refuses."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from composable_fsdp._core.group import AutogradTask, ParamGroup
from composable_fsdp._core.group_plan import HELD_GRADIENTS, LOCAL_GRADIENTS, ParameterState
from composable_fsdp._core.launch import FusedBuckets, GroupReduction, reduce_together
from composable_fsdp._core.schedule import Planner
from composable_fsdp._core.state import ROOT_OPTIONS, Accumulation, ForwardCall, ForwardRecord, FSDPState
from composable_fsdp.errors import ConfigurationError, LifecycleError


def another_thread(state: FSDPState, thread: threading.Thread, kind: str, root: FSDPState) -> LifecycleError:
    """Return the error for a forward of ``state`` while ``thread`` is inside a pass of ``kind``."""
    return LifecycleError(
        f"thread {threading.current_thread().name!r} began a forward of {state.name!r} while thread "
        f"{thread.name!r} is inside the {kind} of {root.name!r}. A sharded model is not "
        "re-entrant: let one thread run it at a time, or give each a copy of its own. If that pass was left by "
        "an exception, call reset_iter_state() on the root module."
    )


def left_by_an_exception(state: FSDPState, kind: str, root: FSDPState) -> LifecycleError:
    """Return the error for a forward of ``state`` that begins while a pass of ``kind`` has not ended."""
    return LifecycleError(
        f"the forward of {state.name!r} begins while the last {kind} pass under {root.name!r} "
        "has not ended; it was probably left by an exception. Call reset_iter_state() on the root module "
        "before the next step."
    )


def unwatched_output(state: FSDPState) -> LifecycleError:
    """Return the error for a backward that used parameters of ``state`` while they were sharded."""
    return LifecycleError(
        f"backward reached {state.name!r} through a tensor that its forward did not show, so gradients are wrong. If "
        f"{state.class_name} returns an object of a class of your own, make it a dataclass or register it with "
        "torch.utils._pytree.register_pytree_node; if it hands tensors on in another way, shard it with "
        "reshard_after_forward=False. Then call reset_iter_state() on the root module before the next step."
    )


def warn_of_lost_gradients(state: FSDPState) -> None:
    """Warn that backwards went through ``state``, and that none of its parameters has a gradient."""
    warnings.warn(
        f"backward went through {state.name!r}, but left no gradient on any of its parameters. Pipeline schedules that "
        "compute the gradients of weights apart from those of inputs, such as zero bubble, look for the parameters "
        "before backward brings them into memory: shard their stages with reshard_after_forward=False.",
        stacklevel=2,
    )


def check_settings(root: FSDPState, states: Iterable[FSDPState]) -> None:
    """Check that no state has another value of a root setting than ``root``, except the default, for the root's value.

    Raises:
        ConfigurationError: a group below ``root`` has another value. The text has both.
    """
    of_root = _values(root)
    for state in states:
        for name, value in _values(state).items():
            if value not in (of_root.get(name), None):
                only = "" if root.options.of_plugins.get(name) is not None else " only"
                setter = "set_order_check" if name == "order check" else "set_schedule"
                remedy = f"Call {setter} on the root{only}."
                remedy = "Give all of them meshes of one device type." if name == "device" else remedy
                raise ConfigurationError(
                    f"the {name} of {state.name!r} ({state.class_name}) is {value}, but that of {root.name!r} "
                    f"({root.class_name}), which contains it, is {of_root.get(name)}, and one counts for all. {remedy}"
                )


def _values(state: FSDPState) -> dict[str, object]:
    options = {name: getattr(state.options, name) for name in ROOT_OPTIONS}
    return {"device": state.group.axes.device, **state.options.of_plugins, **options}


# Up to Python 3.11, a member takes as long as a call to look up on its enum.
_SUM_UNSHARDED = Accumulation.UNSHARDED
_SHARDED, _UNSHARDED = ParameterState.SHARDED, ParameterState.UNSHARDED

_MIN_BYTES_IN_FLIGHT = 1 << 20
"""On streams, the bytes of gradients that may always be in flight: small messages cost latency, not bandwidth."""

_SLACK_DIVISOR = 8
"""On streams, ``1 / _SLACK_DIVISOR`` of the largest group's bytes may be in flight beyond them."""


# Note: ends that no hook sees
#
# The backward of a module ends when the gradients of its inputs are complete. A hook on the nodes of the inputs tells
# so (``call.awaits``). There is none if no input needs a gradient (the first layer), if an input was changed in place,
# inside of transforms, or if a recomputation only refills saved tensors. ``record.ends_without_hook`` has such runs.
# What ends them instead, in this order:
#   1. the last gradient of the group, if all of its parameters are trainable: ``Progress.is_over_for``;
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
            them, and while they are open.
        reached: the states that this backward, or the last one, reached through an output with a hook. Between
            backwards, of states that may hold gradients of several ones, only those whose parameters the forward used.
        current: the state below the root that this backward, or the last one, reached last. ``None`` before the first.
        is_in_forward: this backward is inside of a forward.
        is_in_context: its last pre-backward was in a context of the caller.
        task: autograd's task, inside which reentrant checkpoints begin others.
        forwards: the states that ran in each forward that may get a backward.
    """

    def __init__(self, states: Collection[FSDPState], task: AutogradTask) -> None:
        self.number = 0
        self.reached: set[FSDPState] = set()
        self.current: FSDPState | None = None
        self.is_in_forward = False
        self.is_in_context = True
        self.task = task
        self._states = states
        self.forwards: dict[ForwardRecord, set[FSDPState]] = {}
        self._reached_forwards: set[ForwardRecord] = set()
        self._exits_before_entry: list[ForwardCall] = []
        """Calls whose input gradients were complete before a hook saw any output gradient."""
        self._entered_at: dict[FSDPState, list[Node | None]] = {}
        """The nodes of the outputs at which this backward entered states that may hold gradients of several ones."""
        for state in states:
            state.group.task = task

    def may_come_back_to(self, states: Iterable[FSDPState]) -> bool:
        """Return whether a forward that may get a backward has used one of ``states``."""
        return not all(ran.isdisjoint(states) for ran in self.forwards.values())

    # -- this backward

    def begin(self, *, is_in_forward: bool) -> None:
        self.is_in_forward = is_in_forward
        self.reached.clear()
        self.current = None
        self.task.number = torch._C._current_graph_task_id()

    def enter(self, call: ForwardCall) -> None:
        """Note that a gradient reached an output of ``call``."""
        call.entered = self.number
        if call.awaits and call.counted_in != self.number:
            call.counted_in = self.number
            call.state.open_calls += 1
        self._reached_forwards.add(call.run.record)
        self.reached.add(call.state)
        if call.state.owner_states:
            self.reached.update(call.state.owner_states)
        if _may_hold(call.state):
            for state in (call.state, *call.state.owner_states):
                self._entered_at.setdefault(state, []).append(torch._C._current_autograd_node())

    def leave(self, call: ForwardCall) -> None:
        """Note that the gradients of ``call``'s inputs are complete."""
        # If a call's output is its input, the output's hook follows at once.
        if call.state not in self.reached and not self.has_entered(call.state):
            self._exits_before_entry.append(call)
        call.run.awaited -= 1
        if call.counted_in == self.number:
            call.counted_in = -1
            call.state.open_calls -= 1

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

    def is_over_for(self, state: FSDPState) -> bool:
        """Return whether the rest of backward needs no parameter of ``state``, all of which have gradients.

        If other states are nested inside, this holds only after backward has been through all other states.
        """
        plan = state.group.plan
        if state.user_states or plan.num_trainable < len(plan.specs):
            return False
        # A nested state may come later, and use parameters of the group around it.
        others = (other for other in self._states if other is not state and other.group.plan.specs)
        return not state.has_nested_states or all(
            other in self.reached and other.group.parameter_state is _SHARDED for other in others
        )


class ReductionQueue:
    """The reductions of one root, in the order of their launch. Each holds memory until it is finished."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._in_flight: deque[GroupReduction] = deque()
        self._unread: list[GroupReduction] = []
        """Reductions before those in flight, which hold no buffers any more. Flags of the first block the host."""
        self._limit: int | None = 1
        """The number of reductions in flight; ``None`` limits their bytes instead."""
        self.waiting: set[FSDPState] = set()
        """States whose gradients are complete and wait for those of their fusion."""
        self._fused_buckets = FusedBuckets()
        self._fusions: dict[FSDPState, Sequence[FSDPState]] = {}
        """The fused reductions, by state. Kept because finding one takes a look at every member."""
        self._fusions_for: object = None

    def begin_backward(self) -> None:
        self._limit = self._planner.max_reductions
        if self._fusions_for != self._planner.fused_for:
            self._fusions_for = self._planner.fused_for
            self._fusions.clear()

    @property
    def dissolved(self) -> list[FSDPState]:
        """The states whose fusion was given up, and stays so until settings or plans change."""
        is_current = self._planner.is_current and self._fusions_for == self._planner.fused_for
        return [state for state, fusion in self._fusions.items() if not fusion] if is_current else []

    def dissolve(self, states: Iterable[FSDPState]) -> None:
        """Give up the fusions of ``states``."""
        self._fusions_for = self._planner.fused_for
        self._fusions.update(dict.fromkeys(states, ()))

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
        launcher, is_partial = self._planner.launcher, not is_held and state.keeps_partial
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
            self._planner.launcher.finish(self._in_flight.popleft())

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
            reduction = self._in_flight.popleft()
            self._planner.launcher.start(reduction)
            self._in_flight.append(reduction)


class Finalization:
    """The state of manual finalization of a root's backwards.

    Attributes:
        is_manual: backwards leave their last reductions in flight.
        is_last_backward: the next backward is the last one of its step, and waits for the reductions of all.
    """

    def __init__(self) -> None:
        self.is_manual = False
        self.is_last_backward = True
        self._is_due = False
        """True if a backward has ended since the last finalization."""
        self._in_flight: object = None
        """The token of the finalization whose reductions the user has not waited for."""

    def take_settings(self, former: Finalization) -> None:
        """Take the settings of ``former``, that of a root which is now inside of this one."""
        self.is_manual |= former.is_manual
        self.is_last_backward &= former.is_last_backward

    def set_manual(self, enabled: bool) -> None:
        """Set :attr:`is_manual`. Raises a ``LifecycleError`` if that changes before a backward has been finalized."""
        if enabled != self.is_manual and (self._is_due or self._in_flight is not None):
            raise LifecycleError(
                "set_manual_backward_finalization was called between a backward and the end of its finalization. Call "
                "finalize_backward() first, and wait() of its handle."
            )
        self.is_manual = enabled

    def end_backward(self) -> None:
        """Record the end of a backward."""
        self._is_due = self.is_manual

    def check_due(self) -> None:
        """Raise a ``LifecycleError`` unless backwards are finalized by hand and the last finalization has ended."""
        if not self.is_manual:
            raise LifecycleError(
                "finalize_backward() was called after a backward that has finalized itself. Call "
                "set_manual_backward_finalization(True) before the step."
            )
        if self._in_flight is not None:
            raise LifecycleError("finalize_backward() was called again. Call wait() of its last handle first.")

    def begin(self) -> object:
        """Record that the reductions are launched, and return a token for :meth:`end`."""
        self._is_due, self._in_flight = False, object()
        return self._in_flight

    def end(self, token: object) -> None:
        """Record the end of the wait. Raises a ``LifecycleError`` if :meth:`forget` was called since :meth:`begin`."""
        if self._in_flight is not token:
            raise LifecycleError("wait() was called after reset_iter_state() has dropped the reductions of the handle.")
        self._in_flight = None

    def forget(self) -> None:
        """Forget backwards and reductions: the root was reset."""
        self._is_due, self._in_flight = False, None
