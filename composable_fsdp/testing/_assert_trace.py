"""Assertions about the operations in a trace and their order."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.trace import Operation, TraceEvent

__all__ = ["assert_trace"]


def assert_trace(
    recorder: Iterable[TraceEvent], *lines: str, operations: Collection[Operation | str] | None = None
) -> None:
    """Assert that the events, as text, are exactly ``lines``.

    >>> from composable_fsdp.trace import Recorder, emit
    >>> with Recorder() as recorder:
    ...     emit(Operation.ALLOCATE, "layers.0", 4096)
    ...     emit(Operation.UNSHARD, "layers.0")
    ...     emit(Operation.WAIT, "layers.0")
    >>> assert_trace(recorder, "unshard layers.0", "wait layers.0")

    Args:
        recorder: a ``Recorder``, or any iterable of events.
        lines: ``"<operation> <group>"``, in order.
        operations: the operations to compare; events of others are ignored. The default is the operations in ``lines``,
            so that an operation can be left out, but only everywhere; without lines, all operations.

    Raises:
        AssertionError: the traces differ. The text shows them side by side.
        ConfigurationError: a line does not begin with an operation.
    """
    __tracebackhide__ = True
    named = {_operation(line.split(" ")[0], line) for line in lines} or set(Operation)
    compared = named if operations is None else {_operation(o, str(o)) for o in operations}
    actual = [str(event) for event in recorder if event.operation in compared]
    if actual != list(lines):
        shown = ", ".join(o.value for o in Operation if o in compared)
        columns = "\n".join(_side_by_side(lines, actual))
        raise AssertionError(f"The trace is not what was expected ({shown}):\n{columns}")


def _operation(name: str, line: str) -> Operation:
    try:
        return Operation(name)
    except ValueError:
        known = ", ".join(o.value for o in Operation)
        raise ConfigurationError(
            f"assert_trace: {line!r} does not begin with an operation. Write '<operation> <group>' with one of {known}."
        ) from None


def _side_by_side(expected: Sequence[str], actual: Sequence[str]) -> Iterator[str]:
    """Yield both columns, with ``-`` for a missing line, ``+`` for an extra one and ``!`` for a difference."""
    width = max(map(len, ["expected", *expected]))
    yield f"    {'expected':<{width}}   actual"
    matcher = difflib.SequenceMatcher(None, expected, actual, autojunk=False)
    for _, left_begin, left_end, right_begin, right_end in matcher.get_opcodes():
        for i in range(max(left_end - left_begin, right_end - right_begin)):
            left = expected[left_begin + i] if left_begin + i < left_end else ""
            right = actual[right_begin + i] if right_begin + i < right_end else ""
            mark = " " if left == right else "+" if not left else "-" if not right else "!"
            yield f"  {mark} {left:<{width}}   {right}".rstrip()
