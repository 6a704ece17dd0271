"""Errors of steps on owners: ranks with gradients of different parameters, and owners that raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable_fsdp import DivergenceError, Muon, PeerError, fully_shard, owner_step
from composable_fsdp.optim import muon
from tests._internals import Exchange
from tests.helpers.models import seeded
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, full_value


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9, bias=False), nn.Linear(9, 6, bias=False)
        self.again, self.last = nn.Linear(6, 9, bias=False), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.down(self.up(x)).relu()).relu())


def by_muon(model: nn.Module) -> Optimizer:
    return Muon(model.parameters(), lr=0.02, bucket_bytes=64)


def by_owner_step(model: nn.Module) -> Optimizer:
    return owner_step(torch.optim.Adafactor(model.parameters(), lr=1e-2), bucket_bytes=64)


MAKERS = {"Muon": by_muon, "owner_step": by_owner_step}


def trained(name: str) -> tuple[nn.Module, Optimizer]:
    """Return a model and its optimizer after two steps, with gradients of the next one."""
    model = fully_shard(seeded(Four)())
    optimizer = MAKERS[name](model)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if step < 2:
            optimizer.step()
    return model, optimizer


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_value(p).clone() for name, p in model.named_parameters()}


def step_with_other_gradients(name: str, missing: tuple[str, ...]) -> None:
    """Drop gradients of rank ``r`` named ``missing[r]``. Nothing is changed, and the step succeeds with zeros."""
    model, optimizer = trained(name)
    before, dropped = values(model), missing[dist.get_rank()]
    if dropped:
        model.get_parameter(dropped).grad = None
    ranks = range(dist.get_world_size())
    having = {each: [r for r in ranks if missing[r] != each] for each in sorted(set(missing) - {""}, reverse=True)}
    with pytest.raises(DivergenceError) as caught:
        optimizer.step()
    text = str(caught.value)
    assert text.startswith("the ranks of a step have gradients of different parameters: ")
    assert text.endswith("gradients of the same parameters, zeros where there is none, before the step.")
    for each, others in having.items():
        assert f"'{each}' on ranks {others} only" in text
    for each, value in values(model).items():
        assert_exact(value, before[each], each)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    optimizer.step()
    assert not torch.equal(values(model)["up.weight"], before["up.weight"])


@pytest.mark.behaviour("H-02")
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_of_different_parameters_are_an_error_on_all_ranks(name: str) -> None:
    run_ranks(step_with_other_gradients, 2, name, ("", "down.weight"))
    run_ranks(step_with_other_gradients, 4, name, ("up.weight", "", "again.weight", ""))  # of equal sizes


@pytest.mark.behaviour("C-04")
@pytest.mark.parametrize("name", MAKERS)
@on_ranks(2)
def test_a_parameter_without_a_gradient_on_all_ranks_is_left_as_it_is(name: str) -> None:
    model, optimizer = trained(name)
    before = values(model)
    model.get_parameter("down.weight").grad = None
    with mock.patch.object(Exchange, "__init__", side_effect=AssertionError("a new plan")):
        optimizer.step()
    for each, value in values(model).items():
        assert torch.equal(value, before[each]) == (each == "down.weight"), each


class Failing:
    def __init__(self, function: Callable[..., Any], rank: int) -> None:
        self.function, self.left = function, int(dist.get_rank() == rank)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left = 0
            raise ArithmeticError("no convergence")
        return self.function(*args, **options)


def step_with_a_failing_owner(name: str, rank: int) -> str:
    _, optimizer = trained(name)
    where = (muon, "orthogonalised") if name == "Muon" else (torch.optim._adafactor, "adafactor")
    with mock.patch.object(*where, Failing(getattr(*where), rank)), pytest.raises(PeerError) as caught:
        optimizer.step()
    is_owner = dist.get_rank() == rank
    assert caught.value.ranks == (() if is_owner else (rank,))
    assert isinstance(caught.value.__cause__, ArithmeticError) == is_owner
    optimizer.step()  # all ranks can go on
    return str(caught.value)


@pytest.mark.behaviour("H-02")
@pytest.mark.parametrize(("name", "ranks"), [("Muon", 4), ("owner_step", 2)])
def test_an_owner_that_raises_is_an_error_on_all_ranks_in_the_same_step(name: str, ranks: int) -> None:
    (text,) = set(run_ranks(step_with_a_failing_owner, ranks, name, 1))
    assert text.startswith("an owner failed: rank 1 raised ArithmeticError: no convergence in the update of '")
    assert text.endswith(".weight'. Other parameters may be updated already: go on from a checkpoint.")
