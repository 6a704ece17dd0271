"""The two state machines of a parameter group, as tables: one for parameters, one for gradients.

Idempotence is a row of a table. An operation without a row is illegal, and :func:`advance` lists the legal ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from composable_fsdp.errors import LifecycleError

__all__ = [
    "GRADIENT_TRANSITIONS",
    "HELD_GRADIENTS",
    "LOCAL_GRADIENTS",
    "PARAMETER_TRANSITIONS",
    "GradientOperation",
    "GradientState",
    "Key",
    "ParameterOperation",
    "ParameterState",
    "Pass",
    "advance",
]


class Key(Enum):
    """An ``Enum`` hashed by identity, which is faster: ``Enum`` hashes member names in Python."""

    __hash__ = object.__hash__


class Pass(Key):
    """The pass that an iteration is in."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ParameterState(Key):
    """The state of a group's parameters."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"
    SHRUNK = "SHRUNK"
    """Resharded after forward to a smaller mesh: the sharded parameters are registered, and a larger slice is kept."""
    LENT = "LENT"
    """Full parameters are registered for the user, as inside ``unsharded_params``, on some or all ranks."""


class ParameterOperation(Key):
    """The operations on a group's parameters."""

    UNSHARD = "UNSHARD"
    WAIT = "WAIT"
    RESHARD = "RESHARD"
    SHRINK = "SHRINK"
    LEND = "LEND"
    RETURN = "RETURN"


class GradientState(Key):
    """The state of a group's gradients."""

    NONE = "NONE"
    ARRIVING = "ARRIVING"
    """Some gradients, but not all, have arrived in this backward. They are not yet reduced."""
    LOCAL = "LOCAL"
    """All gradients that this backward gives have arrived, or earlier ones are held. They are not yet reduced."""
    REDUCING = "REDUCING"
    PARTIAL = "PARTIAL"
    """Reduced over the shard axis and kept for a later reduction."""
    REDUCED = "REDUCED"


class GradientOperation(Key):
    """The operations on a group's gradients."""

    ACCUMULATE = "ACCUMULATE"
    """A gradient arrived."""
    READY = "READY"
    """All gradients have arrived, or this rank contributes or holds those that it has."""
    REDUCE = "REDUCE"
    KEEP = "KEEP"
    COMPLETE = "COMPLETE"
    DROP = "DROP"


_P, _PO = ParameterState, ParameterOperation
PARAMETER_TRANSITIONS: Mapping[tuple[ParameterState, ParameterOperation], ParameterState] = {
    (_P.SHARDED, _PO.UNSHARD): _P.UNSHARDING,
    (_P.SHARDED, _PO.RESHARD): _P.SHARDED,
    (_P.SHARDED, _PO.LEND): _P.LENT,
    (_P.UNSHARDING, _PO.UNSHARD): _P.UNSHARDING,  # already prefetched
    (_P.UNSHARDING, _PO.WAIT): _P.UNSHARDED,
    (_P.UNSHARDING, _PO.RESHARD): _P.SHARDED,  # prefetched, never used
    (_P.UNSHARDED, _PO.UNSHARD): _P.UNSHARDED,
    (_P.UNSHARDED, _PO.WAIT): _P.UNSHARDED,
    (_P.UNSHARDED, _PO.RESHARD): _P.SHARDED,
    (_P.UNSHARDED, _PO.SHRINK): _P.SHRUNK,
    (_P.SHRUNK, _PO.UNSHARD): _P.UNSHARDING,  # from the smaller mesh
    (_P.SHRUNK, _PO.RESHARD): _P.SHARDED,
    (_P.LENT, _PO.RESHARD): _P.LENT,  # a state dict reshards first, and shows what is registered
    (_P.LENT, _PO.RETURN): _P.SHARDED,
}

_G, _GO = GradientState, GradientOperation
GRADIENT_TRANSITIONS: Mapping[tuple[GradientState, GradientOperation], GradientState] = {
    **{(state, _GO.ACCUMULATE): _G.ARRIVING for state in _G},
    **{(state, _GO.READY): _G.LOCAL for state in _G},
    (_G.NONE, _GO.REDUCE): _G.NONE,  # not used in this backward
    (_G.ARRIVING, _GO.REDUCE): _G.REDUCING,  # the other gradients do not come in this backward
    (_G.ARRIVING, _GO.COMPLETE): _G.ARRIVING,  # an earlier reduction ended after new gradients arrived
    (_G.ARRIVING, _GO.KEEP): _G.ARRIVING,
    (_G.LOCAL, _GO.REDUCE): _G.REDUCING,
    (_G.LOCAL, _GO.COMPLETE): _G.LOCAL,
    (_G.LOCAL, _GO.KEEP): _G.LOCAL,
    (_G.REDUCING, _GO.REDUCE): _G.REDUCING,
    (_G.REDUCING, _GO.COMPLETE): _G.REDUCED,
    (_G.REDUCING, _GO.KEEP): _G.PARTIAL,
    (_G.PARTIAL, _GO.REDUCE): _G.REDUCING,  # used in an earlier backward, but not in the last
    (_G.PARTIAL, _GO.KEEP): _G.PARTIAL,  # the earlier of two reductions in flight
    (_G.PARTIAL, _GO.COMPLETE): _G.PARTIAL,
    (_G.REDUCED, _GO.REDUCE): _G.REDUCED,
    (_G.REDUCED, _GO.COMPLETE): _G.REDUCED,  # the earlier of two reductions in flight
    (_G.REDUCED, _GO.KEEP): _G.PARTIAL,  # this reduction is partial, an earlier one was not
    **{(state, _GO.DROP): _G.NONE for state in _G},
}

LOCAL_GRADIENTS = frozenset({_G.ARRIVING, _G.LOCAL})
"""The states with gradients that are not yet reduced."""
HELD_GRADIENTS = LOCAL_GRADIENTS | {_G.PARTIAL}
"""The states with gradients that are not yet in the sharded ones."""

_REMEDIES: Mapping[Key, str] = {
    _P.LENT: "A forward, unshard() or another operation of a sharded module came inside unsharded_params, where "
    "parameters of its root are full, or inside a function that initialize called. Leave it first.",
}
_REMEDY = "After an exception in forward or backward, call reset_iter_state() on the root module."

S = TypeVar("S", bound=Key)
Op = TypeVar("Op", bound=Key)


def after(table: Mapping[tuple[S, Op], S], operation: Op) -> Mapping[S, S]:
    """Return the states after ``operation`` by those before it. Hot code uses them, and :func:`advance` to raise."""
    return {state: table[state, op] for state, op in table if op is operation}


def advance(table: Mapping[tuple[S, Op], S], state: S, operation: Op, group: str) -> S:
    """Return the state after ``operation``, or raise a ``LifecycleError`` with the legal operations of ``group``."""
    try:
        return table[state, operation]
    except KeyError:
        legal = ", ".join(o.name for s, o in table if s is state)
        raise LifecycleError(
            f"group {group!r} is {state.name}: {operation.name} is not legal here (legal: {legal}). "
            f"{_REMEDIES.get(state, _REMEDY)}"
        ) from None
