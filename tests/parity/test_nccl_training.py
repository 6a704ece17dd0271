"""Training on the stand-in for NCCL breaks no rule, in its three variants.

Some trainings run on one variant each, or all of them on all variants with ``NCCL_VARIANTS=all``. Each rule catches
what breaks it: see ``tests/unit/test_nccl.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from tests.helpers.nccl_page import LIBRARIES, MESHES, PAGE, counts_of, launches_of_a_step, part_of
from tests.helpers.stream_training import TRAININGS, Block, alone
from tests.parity.test_fuzz import DrawnPrograms
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, stands_in
from tests.stream_fuzz import alone as one_of
from tests.stream_fuzz import problems_of

NAMES = tuple(VARIANTS)
ALL = os.environ.get("NCCL_VARIANTS") == "all"
ONE_IN = 8
PROGRAMS = 3
"""The number of programs of the fuzzer for each variant."""


def on_variants(names: Any) -> list[Any]:
    """Return one name in :data:`ONE_IN` with one variant in turn, or each with all."""
    return [
        pytest.param(name, variant, id=f"{name}, {variant}")
        for number, name in enumerate(names)
        for variant in (NAMES if ALL else [NAMES[number // ONE_IN % len(NAMES)]])
        if ALL or number % ONE_IN == 0
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


@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_launches_as_fsdp2_does_and_no_more_often(mesh: str, variant: str) -> None:
    page = part_of(PAGE.read_text(), "counts")
    ours, unfused, theirs = (launches_of_a_step(library, mesh, variant) for library in LIBRARIES)
    for launches, name in zip((ours, unfused, theirs), LIBRARIES.values(), strict=True):
        assert counts_of(launches, mesh, variant, name) in page, "python -m tests.helpers.nccl_page writes it anew"
        assert {launch.is_async for launch in launches} == {False}
        assert not any(launch.stream.startswith("stream 0 ") for launch in launches), "none is on the default stream"
    assert Counter(launch.operation for launch in unfused) <= Counter(launch.operation for launch in theirs)
    assert len(ours) <= len(theirs)


def stop_averaging(model: Any) -> float:
    model.set_force_sum_reduction_for_comms(True)
    return 8


def divide_by(factor: float, model: Any) -> float:
    model.set_gradient_divide_factor(factor)
    return factor


@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("change", [stop_averaging, *(partial(divide_by, factor) for factor in (2, 3, 8))])
def test_partial_means_and_sums_are_added_at_one_scale(change: Any, variant: str) -> None:
    """Change how gradients are divided while shards of earlier microbatches, of 4 shard ranks of 8, are pending."""
    with stands_in(variant, alone=True), alone() as mesh, simulated_accelerator():
        for is_first in (False, True):
            model: Any = fully_shard(nn.Linear(1, 8, bias=False), mesh=mesh)
            weight, factor = model.weight, 8.0
            for value, is_last in ((1.0, False), (2.0, False), (4.0, True)):
                if value == (1.0 if is_first else 4.0):
                    factor = change(model)
                model.set_requires_all_reduce(is_last)
                model(torch.full((1, 1), value)).sum().backward()
            torch.cpu.synchronize()
            torch.testing.assert_close(weight.grad.to_local(), torch.full((2, 1), 8 * 7 / factor))


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
