"""Test the order of groups in forward, which ranks compare: the error, its delay, and the next steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import DivergenceError, FSDPModule
from composable_fsdp.errors import ExecutionOrderWarning
from tests.helpers.counted_collectives import compared
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, values_of
from tests.helpers.slack import slack
from tests.helpers.transports import IN_COMMON, SOCKETS, TRANSPORTS
from tests.helpers.two_layers import FAULTS, build, sgd, step

SECONDS = 5.0
"""The time within which every rank must raise the error."""


@contextmanager
def failing_within(seconds: float, kind: type[Exception], match: str) -> Iterator[None]:
    begin = time.monotonic()
    with pytest.raises(kind, match=match):
        yield
    assert time.monotonic() - begin < seconds * slack()


def fail_and_go_on(fault: str, at_step: int) -> None:
    """Check that a failed step changes nothing on any rank and that the other steps are unaffected."""
    inject_fault, kind, match = FAULTS[fault]
    last = dist.get_rank() == dist.get_world_size() - 1
    model, undisturbed = build(), build()
    optimizers = sgd(model), sgd(undisturbed)
    for number in range(at_step + 3):
        if number == at_step:
            undo = inject_fault(model) if last else None
            own_fault = last and fault != "order"
            with failing_within(
                SECONDS, ArithmeticError if own_fault else kind, "test failure" if own_fault else match
            ):
                step(model, optimizers[0])
            if undo is not None:
                undo()
            model.reset_iter_state()
            continue
        step(model, optimizers[0])
        step(undisturbed, optimizers[1])
    expected = values_of(undisturbed)
    for name, value in values_of(model).items():
        assert_exact(value, expected[name], name)


@pytest.mark.behaviour("G-01", "H-01", "H-03", "H-05")
@pytest.mark.parametrize(("fault", "transport"), list(zip(FAULTS, cycle(TRANSPORTS), strict=False)))
def test_a_fault_on_one_rank_is_an_error_on_all_and_training_goes_on(fault: str, transport: str) -> None:
    run_ranks(fail_and_go_on, 2, fault, 3, environment=TRANSPORTS[transport])


@pytest.mark.behaviour("G-01", "H-01")
def test_a_fault_in_the_first_step_is_an_error_on_four_ranks() -> None:
    run_ranks(fail_and_go_on, 4, "order", 0, environment=SOCKETS)


@pytest.mark.behaviour("G-01")
@pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])
@on_ranks(2, environment="transport")
def test_a_difference_in_order_names_what_each_rank_is_about_to_gather() -> None:
    model = build()
    model.swapped = dist.get_rank() == 1
    with pytest.raises(DivergenceError) as caught:
        model(torch.ones(2, 64))
    assert "\n  rank 0: all-gather of first in forward" in str(caught.value)
    assert "\n  rank 1: all-gather of second in forward" in str(caught.value)
    model.reset_iter_state()


def count_comparisons(model: nn.Module, play: Callable[[int], None], steps: int) -> list[int]:
    optimizer, group = sgd(model), dist.group.WORLD
    assert group is not None
    counts: list[int] = []
    for number in range(steps):
        before = compared(group)
        play(number)
        step(model, optimizer)
        counts.append(compared(group) - before)
    return counts


def train_and_evaluate() -> None:
    model = build()

    def evaluate(number: int) -> None:
        if number % 2:
            with torch.no_grad():
                model(torch.ones(1, 64))

    counts = count_comparisons(model, evaluate, 8)
    assert max(counts[4:]) <= 4, counts  # when an evaluation follows a step, and when a step follows an evaluation


def train() -> None:
    model = build()
    counts = count_comparisons(model, lambda number: None, 6)
    assert counts[0] > 0
    assert counts[3:] == [0, 0, 0]
    model.set_order_check("always")
    assert min(count_comparisons(model, lambda number: None, 2)) > 0
    model.set_order_check("off")
    assert count_comparisons(model, lambda number: None, 2) == [0, 0]
    model.set_order_check("first")


@pytest.mark.behaviour("G-03", "G-04")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compare_only_new_sequences(ranks: int) -> None:
    run_ranks(train, ranks, environment=SOCKETS)
    run_ranks(train_and_evaluate, ranks, environment=SOCKETS)


@pytest.mark.behaviour("G-02")
@on_ranks(2, environment=SOCKETS)
def test_an_order_that_changes_on_all_ranks_is_warned_of_once() -> None:
    model = build()
    optimizer = sgd(model)
    step(model, optimizer)
    model.swapped = True
    rank = dist.get_rank()
    with pytest.warns(
        ExecutionOrderWarning, match=rf"^Forward order differs from that of the first iteration on rank {rank}"
    ):
        step(model, optimizer)
    model.swapped = False
    step(model, optimizer)
    model.swapped = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)


@on_ranks(2)
def test_an_unknown_level_is_an_error() -> None:
    model: FSDPModule = build()
    level: Any = "sometimes"
    with pytest.raises(ValueError, match="the order check is one of 'off', 'first', 'always', not 'sometimes'"):
        model.set_order_check(level)
