"""Weights that were tied after ``fully_shard``, as transformers does after loading a checkpoint.

The group that owns the registered tensor keeps it. The other group drops its own parameter and uses that tensor, as
with ``shared_from``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.seams import Observer
from composable_fsdp._core.state import FSDPState


class LateTies(Observer):
    """Merges the parameters of a model that show one tensor."""

    def before_assembly(self, root: FSDPState, states: Mapping[str, FSDPState]) -> None:
        _tie_weights(list(states.values()))


class _OwnedParameter(NamedTuple):
    state: FSDPState
    parameter: ShardedParameter


def _tie_weights(states: Sequence[FSDPState]) -> None:
    """Merge the parameters of ``states`` in whose places one tensor is now registered.

    Parameters of different shapes or shardings are skipped: their groups raise when they are next unsharded.
    """
    owned = [_OwnedParameter(state, parameter) for state in states for parameter in state.group.parameters]
    final_owners = _final_owners(owned)
    joined = [
        (each, final_owner)
        for each in owned
        if (final_owner := final_owners.get(id(_registered_tensor(each.parameter)), each)) is not each
        and _have_same_sharding(each, final_owner)
    ]
    for (state, parameter), _ in joined:
        state.reshard()
        state.group.give_up(parameter)
    for (state, parameter), final_owner in joined:
        final_owner.state.reshard()
        final_owner.state.group.refresh()
        final_owner.state.group.register_at(final_owner.parameter, parameter.owners)
        if final_owner.state is not state:
            state.add_owner(final_owner.state)


def _final_owners(owned: Iterable[_OwnedParameter]) -> dict[int, _OwnedParameter]:
    """Return the owner of each tensor by ``id``: the group whose parameter it is, else the innermost that has it."""
    final_owners: dict[int, _OwnedParameter] = {}
    for each in owned:
        shown = _registered_tensor(each.parameter)
        known = final_owners.get(id(shown))
        if shown is not None and (known is None or known.parameter.sharded is not shown):
            final_owners[id(shown)] = each
    return final_owners


def _registered_tensor(parameter: ShardedParameter) -> nn.Parameter | None:
    """Return the tensor registered in all places of the parameter, or ``None`` if there are several."""
    registered = (module._parameters.get(name) for module, name in parameter.owners)
    shown = {id(tensor): tensor for tensor in registered if tensor is not None}
    return next(iter(shown.values())) if len(shown) == 1 else None


def _have_same_sharding(one: _OwnedParameter, other: _OwnedParameter) -> bool:
    a, b = one.parameter.sharding, other.parameter.sharding
    return a.shape == b.shape and a.mesh == b.mesh and a.placements == b.placements
