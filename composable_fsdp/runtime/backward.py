"""How far backward has come: which units it has reached, and what it can still need."""

from __future__ import annotations

from collections.abc import Collection

import torch

from composable_fsdp.lifecycle import ParameterState
from composable_fsdp.runtime.call import Call
from composable_fsdp.runtime.gradients import AutogradRun
from composable_fsdp.runtime.refusals import unseen_output
from composable_fsdp.runtime.steps import optimizer_steps
from composable_fsdp.runtime.unit import Unit

__all__ = ["Backward"]


class Backward:
    """The backward of one root that is under way, or was the last. Final.

    Args:
        units: all below the root.

    Attributes:
        number: of this backward, by which units and calls know that it has reached them.
    """

    def __init__(self, units: Collection[Unit]) -> None:
        self.number = 0
        self._units = units
        self._run = AutogradRun()
        self._seen_steps = optimizer_steps()
        self._left_unseen: list[Call] = []
        """Calls whose gradients left them before any was seen to enter."""
        for unit in units:
            unit.group.gradients.run = self._run

    def begin_forward(self) -> None:
        """A forward begins. To those before an optimizer step no backward comes back any more."""
        steps = optimizer_steps()
        if steps != self._seen_steps:
            self._seen_steps = steps
            self._forget_runs()

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
                raise unseen_output(call.unit)
        self._left_unseen.clear()
        self._run.number = -1
        for unit in self._units:
            if unit.runs_entered:
                unit.runs, unit.runs_entered = max(0, unit.runs - unit.runs_entered), 0

    def forget(self) -> None:
        """It has died, or is given up."""
        self._left_unseen.clear()
        self._run.number = -1
        self._forget_runs()

    def _forget_runs(self) -> None:
        for unit in self._units:
            unit.runs = unit.runs_entered = 0

    # -- how far it has come

    def enter(self, call: Call) -> None:
        """A gradient reached an output of ``call``."""
        call.entered = self.number
        call.open()
        unit, of_round = call.unit, call.round
        for reached in (unit, *unit.lenders):
            reached.entered_backward = self.number
        if of_round.is_counted and of_round.entered != self.number:
            of_round.entered = self.number
            unit.runs_entered += 1

    def leave(self, call: Call) -> None:
        """The gradients of ``call``'s inputs are complete."""
        if not self.was_seen(call.unit):  # unless its output is its input: then they are seen to enter in a moment
            self._left_unseen.append(call)
        call.close()
        call.round.awaited -= 1

    def was_reached(self, unit: Unit) -> bool:
        """Whether it came to ``unit`` through an output that its hooks saw."""
        return unit.entered_backward == self.number

    def was_seen(self, unit: Unit) -> bool:
        """The same; or it need not have."""
        return (
            unit.entered_backward == self.number
            or not unit.unshard_in_backward
            or unit.group.parameter_state is ParameterState.UNSHARDED
        )

    # -- what it can still need

    @property
    def is_outermost(self) -> bool:
        """Whether autograd runs this one now, and not one within it, as reentrant checkpoints begin."""
        return not self._run.is_around_another

    def is_over_for(self, unit: Unit) -> bool:
        """Whether nothing in it can still need the parameters of ``unit``, all of which have gradients.

        Modules inside may: so there, only once it has been through all other units.
        """
        if not unit.frees_with_last_gradient:
            return False
        others = (other for other in self._units if other is not unit and other.group.parameters)
        return not unit.has_nested_units or all(
            self.was_reached(other) and other.group.parameter_state is ParameterState.SHARDED for other in others
        )
