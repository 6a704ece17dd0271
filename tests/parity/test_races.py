"""Training on a simulated accelerator has no races, and the same results in other orders. Each wait is needed."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from composable_fsdp.testing import simulated_accelerator
from tests.helpers.stream_training import BF16, TRAININGS, alone, train
from tests.parity.test_fuzz import DrawnPrograms
from tests.planted_faults import EXPLAINED, reached_by, sites, try_fault
from tests.stream_fuzz import alone as one_of
from tests.stream_fuzz import problems_of


@pytest.mark.behaviour("M-01", "M-02")
@pytest.mark.parametrize("name", TRAININGS)
def test_training_has_no_races_and_the_same_results_in_another_order(name: str) -> None:
    with simulated_accelerator(records=True) as device:
        TRAININGS[name]()
    assert [str(race) for race in device.races] == []
    assert device.run_late(seed=len(name)) == []


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
def test_fsdp2_of_torch_has_neither(is_bf16: bool) -> None:
    options: dict[str, Any] = {"mp_policy": TorchMixedPrecisionPolicy(**BF16)} if is_bf16 else {}
    with alone() as mesh, simulated_accelerator(records=True) as device:
        train(mesh["shard"], library=torch_fully_shard, **options)
    assert [str(race) for race in device.races] == []
    assert [device.run_late(seed) for seed in range(5)] == [[]] * 5


def test_drawn_programs_have_neither() -> None:
    drawn = [program for program in DrawnPrograms(8, 2).map_drawn() if program.placing is None]
    with one_of(2, rank=1) as meshes:
        assert [problems_of(program, meshes, orders=2) for program in drawn] == [[]] * len(drawn)


PLANTED = "unfused, hybrid"
ELSEWHERE = {
    "InFlight.wait": "another waiter on another stream, and copies of one rank",
    "CommStream.wait_for_current": "branches on streams",
    "Calibration._end_step": "an optimizer that does not wait on the host",
}
"""The functions whose calls this training reaches and does not need. ``python -m tests.planted_faults`` runs others."""


@pytest.mark.behaviour("M-01")
def test_each_wait_of_a_training_is_needed() -> None:
    reached = reached_by(PLANTED)
    outcomes = {site: try_fault(site, [PLANTED], orders=0) for site in sites() if site.key in reached}
    assert len(outcomes) > 8
    unnoticed = {site.function for site, outcome in outcomes.items() if not any(outcome)}
    assert unnoticed - ELSEWHERE.keys() == {name.partition(":")[0] for name in EXPLAINED} & unnoticed
