"""Temporary registration of full parameters in place of the sharded ones, during which nothing may compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.groups.state_machine import ParameterState
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
        iteration: Iteration | None = state.iteration
        if state.group.parameter_state is ParameterState.LENT or (iteration is not None and iteration.lent is not None):
            raise LifecycleError(
                f"{caller} was entered for {state.name!r} inside another one for modules of the same root. "
                "Leave that one first, or use one for all: with recurse=True it reaches every module below its own."
            )
        if iteration is not None and any(map(is_being_called, iteration.states.values())):
            raise LifecycleError(
                f"{caller} was entered during a forward that {state.name!r} is part of, which still uses the "
                "parameters. Enter it before the forward or after backward() has returned."
            )


class LentParams:
    """Full parameters registered in place of the sharded ones, on the ranks that show them."""

    def __init__(
        self, states: Sequence[FSDPState], entries: Sequence[ParamPlace], full_parameters: Sequence[nn.Parameter | None]
    ) -> None:
        self._entries = entries
        self._groups = list(dict.fromkeys(state.group for state in states))
        self._iterations = [state.iteration for state in states if state.iteration is not None]
        for group in self._groups:
            group.lend()
        for iteration in self._iterations:
            iteration.lent = self._groups[0]
        for entry, full_parameter in zip(entries, full_parameters, strict=True):
            if full_parameter is not None:
                entry.put(full_parameter)

    def end(self) -> list[object]:
        """Register the sharded parameters again. Return the tensors that were registered, which a user may have set."""
        shown = [entry.current() for entry in self._entries]
        for entry in self._entries:
            entry.put(entry.parameter)
        for group in self._groups:
            group.take_back()
        for iteration in self._iterations:
            iteration.lent = None
        return shown
