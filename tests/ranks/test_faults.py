"""Test faults of one rank: the error on every other rank, its delay, and the end of all processes.

The texts are in ``tests/helpers/fault_texts.txt``. ``test_recovery.py`` tests training after a fault.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.fault_texts import assert_golden
from tests.helpers.faults import (
    LONG_TIMEOUT,
    SHORT_TIMEOUT,
    STRAGGLER_DELAY,
    RaisedError,
    build,
    error_after,
    error_of,
    save_on_full_disk,
    step,
)
from tests.helpers.fresh_process import Program
from tests.helpers.run_ranks import run_ranks
from tests.helpers.slack import slack
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment

LIMIT, LIMIT_OF_LOSS = 5.0, 3.0
"""Seconds until all ranks know that a rank is in another operation, and until they know that a rank is gone."""

OPERATION = re.compile(r"(all-gather|reduce-scatter) of layers\.\d( in (forward|backward))?")

LAST_KNOWN = re.compile(r"rank 1 (last took part in|is at work since) (all-gather|reduce-scatter) of layers\.\d")

SIGNAL = re.compile(r" \(signal \d+, \w+\)")

BOTH = {"sockets": SOCKETS, "in common": IN_COMMON}
over_both = pytest.mark.parametrize("transport", BOTH)


def check(name: str, error: RaisedError, limit: float) -> None:
    assert error.text, f"{name}: no rank raised an error"
    assert error.seconds < limit * slack()
    assert_golden(name, f"{error.kind}: {error.text}")


def check_lost(fault: str, transport: str, error: RaisedError, limit: float) -> None:
    # It is random which of several pending operations fails first, and whether this takes a second of waiting.
    text = OPERATION.sub("OPERATION", SIGNAL.sub("", error.text))  # unknown once its parent has waited for it
    text = re.sub(r"rank 0 is at work since (OPERATION \(.*?\))", r"rank 0 waits in \1, for 0.0 s", text)
    check(f"{fault}, {transport}", replace(error, text=text), limit)
    assert error.kind == "PeerError"
    assert "rank 1" in error.text
    assert LAST_KNOWN.search(error.text)


@pytest.mark.behaviour("H-03", "H-05")
@over_both
@pytest.mark.parametrize("fault", ["killed in forward", "killed in backward", "cut off"])
def test_a_rank_that_is_lost_is_named(fault: str, transport: str) -> None:
    (error,) = run_ranks(error_after, 2, fault, LONG_TIMEOUT, environment=BOTH[transport], lost=[1])
    check_lost(fault, transport, error, LIMIT_OF_LOSS)


@pytest.mark.behaviour("H-03", "H-05")
@over_both
@pytest.mark.parametrize("fault", ["stopped", "late"])
def test_a_rank_that_timed_out_is_named_and_gets_an_error_when_it_returns(fault: str, transport: str) -> None:
    error, own = run_ranks(error_after, 2, fault, SHORT_TIMEOUT, environment=BOTH[transport])
    check_lost(fault, transport, error, SHORT_TIMEOUT + LIMIT)
    assert own.kind == "PeerError"
    assert own.seconds < STRAGGLER_DELAY + LIMIT * slack()


@pytest.mark.behaviour("H-03", "H-05")
@over_both
def test_all_surviving_ranks_name_the_killed_rank(transport: str) -> None:
    for error in run_ranks(error_after, 4, "killed in backward", environment=BOTH[transport], lost=[3]):
        assert error.kind == "PeerError"
        assert "rank 3" in error.text
        assert "layers." in error.text
        assert error.seconds < LIMIT * slack()  # there are twice as many ranks as cores


NO_MEMORY = "can't allocate memory: you tried to allocate 17179869184 bytes. Error code 12 (Cannot allocate memory)"

STAYS = {
    "raises in forward": "raised ArithmeticError: test failure in the forward of layers.1",
    "raises in backward": "raised in the backward of layers.1",
    "has no memory in forward": "raised RuntimeError: [enforce fail at alloc_cpu.cpp:",
    "fails to launch": "raised in the backward of layers.1",
    "leaves out a collective": "order",
    "swaps modules": "order",
    "skips a module": "order",
    "has other gradients": "order",
}


@pytest.mark.behaviour("G-01", "H-01", "H-05")
@over_both
@pytest.mark.parametrize("fault", STAYS)
@pytest.mark.filterwarnings("ignore:Forward order differs from that of the first iteration")
def test_a_rank_with_another_operation_is_named(fault: str, transport: str) -> None:
    error, own = run_ranks(error_after, 2, fault, environment=BOTH[transport])
    check(f"{fault}, {transport}", error, LIMIT)
    if STAYS[fault] == "order":
        assert error.kind == "DivergenceError"
        assert "\n  rank 0: " in error.text
        assert "\n  rank 1: " in error.text
        assert own.kind in ("DivergenceError", "PeerError")
        assert own.seconds < LIMIT * slack()
    else:
        assert error.kind == "PeerError"
        assert f"rank 1 {STAYS[fault]}" in error.text
        assert any(text in own.text for text in ("test failure", "no memory for a message", NO_MEMORY))
        assert (NO_MEMORY in error.text) == (fault == "has no memory in forward")


def error_of_save(folder: str) -> RaisedError:
    model = build()
    step(model)
    return error_of(lambda: save_on_full_disk(folder, model))


@pytest.mark.behaviour("F-12", "H-05")
def test_all_ranks_name_the_rank_and_the_file_for_which_there_is_no_space(tmp_path: Path) -> None:
    texts = {error.text for error in run_ranks(error_of_save, 2, str(tmp_path))}
    (text,) = texts
    assert re.search(r"rank 1: OSError: \[Errno 28\] No space left on device: '\S+__1_0\.distcp'", text), text
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


class Programs:
    def __init__(self, fault: str, folder: Path, environment: Environment) -> None:
        self.folder = folder
        self.outputs = [folder / f"output {rank}" for rank in range(2)]
        self.processes = [
            Program("tests.helpers.faults", fault, str(rank), folder, outputs=(out, out), environment=environment)
            for rank, out in enumerate(self.outputs)
        ]

    def read_report(self, rank: int) -> RaisedError:
        """Return the error that a rank received before its program ended."""
        self.processes[rank].wait()
        path = self.folder / f"error {rank}"
        assert path.exists(), self.outputs[rank].read_text()
        return RaisedError(**json.loads(path.read_text()))

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Programs]:
    fault, transport = request.param
    started = Programs(fault, tmp_path, BOTH[transport])
    yield started
    started.end()


def parametrize_programs(*faults: str) -> pytest.MarkDecorator:
    cases = [(fault, transport) for fault in faults for transport in BOTH]
    return pytest.mark.parametrize("programs", cases, indirect=True, ids=map(", ".join, cases))


ENDINGS = {
    "raises in forward": "raised ArithmeticError: test failure in the forward of layers.1",
    "raises in backward": "raised ArithmeticError: test failure in the backward of layers.1, which ended its program",
    "has no memory in backward": "raised RuntimeError: [enforce fail at alloc_cpu.cpp:",
    "has a loader that raises": "raised ValueError: Caught ValueError in DataLoader worker process 0. ValueError: "
    "record 1 is damaged, which ended its program",
    "has fewer batches": "has come to the end of its program",
}


@pytest.mark.behaviour("H-03", "H-05")
@parametrize_programs(*ENDINGS)
def test_a_rank_whose_program_ended_is_named_with_what_ended_it(
    programs: Programs, request: pytest.FixtureRequest
) -> None:
    fault, transport = request.node.callspec.params["programs"]
    error = programs.read_report(0)
    check(f"{fault} and ends, {transport}", error, LIMIT_OF_LOSS)
    assert error.kind == "PeerError"
    assert f"cannot be done: rank 1 {ENDINGS[fault]}" in error.text
    programs.processes[1].wait()


@pytest.mark.behaviour("H-03", "H-05")
@parametrize_programs("killed in forward")
def test_the_signal_that_ended_a_rank_is_named_until_its_parent_has_waited_for_it(programs: Programs) -> None:
    error = programs.read_report(0)
    assert error.kind == "PeerError"
    assert re.search(r"rank 1 (\(process \d+\) )?is gone \(signal 9, Killed\)[.,]", error.text), error.text
    assert "Without one, look in dmesg: if memory runs out, the kernel ends processes by signal 9." in error.text
    assert LAST_KNOWN.search(error.text)
    assert programs.processes[1].wait() == -signal.SIGKILL


@pytest.mark.behaviour("H-06")
@parametrize_programs("keeps another waiting")
def test_ctrl_c_ends_a_wait(programs: Programs) -> None:
    deadline = time.monotonic() + 300
    while not (programs.folder / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    programs.processes[0].send_signal(signal.SIGINT)
    begin = time.monotonic()
    error = programs.read_report(0)
    assert error.kind == "KeyboardInterrupt"
    assert time.monotonic() - begin < 2.0 * slack() + 1.0  # includes the time that the interpreter needs to exit
