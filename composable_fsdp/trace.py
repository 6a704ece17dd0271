"""Trace events for tests and timelines.

Producers call :func:`emit` after ``if listeners:``, so without listeners each operation costs one check. Listeners are
callables; :class:`Recorder` is one that keeps all events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

__all__ = ["Operation", "Recorder", "TraceEvent", "emit", "listeners", "now"]


class Operation(str, Enum):
    """An operation of a parameter group."""

    UNSHARD = "unshard"
    """The all-gather was launched. ``bytes`` is the size of its output on this rank: the unsharded size on the wire."""
    WAIT = "wait"
    """The unsharded parameters are usable."""
    RESHARD = "reshard"
    """Sharded parameters are registered again and the unsharded memory is released."""
    REDUCE = "reduce"
    """The gradient reduction was launched. ``bytes`` is the size of its input on this rank over the shard axis."""
    REDUCED = "reduced"
    """The reduced gradients were set on the sharded parameters. ``begin`` is that of the wait for them."""
    ALLOCATE = "allocate"
    """``bytes`` of unsharded parameter memory were taken."""
    FREE = "free"
    """``bytes`` of unsharded parameter memory were given back."""
    COLLECTIVE = "collective"
    """A collective is about to be launched. ``group`` is its label, ``bytes`` the size of its input."""
    FORWARD = "forward"
    """A forward has ended, whose outermost sharded module is ``group``."""
    BACKWARD = "backward"
    """A backward of the root ``group`` has ended. The last one of a step waits for its gradients."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One operation of one group. ``begin`` and ``end`` are host times in seconds, as of ``time.perf_counter``.

    If codecs or hooks change the communicated bytes, ``plain_bytes`` is what ``bytes`` would be without them.
    """

    operation: Operation
    group: str
    bytes: int
    stream: str
    begin: float
    end: float
    plain_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.operation.value} {self.group}"


listeners: list[Callable[[TraceEvent], None]] = []

now = time.perf_counter


def emit(
    operation: Operation,
    group: str,
    nbytes: int = 0,
    stream: str = "",
    begin: float | None = None,
    plain_bytes: int | None = None,
) -> None:
    """Send an event to every listener. Call it only if ``listeners`` is not empty."""
    end = now()
    plain = nbytes if plain_bytes is None else plain_bytes
    event = TraceEvent(operation, group, nbytes, stream, end if begin is None else begin, end, plain)
    for listener in tuple(listeners):
        listener(event)


class Recorder:
    """Records all events inside its context.

    >>> with Recorder() as recorder:
    ...     emit(Operation.ALLOCATE, "layers.0", 4096)
    >>> [str(event) for event in recorder]
    ['allocate layers.0']
    """

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def __enter__(self) -> Recorder:
        listeners.append(self.events.append)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        listeners.remove(self.events.append)

    def __iter__(self) -> Iterator[TraceEvent]:
        return iter(self.events)
