"""Test the ``run_ranks`` of the tests: processes are reused, isolated, and replaced after a failure."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable_fsdp.testing import RanksError
from tests._internals import watchdog
from tests.helpers import run_ranks as pool
from tests.helpers.known_watchdog import known_watchdog
from tests.helpers.run_ranks import run_ranks, shutdown
from tests.ranks.test_run_ranks import caller, eventually, exists, fail_on, pid, runs, state, sum_of_ranks, warning

# Functions that run on the ranks


def place(*args: object, **kwargs: object) -> tuple[object, ...]:
    return dist.get_rank(), dist.get_world_size(), args, kwargs


def hash_of_text() -> int:
    return hash("text")


def parent_pid() -> int:
    return os.getppid()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def surroundings() -> tuple[object, ...]:
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
    )


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
    known = watchdog.job_watchdog()
    assert known is not None
    known.fail("raised an error that was caught")
    return os.getpid()


def directory() -> str:
    return os.getcwd()


def destroy_default_group() -> int:
    dist.destroy_process_group()
    return os.getpid()


def kill_rank_1() -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def redistribute_on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
    placements = [Shard(0), Shard(0)]
    distribute_tensor(torch.arange(4.0), mesh, placements).full_tensor()


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# Successful calls


def test_results_come_in_rank_order_and_arguments_arrive() -> None:
    assert run_ranks(place, 2, "a", [1], key="b") == [(rank, 2, ("a", [1]), {"key": "b"}) for rank in range(2)]
    assert run_ranks(place, 1) == [(0, 1, (), {})]


def test_processes_are_kept_for_the_next_call_of_the_same_size() -> None:
    pids = run_ranks(pid, 2)
    assert len(set(pids)) == 2
    assert run_ranks(pid, 2) == pids
    assert not set(run_ranks(pid, 1)) & set(pids)
    assert run_ranks(pid, 2) == pids


def test_functions_run_by_ranks_are_isolated_from_each_other() -> None:
    before = run_ranks(surroundings, 2)
    assert before[0] == before[1]
    assert before[0][:7] == ("gloo", 1, 1, torch.float32, torch.device("cpu"), True, False)
    assert run_ranks(change_surroundings, 2) == run_ranks(pid, 2)
    assert run_ranks(surroundings, 2) == before


def test_modules_and_files_are_found_as_the_caller_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_made_after_the_pool.py").write_text("def answer():\n    return open('file').read()\n")
    (tmp_path / "file").write_text("42")
    run_ranks(pid, 2)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = __import__("module_made_after_the_pool")
    assert run_ranks(module.answer, 2) == ["42", "42"]
    monkeypatch.undo()
    assert run_ranks(directory, 2) == [os.getcwd()] * 2


def test_warnings_are_errors_exactly_where_they_are_for_the_caller() -> None:
    assert run_ranks(warning, 2) == ["raised UserWarning('careful')"] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert run_ranks(warning, 2) == ["passed over"] * 2


def test_a_function_may_destroy_the_default_group() -> None:
    pids = run_ranks(destroy_default_group, 1)
    assert not set(run_ranks(pid, 1)) & set(pids)
    assert not any(map(exists, pids))


def test_later_processes_get_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(destroy_default_group, 1)
    monkeypatch.setenv("SET_LATER", "2")
    assert run_ranks(variable, 1, "SET_LATER") == ["2"]
    run_ranks(destroy_default_group, 1)


def test_process_groups_of_earlier_functions_leave_no_threads() -> None:
    before = run_ranks(count_threads, 2)
    run_ranks(redistribute_on_a_mesh, 2)
    assert run_ranks(count_threads, 2) == before


def test_processes_are_stopped_between_calls() -> None:
    ids = run_ranks(pid, 2)
    assert eventually(lambda: all(state(each) == "T" for each in ids))
    assert run_ranks(pid, 2) == ids


def test_adjacent_ranks_hash_text_differently() -> None:
    first, second = run_ranks(hash_of_text, 2)
    assert first != second


# Failures


def test_processes_are_replaced_after_a_failure() -> None:
    pids = run_ranks(pid, 2)
    with pytest.raises(RanksError, match=r"fail_on failed on rank 1 of 2\n--- rank 0: killed after ") as error:
        run_ranks(fail_on, 2, 1)
    assert "in fail_on\n    dist.barrier()" in error.value.failures[0]
    assert not any(map(exists, pids))
    assert [tensor.item() for tensor in run_ranks(sum_of_ranks, 2)] == [1.0, 1.0]


def test_processes_are_replaced_after_a_call_with_lost_ranks() -> None:
    first = run_ranks(kill_rank_1, 2, lost=[1])
    assert len(first) == 1
    assert not exists(first[0])
    assert len(set(run_ranks(pid, 2))) == 2


# Templates. Each takes seconds to start, so every test begins as the one before has ended.


def test_a_worker_that_was_killed_between_calls_is_replaced_and_shutdown_ends_it() -> None:
    (before,) = run_ranks(pid, 1)
    descriptor = os.pidfd_open(before)
    os.kill(before, signal.SIGKILL)
    assert select.select([descriptor], [], [], 20.0)[0]  # all of its threads have ended
    os.close(descriptor)
    (after,) = run_ranks(pid, 1)
    assert not exists(before)
    shutdown()
    assert not exists(after)


def test_an_interrupt_while_processes_start_does_not_affect_later_calls() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise RuntimeError("stopped by the test")

    shutdown()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # the import takes longer than this
        with pytest.raises(RuntimeError, match="stopped by the test"):
            run_ranks(pid, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(set(run_ranks(pid, 2))) == 2


def test_processes_are_forked_from_two_for_each_environment() -> None:
    parents = run_ranks(parent_pid, 3)
    assert parents[0] == parents[2] != parents[1]
    assert os.getpid() not in parents
    run_ranks(destroy_default_group, 3)  # the next call starts processes
    assert run_ranks(parent_pid, 3) == parents
    assert run_ranks(variable, 1, "FORKED", environment={"FORKED": "1"}) == ["1"]
    assert run_ranks(parent_pid, 1, environment={"FORKED": "1"}) != parents[:1]
    ours = "COMPOSABLE_FSDP_OF_THIS_TEST"  # read late: from the same processes
    assert run_ranks(variable, 1, ours, environment={ours: "1"}) == ["1"]
    assert run_ranks(parent_pid, 1, environment={ours: "1"}) == parents[:1]
    assert run_ranks(variable, 1, "FORKED") == [None]
    for parent in set(parents):
        assert len(os.listdir(f"/proc/{parent}/task")) == 1  # a fork copies only one thread
    shutdown()
    assert not any(map(exists, parents))


def test_processes_that_do_not_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown()
    monkeypatch.setattr(pool, "BOOT", "raise SystemExit(7)")
    with pytest.raises(RanksError, match=r"pid failed on ranks 0-2 of 3\n--- ranks 0-2: ended with exit code 7"):
        run_ranks(pid, 3)
    monkeypatch.undo()
    assert len(run_ranks(pid, 3)) == 3
    gc.collect()  # would warn about unclosed resources


# Processes after the end of the caller


def test_the_end_of_the_interpreter_ends_the_processes(tmp_path: Path) -> None:
    with caller(tmp_path, "end") as program:
        assert program.wait() == 0, (tmp_path / "err").read_text()
        ids = [int(word) for word in (tmp_path / "stopped").read_text().split()]
        assert len(ids) == 2
        assert not any(map(runs, ids))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_their_caller(tmp_path: Path, end: signal.Signals) -> None:
    """Both those that run and those that are stopped."""
    with caller(tmp_path, "kept") as program:
        ids = [int(word) for name in ("stopped", "waiting") for word in (tmp_path / name).read_text().split()]
        assert len(ids) == 4
        assert all(map(runs, ids))
        program.send_signal(end)
        assert program.wait(100.0) == -end
    assert eventually(lambda: not any(map(runs, ids)))
