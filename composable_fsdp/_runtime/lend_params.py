"""Temporary registration of full parameters in place of the sharded ones, during which nothing may compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.hooks import is_being_called
from composable_fsdp._runtime.params.param_places import ParamPlace
from composable_fsdp._runtime.root.iteration import Iteration
from composable_fsdp.errors import LifecycleError

__all__ = ["LentParams", "check_idle"]


def check_idle(states: Sequence[FSDPState], caller: str = "unsharded_params") -> None:
    """Raise if parameters of ``states`` are in use.

    Args:
        states: the states whose full parameters are to be registered.
        caller: the public function, for errors.

    Raises:
        LifecycleError: a forward or backward is running, or full parameters of the same root are registered already.
    """
    if torch._C._current_graph_task_id() != -1:
        raise LifecycleError(
            f"{caller} was entered during a backward, which still uses the parameters. Enter it before the forward or "
            "after backward() has returned."
        )
    for state in states:
        if isinstance(state.iteration, _SuspendedIteration):
            raise LifecycleError(
                f"{caller} was entered for {state.name!r} inside another one for modules of the same root. "
                "Leave that one first, or use one for all: with recurse=True it reaches every module below its own."
            )
        if isinstance(state.iteration, Iteration) and any(map(is_being_called, _states_of_root(state))):
            raise LifecycleError(
                f"{caller} was entered during a forward that {state.name!r} is part of, which still uses the "
                "parameters. Enter it before the forward or after backward() has returned."
            )


def _states_of_root(state: FSDPState) -> list[FSDPState]:
    return list(state.iteration.states.values()) if isinstance(state.iteration, Iteration) else [state]


class _SuspendedIteration:
    """Replaces the iteration of a root while full parameters are registered. Every other operation raises."""

    def abort_forward(self, state: FSDPState) -> None:
        """Do nothing: the forward was rejected before it began."""

    def drain(self) -> None:
        """Do nothing, since nothing is in flight."""

    def drain_before_changes(self) -> None:
        """Do nothing, since nothing is in flight."""

    def __getattr__(self, name: str) -> NoReturn:
        raise LifecycleError(
            "a forward, unshard() or another operation of a sharded module came inside unsharded_params, where "
            "parameters of its root are not sharded, or inside a function that initialize called. Leave it first."
        )


class LentParams:
    """Full parameters registered in place of the sharded ones, on the ranks that show them."""

    def __init__(
        self, states: Sequence[FSDPState], entries: Sequence[ParamPlace], full_parameters: Sequence[nn.Parameter | None]
    ) -> None:
        self._entries = entries
        # All states of the root, since each may prefetch the others.
        affected = [u for state in states for u in _states_of_root(state)]
        self._iterations = {state: state.iteration for state in affected}
        self._stand_in = _SuspendedIteration()  # states have only a weak reference
        for state in affected:
            state.iteration = self._stand_in
        for entry, full_parameter in zip(entries, full_parameters, strict=True):
            if full_parameter is not None:
                entry.put(full_parameter)

    def end(self) -> list[object]:
        """Register the sharded parameters again. Return the tensors that were registered, which a user may have set."""
        shown = [entry.current() for entry in self._entries]
        for entry in self._entries:
            entry.put(entry.parameter)
        for state, iteration in self._iterations.items():
            if state.iteration is self._stand_in:
                state.iteration = iteration
        return shown
