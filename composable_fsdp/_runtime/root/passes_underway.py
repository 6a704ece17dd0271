"""The running passes of a root, and the progress of its backward."""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch
from torch.utils.checkpoint import _StopRecomputationError

from composable_fsdp import trace
from composable_fsdp._consistency.running_pass import EndOfRun, RunningPass
from composable_fsdp._runtime.groups.param_group_gradients import AutogradRun
from composable_fsdp._runtime.groups.state import ForwardCall, FSDPState
from composable_fsdp._runtime.groups.state_machine import ParameterState
from composable_fsdp._runtime.params.optimizer_steps import OptimizerSteps
from composable_fsdp._runtime.root.error_messages import unseen_output
from composable_fsdp._runtime.root.observer import Root
from composable_fsdp._runtime.schedule.forward_record import ForwardRecord

__all__ = ["Backward", "PassesUnderway"]

_MOST_FORWARDS = 256
"""The maximum number of forwards kept for a later backward. There are more only if no backward is intended."""


class Backward:
    """The current or last backward of one root. Final.

    Args:
        states: all FSDP states below the root.
        steps: the step counter of the optimizers of their parameters.

    Attributes:
        number: the number of this backward. Calls store it when backward reaches them.
        reached: the states that this backward, or the last one, reached through an output with a hook.
        is_in_forward: this backward is inside of a forward.
    """

    def __init__(self, states: Collection[FSDPState], steps: OptimizerSteps) -> None:
        self.number = 0
        self.reached: set[FSDPState] = set()
        self.is_in_forward = False
        self._states = states
        self._run = AutogradRun()
        self._steps, self._seen_steps = steps, steps.number
        self._forwards: dict[ForwardRecord, list[FSDPState]] = {}
        """The states that ran in each forward that may get a backward.

        Equal on every rank, except for unused states that ranks skip.
        """
        self._reached_forwards: set[ForwardRecord] = set()
        """The forwards that this backward has reached."""
        self._unseen_exits: list[ForwardCall] = []
        """Calls whose input gradients were seen before any output gradient."""
        for state in states:
            state.runs = 0
            state.group.gradients.run = self._run

    def begin(self, *, is_in_forward: bool) -> None:
        """Begin a new backward."""
        self.number += 1
        self.is_in_forward = is_in_forward
        self.reached.clear()
        self._run.number = torch._C._current_graph_task_id()

    def end(self) -> None:
        """End the backward.

        Raises:
            LifecycleError: gradients entered a module through an output that its hooks did not see.
        """
        for call in self._unseen_exits:
            if call.entered != self.number:
                raise unseen_output(call.state)
        self._unseen_exits.clear()
        self._run.number = -1
        for record in self._reached_forwards:
            self.forget_forward(record)
        self._reached_forwards.clear()

    def forget(self) -> None:
        """Abandon a backward that failed."""
        self._unseen_exits.clear()
        self._reached_forwards.clear()
        self._run.number = -1

    # -- forwards that may get a backward

    def count(self, state: FSDPState, record: ForwardRecord) -> None:
        """Note that ``state`` ran in the forward of ``record``, which may get a backward."""
        states = self._forwards.get(record)
        if states is None:
            states = self._forwards[record] = []
            if len(self._forwards) > _MOST_FORWARDS:
                self.forget_forward(next(iter(self._forwards)))
        states.append(state)
        state.runs += 1

    def forget_forward(self, record: ForwardRecord) -> None:
        """Forget the forward of ``record``: its backward has come, or will not."""
        for state in self._forwards.pop(record, ()):
            state.runs -= 1

    def forget_forwards(self) -> None:
        """Forget all forwards: none will get a backward."""
        for record in list(self._forwards):
            self.forget_forward(record)

    def forget_before_step(self) -> None:
        """Forget the forwards from before the last optimizer step: they get no backward."""
        steps = self._steps.number
        if steps != self._seen_steps:
            self._seen_steps = steps
            self.forget_forwards()

    # -- progress

    def enter(self, call: ForwardCall) -> None:
        """Note that a gradient reached an output of ``call``."""
        call.entered = self.number
        if call.awaits and not call.is_open:
            call.open()
        self._reached_forwards.add((call.first or call).record)
        self.reached.add(call.state)
        if call.state.owner_states:
            self.reached.update(call.state.owner_states)

    def leave(self, call: ForwardCall) -> None:
        """Note that the gradients of ``call``'s inputs are complete."""
        # If a call's output is its input, the output's hook follows at once.
        if call.state not in self.reached and not self.was_seen(call.state):
            self._unseen_exits.append(call)
        call.close()

    def was_seen(self, state: FSDPState) -> bool:
        """Return whether backward reached ``state`` through an output that its hooks saw, or did not need to."""
        return (
            state in self.reached
            or not state.unshard_in_backward
            or state.group.parameter_state is ParameterState.UNSHARDED
        )

    # -- parameters it can still need

    @property
    def is_outermost(self) -> bool:
        """True if autograd is not in a backward inside this one, as reentrant checkpoints begin."""
        return not self._run.is_around_another

    def is_over_for(self, state: FSDPState) -> bool:
        """Return whether the rest of backward needs no parameter of ``state``, all of which have gradients.

        If other states are nested inside, this holds only after backward has been through all other states.
        """
        if not state.frees_with_last_gradient:
            return False
        others = (other for other in self._states if other is not state and other.group.parameters)
        return not state.has_nested_states or all(
            other in self.reached and other.group.parameter_state is ParameterState.SHARDED for other in others
        )


