"""Whole parameters lent in the place of the sharded ones, and that nothing computes with these meanwhile."""

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
    """
    Args:
        states: whose parameters are to be lent.
        caller: the public function that lends them, for errors.

    Raises:
        LifecycleError: a forward or backward of ``states`` is under way, or another loan of the same root.
    """
    if torch._C._current_graph_task_id() != -1:
        raise LifecycleError(
            f"{caller} was entered during a backward, whose parameters would be pulled from under it. Enter it "
            "before the forward or after backward() has returned."
        )
    for state in states:
        if isinstance(state.iteration, _Lent):
            raise LifecycleError(
                f"{caller} was entered for {state.name!r} inside another one for modules of the same root. "
                "Leave that one first, or use one for all: with recurse=True it reaches every module below its own."
            )
        if isinstance(state.iteration, Iteration) and any(map(is_being_called, _of_same_root(state))):
            raise LifecycleError(
                f"{caller} was entered during a forward that {state.name!r} is part of, whose parameters would "
                "be pulled from under it. Enter it before the forward or after backward() has returned."
            )


def _of_same_root(state: FSDPState) -> list[FSDPState]:
    return list(state.iteration.states.values()) if isinstance(state.iteration, Iteration) else [state]


class _Lent:
    """Stands in for a unit's iteration while parameters of its root are whole, and refuses what would compute."""

    def abort_forward(self, state: FSDPState) -> None:
        """A forward was refused: there is nothing to undo."""

    def drain(self) -> None:
        """Nothing is in flight."""

    def deliver_before_changes(self) -> None:
        """Nothing is in flight."""

    def __getattr__(self, name: str) -> NoReturn:
        raise LifecycleError(
            "a forward, unshard() or another operation of a sharded module came inside unsharded_params, where "
            "parameters of its root are not sharded, or inside a function that initialize called. Leave it first."
        )


class LentParams:
    """Whole parameters in the place of the sharded ones, on ranks that show them."""

    def __init__(
        self, states: Sequence[FSDPState], entries: Sequence[ParamPlace], wholes: Sequence[nn.Parameter | None]
    ) -> None:
        self._entries = entries
        # All units of the same root: each of them may prefetch those on loan.
        affected = [u for state in states for u in _of_same_root(state)]
        self._iterations = {state: state.iteration for state in affected}
        self._stand_in = _Lent()  # units do not own what they take part in
        for state in affected:
            state.iteration = self._stand_in
        for entry, whole in zip(entries, wholes, strict=True):
            if whole is not None:
                entry.put(whole)

    def end(self) -> list[object]:
        """Puts the sharded parameters back. Returns what was registered in their place, which the body may have set."""
        shown = [entry.current() for entry in self._entries]
        for entry in self._entries:
            entry.put(entry.parameter)
        for state, iteration in self._iterations.items():
            if state.iteration is self._stand_in:
                state.iteration = iteration
        return shown
