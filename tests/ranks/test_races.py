"""Training over real processes on a simulated accelerator: the results of the unsharded model, and no races."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.testing import BACKEND, run_ranks, simulated_accelerator
from tests.helpers.models import TASKS
from tests.helpers.training import check_parity, play_task
from tests.helpers.transports import SOCKETS


def train(name: str) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    with simulated_accelerator() as device:
        check_parity(TASKS[name].build, play_task(name), mesh=mesh, steps=3)
    assert [str(race) for race in device.races] == []


@pytest.mark.parametrize("name", TASKS)
def test_training_has_no_races_and_the_results_of_the_unsharded_model(name: str) -> None:
    run_ranks(train, 2, name, environment=SOCKETS)


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
