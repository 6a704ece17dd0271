"""Training over real processes on the stand-in for NCCL: no rule broken, and the results of the unsharded model."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.models import TASKS
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import check_parity, play_task
from tests.helpers.transports import SOCKETS
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, stands_in


def train(variant: str, name: str) -> int:
    with stands_in(variant) as contract:
        mesh = DeviceMesh.from_group(dist.new_group(backend=contract.backend), "cpu")
        with simulated_accelerator() as device:
            check_parity(TASKS[name].build, play_task(name), mesh=mesh, steps=3)
        assert device.races == []
        return len(contract.launches)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TASKS)
def test_training_keeps_the_contract_and_has_the_results_of_the_unsharded_model(variant: str, name: str) -> None:
    launches = run_ranks(train, 2, variant, name, environment=SOCKETS)
    assert launches[0] == launches[1] > 0
