"""Steps of torch's optimizers on local shards: those that nobody asked for, and element-wise ones."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from composable_fsdp import fully_shard, local_optimizer, offload_optimizer, owner_step, set_local_steps
from composable_fsdp.errors import ConfigurationError, LifecycleError
from tests.helpers.sharding import full_value

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


@pytest.mark.parametrize("call", [local_optimizer, offload_optimizer, owner_step])
@pytest.mark.parametrize("scheduled", [False, True])
def test_calls_that_replace_a_step_find_torchs_own(call: Callable[[Optimizer], Any], scheduled: bool) -> None:
    optimizer = trained(Adam)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        vars(optimizer)["_opt_called"] = True
    optimizer.step()
    if scheduled:
        with pytest.raises(ConfigurationError, match="has been replaced already, by a learning-rate scheduler, "):
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


def sharded(*sizes: int) -> list[nn.Parameter]:
    """Return sharded vectors of ones with gradients of ones."""
    mesh = init_device_mesh("cpu", (1,))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Shard(0)])) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


@pytest.mark.behaviour("D-02")
def test_state_of_offloaded_shards_stays_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (parameter,) = sharded(8)
    optimizer = local_optimizer(torch.optim.AdamW([parameter]))
    monkeypatch.setattr(DeviceMesh, "device_type", "meta")  # the mesh has another device than the shards
    for _ in range(2):
        optimizer.step()
    state = optimizer.state[parameter]
    assert {state[key].to_local().device.type for key in ("exp_avg", "exp_avg_sq")} == {"cpu"}


class Sign(Optimizer):
    """A custom element-wise optimizer with all kinds of state. It raises for parameters of size ``fail_at``."""

    def __init__(self, parameters: Any, fail_at: int = 0) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.fail_at = fail_at
        self.updated: list[type] = []

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if parameter.numel() == self.fail_at:
                    raise RuntimeError("too many steps")
                state.pop("first", None)
                if not state:
                    state["first"] = True
                state["calls"] = state.get("calls", 0) + 1
                state["sum"] = state.get("sum", 0) + parameter.grad  # a new tensor in every step
                parameter.add_(state["sum"].sign(), alpha=-group["lr"] * scale)
                self.updated.append(type(parameter))
        total = self.state[cast(Any, "total")]
        total["steps"] = total.get("steps", 0) + 1
        return "done"


def test_a_custom_optimizer_runs_on_shards_if_declared_elementwise() -> None:
    parameters = sharded(3, 4)
    optimizer = local_optimizer(Sign(parameters), elementwise=True)
    assert optimizer.step() == "done"
    assert optimizer.step(scale=0.5) == "done"
    assert optimizer.step(lambda: "loss") == "loss"
    assert set(optimizer.updated) == {torch.Tensor}
    assert optimizer.param_groups[0]["params"][0] is parameters[0]
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert list(state) == ["calls", "sum"]
        assert state["calls"] == 3
        assert isinstance(parameter, DTensor)
        assert isinstance(state["sum"], DTensor)
        assert state["sum"].placements == parameter.placements
        assert torch.equal(state["sum"].full_tensor(), torch.full(parameter.shape, 3.0))
        assert torch.equal(full_value(parameter), torch.full(parameter.shape, 1 - 0.5 - 0.25 - 0.5))
    assert optimizer.state[cast(Any, "total")] == {"steps": 3}
    assert len(optimizer.state) == 3


def test_a_failed_step_keeps_its_updates_and_reshards() -> None:
    parameters = sharded(3, 4)
    optimizer = local_optimizer(Sign(parameters, fail_at=4), elementwise=True)
    with pytest.raises(RuntimeError, match="too many steps"):
        optimizer.step()
    held = optimizer.param_groups[0]["params"]
    assert [a is b for a, b in zip(held, parameters, strict=True)] == [True, True]
    assert all(isinstance(key, DTensor) for key in optimizer.state)
    assert optimizer.state[parameters[0]]["calls"] == 1
    assert torch.equal(full_value(parameters[0]), torch.full((3,), 0.5))


def test_parameters_without_gradient_are_left_alone() -> None:
    first, second = sharded(3, 4)
    second.grad = None
    optimizer = local_optimizer(torch.optim.AdamW([first, second]))
    optimizer.step()
    assert list(optimizer.state) == [first]
    assert second._version == 0


@pytest.mark.parametrize("asked", [True, False])
def test_copies_and_pickles_are_ordinary_optimizers_with_the_same_state(asked: bool) -> None:
    optimizer = trained(momentum=0.9)
    if asked:
        local_optimizer(optimizer)
    for _ in range(2):
        optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert "step" not in vars(other)
        for state in other.state.values():
            assert torch.equal(state["momentum_buffer"].full_tensor(), torch.full(state["momentum_buffer"].shape, 1.9))


@pytest.mark.parametrize("asked", [True, False])
def test_an_optimizer_is_freed_with_the_last_reference(asked: bool) -> None:
    optimizer = trained(AdamW)
    if asked:
        local_optimizer(optimizer)
    for _ in range(2):
        optimizer.step()
    gc.disable()
    try:
        gone, step = weakref.ref(optimizer), optimizer.step
        del optimizer
        assert gone() is None
        with pytest.raises(LifecycleError, match=r"this step of AdamW belongs to an object that is gone\. Keep the"):
            step()
    finally:
        gc.enable()


@pytest.mark.behaviour("H-02")
@pytest.mark.parametrize("name", ["LBFGS", "Muon"])
def test_an_optimizer_that_is_not_elementwise_is_refused_even_if_declared(name: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    optimizer = getattr(torch.optim, name)([nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))])
    text = rf"{name} is not element-wise, or not known to be\. If it needs whole parameters, .* pass it to owner_step"
    for promise in (False, True):
        with pytest.raises(ConfigurationError, match=text):
            local_optimizer(optimizer, elementwise=promise)
    with pytest.raises(
        ConfigurationError, match=r"Sign is not element-wise, or not known to be\. .* pass elementwise="
    ):
        local_optimizer(Sign(sharded(3)))
    with pytest.raises(ConfigurationError, match=r"AdamW was made with differentiable=True, .* Use it as it is"):
        local_optimizer(torch.optim.AdamW(sharded(3), differentiable=True))


@pytest.mark.behaviour("H-02")
def test_a_step_replaced_by_another_process_is_refused() -> None:
    scheduled, twice = torch.optim.AdamW(sharded(3)), local_optimizer(torch.optim.AdamW(sharded(3)))
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)
    for optimizer in (scheduled, twice):
        text = r"the step of this AdamW has been replaced already, .* Call local_optimizer once"
        with pytest.raises(ConfigurationError, match=text):
            local_optimizer(optimizer)


@pytest.mark.behaviour("H-02")
def test_an_optimizer_made_before_fully_shard_is_found() -> None:
    model = nn.Linear(3, 2)
    optimizer = local_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ConfigurationError, match="SGD was built before fully_shard: 2 of its 2 parameters"):
        optimizer.step()