class PassesUnderway:
    """The forward, the backward, or one inside the other, of a root. Its observers are told of both. Final."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        """The thread that began the current pass."""
        self._forward: RunningPass | None = None
        self._backward: RunningPass | None = None

    def begin_forward(self, root: Root, outermost: ForwardCall) -> None:
        """Begin the forward of which ``outermost`` is the outermost call. No other pass is running."""
        self.end(root)
        self.thread = threading.current_thread()
        self._forward = _begun(root, RunningPass("forward", outermost.state.name, outermost.caller))

    def begin_backward(self, root: Root) -> EndOfRun:
        """Begin a backward. Return the callback for autograd, which ends it if the autograd run succeeds."""
        self.thread = threading.current_thread()
        self._backward = _begun(root, RunningPass("backward", root.root.name, None))
        return EndOfRun(root.end_backward, self._backward)

    @property
    def runs_backward(self) -> bool:
        """True if autograd still runs the last backward."""
        return self._backward is not None and not self._backward.run_has_ended

    @property
    def are_over(self) -> bool:
        """True outside of autograd, where no backward runs."""
        return torch._C._current_graph_task_id() == -1

    def reach(self, root: Root, state: FSDPState) -> None:
        """Note that backward has reached ``state``."""
        if self._backward is not None and state is not root.root:
            self._backward.module = state.group.name

    def end_backward(self, root: Root) -> None:
        """End the backward, which succeeded."""
        running, self._backward = self._backward, None
        _end(root, running, succeeded=True)

    def end(self, root: Root, *, succeeded: bool = False) -> None:
        """End all passes. ``succeeded``: the forward has."""
        running, self._forward, self._backward = (self._forward, self._backward), None, None
        for each in running:
            _end(root, each, succeeded=succeeded and each is running[0])

    def note(
        self, root: Root, error: BaseException, state: FSDPState, *, in_backward: bool, ends_forward: bool
    ) -> None:
        """Note that ``error`` came out of ``state``. The caller may still catch it, unless it ends the forward."""
        running = self._backward if in_backward else self._forward
        if running is None or isinstance(error, _StopRecomputationError):
            return  # refused before it began, or a checkpoint stopped its recomputation early
        running.note(error, state.name)
        if not in_backward and not ends_forward:
            return
        if not in_backward:
            for observe in root.events.failed:
                observe(root, running)
        running.is_reported = True
        trace.emit_fault(error, f"the {running.kind} of {running.raised_in}")


def _begun(root: Root, running: RunningPass) -> RunningPass:
    for observe in root.events.begin_pass:
        observe(root, running)
    return running


def _end(root: Root, running: RunningPass | None, *, succeeded: bool) -> None:
    if running is not None:
        running.succeeded = succeeded
        for observe in root.events.end_pass:
            observe(root, running)
