"""Training on the stand-in for NCCL breaks no rule, in its three variants.

Each training and program runs on one variant, or on all of them with ``NCCL_VARIANTS=all``. ``tests/unit/test_nccl.py``
shows that each rule catches what breaks it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from composable_fsdp import fully_shard
from tests.helpers.stream_training import TRAININGS, Block, alone, train
from tests.parity.test_fuzz import DrawnPrograms
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, Contract, stands_in
from tests.stream_fuzz import alone as one_of
from tests.stream_fuzz import problems_of

NAMES = tuple(VARIANTS)
ALL = os.environ.get("NCCL_VARIANTS") == "all"
PROGRAMS = 3
"""The number of programs of the fuzzer for each variant."""


def on_variants(names: Any) -> list[Any]:
    """Return each name with one variant in turn, or with all."""
    return [
        pytest.param(name, variant, id=f"{name}, {variant}")
        for number, name in enumerate(names)
        for variant in (NAMES if ALL else [NAMES[number % len(NAMES)]])
    ]


@pytest.mark.behaviour("M-01", "M-02")
@pytest.mark.parametrize(("name", "variant"), on_variants(TRAININGS))
def test_training_breaks_no_rule_and_has_the_same_results_in_another_order(name: str, variant: str) -> None:
    with stands_in(variant, alone=True), simulated_accelerator(records=True) as device:
        TRAININGS[name]()
    assert [str(race) for race in device.races] == []
    assert device.run_late(seed=len(name)) == []


@pytest.mark.parametrize("variant", NAMES)
def test_drawn_programs_break_no_rule(variant: str) -> None:
    number = NAMES.index(variant)
    drawn = [program for program in DrawnPrograms(60, 2).map_drawn() if program.placing is None]
    with stands_in(variant, alone=True), one_of(2, rank=1) as meshes:
        for program in drawn[number : number + len(NAMES) * PROGRAMS : len(NAMES)]:
            assert problems_of(program, meshes, orders=1) == []


def launches_of(library: Any, variant: str, **options: Any) -> Contract:
    """Train three blocks without fusion, and return the stand-in."""
    prepare = id if library is torch_fully_shard else lambda model: model.set_max_fused_bytes(0)
    with stands_in(variant, alone=True) as contract, alone() as mesh, simulated_accelerator():
        train(mesh, library=library, prepare=prepare, **options)
    return contract


@pytest.mark.parametrize("variant", NAMES)
def test_collectives_run_on_our_streams_as_from_fsdp2(variant: str) -> None:
    for library in (torch_fully_shard, fully_shard):
        launches = launches_of(library, variant).launches
        assert {launch.is_async for launch in launches if launch.operation != "all_reduce"} == {False}
        on = {launch.stream.partition(" (")[0] for launch in launches if not launch.is_async}
        assert "stream 0" not in on, "nothing is launched on the default stream"


@pytest.mark.parametrize("variant", NAMES)
def test_a_step_has_no_more_launches_than_fsdp2(variant: str) -> None:
    ours, theirs = (len(launches_of(library, variant).launches) for library in (fully_shard, torch_fully_shard))
    assert ours <= theirs


@pytest.mark.parametrize("variant", NAMES)
def test_a_step_can_be_captured_after_another_one(variant: str) -> None:
    with stands_in(variant, alone=True), alone() as mesh, simulated_accelerator() as device:
        model = nn.Sequential(Block(), Block(), Block())
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = torch.randn(8, 64)
        model(x).square().sum().backward()
        torch.cpu.synchronize()
        with device.capture():
            model(x).square().sum().backward()
        model(x).square().sum().backward()
