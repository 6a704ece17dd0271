"""Test the ``run_ranks`` of the tests: processes are reused, isolated, and replaced after a failure."""

from __future__ import annotations

import os
import random
import select
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from composable_fsdp.testing import RanksError
from tests._internals import watchdog
from tests.helpers.known_watchdog import known_watchdog
from tests.helpers.run_ranks import run_ranks, shutdown
from tests.ranks.test_run_ranks import caller, eventually, exists, fail_on, pid, runs, sum_of_ranks


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
    known: Any = watchdog.job_watchdog()
    known.fail("raised an error that was caught")
    return os.getpid()


def kill_rank_1() -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_functions_run_by_ranks_are_isolated_from_each_other() -> None:
    before = run_ranks(surroundings, 2)
    assert before[0] == before[1]
    assert before[0][:7] == ("gloo", 1, 1, torch.float32, torch.device("cpu"), True, False)
    assert run_ranks(change_surroundings, 2) == run_ranks(pid, 2)
    assert run_ranks(surroundings, 2) == before


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
