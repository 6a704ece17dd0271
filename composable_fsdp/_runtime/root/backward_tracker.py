"""How far backward has come: which units it has reached, and what it can still need."""

from __future__ import annotations

from collections.abc import Collection

import torch

from composable_fsdp._runtime.groups.gradients import AutogradRun
from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.groups.state_machine import ParameterState
from composable_fsdp._runtime.params.optimizer_steps import OptimizerSteps
from composable_fsdp._runtime.root.error_messages import unseen_output
from composable_fsdp._runtime.root.forward_call import Call
from composable_fsdp._runtime.schedule.policy import ForwardRecord

__all__ = ["Backward"]

_MOST_FORWARDS = 256
"""To which a backward may come, as far as is kept: there are more only where nobody means to run one."""


class Backward:
    """The backward of one root that is under way, or was the last. Final.

    Args:
        states: all below the root.
        steps: of the optimizers of their parameters.

    Attributes:
        number: of this backward, by which units and calls know that it has reached them.
    """

    def __init__(self, states: Collection[FSDPState], steps: OptimizerSteps) -> None:
        self.number = 0
        self._states = states
        self._run = AutogradRun()
        self._steps, self._seen_steps = steps, steps.number
        self._forwards: dict[ForwardRecord, list[FSDPState]] = {}
        """Those to which a backward may come, and which units ran in each. Every rank has the same, but for units that
        ranks in step skip.
        """
        self._reached: set[ForwardRecord] = set()
        """Those to which this one has come."""
        self._left_unseen: list[Call] = []
        """Calls whose gradients left them before any was seen to enter."""
        for state in states:
            state.runs = 0
            state.group.gradients.run = self._run

    def begin(self) -> None:
        """A new one begins."""
        self.number += 1
        self._run.number = torch._C._current_graph_task_id()

    def end(self) -> None:
        """
        Raises:
            LifecycleError: gradients entered a unit through an output that its hooks did not see.
        """
        for call in self._left_unseen:
            if call.entered != self.number:
                raise unseen_output(call.state)
        self._left_unseen.clear()
        self._run.number = -1
        for record in self._reached:
            self.forget_forward(record)
        self._reached.clear()

    def forget(self) -> None:
        """It has died, or is given up."""
        self._left_unseen.clear()
        self._reached.clear()
        self._run.number = -1

    # -- to which forwards it may come

    def count(self, state: FSDPState, record: ForwardRecord) -> None:
        """``state`` has run in the forward of ``record``, to which a backward may come."""
        states = self._forwards.get(record)
        if states is None:
            states = self._forwards[record] = []
            if len(self._forwards) > _MOST_FORWARDS:
                self.forget_forward(next(iter(self._forwards)))
        states.append(state)
        state.runs += 1

    def forget_forward(self, record: ForwardRecord) -> None:
        """A backward has come to the forward of ``record``, or none will."""
        for state in self._forwards.pop(record, ()):
            state.runs -= 1

    def forget_forwards(self) -> None:
        """No backward will come to any."""
        for record in list(self._forwards):
            self.forget_forward(record)

    def forget_before_step(self) -> None:
        """No backward comes to forwards from before the last optimizer step."""
        steps = self._steps.number
        if steps != self._seen_steps:
            self._seen_steps = steps
            self.forget_forwards()

    # -- how far it has come

    def enter(self, call: Call) -> None:
        """A gradient reached an output of ``call``."""
        call.entered = self.number
        call.open()
        state = call.state
        self._reached.add(call.round.record)
        for reached in (state, *state.lenders):
            reached.entered_backward = self.number

    def leave(self, call: Call) -> None:
        """The gradients of ``call``'s inputs are complete."""
        if not self.was_seen(call.state):  # unless its output is its input: then they are seen to enter in a moment
            self._left_unseen.append(call)
        call.close()
        call.round.awaited -= 1

    def was_reached(self, state: FSDPState) -> bool:
        """Whether it came to ``state`` through an output that its hooks saw."""
        return state.entered_backward == self.number

    def was_seen(self, state: FSDPState) -> bool:
        """The same; or it need not have."""
        return (
            state.entered_backward == self.number
            or not state.unshard_in_backward
            or state.group.parameter_state is ParameterState.UNSHARDED
        )

    # -- what it can still need

    @property
    def is_outermost(self) -> bool:
        """Whether autograd runs this one now, and not one within it, as reentrant checkpoints begin."""
        return not self._run.is_around_another

    def is_over_for(self, state: FSDPState) -> bool:
        """Whether nothing in it can still need the parameters of ``state``, all of which have gradients.

        Modules inside may: so there, only once it has been through all other units.
        """
        if not state.frees_with_last_gradient:
            return False
        others = (other for other in self._states if other is not state and other.group.parameters)
        return not state.has_nested_states or all(
            self.was_reached(other) and other.group.parameter_state is ParameterState.SHARDED for other in others
        )
