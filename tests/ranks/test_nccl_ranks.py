"""Training over real processes on the stand-in for NCCL: no rule broken, and the results of the unsharded model."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests._internals import PATIENCE
from tests.helpers.models import TASKS
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import check_parity, play_task
from tests.helpers.transports import SOCKETS
from tests.planted_nccl import ON_RANKS, Program
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, stands_in
from tests.simulation.rules import ContractViolation


def train(variant: str, name: str, connection_seconds: float = 0.0) -> int:
    with stands_in(variant, connection_seconds=connection_seconds) as contract:
        mesh = DeviceMesh.from_group(dist.new_group(backend=contract.backend), "cpu")
        with simulated_accelerator() as device:
            check_parity(TASKS[name].build, play_task(name), mesh=mesh, steps=3)
        assert device.races == []
        return len(contract.launches)


@pytest.mark.parametrize(("name", "variant"), list(zip(TASKS, cycle(VARIANTS), strict=False)))
def test_training_keeps_the_contract_and_has_the_results_of_the_unsharded_model(variant: str, name: str) -> None:
    launches = run_ranks(train, 2, variant, name, environment=SOCKETS)
    assert launches[0] == launches[1] > 0


def test_a_slow_first_operation_is_no_fault() -> None:
    seconds = 1.5 * PATIENCE
    assert all(run_ranks(train, 2, "nccl", "mlp", seconds, environment=SOCKETS))


def violation_of(program: Program, variant: str, broken: bool) -> str:
    """Return the rule that this rank breaks by a program, or an empty text."""
    try:
        with stands_in(variant) as contract, simulated_accelerator() as device:
            program(device, contract, broken)
    except ContractViolation as violation:
        return violation.rule
    return ""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("rule", "program"), [(rule, program) for rule, programs in ON_RANKS.items() for program in programs]
)
def test_each_rule_between_ranks_catches_its_planted_fault(rule: str, program: Program, variant: str) -> None:
    assert run_ranks(violation_of, 2, program, variant, False, environment=SOCKETS) == ["", ""]
    assert run_ranks(violation_of, 2, program, variant, True, environment=SOCKETS)[0] == rule
