"""The format of diagnostics files, the events that write them, and their joint analysis.

``tests/ranks/test_diagnostics.py`` tests ranks that fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from composable_fsdp import PeerError, diagnostics, trace
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.trace import Operation, Position, TraceEvent
from tests._internals import (
    ABSENT,
    FORGOTTEN,
    DiagnosticsRecorder,
    Dump,
    decode,
    file_name,
    read,
    recorded_events,
    sequences,
)
from tests.helpers.command import run_command


@pytest.fixture(autouse=True)
def disable_afterwards() -> Iterator[None]:
    yield
    diagnostics.disable()
    assert not trace.listeners
    assert not trace.fault_listeners


def collective(label: str, number: int, connection: int = 0, ranks: tuple[int, ...] = (0, 1)) -> TraceEvent:
    position = Position("group", ranks, connection, number)
    return TraceEvent(Operation.COLLECTIVE, label, 8, "", float(number), float(number), 8, position)


def make_dump(
    rank: int,
    *launched: TraceEvent,
    world_size: int = 2,
    attempt: int = 0,
) -> Dump:
    about = {"format": 4, "rank": rank, "world_size": world_size, "attempt": attempt, "host": "host", "process": 1}
    about |= {"reason": "asked for", "written": 1e9, "clock": 100.0, "versions": {"torch": "2"}, "state": ""}
    events = [asdict(event) for event in launched]
    return {**about, "faults": [], "stacks": [["MainThread", ["f"]]], "events": events}


def by_rank(*dumps: Dump) -> dict[int, Dump]:
    return {dump["rank"]: dump for dump in dumps}


def store(folder: Path, dumps: Mapping[int, Dump]) -> None:
    for rank, dump in dumps.items():
        (folder / file_name(rank)).write_text(json.dumps(dump))


def labels(launched: str, connection: int = 0) -> list[TraceEvent]:
    return [collective(label, number, connection) for number, label in enumerate(launched)]


# -- format


def test_events_round_trip_through_files() -> None:
    events = [TraceEvent(Operation.UNSHARD, "a", 8, "gather", 1.0, 2.0), collective("b", 3)]
    assert recorded_events(decode(json.dumps(make_dump(1, *events)))) == events


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a file of diagnostics"),
        ("[]", "not a file of diagnostics"),
        ('{"format": 2}', "format 2, which this version does not know: it reads 4"),
        ('{"format": 4, "rank": 0}', "it has no 'attempt'"),
        ('{"format": ', "Expecting value"),
    ],
)
def test_files_of_another_format_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(text)


def test_a_folder_lists_missing_damaged_and_old_files(tmp_path: Path) -> None:
    store(tmp_path, by_rank(make_dump(0, world_size=4, attempt=1), make_dump(2, world_size=4)))
    (tmp_path / file_name(3)).write_text("{")
    found = read(tmp_path)
    assert (list(found.dumps), found.missing, list(found.damaged)) == ([0], [1, 2, 3], [file_name(3)])


# -- comparison of ranks


@pytest.mark.parametrize(
    ("first", "second", "number", "cells"),
    [
        ("abc", "abc", None, None),
        ("abc", "axc", 1, ("b", "x")),
        ("abc", "ab", 2, ("c", ABSENT)),
        ("a", "", 0, ("a", ABSENT)),
    ],
)
def test_the_first_difference_is_found(
    first: str, second: str, number: int | None, cells: tuple[str, str] | None
) -> None:
    (found,) = sequences(by_rank(make_dump(0, *labels(first)), make_dump(1, *labels(second))))
    row = found.first_difference
    assert (row and row.number) == number
    assert (row and tuple(row.labels.values())) == cells


def test_forgotten_events_are_no_difference() -> None:
    (found,) = sequences(by_rank(make_dump(0, *labels("abc")), make_dump(1, *labels("abc")[2:])))
    assert [row.labels[1] for row in found.rows] == [FORGOTTEN, FORGOTTEN, "c"]
    assert found.first_difference is None


def test_operation_numbers_restart_with_a_new_connection() -> None:
    both = by_rank(make_dump(0, *labels("ab"), *labels("x", 1)), make_dump(1, *labels("abcd"), *labels("x", 1)))
    (found,) = sequences(both)
    assert [row.labels for row in found.rows] == [{0: "x", 1: "x"}]


def test_the_diagnostics_command_shows_ranks_side_by_side(tmp_path: Path) -> None:
    ranks = (0, 1, 2)
    events = [[collective(label, n, ranks=ranks) for n, label in enumerate(each)] for each in ("abc", "abc", "axc")]
    store(tmp_path, by_rank(*(make_dump(rank, *own, world_size=4) for rank, own in zip(ranks, events, strict=True))))
    shown = run_command("diagnostics", tmp_path, "--stacks")
    assert shown.exit_code == 1
    assert "No file of rank 3" in shown.stdout
    (line,) = (line for line in shown.stdout.splitlines() if "first difference" in line)
    assert line.split("  ", 1)[1].split() == ["1", "b", "x"]
    assert "ranks 0-1" in shown.stdout
    assert "rank 2, thread MainThread\n  f" in shown.stdout
    empty = run_command("diagnostics", tmp_path / "nothing")
    assert (empty.exit_code, empty.stderr) == (
        2,
        f"error: there is no file of diagnostics in {tmp_path / 'nothing'}.\n",
    )


# -- events that write files


def test_the_last_events_and_the_last_collectives_are_kept(tmp_path: Path) -> None:
    diagnostics.enable(tmp_path, last=2)
    for position in (Position("world", (0, 1), 0, 1), Position("world", (0, 1), 0, 2)):
        trace.emit(Operation.COLLECTIVE, f"number {position.number}", 8, position=position)
    for group in "abc":
        trace.emit(Operation.UNSHARD, group, 8)
    path = diagnostics.dump()
    assert path == tmp_path / file_name(0)
    found = recorded_events(read(tmp_path).dumps[0])
    assert [each.group for each in found] == ["number 2", "b", "c"], "the last collective is known anyway"
    assert os.listdir(tmp_path) == [file_name(0)]


def test_a_fault_is_written_once_and_says_where(tmp_path: Path) -> None:
    diagnostics.enable(tmp_path)
    error = PeerError("rank 1 is gone")
    trace.emit_fault(error, "all-gather of a")
    trace.emit_fault(error, "the forward of a")
    assert str(error) == (
        f"rank 1 is gone\n{tmp_path / file_name(0)} has what this rank did until then; "
        f"composable-fsdp diagnostics {tmp_path}"
    )
    (fault,) = read(tmp_path).dumps[0]["faults"]
    assert (fault["error"], fault["text"], fault["where"]) == ("PeerError", "rank 1 is gone", "all-gather of a")


def test_a_file_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    diagnostics.enable(tmp_path / "file")
    error = PeerError("rank 1 is gone")
    trace.emit_fault(error, "all-gather of a")
    assert str(error) == "rank 1 is gone"
    assert diagnostics.dump() is None
    assert f"diagnostics could not be written to {tmp_path / 'file'}" in caplog.text


def test_an_uncaught_exception_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, stack: seen.append(error))
    before = sys.excepthook
    diagnostics.enable(tmp_path)
    error = ArithmeticError("test failure")
    sys.excepthook(type(error), error, None)
    assert seen == [error]
    assert read(tmp_path).dumps[0]["reason"] == "ArithmeticError: test failure"
    diagnostics.disable()
    assert sys.excepthook is before


def test_a_signal_is_written_and_then_handled_as_before(tmp_path: Path) -> None:
    handled: list[bool] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append((tmp_path / file_name(0)).exists()))
    try:
        diagnostics.enable(tmp_path)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0)  # the handler runs between two instructions
        assert handled == [True]
        assert read(tmp_path).dumps[0]["reason"] == "SIGUSR1"
    finally:
        diagnostics.disable()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons warn of fork with threads
def test_a_forked_process_is_no_rank(tmp_path: Path) -> None:
    """Data loaders fork such processes and end them by SIGTERM."""
    diagnostics.enable(tmp_path)
    child = os.fork()
    if not child:
        quiet = diagnostics.dump() is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        time.sleep(60 if quiet else 0)
        os._exit(1)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    assert os.listdir(tmp_path) == []
    assert len(trace.listeners) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_rank_may_be_forked_from_a_process_that_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSABLE_FSDP_DIAGNOSTICS", str(tmp_path))
    DiagnosticsRecorder().before_sharding([])
    child = os.fork()
    if not child:
        DiagnosticsRecorder().before_sharding([])  # as in its first fully_shard
        os._exit(0 if diagnostics.dump() == tmp_path / file_name(0) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("last", [0, -1])
def test_a_record_length_below_one_is_refused(tmp_path: Path, last: int) -> None:
    with pytest.raises(ConfigurationError, match=f"last must be at least 1, not {last}"):
        diagnostics.enable(tmp_path, last=last)


def test_other_threads_handle_no_signals(tmp_path: Path) -> None:
    thread = threading.Thread(target=diagnostics.enable, args=(tmp_path,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert diagnostics.dump() == tmp_path / file_name(0)
