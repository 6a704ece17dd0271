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
from composable_fsdp.trace import Operation, Recorder
from tests._internals import ScheduleSettings, over_ranks
from tests.helpers.models import TASKS
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stream_training import IN_BUCKETS, chosen, give_costs
from tests.helpers.training import check_parity, play_task
from tests.helpers.transports import SOCKETS
from tests.simulation import BACKEND, SimulatedAccelerator, SimulatedEvent, SimulatedStream, simulated_accelerator

ONE_MESSAGE = ScheduleSettings(zero_copy=False, grad_buckets=1)


def train(name: str) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    with simulated_accelerator() as device:
        check_parity(TASKS[name].build, play_task(name), mesh=mesh, steps=3)
    assert [str(race) for race in device.races] == []


@pytest.mark.parametrize("name", TASKS)
def test_training_has_no_races_and_the_results_of_the_unsharded_model(name: str) -> None:
    run_ranks(train, 2, name, environment=SOCKETS)


def watch_the_host(calibrates: bool) -> tuple[list[list[str]], set[str]]:
    """Train, and return the waits of the host in each step, and the names of threads that touch the device.

    A question if something is done counts as a wait without ``calibrates``, and so do talks of ranks about costs.
    """
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    waits: list[list[str]] = [[]]
    threads: set[str] = set()

    def watched(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            if name == "synchronize" or (name == "query" and not calibrates):  # calibrate() reads events that are done
                waits[-1].append(f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    def talk(*args: Any, **kwargs: Any) -> Any:
        waits[-1].append("talk")
        return over_ranks(*args, **kwargs)

    with simulated_accelerator(), ExitStack() as stack:
        stack.enter_context(mock.patch("composable_fsdp.plugins.tuning.calibration.over_ranks", talk))
        for owner, names in TOUCHING.items():
            for name in names:
                stack.enter_context(watched(owner, name))
        model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(80 if calibrates else 9):
            if step == 4 and calibrates:
                model.calibrate(3)
            waits.append([])
            model(torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return waits[1:], threads


TOUCHING = {
    SimulatedEvent: ("record", "wait", "synchronize", "query", "elapsed_time"),
    SimulatedStream: ("wait_stream", "wait_event", "record_event", "synchronize", "query", "advance"),
    SimulatedAccelerator: ("synchronize",),
}
"""The methods of a device, by their class."""


@pytest.mark.parametrize("calibrates", [False, True])
def test_the_host_waits_in_no_step_and_only_the_program_touches_the_device(calibrates: bool) -> None:
    for waits, threads in run_ranks(watch_the_host, 2, calibrates, environment=SOCKETS):
        assert threads == {"MainThread"}, "autograd runs the backward of CPU tensors in the thread that calls it"
        # The first step compares the models. Before step 4, what calibrate() waits for counts as that of step 3.
        waiting = [step for step, found in enumerate(waits) if found and step not in (0, 3 if calibrates else 0)]
        # The steps that calibrate() measures do not wait, nor do 72 more after one talk about the costs.
        assert waiting == ([7] if calibrates else [])
        assert not calibrates or (waits[7].count("talk"), "talk" in waits[3]) == (1, True)


class Branches(nn.Module):
    """Large layers of which each rank leaves out others."""

    def __init__(self, skipped: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.skipped = skipped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skipped:
                x = layer(x).tanh()
        return x


def train_chosen(
    skipped: tuple[int, int], settings: ScheduleSettings
) -> tuple[list[torch.Tensor], list[str], list[str]]:
    """Train blocks of which each rank skips a layer. Return parameters, launches of the last step, and races."""
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    with simulated_accelerator() as device, chosen(settings):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Branches() for _ in range(4)))
        for block in model:
            fully_shard(block, mesh=mesh)
        give_costs(fully_shard(model, mesh=mesh))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for block in model:
            block.skipped = skipped[dist.get_rank()]
        recorder = Recorder()
        for step in range(4):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            with (recorder := Recorder()):
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    launches = [
        f"{e.operation.name} {e.group}" for e in recorder if e.operation in (Operation.UNSHARD, Operation.REDUCE)
    ]
    parameters = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    return parameters, launches, [str(race) for race in device.races]


@pytest.mark.parametrize("skipped", [(-1, -1), (-1, 3), (3, 2), (2, 0)], ids=str)
def test_gradient_buckets_on_streams_change_no_result_and_have_one_order(skipped: tuple[int, int]) -> None:
    default = run_ranks(train_chosen, 2, skipped, ONE_MESSAGE, environment=SOCKETS)
    in_buckets = run_ranks(train_chosen, 2, skipped, IN_BUCKETS, environment=SOCKETS)
    for (expected, plain, _), (actual, launches, races) in zip(default, in_buckets, strict=True):
        assert races == []
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert launches.count("REDUCE 3") > 1 == plain.count("REDUCE 3")
    assert in_buckets[0][1] == in_buckets[1][1], "the same order on all ranks"


def leave_out_waits() -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    full = torch.full((8,), float(dist.get_rank()))
    with simulated_accelerator() as device:
        work = dist.all_reduce(full, group=mesh.get_group(), async_op=True)
        early = full + 1
        assert work is not None
        work.wait()
        late = full + 1
    assert early.equal(late), "operations run in the order of the host"
    assert late.equal(torch.full((8,), 2.0))
    assert [race.kind for race in device.races] == ["read"]


def test_a_result_that_is_read_before_the_wait_is_found() -> None:
    run_ranks(leave_out_waits, 2, environment=SOCKETS)
