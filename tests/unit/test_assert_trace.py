"""The comparison of ``assert_trace`` and the difference that it shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.trace import Operation, Recorder, TraceEvent, emit
from tests.helpers.assert_trace import assert_trace


def recorded(*lines: str) -> Recorder:
    with Recorder() as recorder:
        for line in lines:
            operation, group = line.split(" ")
            emit(Operation(operation), group)
    return recorder


STEP = ("allocate a", "unshard a", "wait a", "unshard b", "reshard a", "free a", "wait b")


def difference(recorder: Sequence[TraceEvent] | Recorder, *lines: str) -> str:
    with pytest.raises(AssertionError) as error:
        assert_trace(recorder, *lines)
    return str(error.value)


def test_unnamed_operations_are_skipped() -> None:
    assert_trace(recorded(*STEP), "unshard a", "wait a", "unshard b", "wait b")
    assert_trace(recorded(*STEP), "reshard a")
    assert_trace(recorded(*STEP), *STEP)


def test_a_named_operation_must_be_listed_completely() -> None:
    difference(recorded(*STEP), "unshard a")
    difference(recorded(*STEP), "unshard a", "unshard b", "wait a")


def test_order_and_repetition_count() -> None:
    assert_trace(recorded("wait a", "wait b"), "wait a", "wait b")
    difference(recorded("wait a", "wait b"), "wait b", "wait a")
    difference(recorded("wait a", "wait a"), "wait a")


def test_operations_choose_the_compared_events() -> None:
    assert_trace(recorded(*STEP), "unshard a", "unshard b", operations=[Operation.UNSHARD])
    assert_trace(recorded(*STEP), "unshard a", "unshard b", operations=["unshard", "reduce"])
    assert_trace(recorded(*STEP), operations=["reduce"])
    with pytest.raises(AssertionError, match=r"\(unshard, wait; "):
        assert_trace(recorded(*STEP), "unshard a", "unshard b", operations=["wait", "unshard"])


def test_an_empty_trace_must_have_no_events() -> None:
    assert_trace(recorded())
    assert "+ free a" in difference(recorded("free a"))


def test_any_events_will_do() -> None:
    assert_trace(recorded("wait a").events, "wait a")


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


@pytest.mark.parametrize("line", ["unshrd a", "Unshard a", "", "a unshard"])
def test_a_line_must_begin_with_an_operation(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"does not begin with an operation.* one of unshard, wait, reshard"):
        assert_trace(recorded(), line)


def test_operations_must_exist() -> None:
    with pytest.raises(ConfigurationError, match="'unshrd'"):
        assert_trace(recorded(), operations=["unshrd"])
