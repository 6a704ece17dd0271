"""Test that steps on local shards are bitwise those on DTensors, with the same interface.

Each case has an optimizer of ``local_optimizer``, and one of torch that steps on local shards without being asked.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from composable_fsdp import fully_shard, local_optimizer, to_empty
from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.helpers.models import seeded
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact

Make = Callable[[Iterable[Any]], Optimizer]

ADAM: tuple[dict[str, Any], ...] = (
    {},
    {"foreach": True, "amsgrad": True, "weight_decay": 0.1},
    {"fused": True, "maximize": True},
    {"fused": True, "amsgrad": True},
    {"lr": torch.tensor(0.01)},
)
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "ASGD": ({}, {"foreach": True, "weight_decay": 0.1, "t0": 1}),
    "Adadelta": ({}, {"foreach": True, "weight_decay": 0.1}),
    "Adagrad": ({}, {"foreach": True, "lr_decay": 0.1}, {"initial_accumulator_value": 0.2}),
    "Adam": ADAM,
    "AdamW": ADAM,
    "Adamax": ({}, {"foreach": True, "maximize": True}),
    "NAdam": ({}, {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ({}, {"foreach": True, "weight_decay": 0.1}),
    "RMSprop": ({}, {"foreach": True, "centered": True, "momentum": 0.9}),
    "SGD": (
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True},
    ),
}

# Torch has no sharding rules for these variants. They run on local shards.
NOT_ON_DTENSORS: dict[str, tuple[dict[str, Any], ...]] = {
    "Adagrad": ({"fused": True, "initial_accumulator_value": 0.2},),
    "Rprop": ({}, {"foreach": True, "maximize": True}),
    "SGD": ({"fused": True, "lr": 0.1}, {"fused": True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)])
        self.layers[2].weight = self.layers[1].weight
        self.layers[0].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


build = seeded(Mixed)


def backward(model: nn.Module, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(torch.randn(4, 5, generator=generator).to(dtype)).square().mean()
    loss.backward()
    return loss.detach()


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_same_tensor(ours: Any, expected: Any, what: str) -> None:
    assert type(ours) is type(expected), what
    if isinstance(expected, DTensor):
        assert (ours.shape, ours.stride()) == (expected.shape, expected.stride()), what
        assert (ours.device_mesh, ours.placements) == (expected.device_mesh, expected.placements), what
    if isinstance(expected, torch.Tensor):
        assert_exact(local(ours), local(expected), what)
    else:
        assert ours == expected, what


def assert_same(models: tuple[nn.Module, nn.Module], optimizers: tuple[Optimizer, Optimizer], what: str = "") -> None:
    """Assert that parameters are equal, and that optimizer states are equal by parameter and name."""
    for (name, ours), expected in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_same_tensor(ours, expected, f"{what} {name}")
    assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict(), what)


def assert_same_state(ours: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_same_state(ours[key], value, f"{what} {key}")
    else:
        assert_same_tensor(ours, expected, what)


ASKED = pytest.mark.parametrize("asked", [True, False], ids=["local_optimizer", "unasked"])


def on_shards(optimizer: Optimizer, asked: bool) -> Optimizer:
    return local_optimizer(optimizer) if asked else optimizer


def on_dtensors(optimizer: Optimizer) -> Optimizer:
    """Make ``optimizer`` one of a subclass, which is not known to be element-wise."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (kind,), {})
    return optimizer


def pair(
    make: Make, asked: bool, dtype: torch.dtype = torch.float32
) -> tuple[tuple[nn.Module, nn.Module], tuple[Optimizer, Optimizer]]:
    """Return two equal sharded models, with an optimizer of local shards for the first, of DTensors for the second."""
    models = (build().to(dtype), build().to(dtype))
    for model in models:
        fully_shard(model)
    return models, (on_shards(make(models[0].parameters()), asked), on_dtensors(make(models[1].parameters())))


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.behaviour("C-01", "C-05")
@pytest.mark.parametrize("name", VARIANTS)
@on_ranks(2)
def test_every_element_wise_optimizer_gives_the_same_bits(name: str) -> None:
    for options, (dtype, asked) in itertools.product(VARIANTS[name], ((torch.float32, True), (torch.bfloat16, False))):
        models, optimizers = pair(partial(getattr(torch.optim, name), **options), asked, dtype)
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(model, step)
                if step == 2:
                    model.scale.grad = None
                optimizer.step()
        assert_same(models, optimizers, f"{name} {options} {dtype} {asked}")


@pytest.mark.parametrize("name", NOT_ON_DTENSORS)
@on_ranks(2)
def test_optimizer_variants_without_dtensor_support_equal_plain_shards_bitwise(name: str) -> None:
    for options in NOT_ON_DTENSORS[name]:
        model = build()
        fully_shard(model)
        parameters = list(model.parameters())
        plain = [local(p).detach().clone() for p in parameters]
        kind = getattr(torch.optim, name)
        optimizers = local_optimizer(kind(parameters, **options)), kind(plain, **options)
        for step in range(4):
            optimizers[0].zero_grad()
            backward(model, step)
            for sharded, shard in zip(parameters, plain, strict=True):
                shard.grad = None if sharded.grad is None else local(sharded.grad).clone()
            for optimizer in optimizers:
                optimizer.step()
        for sharded, shard in zip(parameters, plain, strict=True):
            assert_exact(local(sharded).detach(), shard, f"{name} {options}")
            state, expected = optimizers[0].state.get(sharded, {}), optimizers[1].state.get(shard, {})
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert_exact(local(state[key]), value, f"{name} {options} {key}")
                assert isinstance(state[key], DTensor) == (value.shape == shard.shape)


