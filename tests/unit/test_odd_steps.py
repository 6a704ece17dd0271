"""Steps and schedules where the last pass was no ordinary step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import fully_shard
from composable_fsdp.errors import ParameterError
from tests._internals import Pass, root_of, state_of
from tests.helpers.sharding import fake_ranks

WIDTH, NAMES = 16, "abc"


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


class Chain(nn.Module):
    """Layers, each a group. The first may raise, or have a backward of its own inside the forward, that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=True) for _ in NAMES)
        self.catches, self.inner_backward_fails = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner_backward_fails:
            torch.autograd.grad(self.a(Raising.apply(x)).sum(), x)
        with suppress(*[ParameterError] * self.catches):
            x = self.a(x)
        return cast(torch.Tensor, self.c(self.b(x)))


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArithmeticError("in backward")


def build() -> Any:
    model: Any = fully_shard(Chain())
    assert not model.schedule()
    return model


def step(model: Any) -> None:
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


def test_after_an_evaluation_or_a_reset_the_schedule_is_that_of_a_step() -> None:
    model = build()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    before = str(model.schedule())
    step(model)
    recorded = str(model.schedule())
    model.reset_iter_state()
    after = str(model.schedule())
    assert before.count("gather") == recorded.count("gather") == after.count("gather") == 3
    assert all("end of backward" in each and "reduce a, b, c" in each for each in (before, recorded, after))


def test_a_pre_forward_that_raised_is_not_in_the_schedule() -> None:
    model = build()
    step(model)
    model.catches = True
    kept = model.a.weight.data
    model.a.weight.data = torch.zeros(0)
    step(model)
    assert "pre-forward a" not in str(model.schedule())
    model.a.weight.data = kept
    step(model)
    assert "pre-forward a" in str(model.schedule())


def test_a_reset_forgets_that_a_backward_was_inside_of_a_forward() -> None:
    model = build()
    step(model)
    model.inner_backward_fails = True
    with pytest.raises(ArithmeticError, match="in backward"):
        step(model)
    model.reset_iter_state()
    root = root_of(state_of(model))
    root.end_backward()  # as pipelining ends the last of several backwards
    assert root.current_pass is Pass.IDLE


class Shown(nn.Module):
    """Returns an object whose tensor no hook sees, unless it ``shows`` the tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=False)
        self.shows = True

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layer(x)
        return x if self.shows else Hidden(x)


class Hidden:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(str(function))
        return function(*args, **(kwargs or {}))


def test_each_backward_is_outside_of_the_modes_of_its_caller() -> None:
    """No pre-backward begins the second one, which must not rely on what the first one has found."""
    inner = Shown()
    model: Any = fully_shard(nn.Sequential(inner), reshard_after_forward=False)
    model(torch.ones(2, WIDTH)).sum().backward()
    inner.shows = False
    hidden = model(torch.ones(2, WIDTH))
    with Log() as log:
        hidden.tensor.sum().backward()
    assert not {each for each in log.operations if "c10d" in each or "empty" in each}


class CustomGather:
    """An all-gather of the user, over fake ranks that send nothing."""

    def allocate(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def __call__(self, **_: object) -> None: ...


def test_a_group_leaves_its_fusion_once_a_callable_of_the_user_gathers_it() -> None:
    def gathers() -> list[tuple[str, ...]]:
        step(model)
        actions = (action for each in model.schedule() for action in each.actions)
        return [action.groups for action in actions if action.verb == "gather"]

    model = build()
    step(model)
    assert ("a", "b", "c") in gathers()
    model.b.set_custom_all_gather(CustomGather())
    alone = gathers()
    assert ("b",) in alone
    assert not any(len(groups) > 1 and "b" in groups for groups in alone)
