"""Chooses which small, adjacent parameter groups share one collective. Pure policy: launches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composable_fsdp._runtime.collectives.packing import describe_groups
from composable_fsdp._runtime.groups.state import Accumulation, FSDPState
from composable_fsdp._runtime.groups.state_machine import ParameterState
from composable_fsdp._runtime.schedule.policy import merge_adjacent

__all__ = ["Company"]


class Company:
    """The current fusion of parameter groups. ``states`` are all below ``root``, by name.

    Invariant: the companions of a state are a contiguous part of the last expected order, itself included.
    """

    def __init__(self, root: FSDPState, states: Mapping[str, FSDPState]) -> None:
        self._root = root
        self._states = states
        self._made_for: tuple[Sequence[str], int] = ((), 0)
        """The order and the byte limit that the companions were computed for."""
        self._companions: dict[FSDPState, tuple[FSDPState, ...]] = {}
        self._eligible: set[FSDPState] = set()
        """States that may share collectives in this iteration."""
        self._waiting: set[FSDPState] = set()
        """States whose gradients are complete and wait for those of their companions."""

    def expect(self, order: Sequence[str]) -> None:
        """Set the expected order of groups of the next forward."""
        limit = self._root.max_merged_bytes
        if self._made_for != (order, limit):
            self._made_for = order, limit
            self._make(order, limit)
        self._eligible = {state for state in self._companions if state.can_be_fused}

    def _make(self, order: Sequence[str], limit: int) -> None:
        plans = {name: state.group.plan for name, state in self._states.items() if state is not self._root}
        sizes = {name: plan.full_bytes for name, plan in plans.items() if plan.is_small}
        runs = merge_adjacent(order, sizes, limit)
        self._companions = {self._states[name]: tuple(self._states[n] for n in run) for name, run in runs.items()}

    def gathered_with(self, state: FSDPState, *, in_backward: bool) -> list[FSDPState]:
        """Return ``state`` and its sharded companions that come after it in this pass, to unshard together."""
        companions = self._companions.get(state)
        if companions is None or not self._can_fuse(state, in_backward=in_backward):
            return [state]
        index = companions.index(state)
        later = companions[index::-1] if in_backward else companions[index:]
        return [each for each in later if self._can_fuse(each, in_backward=in_backward)]

    def name_of(self, state: FSDPState) -> str:
        """Return the label of the all-gather of ``state`` and its companions. It is the same on all ranks."""
        return describe_groups([each.group.name for each in self._companions.get(state, (state,))])

    def reduces(self, state: FSDPState) -> bool:
        """Return whether the gradients of ``state`` are reduced with those of its companions."""
        return state in self._companions and self._reduces_now(state)

    def is_waiting(self, state: FSDPState) -> bool:
        """Return whether the gradients of ``state`` are complete and wait for those of its companions."""
        return state in self._waiting

    def mark_ready(self, state: FSDPState, *, at_end: bool) -> list[FSDPState]:
        """Mark the gradients of ``state`` as complete. Return the states to reduce now.

        The result is empty until all companions are complete or backward is ``at_end``. At the end it includes
        companions without gradients, because other ranks may have some.
        """
        companions = self._companions[state]
        self._waiting.add(state)
        if not at_end and not self._waiting.issuperset(companions):
            return []
        self._waiting.difference_update(companions)
        return [companion for companion in companions if self._reduces_now(companion)]

    def clear_waiting(self) -> None:
        """Forget all waiting states: backward is over or abandoned."""
        self._waiting.clear()

    def _can_fuse(self, state: FSDPState, *, in_backward: bool) -> bool:
        if state.group.parameter_state is not ParameterState.SHARDED or state not in self._eligible:
            return False
        return state.unshard_in_backward or not in_backward

    def _reduces_now(self, state: FSDPState) -> bool:
        """Return whether this backward sets the reduced gradients of ``state`` on its sharded parameters."""
        return state in self._eligible and state.accumulation is Accumulation.REDUCE and not state.keeps_partial
