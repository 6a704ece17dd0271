"""The choice of a root's schedule settings by costs, which the user gave or asked to measure. Opt-in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from composable_fsdp import trace
from composable_fsdp._comm.communicator import Communicator
from composable_fsdp._runtime.groups import profiling
from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.groups.state_machine import HELD_GRADIENTS
from composable_fsdp._runtime.root.calibration import Calibration, StepObserver
from composable_fsdp._runtime.root.clock import Clock
from composable_fsdp._runtime.root.schedule_runner import ScheduleRunner
from composable_fsdp._sharding.mesh import DataParallelAxes

__all__ = ["Tuning"]


class Tuning:
    """Measures the costs of a root when asked to, and chooses the settings of its schedule by its costs. Final.

    Args:
        root: the state of the outermost module.
        states: all FSDP states below it.
        runner: performs the schedule, and has the last choice.

    Attributes:
        observer: measures the current steps. ``None`` if nothing does.
    """

    def __init__(self, root: FSDPState, states: Mapping[str, FSDPState], runner: ScheduleRunner) -> None:
        self.observer: StepObserver | None = None
        self._root, self._states, self._runner = root, states, runner

    def calibrate(self, steps: int) -> None:
        """Measure the costs of collectives and of computation in the next ``steps``."""
        groups = {name: state.group for name, state in self._states.items() if state.group.parameters}
        clock = Clock(self._root.group.axes.device)
        self.observer = Calibration(self.axes, self._communicators, groups, steps, clock)

    @functools.cached_property
    def axes(self) -> list[DataParallelAxes]:
        """The data-parallel axes of all parameters."""
        return list(dict.fromkeys(pgs.axes for state in self._states.values() for pgs in state.group.process_groups))

    @functools.cached_property
    def _communicators(self) -> list[Communicator]:
        """The communicators of all axes along which ranks run the same model, model-parallel axes last."""
        known = [each for axes in self.axes for each in (axes.shard, axes.replicate)]
        layouts = (p.sharding.inner for state in self._states.values() for p in state.group.parameters)
        by_mesh = {layout.mesh: layout for layout in layouts if layout is not None}
        return known + [each for layout in by_mesh.values() for each in layout.communicators()]

    def begin_step(self, drain: Callable[[], None]) -> None:
        """Begin a step. If costs have changed and nothing is under way, choose the settings of the schedule by them.

        Only a forward of the root that gathers some group may call it: others may run on some ranks only.

        Args:
            drain: waits for everything in flight.
        """
        observer, waited = self.observer, self._runner.streams.seconds_waited
        if observer is not None and (costs := observer.begin_step(waited)) is not None:
            self.observer, self._root.costs = None, self._runner.fitted(costs, observer.waited)
        if self._runner.choice_is_due() and not self._is_under_way:
            drain()
            begin = trace.now()
            self._runner.choose()
            self._note_choice(begin)

    @property
    def _is_under_way(self) -> bool:
        """True between a forward and its backward, and while gradients are held."""
        return any(state.runs or state.group.gradients.state in HELD_GRADIENTS for state in self._states.values())

    def _note_choice(self, begin: float) -> None:
        """Note a choice, which began at ``begin``, in traces and profiles."""
        choice = self._runner.choice
        if choice is None:
            return
        if trace.listeners:
            trace.emit(trace.Operation.CHOOSE, choice.summary, choice.peak_bytes, begin=begin)
        if profiling.active:
            with profiling.label("choose_schedule", choice.summary):
                pass
