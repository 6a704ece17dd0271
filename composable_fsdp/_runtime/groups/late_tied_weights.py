"""Parameters that were tied only after they had been sharded, as transformers ties them once a checkpoint is loaded.

The group that has the tensor keeps it, for the modules of the other one too; the other group gives up what it had in
its place, and has the first one lend it the tensor, as if it had been sharded with ``shared_from``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.params.sharded_param import ShardedParameter

__all__ = ["join_ties"]


class _Held(NamedTuple):
    state: FSDPState
    parameter: ShardedParameter


def join_ties(states: Sequence[FSDPState]) -> None:
    """Makes one parameter of those of ``states`` in whose places somebody has registered one tensor.

    Parameters of different shapes, or cut differently, are left alone: their groups say so when they are gathered.
    """
    held = [_Held(state, parameter) for state in states for parameter in state.group.parameters]
    keepers = _keepers(held)
    joined = [
        (each, keeper)
        for each in held
        if (keeper := keepers.get(id(_shown(each.parameter)), each)) is not each and _are_cut_alike(each, keeper)
    ]
    for (state, parameter), _ in joined:
        state.group.give_up(parameter)
    for (state, parameter), keeper in joined:
        keeper.state.group.refresh()
        keeper.state.group.register_at(keeper.parameter, parameter.owners)
        if keeper.state is not state:
            state.borrow_from(keeper.state)


def _keepers(held: Iterable[_Held]) -> dict[int, _Held]:
    """Who keeps each tensor, by its id: whose own it is, or else the innermost that shows it."""
    keepers: dict[int, _Held] = {}
    for each in held:
        shown = _shown(each.parameter)
        known = keepers.get(id(shown))
        if shown is not None and (known is None or known.parameter.sharded is not shown):
            keepers[id(shown)] = each
    return keepers


def _shown(parameter: ShardedParameter) -> nn.Parameter | None:
    """What is registered in all of its places, if that is one tensor."""
    shown = {
        id(tensor): tensor for module, name in parameter.owners if (tensor := module._parameters.get(name)) is not None
    }
    return next(iter(shown.values())) if len(shown) == 1 else None


def _are_cut_alike(one: _Held, other: _Held) -> bool:
    a, b = one.parameter.sharding, other.parameter.sharding
    return a.shape == b.shape and a.mesh == b.mesh and a.placements == b.placements
