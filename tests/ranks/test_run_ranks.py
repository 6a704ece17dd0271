"""Test ``run_ranks``: processes are reused, isolated, and replaced after a failure, whose errors name the ranks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from tests._internals import watchdog
from tests.helpers.known_watchdog import known_watchdog
from tests.helpers.rank_process import RanksError
from tests.helpers.run_ranks import run_ranks


def pid() -> int:
    return os.getpid()


def sum_of_ranks() -> torch.Tensor:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor


def surroundings(*args: object, **kwargs: object) -> tuple[object, ...]:
    return (
        dist.get_backend(),
        len(dist.distributed_c10d._world.pg_map),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.rand(()).item(),
        random.random(),
        numpy.random.random(),
        (known := known_watchdog()) is not None and known.has_failed,
        args,
        kwargs,
        os.getcwd(),
        os.environ.get("ADDED"),
        warning(),
    )


def warning() -> str:
    try:
        warnings.warn("careful", UserWarning, stacklevel=1)
    except UserWarning as error:
        return f"raised {error!r}"
    return "passed over"


def change_surroundings() -> int:
    dist.new_group([0, 1])
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    random.seed(7)
    torch.manual_seed(7)
    numpy.random.seed(7)
    known: Any = watchdog.job_watchdog()
    known.fail("raised an error that was caught")
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        wrong = {"loss": 3.5}
        assert wrong["loss"] == 0, f"rank {rank} has wrong values: {wrong}"
    dist.barrier()


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
    return os.getpid()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def runs(pid: int) -> bool:
    """Return whether the process runs. A zombie does not: init removes orphaned ones."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def failure_of(call: Callable[..., object], *args: object, **options: object) -> RanksError:
    with pytest.raises(RanksError) as error:
        run_ranks(call, 2, *args, **options)  # type: ignore[arg-type]
    return error.value


def test_functions_run_by_ranks_are_isolated_and_get_arguments_directory_and_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_ranks(surroundings, 2)
    assert before[0] == before[1]
    assert before[0][:7] == ("gloo", 1, 1, torch.float32, torch.device("cpu"), True, False)
    assert run_ranks(change_surroundings, 2) == run_ranks(pid, 2)
    assert run_ranks(surroundings, 2) == before
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "care", UserWarning)
        found = run_ranks(surroundings, 2, "a", [1], key="b", environment={"ADDED": "1"})
    assert found[0][-5:] == (("a", [1]), {"key": "b"}, str(tmp_path), "1", "passed over")
    assert "ADDED" not in os.environ


def test_an_exception_on_one_rank_does_not_leave_the_others_waiting_and_replaces_the_processes() -> None:
    pids = run_ranks(pid, 2)
    error = failure_of(fail_on, 1, timeout=300.0)
    text = str(error)
    assert text.startswith(f"{__name__}.fail_on failed on rank 1 of 2\n--- rank 0: killed after ")
    raised = "--- rank 1: raised AssertionError: rank 1 has wrong values: {'loss': 3.5}\n"
    assert f"{raised}Traceback (most recent call last)" in text
    assert f'File "{__file__}"' in error.failures[1]
    assert """assert wrong["loss"] == 0""" in error.failures[1]
    assert "in fail_on\n    dist.barrier()" in error.failures[0]
    assert "rank_process.py" not in text
    assert not any(map(exists, pids))
    assert [tensor.item() for tensor in run_ranks(sum_of_ranks, 2)] == [1.0, 1.0]


def test_a_timeout_shows_where_every_rank_was_and_ends_what_they_started(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    error = failure_of(leave_others_waiting, str(child_file), timeout=3.0)
    assert str(error).startswith(f"{__name__}.leave_others_waiting did not return in time on ranks 0-1 of 2\n--- rank")
    for rank, line in enumerate(("dist.barrier()", "time.sleep(600)")):
        assert error.failures[rank].startswith("killed after 3.")
        assert f"in leave_others_waiting\n    {line}" in error.failures[rank]
    assert eventually(lambda: not any(runs(int(word)) for word in child_file.read_text().split()))


def test_lost_ranks_have_no_result_and_processes_are_replaced_after_them() -> None:
    begin = time.monotonic()
    (first,) = run_ranks(lose_rank_1, 2, lost=[1], timeout=300.0)
    assert time.monotonic() - begin < 200
    assert not exists(first)
    assert len(set(run_ranks(pid, 2))) == 2


# Templates. Each takes seconds to start, so every test begins as the one before has ended.