@pytest.mark.behaviour("C-02")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@ASKED
@on_ranks(4)
def test_shards_of_tensor_parallel_parameters(options: dict[str, Any], asked: bool) -> None:
    mesh = named_mesh(dp=2, tp=2)
    models = (PAIRS.build(), PAIRS.build())
    for model in models:
        parallelize_pairs(model, mesh["tp"])
        # Foreach on DTensors needs all parameters on one mesh, so the head and the scale stay unsharded.
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh["dp"])
    parameters = [[p for p in model.parameters() if isinstance(p, DTensor)] for model in models]
    ours = on_shards(torch.optim.AdamW(parameters[0], **options), asked)
    optimizers = ours, on_dtensors(torch.optim.AdamW(parameters[1], **options))
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            PAIRS.loss(model, PAIRS.batch_of(step, mesh.get_local_rank("dp"))).backward()
            optimizer.step()
    assert_same(models, optimizers, str(options))


@on_ranks(2)
def test_plain_and_unusual_parameters_are_updated_as_before() -> None:
    """Step one group of unusual tensors."""
    mesh = init_device_mesh("cpu", (2,))

    def make() -> list[nn.Parameter]:
        scalar = nn.Parameter(distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]))
        scalar.grad = distribute_tensor(torch.tensor(0.5), mesh, [Replicate()])
        plain = nn.Parameter(torch.ones(3))
        plain.grad = torch.arange(3.0)
        turned = nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]))
        turned.grad = distribute_tensor(torch.arange(15.0).view(3, 5), mesh, [Replicate()])
        narrow = nn.Parameter(distribute_tensor(torch.ones(5, dtype=torch.bfloat16), mesh, [Shard(0)]))
        narrow.grad_dtype = torch.float32
        narrow.grad = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        return [scalar, plain, turned, narrow]

    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW):
        parameters = make(), make()
        if kind is not torch.optim.SGD:
            parameters = parameters[0][:3], parameters[1][:3]  # the others require gradients in the parameter's dtype
        optimizers = local_optimizer(kind(parameters[0], lr=0.1)), kind(parameters[1], lr=0.1)
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.step()
        assert_same((nn.ParameterList(parameters[0]), nn.ParameterList(parameters[1])), optimizers, kind.__name__)


@pytest.mark.behaviour("C-01")
@pytest.mark.filterwarnings("error")
@ASKED
@on_ranks(2)
def test_schedulers_hooks_closures_and_groups_work_unchanged(asked: bool) -> None:
    models, optimizers = pair(adamw, asked)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    seen: list[list[object]] = [[], []]

    for optimizer, events in zip(optimizers, seen, strict=True):

        def look(self: Optimizer, *_: object, events: list[object] = events) -> None:
            held = [p for group in self.param_groups for p in group["params"]]
            states = [v for p in self.state for v in self.state[p].values()]
            events.append((len(self.state), [type(t) for t in (*held, *self.state, *states)]))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
    for step in range(3):
        for model, optimizer, scheduler, events in zip(models, optimizers, schedulers, seen, strict=True):

            def closure(model: nn.Module = model, optimizer: Optimizer = optimizer, step: int = step) -> Any:
                optimizer.zero_grad()
                return backward(model, step)

            version = model.scale._version
            events.append(optimizer.step(closure))
            assert model.scale._version > version
            scheduler.step()
            if step == 0:
                extra = nn.Parameter(distribute_tensor(torch.ones(5), init_device_mesh("cpu", (2,)), [Shard(0)]))
                extra.grad = extra.detach().clone()
                optimizer.add_param_group({"params": [extra], "lr": 0.3})
    assert seen[0] == seen[1]
    assert len(seen[0]) == 9
    assert_same(models, optimizers)


@pytest.mark.behaviour("C-11")
@pytest.mark.parametrize("fused", [False, True])
@ASKED
@on_ranks(2)
def test_scaled_losses_skip_the_same_steps(fused: bool, asked: bool) -> None:
    models, optimizers = pair(partial(torch.optim.AdamW, fused=fused), asked)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in optimizers]
    for step in range(4):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(inputs * (float("inf") if step == 1 else 1)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same(models, optimizers, f"fused={fused}")


@pytest.mark.behaviour("F-09")
@pytest.mark.parametrize("full", [False, True])
@ASKED
@on_ranks(2)
def test_state_is_saved_and_loaded_as_dtensors(full: bool, asked: bool) -> None:
    """Save and load by torch's functions, which initialise the state of a new optimizer by a step."""
    models, optimizers = pair(adamw, asked)
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model)
        optimizer.step()
    options = StateDictOptions(full_state_dict=full)
    loading = StateDictOptions(full_state_dict=full, strict=False)  # unused parameters have no state
    saved = [get_optimizer_state_dict(m, o, options=options) for m, o in zip(models, optimizers, strict=True)]
    assert_same_state(saved[0]["state"], saved[1]["state"], "saved")
    others, fresh = pair(adamw, asked)
    for model, optimizer, state in zip(others, fresh, saved, strict=True):
        set_optimizer_state_dict(model, optimizer, state, options=loading)
    assert_same(others, fresh, "loaded")
    for model, optimizer in zip(others, fresh, strict=True):
        backward(model, 1)
        optimizer.step()
    assert_same(others, fresh, "trained on")


@pytest.mark.behaviour("F-04")
@ASKED
@on_ranks(2)
def test_a_local_optimizer_follows_replaced_memory(asked: bool) -> None:
    models, optimizers = pair(adamw, asked)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            if step == 1:
                model.load_state_dict(state, assign=True)
                optimizer.param_groups[0]["params"] = list(model.parameters())
                optimizer.state.clear()
            if step == 2:
                to_empty(model, device="cpu")
                model.load_state_dict(state)
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert_same(models, optimizers)
