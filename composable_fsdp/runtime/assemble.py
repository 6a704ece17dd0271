"""The runtime of one root: built once, complete, from the units beneath it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.memory.lanes import Lanes
from composable_fsdp.runtime.iteration import Iteration
from composable_fsdp.runtime.late_ties import join_ties
from composable_fsdp.runtime.parameter import find_taken, find_unsharded
from composable_fsdp.runtime.recovery import set_order_check
from composable_fsdp.runtime.steps import note_optimizer_step
from composable_fsdp.runtime.strangers import warn_of_strangers
from composable_fsdp.runtime.unit import Unit, find_unit

__all__ = ["ROOT_NAME", "assemble", "iteration_of", "name_units", "watch_optimizers"]

ROOT_NAME = "root"

_watches_optimizers = False
_checked_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()


def iteration_of(unit: Unit) -> Iteration:
    """The iteration that ``unit`` takes part in. The first use makes one with ``unit`` as the root."""
    iteration: Iteration | None = unit.iteration
    return assemble(unit) if iteration is None else iteration


def assemble(root: Unit) -> Iteration:
    """Names the units beneath ``root`` by their place in it and builds the iteration that they share.

    A module that ran on its own before its parent did hands its units over to the parent's root.
    """
    watch_optimizers()
    warn_of_strangers(root)
    units = _units_by_name(root)
    join_ties(list(units.values()))
    iteration = Iteration(root, units, Lanes(root.group.axes.device))
    set_order_check(units.values(), root.order_check)  # what an earlier model chose for the same process groups is over
    for former in {iteration_of(unit) for unit in units.values() if unit.iteration is not None}:
        former.drain()
        iteration.is_last_backward &= former.is_last_backward
        iteration.post_optimizer_event = former.post_optimizer_event or iteration.post_optimizer_event
    for name, unit in units.items():
        unit.group.rename(name)
        unit.group.find_patches()
        unit.iteration = iteration
    return iteration


def _units_by_name(root: Unit) -> dict[str, Unit]:
    """In the order of the modules; a unit of several modules has all their names."""
    places: dict[Unit, list[str]] = {}
    for index, top in enumerate(root.modules):
        prefix = f"{index}." if len(root.modules) > 1 else ""
        for name, module in top.named_modules():
            unit = find_unit(module)
            if unit is not None and module in unit.modules:
                places.setdefault(unit, []).append(f"{prefix}{name}" if name else "")
    return name_units(places)


def name_units(places: Mapping[Unit, Sequence[str]]) -> dict[str, Unit]:
    """Units by all the names of their modules; what has none is the root, however a module of it may be called."""
    named = {", ".join(filter(None, names)): unit for unit, names in places.items()}
    root = ROOT_NAME if ROOT_NAME not in named else f"({ROOT_NAME})"
    return {name or root: unit for name, unit in named.items()}


def watch_optimizers() -> None:
    """Lets every optimizer's step be noticed. Once is enough."""
    global _watches_optimizers
    if not _watches_optimizers:
        register_optimizer_step_pre_hook(_check_optimizer)
        register_optimizer_step_post_hook(note_optimizer_step)
        _watches_optimizers = True


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """An optimizer that holds other forms of parameters than the sharded ones would step what nobody reads."""
    if optimizer in _checked_optimizers:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [taken.description for p in parameters if (taken := find_taken(p)) is not None]
    if stale:
        raise ConfigurationError(
            f"{type(optimizer).__name__} was built before fully_shard: {len(stale)} of its {len(parameters)} "
            f"parameters have been replaced by sharded ones, such as {stale[0]}, so that its step would change "
            "nothing. Build the optimizer after the last fully_shard call, or give this one the sharded parameters: "
            "composable_fsdp.rekey_optimizer(optimizer, model)."
        )
    unsharded = find_unsharded(parameters)
    if unsharded is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} was built while parameters were unsharded, such as {unsharded.name!r}: "
            "between a forward and its backward, or after unshard(). Its step would change what is freed again. Build "
            "the optimizer before the first forward."
        )
    _checked_optimizers.add(optimizer)
