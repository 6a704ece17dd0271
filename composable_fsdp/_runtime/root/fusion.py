"""Small units next to each other in the order of forward, whose collectives go together. Decides, never acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composable_fsdp._runtime.collectives.packing import describe_groups
from composable_fsdp._runtime.groups.state import Accumulation, FSDPState
from composable_fsdp._runtime.groups.state_machine import ParameterState
from composable_fsdp._runtime.schedule.policy import merge_adjacent

__all__ = ["Company"]


class Company:
    """Who travels with whom. ``states`` are all below ``root``, by name.

    Invariant: the companions of a unit are a run of the order that was expected last, itself included.
    """

    def __init__(self, root: FSDPState, states: Mapping[str, FSDPState]) -> None:
        self._root = root
        self._states = states
        self._made_for: tuple[Sequence[str], int] = ((), 0)
        """The order and the limit."""
        self._companions: dict[FSDPState, tuple[FSDPState, ...]] = {}
        self._sociable: set[FSDPState] = set()
        """Those of them that may have company in this iteration."""
        self._settled: set[FSDPState] = set()
        """Those whose gradients are complete, and wait for their companions'."""

    def expect(self, order: Sequence[str]) -> None:
        """The next forward is expected to go through groups in ``order``."""
        limit = self._root.max_merged_bytes
        if self._made_for != (order, limit):
            self._made_for = order, limit
            self._make(order, limit)
        self._sociable = {state for state in self._companions if state.may_have_company}

    def _make(self, order: Sequence[str], limit: int) -> None:
        plans = {name: state.group.plan for name, state in self._states.items() if state is not self._root}
        sizes = {name: plan.full_bytes for name, plan in plans.items() if plan.is_small}
        runs = merge_adjacent(order, sizes, limit)
        self._companions = {self._states[name]: tuple(self._states[n] for n in run) for name, run in runs.items()}

    def gathered_with(self, state: FSDPState, *, in_backward: bool) -> list[FSDPState]:
        """Those to gather now that ``state`` is: it, and sharded companions to which the pass comes after it."""
        companions = self._companions.get(state)
        if companions is None or not self._may_go_along(state, in_backward=in_backward):
            return [state]
        place = companions.index(state)
        later = companions[place::-1] if in_backward else companions[place:]
        return [each for each in later if self._may_go_along(each, in_backward=in_backward)]

    def name_of(self, state: FSDPState) -> str:
        """What all ranks call what is gathered with ``state``, whichever of its companions each of them needs."""
        return describe_groups([each.group.name for each in self._companions.get(state, (state,))])

    def reduces(self, state: FSDPState) -> bool:
        """Whether ``state``'s gradients go with those of its companions."""
        return state in self._companions and self._reduces_whole(state)

    def has_settled(self, state: FSDPState) -> bool:
        """Whether ``state``'s gradients wait for its companions'."""
        return state in self._settled

    def settle(self, state: FSDPState, *, at_end: bool) -> list[FSDPState]:
        """``state``'s gradients are complete: those to reduce now, once all companions' are, or at the end.

        At the end also companions without gradients are among them, as they may have some on other ranks.
        """
        companions = self._companions[state]
        self._settled.add(state)
        if not at_end and not self._settled.issuperset(companions):
            return []
        self._settled.difference_update(companions)
        return [companion for companion in companions if self._reduces_whole(companion)]

    def forget_settled(self) -> None:
        """A backward is over, or given up."""
        self._settled.clear()

    def _may_go_along(self, state: FSDPState, *, in_backward: bool) -> bool:
        if state.group.parameter_state is not ParameterState.SHARDED or state not in self._sociable:
            return False
        return state.unshard_in_backward or not in_backward

    def _reduces_whole(self, state: FSDPState) -> bool:
        """Whether the unit's gradients become those of its sharded parameters in this backward."""
        return state in self._sociable and state.accumulation is Accumulation.REDUCE and not state.keeps_partial
