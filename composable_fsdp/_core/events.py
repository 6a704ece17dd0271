"""The hooks, passes and states of a step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import NamedTuple, TypeVar

from composable_fsdp.errors import LifecycleError


def has_ended(frame: FrameType) -> bool:
    """Return whether ``frame``, of any thread, has returned or raised. If so, its locals are released.

    ``frame.clear()`` is Python's only test for it: it raises for a frame that executes. Frames of generators and
    coroutines count as running, because it would close a suspended one.
    """
    if frame.f_code.co_flags & _MAY_BE_SUSPENDED:
        return False
    try:
        frame.clear()
    except RuntimeError:  # the frame executes
        return False
    return True


_MAY_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Key(Enum):
    """An ``Enum`` hashed by identity, which is faster: ``Enum`` hashes member names in Python."""

    __hash__ = object.__hash__


class Pass(Key):
    """The pass that a root is in."""

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


class ParameterOperation(Key):
    """The operations on a group's parameters."""

    UNSHARD = "UNSHARD"
    WAIT = "WAIT"
    RESHARD = "RESHARD"
    SHRINK = "SHRINK"


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
            "After an exception in forward or backward, call reset_iter_state() on the root module."
        ) from None


def describe_groups(names: Sequence[str]) -> str:
    """Return the name in errors of several groups that share a collective."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} groups)"


class Hook(Key):
    """A hook of the runtime that fires for a group, or for the whole root."""

    PRE_FORWARD = "pre-forward"
    POST_FORWARD = "post-forward"
    END_FORWARD = "end of forward"
    PRE_BACKWARD = "pre-backward"
    GRAD_READY = "gradients ready"
    POST_BACKWARD = "post-backward"
    END_BACKWARD = "end of backward"


class Event(NamedTuple):
    """One firing of a hook. ``group`` is empty for the ends of passes."""

    hook: Hook
    group: str = ""

    def __str__(self) -> str:
        return f"{self.hook.value} {self.group}".rstrip()
