"""Trace events, the recorder, and the comparison of ``assert_trace``."""

from __future__ import annotations

import doctest
from collections.abc import Iterator, Sequence

import pytest

from composable_fsdp import trace
from composable_fsdp.trace import Operation, Recorder, TraceEvent, emit, listeners, now
from tests.helpers.assert_trace import assert_trace


@pytest.fixture(autouse=True)
def _check_no_listeners() -> Iterator[None]:
    assert listeners == []
    yield
    assert listeners == []


def allocate(group: str, nbytes: int) -> TraceEvent:
    return TraceEvent(Operation.ALLOCATE, group, nbytes, "", 0.0, 0.0)


def free(group: str, nbytes: int) -> TraceEvent:
    return TraceEvent(Operation.FREE, group, nbytes, "", 0.0, 0.0)


def recorded(*events: TraceEvent) -> Recorder:
    recorder = Recorder()
    recorder.events.extend(events)
    return recorder


def test_events_are_recorded_in_order_while_the_recorder_is_entered_and_not_before_or_after() -> None:
    recorder = Recorder()
    emit(Operation.UNSHARD, "before")
    with recorder as entered:
        assert entered is recorder
        emit(Operation.UNSHARD, "a")
        emit(Operation.WAIT, "a")
    emit(Operation.RESHARD, "after")
    assert [str(event) for event in recorder] == ["unshard a", "wait a"]


def test_an_event_carries_what_was_emitted() -> None:
    begin = now()
    with Recorder() as recorder:
        emit(Operation.REDUCE, "layers.0", 4096, "reduce", begin=begin)
        emit(Operation.REDUCED, "layers.0")
    launched, done = recorder
    assert (launched.operation, launched.group, launched.bytes, launched.stream) == (
        Operation.REDUCE,
        "layers.0",
        4096,
        "reduce",
    )
    assert launched.begin == begin <= launched.end <= now()
    assert (done.bytes, done.stream) == (0, "")
    assert done.begin == done.end >= launched.end


def test_the_example_in_the_documentation_is_true() -> None:
    failed, attempted = doctest.testmod(trace)
    assert attempted
    assert not failed


def recorded_lines(*lines: str) -> Recorder:
    with Recorder() as recorder:
        for line in lines:
            operation, group = line.split(" ")
            emit(Operation(operation), group)
    return recorder


def difference(recorder: Sequence[TraceEvent] | Recorder, *lines: str) -> str:
    with pytest.raises(AssertionError) as error:
        assert_trace(recorder, *lines)
    return str(error.value)


def test_a_difference_is_shown() -> None:
    actual = recorded_lines("allocate a", "unshard a", "unshard long.name", "wait a", "reduce a", "wait long.name")
    assert difference(actual, "unshard a", "wait a", "unshard long.name", "wait long.name", "wait c").splitlines() == [
        "The trace is not what was expected (unshard, wait; - expected, + actual):",
        "  unshard a",
        "+ unshard long.name",
        "  wait a",
        "- unshard long.name",
        "  wait long.name",
        "- wait c",
    ]
