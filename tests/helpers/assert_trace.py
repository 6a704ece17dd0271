"""Assertions about the operations in a trace and their order."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.trace import Operation, TraceEvent


def assert_trace(
    recorder: Iterable[TraceEvent], *texts: str, operations: Collection[Operation | str] | None = None
) -> None:
    """Assert that the events, as text, are exactly the lines of ``texts``.

    >>> from composable_fsdp.trace import Recorder, emit
    >>> with Recorder() as recorder:
    ...     emit(Operation.ALLOCATE, "layers.0", 4096)
    ...     emit(Operation.UNSHARD, "layers.0")
    ...     emit(Operation.WAIT, "layers.0")
    >>> assert_trace(recorder, "unshard layers.0", "wait layers.0")

    Args:
        recorder: a ``Recorder``, or any iterable of events.
        texts: lines ``"<operation> <group>"``, in order. One text may have several, with ``"; "`` between them.
        operations: the operations to compare; events of others are ignored. The default is those of the lines, so that
            an operation can be left out, but only everywhere; without lines, all operations.

    Raises:
        AssertionError: the traces differ. The text shows how.
        ConfigurationError: a line does not begin with an operation.
    """
    __tracebackhide__ = True
    lines = [line for text in texts for line in text.split("; ")]
    named = {_operation(line.split(" ")[0], line) for line in lines} or set(Operation)
    compared = named if operations is None else {_operation(o, str(o)) for o in operations}
    actual = [str(event) for event in recorder if event.operation in compared]
    if actual != lines:
        shown = ", ".join(o.value for o in Operation if o in compared)
        difference = "\n".join(each.rstrip() for each in difflib.ndiff(lines, actual) if not each.startswith("?"))
        raise AssertionError(f"The trace is not what was expected ({shown}; - expected, + actual):\n{difference}")


def _operation(name: str, line: str) -> Operation:
    try:
        return Operation(name)
    except ValueError:
        known = ", ".join(o.value for o in Operation)
        raise ConfigurationError(
            f"assert_trace: {line!r} does not begin with an operation. Write '<operation> <group>' with one of {known}."
        ) from None


def peak_groups(events: Iterable[TraceEvent]) -> int:
    """Return the most groups that were unsharded or in flight at one time, if any had to be communicated."""
    gathered: set[str] = set()
    most = 0
    for event in events:
        if event.operation is Operation.UNSHARD and event.bytes:
            gathered.add(event.group)
        elif event.operation is Operation.RESHARD:
            gathered.discard(event.group)
        most = max(most, len(gathered))
    return most


_SIGNS = {Operation.ALLOCATE: 1, Operation.FREE: -1}


def ledger(events: Iterable[TraceEvent]) -> dict[str, int]:
    """Return the bytes of unsharded parameters per group after ``events``, without groups that hold none."""
    held: dict[str, int] = {}
    for event in events:
        held[event.group] = held.get(event.group, 0) + _SIGNS.get(event.operation, 0) * event.bytes
    return {group: nbytes for group, nbytes in held.items() if nbytes}
