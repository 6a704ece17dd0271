"""The choice of a root's schedule settings by costs, which the user gave or asked to measure. Opt-in."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.profiler import record_function

from composable_fsdp import trace
from composable_fsdp._core.comm import Communicator, communicators
from composable_fsdp._core.events import HELD_GRADIENTS, Hook, Pass
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.schedule import ScheduleSettings, set_by_user
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import ROOT_OPTIONS, FSDPState, connections
from composable_fsdp.plugins.tuning.calibration import Calibration, StepObserver
from composable_fsdp.plugins.tuning.choose import Choice, ScheduleOptions, choose
from composable_fsdp.plugins.tuning.clock import Clock
from composable_fsdp.plugins.tuning.costs import Costs
from composable_fsdp.plugins.tuning.predict import schedule_for, specs_for
from composable_fsdp.plugins.tuning.simulate import Timeline, fit_computation, simulate

__all__ = ["Tuning", "choice_of", "options_of", "tuning_of"]

_log = logging.getLogger("torch.distributed.fsdp.fully_shard")


class Tuning(Observer):
    """Measures the costs of a root when asked to, and chooses the settings of its schedule by its costs."""

    def __init__(self) -> None:
        self.choice: Choice | None = None
        """The last choice of settings by costs."""
        self._measuring: _Measuring | None = None
        self._inputs: tuple[object, ...] = (None,)
        """All that a choice depends on, beginning with the costs, at the last forward that may get a backward."""
        self._chosen_for: tuple[object, ...] = (None,)
        """The same at the last choice."""
        self._specs: tuple[object, object] = (None, None)
        """The inputs of plans, and the specs that belong to them."""

    def for_root(self, root: ObservedRoot) -> Observer | None:
        return None if _costs_of(root) is None else Tuning()

    def calibrate(self, root: ObservedRoot, steps: int) -> None:
        """Measure the costs of collectives now, and of computation in the next ``steps``."""
        groups = {name: state.group for name, state in root.states.items() if state.group.parameters}
        axes = _axes(root)
        calibration = Calibration(
            axes, _communicators(root, axes), groups, steps, Clock(root.root_state.group.axes.device)
        )
        root.verify_ranks()
        try:
            calibration.measure_collectives()
        except BaseException:
            for each in communicators(connections(root.states.values())):
                each.abandon()  # else the others wait
            raise
        self.measure(root, calibration)

    def measure(self, root: ObservedRoot, observer: StepObserver) -> None:
        """Let ``observer`` measure the next steps."""
        self._stop(root)
        self._measuring = _Measuring(observer)
        root.observers.add(self._measuring)

    def begin_forward(self, root: ObservedRoot, outermost: FSDPState) -> None:
        """Begin a step. If costs have changed and nothing is under way, choose the settings of the schedule by them.

        Only a forward of the root that gathers some group does so: others may run on some ranks only.
        """
        if any(state.group.process_groups[0].reduces_unused for state in root.states.values()):
            self._stop(root)
        elif torch.is_grad_enabled() and outermost is root.root_state and root.plans.will_gather():
            self._begin_step(root)

    def _begin_step(self, root: ObservedRoot) -> None:
        if self._measuring is not None:
            observer = self._measuring.observer
            costs = observer.begin_step()
            if costs is not None:
                self._stop(root)
                root.root_state.change_for_plugin("costs", _fitted(root, costs, observer.waited))
        if self._is_due(root) and not _is_under_way(root):
            root.drain()
            begin = trace.now()
            self._choose(root)
            _note_choice(self.choice, begin)

    def _is_due(self, root: ObservedRoot) -> bool:
        """Return whether to choose settings. Called once before each forward that may get a backward.

        New costs count at once. A change of the order, of options or of plans counts once two forwards in a row have
        it, so that a model that alternates between two orders keeps its settings.
        """
        costs = _costs_of(root)
        if costs is None:
            return self.choice is not None
        before, self._inputs = self._inputs, self._inputs_now(root)
        has_changed = self._chosen_for[0] is not costs or before == self._inputs != self._chosen_for
        return has_changed and bool(root.plans.known.events)

    def _inputs_now(self, root: ObservedRoot) -> tuple[object, ...]:
        plans = root.plans
        inputs, bound = plans.refresh(), root.root_state.options.max_unsharded_bytes
        if self._specs[0] is not inputs:
            self._specs = inputs, specs_for(root, plans.settings)
        options = inputs.limits, bound, plans.max_reductions
        return _costs_of(root), plans.known.events, options, self._specs[1]

    def _choose(self, root: ObservedRoot) -> None:
        """Choose the settings by the costs of the root. The choice is the same on every rank."""
        costs, plans = _costs_of(root), root.plans
        if costs is None:
            self.choice = None
        else:
            specs_of = cache(partial(specs_for, root))

            def predict(settings: ScheduleSettings) -> Timeline:
                return simulate(schedule_for(root, settings), specs_of(replace(settings, prefetch_limit=0)), costs)

            self.choice = choose(
                predict,
                costs.source,
                current=plans.settings,
                default=plans.default_settings,
                before=self.choice.seconds if self.choice else None,
                fixed=set_by_user(root.root_state),
            )
        plans.use(self.choice.settings if self.choice else plans.default_settings)
        self._chosen_for = self._inputs = self._inputs_now(root)

    def after_reset(self, root: ObservedRoot) -> None:
        self._stop(root)

    def _stop(self, root: ObservedRoot) -> None:
        root.observers.remove(self._measuring)
        self._measuring = None


def _costs_of(root: ObservedRoot) -> Costs | None:
    """Return the costs by which settings are chosen that the user has not set."""
    costs: Costs | None = root.root_state.options.of_plugins.get("costs")
    return costs


class _Measuring(Observer):
    """Tells ``observer`` of the hooks of steps that train."""

    def __init__(self, observer: StepObserver) -> None:
        self.observer = observer

    def before_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        if not root.evaluates:
            in_backward, waited = root.current_pass is Pass.BACKWARD, root.streams.seconds_waited
            self.observer.enter(hook, subject.name, in_backward=in_backward, waited=waited)

    def after_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        if not root.evaluates:
            ends_pass, waited = root.current_pass is Pass.IDLE, root.streams.seconds_waited
            self.observer.leave(hook, subject.name, ends_pass=ends_pass, waited=waited)


def tuning_of(root: ObservedRoot) -> Tuning:
    """Return the tuning of ``root``, which is attached if it was not."""
    known = next((each for each in root.observers.attached if isinstance(each, Tuning)), None)
    if known is None:
        root.observers.add(known := Tuning())
    return known


def options_of(root: ObservedRoot) -> ScheduleOptions:
    """Return the options of the schedule of ``root``."""
    given = root.root_state.options
    return ScheduleOptions(**{each: getattr(given, each) for each in ROOT_OPTIONS}, costs=_costs_of(root))


def choice_of(root: ObservedRoot) -> Choice | None:
    """Return the last choice of settings by costs for ``root``, if any."""
    return next((each.choice for each in root.observers.attached if isinstance(each, Tuning)), None)


def _fitted(root: ObservedRoot, costs: Costs, waited: float) -> Costs:
    """Return ``costs`` by which the last steps take as long as they did, each with ``waited`` seconds of waits."""
    if not root.plans.known.events:
        return costs
    specs = specs_for(root, root.plans.settings)
    return fit_computation(schedule_for(root, root.plans.settings), specs, costs, waited)


def _axes(root: ObservedRoot) -> list[DataParallelAxes]:
    """Return the data-parallel axes of all parameters."""
    return list(dict.fromkeys(pgs.axes for state in root.states.values() for pgs in state.group.process_groups))


def _communicators(root: ObservedRoot, axes: list[DataParallelAxes]) -> list[Communicator]:
    """Return the communicators of all axes along which ranks run the same model, model-parallel axes last."""
    known = [each for mesh in axes for each in (mesh.shard, mesh.replicate)]
    layouts = (p.sharding.inner for state in root.states.values() for p in state.group.parameters)
    by_mesh = {layout.mesh: layout for layout in layouts if layout is not None}
    return known + [each for layout in by_mesh.values() for each in layout.communicators()]


def _is_under_way(root: ObservedRoot) -> bool:
    """Return True between a forward and its backward, and while gradients are held."""
    return any(state.runs or state.group.gradients.state in HELD_GRADIENTS for state in root.states.values())


def _note_choice(choice: Choice | None, begin: float) -> None:
    """Note a choice, which began at ``begin``, in traces and profiles."""
    if choice is None:
        return
    if trace.listeners:
        trace.emit(trace.Operation.CHOOSE, choice.summary, choice.peak_bytes, begin=begin)
    _log.debug("FSDP::choose_schedule (%s)", choice.summary)
    with record_function(f"FSDP::choose_schedule ({choice.summary})"):
        pass
