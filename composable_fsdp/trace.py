"""What happened, for whoever wants to know: tests, the memory ledger, timelines, execution-order checks.

Code that acts calls :func:`emit`, guarded by ``if listeners:``, so that a step nobody listens to pays one check per
operation. Readers are callables; :class:`Recorder` is the one that keeps everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

__all__ = [
    "Operation",
    "Position",
    "Recorder",
    "TraceEvent",
    "emit",
    "fault_listeners",
    "listeners",
    "now",
    "tell_fault",
]


class Operation(str, Enum):
    """What a group did."""

    UNSHARD = "unshard"
    """All-gather launched; ``bytes`` is what it puts out on this rank: the unsharded size on the wire. What is summed
    up in place counts twice, as it travels twice."""
    WAIT = "wait"
    """The unsharded parameters became usable."""
    RESHARD = "reshard"
    """Sharded parameters are registered again and the unsharded memory is released."""
    REDUCE = "reduce"
    """Gradient reduction launched; ``bytes`` is what goes in on this rank over the shard axis, twice what is reduced in
    place."""
    REDUCED = "reduced"
    """The reduced gradients were set on the sharded parameters."""
    ALLOCATE = "allocate"
    """``bytes`` of unsharded parameter memory were taken."""
    FREE = "free"
    """``bytes`` of unsharded parameter memory were given back."""
    COLLECTIVE = "collective"
    """What the other ranks must do too is about to be launched; ``group`` is its label, ``bytes`` what goes in."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a collective stands among those of its process group.

    Invariant: ranks that did the same have, at equal positions, events with the same label.

    Args:
        group: the name of the process group.
        ranks: its ranks, by their number in the whole job.
        connection: how often they have connected to each other anew.
        number: counted since then.
    """

    group: str
    ranks: tuple[int, ...]
    connection: int
    number: int


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One operation of one group. ``begin`` and ``end`` are host times in seconds, as of ``time.perf_counter``.

    Where codecs or hooks change what travels, ``plain_bytes`` is what ``bytes`` would be without them. Collectives have
    a ``position``.
    """

    operation: Operation
    group: str
    bytes: int
    stream: str
    begin: float
    end: float
    plain_bytes: int = 0
    position: Position | None = None

    def __str__(self) -> str:
        return f"{self.operation.value} {self.group}"


listeners: list[Callable[[TraceEvent], None]] = []
fault_listeners: list[Callable[[BaseException | None, str, Position | None], None]] = []
"""Called with what :func:`tell_fault` is."""

now = time.perf_counter


def emit(
    operation: Operation,
    group: str,
    nbytes: int = 0,
    stream: str = "",
    begin: float | None = None,
    plain_bytes: int | None = None,
    position: Position | None = None,
) -> None:
    """Tells every listener. Call it only where ``listeners`` is not empty."""
    end = now()
    plain = nbytes if plain_bytes is None else plain_bytes
    event = TraceEvent(operation, group, nbytes, stream, end if begin is None else begin, end, plain, position)
    for listener in tuple(listeners):
        listener(event)


def tell_fault(error: BaseException | None, where: str, position: Position | None = None) -> None:
    """Tells every fault listener what ended a pass or a collective of this rank, before it is raised.

    Args:
        error: ``None`` where nobody saw it, as in a backward that was left by an exception.
        where: the pass or the collective.
        position: of the collective.
    """
    for listener in tuple(fault_listeners):
        listener(error, where, position)


class Recorder:
    """Keeps all events while it is entered.

    >>> with Recorder() as recorder:
    ...     emit(Operation.ALLOCATE, "layers.0", 4096)
    >>> recorder.allocated
    {'layers.0': 4096}
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

    @property
    def allocated(self) -> dict[str, int]:
        """The ledger: bytes of unsharded parameters each group holds now, groups that hold none left out."""
        return ledger(self.events)

    @property
    def peak_groups(self) -> int:
        """The most groups whose parameters were in memory or on their way at one time, if anything had to travel."""
        gathered: set[str] = set()
        most = 0
        for event in self.events:
            if event.operation is Operation.UNSHARD and event.bytes:
                gathered.add(event.group)
            elif event.operation is Operation.RESHARD:
                gathered.discard(event.group)
            most = max(most, len(gathered))
        return most


def ledger(events: Iterable[TraceEvent]) -> dict[str, int]:
    """Bytes of unsharded parameters per group after ``events``."""
    *_, last = _holdings(events)
    return last


def _holdings(events: Iterable[TraceEvent]) -> Iterator[dict[str, int]]:
    """Bytes of unsharded parameters per group, before the first event and after each that changes them."""
    held: dict[str, int] = {}
    yield held
    signs = {Operation.ALLOCATE: 1, Operation.FREE: -1}
    for event in events:
        change = signs.get(event.operation, 0) * event.bytes
        if change:
            changed = held | {event.group: held.get(event.group, 0) + change}
            held = {group: nbytes for group, nbytes in changed.items() if nbytes}
            yield held
