"""Test the public ``run_ranks``: results, the surroundings of a function, and errors for every kind of failure.

Each call starts processes, which takes seconds. So failures that the same code reports for the ``run_ranks`` of the
tests are tested with that one. tests/ranks/test_worker_pool.py tests what only that one does.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.testing import RanksError, run_ranks
from tests.helpers import run_ranks as pool
from tests.helpers.fresh_process import Program


def pid() -> int:
    return os.getpid()


def sum_of_ranks() -> torch.Tensor:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor


def surroundings(*args: object, **kwargs: object) -> tuple[object, ...]:
    return (
        dist.get_rank(),
        sum_of_ranks().item(),
        args,
        kwargs,
        dist.get_backend(),
        torch.get_num_threads(),
        (torch.rand(()).item(), random.random(), numpy.random.random()),
        os.getcwd(),
        os.environ["GLOO_SOCKET_IFNAME"],
        os.environ.get("ADDED"),
        warning(),
        os.getpid(),
    )


def warning() -> str:
    try:
        warnings.warn("careful", UserWarning, stacklevel=1)
    except UserWarning as error:
        return f"raised {error!r}"
    return "passed over"


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        wrong = {"loss": 3.5}
        assert wrong["loss"] == 0, f"rank {rank} has wrong values: {wrong}"
    dist.barrier()


def exit_on(rank: int, child_file: str, *, code: int) -> None:
    if dist.get_rank() == rank:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # warns about a fork in a process with threads
            child = os.fork()  # the child inherits all pipes and sockets, so no other process sees them closed
        if child == 0:
            time.sleep(600)
        Path(child_file).write_text(str(child))
        os._exit(code)
    dist.barrier()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave_others_waiting(child_file: str) -> None:
    if dist.get_rank() == 1:
        child = subprocess.Popen(["sleep", "600"])
        Path(child_file).write_text(f"{child.pid} {os.getpid()}")
        time.sleep(600)
    dist.barrier()


def lose_rank_1() -> int:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return dist.get_rank()


def ids_in(folder: str) -> None:
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    fail_on(1)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state(pid: int) -> str:
    """Return the letter that ``ps`` shows, such as ``"T"`` for a stopped process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def runs(pid: int) -> bool:
    """Return whether the process runs. A zombie does not: init removes orphaned ones."""
    try:
        return state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def failure_of(call: Callable[..., object], *args: object, **options: object) -> RanksError:
    with pytest.raises(RanksError) as error:
        call(*args, **options)
    return error.value


def test_results_come_in_rank_order_and_arguments_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a module that only the caller's ``sys.path`` has, and with its warning filters."""
    torch.manual_seed(0)
    numbers = torch.rand(()).item(), random.Random(0).random(), numpy.random.RandomState(0).random()
    text = "from tests.ranks.test_run_ranks import surroundings\ndef here(*a, **k):\n    return surroundings(*a, **k)\n"
    (tmp_path / "module_of_this_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = __import__("module_of_this_test")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "care", UserWarning)
        *found, ids = zip(*run_ranks(module.here, 2, "a", [1], key="b", environment={"ADDED": "1"}), strict=True)
    common = ("gloo", 1, numbers, str(tmp_path), "lo", "1", "passed over")
    expected = [(rank, 1.0, ("a", [1]), {"key": "b"}, *common) for rank in range(2)]
    assert found == list(zip(*expected, strict=True))
    assert "ADDED" not in os.environ
    assert len({*ids, os.getpid()}) == 3
    assert not any(map(exists, ids))


def test_lost_ranks_have_no_result_and_are_not_waited_for() -> None:
    begin = time.monotonic()
    assert pool.run_ranks(lose_rank_1, 2, lost=[1], timeout=300.0) == [0]
    assert time.monotonic() - begin < 200


def test_an_exception_on_one_rank_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    begin = time.monotonic()
    error = failure_of(run_ranks, ids_in, 2, str(tmp_path), timeout=300.0)
    assert time.monotonic() - begin < 200
    text = str(error)
    assert text.startswith(f"{__name__}.ids_in failed on rank 1 of 2\n--- rank 0: killed after ")
    raised = "--- rank 1: raised AssertionError: rank 1 has wrong values: {'loss': 3.5}\n"
    assert f"{raised}Traceback (most recent call last)" in text
    assert f'File "{__file__}"' in error.failures[1]
    assert """assert wrong["loss"] == 0""" in error.failures[1]
    assert "dist.barrier()" in error.failures[0]
    assert "testing/ranks.py" not in text
    assert not any(exists(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def test_a_timeout_shows_where_every_rank_was_and_ends_what_they_started(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    error = failure_of(pool.run_ranks, leave_others_waiting, 2, str(child_file), timeout=3.0)
    assert str(error).startswith(
        f"{__name__}.leave_others_waiting did not return in time on ranks 0-1 of 2\n--- rank 0: "
    )
    for rank, line in enumerate(("dist.barrier()", "time.sleep(600)")):
        assert error.failures[rank].startswith("killed after 3.")
        assert f"in leave_others_waiting\n    {line}" in error.failures[rank]
    assert eventually(lambda: not any(runs(int(word)) for word in child_file.read_text().split()))


def test_a_rank_that_exits_is_reported_with_its_code_and_its_children_end_too(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    error = failure_of(pool.run_ranks, exit_on, 2, 1, str(child_file), code=3)
    assert error.failures[1] == "ended with exit code 3"
    assert "dist.barrier()" in error.failures[0]
    assert eventually(lambda: not runs(int(child_file.read_text())))


def test_a_rank_that_crashes_shows_its_stack() -> None:
    failure = failure_of(pool.run_ranks, crash, 1).failures[0]
    assert failure.startswith("died of SIGSEGV\nFatal Python error: Segmentation fault")
    assert "in crash" in failure


def test_processes_that_do_not_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RanksError, match=r"pid failed on ranks 0-2 of 3\n--- ranks 0-2: ended with exit code 1$"):
        run_ranks(pid, 3, lost=[0, 1, 2])


def test_unpicklable_functions_and_arguments_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"test_run_ranks.*<lambda>.* top of a module"):
        run_ranks(lambda: None, 2)
    with pytest.raises(ConfigurationError, match=r"pid and its arguments.* arguments must be picklable"):
        run_ranks(pid, 2, threading.Lock())
    with pytest.raises(ConfigurationError, match=r"at least one rank, not 0"):
        run_ranks(pid, 0)
    monkeypatch.setattr(pid, "__module__", "__main__")
    with pytest.raises(ConfigurationError, match=r"cannot import __main__.pid from the script.* Move it to a module"):
        run_ranks(pid, 2)


@contextmanager
def caller(folder: Path, how: str) -> Iterator[Program]:
    """Start ``tests.helpers.caller_of_ranks``, and wait until its rank waits, if it has one. Kill it at the end."""
    outputs = (folder / "out", folder / "err")
    program = Program("tests.helpers.caller_of_ranks", how, str(folder), outputs=outputs, environment={})
    try:
        assert how == "end" or eventually((folder / "waiting").exists, 100.0), outputs[1].read_text()
        yield program
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_their_caller(tmp_path: Path, end: signal.Signals) -> None:
    with caller(tmp_path, "new") as program:
        ids = [int(word) for word in (tmp_path / "waiting").read_text().split()]
        assert all(map(runs, ids))
        program.send_signal(end)
        assert program.wait(100.0) == -end
    assert eventually(lambda: not any(map(runs, ids)))
