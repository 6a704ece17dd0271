"""Training over real processes on a simulated accelerator: the results of the unsharded model, and no races."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import fully_shard
from tests.helpers.models import TASKS
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import check_parity, play_task
from tests.helpers.transports import SOCKETS
from tests.simulation import BACKEND, SimulatedAccelerator, SimulatedEvent, SimulatedStream, simulated_accelerator


@pytest.mark.parametrize("name", TASKS)
@on_ranks(2, environment=SOCKETS)
def test_training_has_no_races_and_the_results_of_the_unsharded_model(name: str) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    with simulated_accelerator() as device:
        check_parity(TASKS[name].build, play_task(name), mesh=mesh, steps=3)
    assert [str(race) for race in device.races] == []


def watch_the_host() -> tuple[list[list[str]], set[str]]:
    """Train, and return the waits of the host in each step, and the names of threads that touch the device."""
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    waits: list[list[str]] = [[]]
    threads: set[str] = set()

    def watched(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            if name in ("synchronize", "query"):
                waits[-1].append(f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with simulated_accelerator(), ExitStack() as stack:
        for owner, names in TOUCHING.items():
            for name in names:
                stack.enter_context(watched(owner, name))
        model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(9):
            waits.append([])
            model(torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return waits[1:], threads


TOUCHING = {
    SimulatedEvent: ("record", "wait", "synchronize", "query"),
    SimulatedStream: ("wait_stream", "wait_event", "record_event", "synchronize", "query", "advance"),
    SimulatedAccelerator: ("synchronize",),
}
"""The methods of a device, by their class."""


def test_the_host_waits_in_no_step_and_only_the_program_touches_the_device() -> None:
    for waits, threads in run_ranks(watch_the_host, 2, environment=SOCKETS):
        assert threads == {"MainThread"}, "autograd runs the backward of CPU tensors in the thread that calls it"
        assert [step for step, found in enumerate(waits) if found] in ([], [0]), "the first step compares the models"


@on_ranks(2, environment=SOCKETS)
def test_a_result_that_is_read_before_the_wait_is_found() -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    full = torch.full((8,), float(dist.get_rank()))
    with simulated_accelerator() as device:
        work = dist.all_reduce(full, group=mesh.get_group(), async_op=True)
        early = full + 1
        work.wait()
        late = full + 1
    assert early.equal(late), "operations run in the order of the host"
    assert late.equal(torch.full((8,), 2.0))
    assert [race.kind for race in device.races] == ["read"]
