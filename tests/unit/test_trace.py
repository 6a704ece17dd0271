"""Trace events, the recorder, and the comparison of ``assert_trace``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from composable_fsdp.trace import Operation, Recorder, emit, listeners, now


@pytest.fixture(autouse=True)
def _check_no_listeners() -> Iterator[None]:
    assert listeners == []
    yield
    assert listeners == []


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
