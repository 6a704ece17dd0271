"""Steps of torch's optimizers on local shards that nobody asked for. Their bits: test_local_optimizer.py."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from composable_fsdp import fully_shard, local_optimizer, offload_optimizer, owner_step, set_local_steps
from composable_fsdp.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("own_rank")


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each step of SGD: whether it saw DTensors."""
    seen: list[bool] = []
    module = sys.modules["torch.optim.sgd"]
    update = module.sgd

    def look(params: list[torch.Tensor], *args: Any, **options: Any) -> None:
        seen.append(isinstance(params[0], DTensor))
        update(params, *args, **options)

    monkeypatch.setattr(module, "sgd", look)
    return seen


def trained(make: Callable[..., Optimizer] = SGD, steps: int = 0, **options: Any) -> Optimizer:
    """Return an optimizer of a sharded model whose gradients are ones."""
    model = fully_shard(nn.Linear(3, 2))
    optimizer = make(model.parameters(), **({"lr": 0.1} | options))
    vars(optimizer)["model"] = model  # the hooks end with the last sharded model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def test_a_known_optimizer_steps_on_local_shards_from_its_second_step_on(looked_at: list[bool]) -> None:
    optimizer = trained(steps=3)
    assert looked_at == [True, False, False]
    assert type(optimizer) is SGD
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])


def test_subclasses_plain_and_differentiable_parameters_and_other_devices_are_left_alone() -> None:
    class Own(SGD):
        pass

    optimizers = [trained(Own, 1), trained(differentiable=True)]
    plain = SGD([nn.Parameter(torch.ones(2))])
    plain.step()
    model = fully_shard(nn.Linear(3, 2, device="meta"))
    meta = SGD(model.parameters())
    meta.step()
    assert not any("step" in vars(optimizer) for optimizer in (*optimizers, plain, meta))


def test_the_switch_sends_all_steps_back_to_dtensors(looked_at: list[bool]) -> None:
    optimizer = trained(steps=2)
    set_local_steps(False)
    try:
        optimizer.step()
        assert "step" not in vars(trained(steps=1))
    finally:
        set_local_steps(True)
    optimizer.step()
    assert looked_at == [True, False, True, True, False]


@pytest.mark.filterwarnings("error")
def test_a_scheduler_made_before_the_first_step_still_counts_the_steps(looked_at: list[bool]) -> None:
    optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    vars(optimizer)["_opt_called"] = False
    for _ in range(2):
        optimizer.step()
    assert vars(optimizer)["_opt_called"]
    scheduler.step()
    assert looked_at == [True, False]
    vars(optimizer)["_opt_called"] = False
    optimizer.step()
    assert vars(optimizer)["_opt_called"]


@pytest.mark.filterwarnings("error")
def test_a_scheduler_made_after_the_first_step_works(looked_at: list[bool]) -> None:
    optimizer = trained(steps=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert looked_at == [True, False]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_step_that_another_library_has_replaced_stays() -> None:
    """As accelerate does around the step of a gradient scaler: the original comes back after each step."""
    optimizer = trained()
    original, calls = optimizer.step, []

    def patched(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    for count in (1, 2):
        optimizer.step = patched  # type: ignore[method-assign]
        optimizer.step()
        assert vars(optimizer)["step"] is patched
        optimizer.step = original  # type: ignore[method-assign]
        assert len(calls) == count


def test_a_tool_that_replaces_the_step_of_the_class_is_called(monkeypatch, looked_at: list[bool]) -> None:
    optimizers = trained(steps=2), trained(), trained(steps=2)
    torch.optim.lr_scheduler.StepLR(optimizers[2], 1)  # its function calls the replaced step
    original: Any = SGD.step
    calls = []

    @wraps(original)
    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    monkeypatch.setattr(SGD, "step", counted)
    for optimizer in optimizers:
        for _ in range(2):
            optimizer.step()
    assert len(calls) == 6
    assert looked_at == [True, False] * 2 + [True] * 6


def test_a_step_that_raises_leaves_dtensors_and_can_be_repeated(looked_at: list[bool]) -> None:
    optimizer = trained(steps=2)
    group = optimizer.param_groups[0]
    group["weight_decay"] = "much"
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(isinstance(p, DTensor) for p in group["params"])
    group["weight_decay"] = 0
    optimizer.step()
    assert looked_at == [True, False, False, False]


def test_copies_and_pickles_are_ordinary_optimizers() -> None:
    optimizer = trained(AdamW, 2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert "step" not in vars(other)
        assert type(other) is AdamW
        assert all(isinstance(state["exp_avg"], DTensor) for state in other.state.values())


def test_an_optimizer_is_freed_with_the_last_reference() -> None:
    optimizer = trained(steps=2)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("call", [local_optimizer, offload_optimizer, owner_step])
@pytest.mark.parametrize("scheduled", [False, True])
def test_calls_that_replace_a_step_find_torchs_own(call: Callable[[Optimizer], Any], scheduled: bool) -> None:
    optimizer = trained(Adam)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        vars(optimizer)["_opt_called"] = True
    optimizer.step()
    if scheduled:
        with pytest.raises(ConfigurationError, match="has been replaced already, by a learning-rate scheduler or"):
            call(optimizer)
    else:
        call(optimizer)
    optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_runs_uncompiled_or_says_why_it_cannot() -> None:
    torch.compiler.reset()
    optimizer, compiled = trained(steps=1), trained()
    torch.compile(optimizer.step)()
    for mine in optimizer.param_groups[0]["params"]:
        assert mine._version > 0
    with pytest.raises(
        ConfigurationError,
        match=r"torch\.compile cannot trace the step of this SGD: parameter 'bias' is a part of the flat shard .* Call "
        r"optimizer\.step\(\) itself",
    ):
        torch.compile(compiled.step)()
