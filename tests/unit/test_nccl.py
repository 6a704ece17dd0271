"""The stand-in for NCCL: each rule catches the fault that breaks it, and no fault where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.helpers.nccl_page import PAGE, part_of, rules_table
from tests.planted_nccl import ALONE, NEEDS, ON_RANKS, Program
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, stands_in
from tests.simulation.rules import RULES, ContractViolation


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


ROWS = [
    pytest.param(rule, program, variant, id=f"{rule} {number}, {variant}")
    for rule, programs in ALONE.items()
    for number, program in enumerate(programs)
    for variant in NEEDS.get(rule, tuple(VARIANTS))
]


def run(program: Program, variant: str, *, broken: bool) -> None:
    with stands_in(variant, alone=True) as contract, simulated_accelerator() as device:
        program(device, contract, broken)


@pytest.mark.parametrize(("rule", "program", "variant"), ROWS)
def test_each_rule_catches_its_planted_fault(rule: str, program: Program, variant: str) -> None:
    run(program, variant, broken=False)
    with pytest.raises(ContractViolation, match=r"^\[") as caught:
        run(program, variant, broken=True)
    assert caught.value.rule == rule
    assert RULES[rule].text in str(caught.value)
    assert RULES[rule].source in str(caught.value)


def test_each_rule_has_a_planted_fault() -> None:
    assert RULES.keys() == {*ALONE, *ON_RANKS}


def test_the_page_has_each_rule_with_its_source_and_its_fault() -> None:
    assert part_of(PAGE.read_text(), "rules") == rules_table(), "python -m tests.helpers.nccl_page writes it"
