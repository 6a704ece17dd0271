"""The schedule of the next step of a root, and the properties of its groups, with settings that it may not have yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from composable_fsdp._core.dry import schedule_of
from composable_fsdp._runtime.groups.state_machine import Pass
from composable_fsdp._runtime.root.group_spec import names_of, spec_of
from composable_fsdp._runtime.root.observer import Root
from composable_fsdp._runtime.schedule.costs import Costs
from composable_fsdp._runtime.schedule.passes import GroupSpec, ScheduleSettings, build
from composable_fsdp._runtime.schedule.schedule import Event, Hook, Schedule, Step
from composable_fsdp._sharding.mesh import axis_names
from composable_fsdp.plugins.tuning.simulate import Timeline, simulate

__all__ = ["predicted", "schedule_for", "specs_for"]


def specs_for(root: Root, settings: ScheduleSettings, *, synchronized: bool = True) -> dict[str, GroupSpec]:
    """Return the properties of all groups with ``settings``, by name."""
    if not hasattr(root, "plans"):
        return root.runner.specs_for(settings) if synchronized else dict(root.runner.specs)
    names = names_of(root.states)
    axes = axis_names(pgs.axes for state in names for pgs in state.group.process_groups)
    sizes = settings.message_sizes
    return {
        name: spec_of(state, root.root, names, axes, settings, sizes=sizes, synchronized=synchronized)
        for name, state in root.states.items()
    }


def schedule_for(root: Root, settings: ScheduleSettings, specs: Mapping[str, GroupSpec]) -> Schedule:
    """Return the schedule of the next step with ``settings``, in which gradients are reduced."""
    if hasattr(root, "plans"):
        return _for_simulation(schedule_of(cast(Any, root), settings))
    known, chosen = root.runner.known, {"prefetch_limit", "max_fused_bytes"}
    options = cast(Any, root.runner.training_options)
    options = replace(options, **{name: getattr(settings, name) for name in chosen})
    return build(known.events, specs, options, unseen=known.unseen)


def predicted(root: Root, costs: Costs, change: Callable[[GroupSpec], GroupSpec] | None = None) -> Timeline:
    """Return the timeline of the next iteration that trains, with each group as ``change`` returns it."""
    runner = root.runner
    if not hasattr(root, "plans"):
        specs = {name: change(spec) if change else spec for name, spec in runner.specs.items()}
        return simulate(runner.built(specs, runner.training_options), specs, costs)
    before = specs_for(root, runner.settings, synchronized=False)
    specs = {name: change(spec) if change else spec for name, spec in before.items()}
    reshard = {name: spec.reshard for name, spec in specs.items()} if change else None
    return simulate(_for_simulation(schedule_of(cast(Any, root), reshard=reshard)), specs, costs)


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
    return Schedule(tuple(steps), schedule.initially_unsharded)
