"""The runtime of one root: built once, complete, from the units beneath it."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from composable_fsdp.memory.lanes import Lanes
from composable_fsdp.runtime.iteration import Iteration, note_optimizer_step
from composable_fsdp.runtime.unit import Unit, find_unit, unit_of

__all__ = ["assemble", "iteration_of"]

ROOT_NAME = "root"

_watches_optimizers = False


def iteration_of(unit: Unit) -> Iteration:
    """The iteration that ``unit`` takes part in. The first use makes one with ``unit`` as the root."""
    return cast(Iteration, unit.iteration) if unit.iteration is not None else assemble(unit.module)


def assemble(root: nn.Module) -> Iteration:
    """Names the units beneath ``root`` by their place in it and builds the iteration that they share.

    A module that ran on its own before its parent did hands its units over to the parent's root.
    """
    _watch_optimizers()
    units = {
        name or ROOT_NAME: unit for name, module in root.named_modules() if (unit := find_unit(module)) is not None
    }
    top = unit_of(root)
    for former in {iteration_of(unit) for unit in units.values() if unit.iteration is not None}:
        former.drain()
    iteration = Iteration(top, units, Lanes(top.group.axes.device))
    for name, unit in units.items():
        unit.group.name = name
        unit.iteration = iteration
    return iteration


def _watch_optimizers() -> None:
    global _watches_optimizers
    if not _watches_optimizers:
        register_optimizer_step_post_hook(note_optimizer_step)
        _watches_optimizers = True
