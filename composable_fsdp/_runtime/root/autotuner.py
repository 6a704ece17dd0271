"""Measurement of costs in the steps of one root, and the choice of its schedule's settings by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from composable_fsdp import trace
from composable_fsdp._comm.communicator import Communicator
from composable_fsdp._runtime.groups import profiling
from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.groups.state_machine import HELD_GRADIENTS
from composable_fsdp._runtime.root.calibration import Calibration, StepObserver, median_over_ranks
from composable_fsdp._runtime.root.clock import Clock
from composable_fsdp._runtime.root.schedule_runner import ScheduleRunner
from composable_fsdp._runtime.root.step_times import StepTimes
from composable_fsdp._sharding.mesh import DataParallelAxes

__all__ = ["Autotuner"]

_STEPS_BEFORE_MEASUREMENT = 2
"""The first step makes memory, and the second one is the first with a known order."""
_MEASURED_STEPS = 2
"""The steps in which computation is measured, of which the median counts."""


class Autotuner:
    """Measures the costs of a root, and chooses the settings of its schedule by them. Final.

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
        self._step_times = StepTimes(root.group.axes.device)

    def calibrate(self, steps: int) -> None:
        """Measure the costs of collectives and of computation in the next ``steps``."""
        groups = {name: state.group for name, state in self._states.items() if state.group.parameters}
        clock = Clock(self._root.group.axes.device)
        self.observer = Calibration(self.axes, self.communicators, groups, steps, clock)

    @functools.cached_property
    def axes(self) -> list[DataParallelAxes]:
        """The data-parallel axes of all parameters."""
        return list(dict.fromkeys(pgs.axes for state in self._states.values() for pgs in state.group.process_groups))

    @functools.cached_property
    def communicators(self) -> list[Communicator]:
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
        if self.observer is None and self._measures_now():
            self.calibrate(_MEASURED_STEPS)
        observer, waited = self.observer, self._runner.streams.seconds_waited
        if observer is not None and (costs := observer.begin_step(waited)) is not None:
            self.observer, self._root.costs = None, self._runner.fitted(costs, observer.waited)
        if self._runner.choice_is_due() and not self._is_under_way:
            drain()
            before, begin = self._runner.settings, trace.now()
            self._runner.choose()
            self._step_times.restart(has_changed=self._runner.settings != before)
            self._note_choice(begin)
        if self._measures_costs or self._awaits_measured_time:
            self._step_times.begin_step()

    def end_step(self, *, synchronized: bool) -> None:
        """End a step, after its backward. ``synchronized`` if it has reduced gradients over all ranks."""
        self._step_times.end_step(synchronized=synchronized)

    def reset(self) -> None:
        """Drop what was measured in a step that failed."""
        self.observer = None
        self._step_times.restart(has_changed=True)

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

    def _measures_now(self) -> bool:
        """Return whether this step must measure costs: in the third one, and when the times of steps have changed.

        It is the same on all ranks.
        """
        times, choice = self._step_times, self._runner.choice
        if not self._measures_costs and not self._awaits_measured_time:
            return False
        if choice is None:
            return times.steps == _STEPS_BEFORE_MEASUREMENT
        has_changed = times.has_changed()
        if choice.measured_seconds is None and times.seconds is not None:
            self._runner.choice = replace(choice, measured_seconds=times.seconds)
        if has_changed is None or not self._measures_costs:
            return False
        (most,) = median_over_ranks([float(has_changed)], self.communicators, self._root.group.axes.device)
        return most > 0.5

    @property
    def _awaits_measured_time(self) -> bool:
        """True while the time of steps with the last choice is not known."""
        return self._runner.choice is not None and self._runner.choice.measured_seconds is None

    @property
    def _measures_costs(self) -> bool:
        """True if costs are measured without a call of the user."""
        chosen = self._root.measures_costs
        return self._measures_by_default if chosen is None else chosen

    @functools.cached_property
    def _measures_by_default(self) -> bool:
        if not self._runner.streams.device.has_streams or torch.are_deterministic_algorithms_enabled():
            return False
        if not Clock(self._root.group.axes.device).has_times:
            return False
        return any(each.size > 1 for each in self.communicators)
