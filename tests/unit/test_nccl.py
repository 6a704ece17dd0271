"""The stand-in for NCCL: each rule catches the fault that breaks it, and no fault where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.nccl_page import PAGE, part_of, rules_table
from tests.helpers.stream_training import alone
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


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_a_barrier_blocks_the_host(variant: str, is_async: bool) -> None:
    def is_done_after(launch: Callable[..., Any], *tensors: torch.Tensor) -> bool:
        event: Any = torch.cpu.current_stream().record_event()  # type: ignore[func-returns-value]
        work = launch(*tensors, async_op=is_async)
        if work is not None:
            work.wait()
        return bool(event.query())

    with stands_in(variant, alone=True), alone(), simulated_accelerator():
        assert not is_done_after(dist.all_reduce, torch.ones(4))
        assert is_done_after(dist.barrier)


def test_the_page_has_each_rule_with_its_source_and_its_fault() -> None:
    assert part_of(PAGE.read_text(), "rules") == rules_table(), "python -m tests.helpers.nccl_page writes it"
