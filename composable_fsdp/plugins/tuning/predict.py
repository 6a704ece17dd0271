"""The schedule of the next step of a root, and the properties of its groups, with settings that it may not have yet."""

from __future__ import annotations

from typing import Any, cast

from composable_fsdp._core.dry import schedule_of
from composable_fsdp._core.events import Event, Hook, Pass, Schedule, Step
from composable_fsdp._core.schedule import ScheduleSettings
from composable_fsdp._core.seams import ObservedRoot
from composable_fsdp.plugins.tuning.costs import Costs
from composable_fsdp.plugins.tuning.group_spec import GroupSpec, axis_names, spec_of
from composable_fsdp.plugins.tuning.simulate import Timeline, simulate

__all__ = ["predicted", "schedule_for", "specs_for"]


def specs_for(root: ObservedRoot, settings: ScheduleSettings) -> dict[str, GroupSpec]:
    """Return the properties of all groups with ``settings``, by name."""
    axes = axis_names(pgs.axes for state in root.states.values() for pgs in state.group.process_groups)
    return {name: spec_of(state, axes, settings.message_sizes) for name, state in root.states.items()}


def schedule_for(root: ObservedRoot, settings: ScheduleSettings) -> Schedule:
    """Return the schedule of the next step with ``settings``, in which gradients are reduced."""
    return _for_simulation(schedule_of(cast(Any, root), settings))


def predicted(root: ObservedRoot, costs: Costs) -> Timeline:
    """Return the timeline of the next iteration that trains."""
    specs = specs_for(root, root.plans.settings)
    return simulate(_for_simulation(schedule_of(cast(Any, root))), specs, costs)


def _for_simulation(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with the times at which a recomputation gathers, but without its computation."""
    steps, current = [], Pass.FORWARD
    for event, actions in schedule:
        current = Pass.BACKWARD if event.hook is Hook.PRE_BACKWARD else current
        is_recomputed = current is Pass.BACKWARD and event.hook in (Hook.PRE_FORWARD, Hook.POST_FORWARD)
        if is_recomputed and actions:
            event = Event(Hook.PRE_BACKWARD, event.group)
        if actions or not is_recomputed:
            steps.append(Step(event, actions))
    return Schedule(tuple(steps))
