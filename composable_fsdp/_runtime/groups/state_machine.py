"""The two small machines of a group, as data: where its parameters are, and where its gradients are.

Idempotence is a row of a table. What is not in a table is not legal, and :func:`advance` says what would have been.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from composable_fsdp.errors import LifecycleError

__all__ = [
    "GRADIENT_TRANSITIONS",
    "PARAMETER_TRANSITIONS",
    "GradientOperation",
    "GradientState",
    "Key",
    "ParameterOperation",
    "ParameterState",
    "advance",
]


class Key(Enum):
    """Members that are hashed by identity, as they are compared: ``Enum`` itself hashes their names, in Python."""

    __hash__ = object.__hash__


class ParameterState(Key):
    """Where a group's parameters are."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"
    SHRUNK = "SHRUNK"
    """Resharded after forward to a smaller mesh: the modules show the sharded parameters, a larger slice is kept."""


class ParameterOperation(Key):
    """What can be done to a group's parameters."""

    UNSHARD = "UNSHARD"
    WAIT = "WAIT"
    RESHARD = "RESHARD"
    SHRINK = "SHRINK"


class GradientState(Key):
    """Where a group's gradients are."""

    NONE = "NONE"
    LOCAL = "LOCAL"
    """Autograd has put at least one on an unsharded parameter, and it has not been sent yet."""
    REDUCING = "REDUCING"
    PARTIAL = "PARTIAL"
    """Summed over the shard axis and kept; what makes them gradients is still to come."""
    REDUCED = "REDUCED"


class GradientOperation(Key):
    """What can happen to a group's gradients."""

    ACCUMULATE = "ACCUMULATE"
    REDUCE = "REDUCE"
    KEEP = "KEEP"
    COMPLETE = "COMPLETE"
    DROP = "DROP"


_P, _PO = ParameterState, ParameterOperation
PARAMETER_TRANSITIONS: Mapping[tuple[ParameterState, ParameterOperation], ParameterState] = {
    (_P.SHARDED, _PO.UNSHARD): _P.UNSHARDING,
    (_P.SHARDED, _PO.RESHARD): _P.SHARDED,
    (_P.UNSHARDING, _PO.UNSHARD): _P.UNSHARDING,  # already prefetched
    (_P.UNSHARDING, _PO.WAIT): _P.UNSHARDED,
    (_P.UNSHARDING, _PO.RESHARD): _P.SHARDED,  # prefetched, never used
    (_P.UNSHARDED, _PO.UNSHARD): _P.UNSHARDED,
    (_P.UNSHARDED, _PO.WAIT): _P.UNSHARDED,
    (_P.UNSHARDED, _PO.RESHARD): _P.SHARDED,
    (_P.UNSHARDED, _PO.SHRINK): _P.SHRUNK,
    (_P.SHRUNK, _PO.UNSHARD): _P.UNSHARDING,  # from the smaller mesh
    (_P.SHRUNK, _PO.RESHARD): _P.SHARDED,
}

_G, _GO = GradientState, GradientOperation
GRADIENT_TRANSITIONS: Mapping[tuple[GradientState, GradientOperation], GradientState] = {
    (_G.NONE, _GO.ACCUMULATE): _G.LOCAL,
    (_G.NONE, _GO.REDUCE): _G.NONE,  # took no part in this backward
    (_G.NONE, _GO.DROP): _G.NONE,
    (_G.LOCAL, _GO.ACCUMULATE): _G.LOCAL,
    (_G.LOCAL, _GO.REDUCE): _G.REDUCING,
    (_G.LOCAL, _GO.COMPLETE): _G.LOCAL,  # an earlier reduction ended after new gradients had come
    (_G.LOCAL, _GO.KEEP): _G.LOCAL,
    (_G.LOCAL, _GO.DROP): _G.NONE,
    (_G.REDUCING, _GO.ACCUMULATE): _G.LOCAL,  # a second backward reached the group
    (_G.REDUCING, _GO.REDUCE): _G.REDUCING,
    (_G.REDUCING, _GO.COMPLETE): _G.REDUCED,
    (_G.REDUCING, _GO.KEEP): _G.PARTIAL,
    (_G.REDUCING, _GO.DROP): _G.NONE,
    (_G.PARTIAL, _GO.ACCUMULATE): _G.LOCAL,
    (_G.PARTIAL, _GO.REDUCE): _G.REDUCING,  # took no part in the last backward, but in one before
    (_G.PARTIAL, _GO.KEEP): _G.PARTIAL,  # the earlier of two reductions in flight
    (_G.PARTIAL, _GO.COMPLETE): _G.PARTIAL,
    (_G.PARTIAL, _GO.DROP): _G.NONE,
    (_G.REDUCED, _GO.ACCUMULATE): _G.LOCAL,
    (_G.REDUCED, _GO.REDUCE): _G.REDUCED,
    (_G.REDUCED, _GO.COMPLETE): _G.REDUCED,  # the earlier of two reductions in flight
    (_G.REDUCED, _GO.KEEP): _G.PARTIAL,  # an earlier reduction was whole, this one not
    (_G.REDUCED, _GO.DROP): _G.NONE,
}

S = TypeVar("S", bound=Key)
Op = TypeVar("Op", bound=Key)


def advance(table: Mapping[tuple[S, Op], S], state: S, operation: Op, group: str) -> S:
    """The state after ``operation``, or a ``LifecycleError`` that names the group and what is legal."""
    try:
        return table[state, operation]
    except KeyError:
        legal = ", ".join(o.name for s, o in table if s is state)
        raise LifecycleError(
            f"group {group!r} is {state.name}: {operation.name} is not legal here (legal: {legal}). "
            "After an exception in forward or backward, call reset_iter_state() on the root module."
        ) from None
