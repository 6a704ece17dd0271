"""The comparison of ``assert_trace`` and the difference that it shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from composable_fsdp.trace import Operation, Recorder, TraceEvent, emit
from tests.helpers.assert_trace import assert_trace


def recorded(*lines: str) -> Recorder:
    with Recorder() as recorder:
        for line in lines:
            operation, group = line.split(" ")
            emit(Operation(operation), group)
    return recorder


def difference(recorder: Sequence[TraceEvent] | Recorder, *lines: str) -> str:
    with pytest.raises(AssertionError) as error:
        assert_trace(recorder, *lines)
    return str(error.value)


def test_order_and_repetition_count() -> None:
    assert_trace(recorded("wait a", "wait b"), "wait a", "wait b")
    difference(recorded("wait a", "wait b"), "wait b", "wait a")
    difference(recorded("wait a", "wait a"), "wait a")


def test_a_difference_is_shown() -> None:
    actual = recorded("allocate a", "unshard a", "unshard long.name", "wait a", "reduce a", "wait long.name")
    assert difference(actual, "unshard a", "wait a", "unshard long.name", "wait long.name", "wait c").splitlines() == [
        "The trace is not what was expected (unshard, wait; - expected, + actual):",
        "  unshard a",
        "+ unshard long.name",
        "  wait a",
        "- unshard long.name",
        "  wait long.name",
        "- wait c",
    ]
