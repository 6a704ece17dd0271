"""Diagnostics files that all ranks write if one fails, is terminated, or runs something else."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from composable_fsdp import DivergenceError, PeerError, diagnostics, trace
from tests._internals import (
    ABSENT,
    PATIENCE,
    Collective,
    Files,
    ProcessGroupCommunicator,
    Transfer,
    Visible,
    file_name,
    known_watchdog,
    read,
    sequences,
)
from tests.helpers.fresh_process import Program, run_module
from tests.helpers.run_ranks import run_ranks
from tests.helpers.slack import slack
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment
from tests.helpers.two_layers import FAULTS, build, sgd, step

SECONDS = 5.0
OVER = pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])


def fail(fault: str, folder: str) -> str:
    """Run two steps, then one in which the last rank has a fault. Return the error of that step."""
    diagnostics.enable(folder, last=200)
    try:
        model = build()
        optimizer = sgd(model)
        for _ in range(2):
            step(model, optimizer)
        if dist.get_rank() == dist.get_world_size() - 1:
            FAULTS[fault][0](model)
        with pytest.raises((PeerError, DivergenceError, ArithmeticError)) as caught:
            step(model, optimizer)
        await_file(Path(folder) / file_name(dist.get_rank()))
        model.reset_iter_state()
    finally:
        diagnostics.disable()
    return str(caught.value)


def await_file(path: Path, text: str = "", seconds: float = SECONDS) -> None:
    """Wait for a file with ``text``, such as that of an abandoned backward, which a thread writes soon."""
    end = time.monotonic() + seconds * slack()
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.02)


@pytest.mark.behaviour("H-03", "H-05")
@OVER
@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_write_when_one_fails(fault: str, transport: Environment, tmp_path: Path) -> None:
    errors = run_ranks(fail, 2, fault, str(tmp_path), environment=transport)
    assert f"\n{tmp_path / file_name(0)} has what this rank did until then; " in errors[0]
    assert errors[0].endswith(f"composable-fsdp diagnostics {tmp_path}")
    files = read(tmp_path)
    assert sorted(files.dumps) == [0, 1]
    assert not files.missing
    assert all(dump["versions"]["torch"] == torch.__version__ for dump in files.dumps.values())
    assert all("in step" in str(frames) for thread, frames in files.dumps[0]["stacks"] if thread == "MainThread")
    recorded = files.dumps[1]["faults"][0]
    expected = {
        "order": ("DivergenceError", "Forward order differs across ranks"),
        "forward": ("ArithmeticError", "test failure"),
        "backward": ("", "raised in the backward of second"),
    }
    assert (recorded["error"], recorded["text"][: len(expected[fault][1])]) == expected[fault]


@pytest.mark.behaviour("G-01", "H-05")
@OVER
def test_records_show_where_ranks_diverged(transport: Environment, tmp_path: Path) -> None:
    run_ranks(fail, 4, "order", str(tmp_path), environment=transport)
    (found,) = sequences(read(tmp_path).dumps)
    assert found.first_difference is not None
    labels = found.first_difference.labels
    assert labels == dict.fromkeys(range(3), "all-gather of first in forward") | {3: "all-gather of second in forward"}


@pytest.mark.behaviour("H-03")
@OVER
def test_records_show_which_rank_waited_for_which(transport: Environment, tmp_path: Path) -> None:
    run_ranks(fail, 2, "forward", str(tmp_path), environment=transport)
    fault = read(tmp_path).dumps[0]["faults"][-1]
    assert "cannot be done: rank 1 raised ArithmeticError: test failure in the forward of" in fault["text"]


def nothing_listens() -> None:
    model = build()
    step(model, sgd(model))
    assert not trace.listeners
    assert not trace.fault_listeners
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.behaviour("G-04")
def test_diagnostics_listen_to_nothing_until_enabled() -> None:
    run_ranks(nothing_listens, 2)


def wait_long() -> None:
    model = build()
    optimizer = sgd(model)
    step(model, optimizer)
    if dist.get_rank() == 1:
        time.sleep(2 * PATIENCE)
    step(model, optimizer)
    watchdog = known_watchdog()
    assert watchdog is not None
    assert watchdog.report().waiting is None


@OVER
def test_a_long_wait_that_ended_is_not_reported(transport: Environment) -> None:
    run_ranks(wait_long, 2, environment=transport)


def gather_over_the_backend() -> list[tuple[str, int, tuple[int, ...]]]:
    world = dist.group.WORLD
    assert world is not None
    communicator = Visible(ProcessGroupCommunicator(world, "cpu"))
    with trace.Recorder() as recorder:
        for label in ("a", "b"):
            communicator.launch(Collective.ALL_GATHER, [Transfer(torch.empty(4), torch.ones(2))], label).wait()
    positions = [event.position for event in recorder]
    assert all(event.operation is trace.Operation.COLLECTIVE and event.bytes == 8 for event in recorder)
    first = positions[0].number if positions[0] is not None else 0
    return [(e.group, p.number - first, p.ranks) for e, p in zip(recorder, positions, strict=True) if p is not None]


def test_collectives_of_any_backend_are_recorded_with_their_position() -> None:
    """This includes NCCL, where it is the only way to compare ranks."""
    assert run_ranks(gather_over_the_backend, 2) == [[("a", 0, (0, 1)), ("b", 1, (0, 1))]] * 2


# -- ranks that are terminated


@pytest.fixture
def job(tmp_path: Path) -> Iterator[list[Program]]:
    """Start two ranks that train; one pauses after a few steps. Returns once it does, and the other waits in gloo."""
    environment = {**SOCKETS, "COMPOSABLE_FSDP_DIAGNOSTICS": str(tmp_path / "out"), "WORLD_SIZE": "2"}
    pausing = [tmp_path / f"stdout {rank}" for rank in range(2)]
    ranks = [
        Program(
            "tests.helpers.paused_rank",
            tmp_path / "store",
            outputs=(pausing[rank], tmp_path / f"stderr {rank}"),
            environment={**environment, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    for path in pausing:
        await_file(path, "pausing\n", 60.0)
    time.sleep(1.5)  # so that the other rank waits in gloo, where no Python code runs
    yield ranks
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        rank.wait()


@pytest.mark.behaviour("H-03", "H-05")
def test_all_ranks_write_records_when_one_is_terminated(job: list[Program], tmp_path: Path) -> None:
    out = tmp_path / "out"
    job[0].send_signal(signal.SIGUSR1)
    await_file(out / file_name(0))
    waiting = read(out)
    assert waiting.missing == [1]
    assert waiting.dumps[0]["reason"] == "SIGUSR1"
    assert waiting.dumps[0]["state"].startswith("rank 0 waits in all-gather of first in forward (operation ")

    begin = time.time()
    job[1].send_signal(signal.SIGTERM)
    assert job[1].wait() == -signal.SIGTERM
    assert job[0].wait() == 1
    errors = (tmp_path / "stderr 0").read_text()
    assert "rank 1 is gone" in errors
    assert f"{out / file_name(0)} has what this rank did until then" in errors
    files = read(out)
    assert files.dumps[1]["reason"] == "SIGTERM"
    assert files.dumps[0]["faults"][-1]["error"] == "PeerError"
    assert files.dumps[0]["faults"][-1]["time"] < begin + SECONDS * slack()
    (found,) = sequences(files.dumps)
    assert found.first_difference is not None
    assert found.first_difference.labels == {0: "all-gather of first in forward", 1: ABSENT}
    assert "rank 1 is gone" in shown(out)


def test_a_waiting_rank_ends_on_a_signal(job: list[Program], tmp_path: Path) -> None:
    """Its main thread is in gloo, and would run a handler of Python much later."""
    job[0].send_signal(signal.SIGTERM)
    assert job[0].wait() == -signal.SIGTERM
    files: Files = read(tmp_path / "out")
    assert files.dumps[0]["reason"] == "SIGTERM"


def shown(folder: Path) -> str:
    done = run_module("composable_fsdp", "diagnostics", folder)
    assert done.returncode == 1, done.stderr
    return done.stdout
