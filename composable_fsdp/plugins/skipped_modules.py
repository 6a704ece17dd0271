"""Ranks that run different modules (``set_reduce_scatter_unused_params``) launch the same collectives."""

from __future__ import annotations

from typing import Any, cast

from composable_fsdp._runtime.groups.state import ForwardCall, FSDPState
from composable_fsdp._runtime.groups.state_machine import Pass
from composable_fsdp._runtime.root.observer import Observer, Root
from composable_fsdp._runtime.root.unused_modules import UnusedModules

__all__ = ["SkippedModules"]


class SkippedModules(Observer):
    """Stands in for the hooks of the modules that this rank skips, in forwards of one root that need it."""

    def __init__(self) -> None:
        self._current: _CurrentForward | None = None

    def for_root(self, root: Root) -> Observer | None:
        return SkippedModules() if hasattr(root, "plans") else None

    def begin_forward(self, root: Root, outermost: FSDPState) -> None:
        root.events.remove(self._current)
        is_needed = any(state.unequal_use for state in root.states.values())
        self._current = _CurrentForward(UnusedModules(cast(Any, root), outermost)) if is_needed else None
        root.events.add(self._current)
        cast(Any, root).launches_reductions = not is_needed


class _CurrentForward(Observer):
    """A forward, and its backward, in which this rank may skip ``modules`` of the root."""

    def __init__(self, modules: UnusedModules) -> None:
        self._modules = modules
        self._backward = -1

    def begin_run(self, root: Root, state: FSDPState) -> None:
        if root.current_pass is Pass.BACKWARD:
            self._modules.check_recomputed(state)
        else:
            self._modules.begin(state)

    def end_run(self, root: Root, state: FSDPState) -> None:
        self._modules.end(state)

    def end_forward(self, root: Root) -> None:
        self._modules.end_forward()

    def enter_backward(self, root: Root, call: ForwardCall) -> None:
        run, self._backward = call.first or call, call.entered
        if call.state.group.parameters:
            self._modules.reach(run.record, run.position, self._backward, call.state)

    def end_backward(self, root: Root) -> None:
        self._modules.end_backward(self._backward)

    def after_reset(self, root: Root) -> None:
        self._modules.forget_backward()
