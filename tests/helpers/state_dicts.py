"""Models, training functions and comparisons for the tests of state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import Full, Local, Sharded
from composable_fsdp.errors import CheckpointError
from tests._internals import Form, gather, plain_name, shardings_of, states_below
from tests.helpers.models import seeded
from tests.helpers.sharding import assert_exact

Optimizer = torch.optim.Optimizer


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Everything(nn.Module):
    """Has uneven layers, a tied weight, a shared module, an ignored one, buffers of both kinds, and extra state.
    ``flag`` has one row, so that with several ranks some shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), Counted(7, 7), nn.Linear(7, 7), nn.Linear(7, 5)])
        self.layers[2].weight = self.layers[1].weight
        self.again = self.layers[0]
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.plain = nn.Linear(5, 5)
        self.flag = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.plain(self.norm(x.float())) * self.flag


build = seeded(Everything)


def shard(model: nn.Module, mesh: DeviceMesh | None = None, *, wrap: str = "", **options: Any) -> nn.Module:
    """Apply ``fully_shard`` to a pair of layers, to another layer, and to the root. ``wrap``: ``before`` and ``after``
    apply activation checkpointing to two layers, before or after they are sharded. ``compiled`` replaces two layers by
    the results of ``torch.compile``."""
    layers: Any = model.get_submodule("layers")

    def replace_layer(index: int, wrapped: Callable[[nn.Module], Any]) -> None:
        layers[index] = wrapped(layers[index])

    wrapper: Any = partial(torch.compile, backend="eager") if wrap == "compiled" else checkpoint_wrapper
    if wrap in ("before", "compiled"):
        replace_layer(2, wrapper)
        replace_layer(3, wrapper)
    options = {"mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),)), **options}
    fully_shard([layers[1], layers[2]], **options)
    fully_shard(layers[3], **options)
    fully_shard(model, ignored_modules=[model.get_submodule("plain")], **options)
    if wrap == "after":
        replace_layer(2, wrapper)
        replace_layer(3, wrapper)
    return model


def backward(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Run forward and backward on the same batch on every rank. Buffers and ignored parameters stay equal."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(2)) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def full_state_of(model: nn.Module) -> dict[str, Any]:
    """Return copies of ``model.state_dict()`` with full tensors. Does not use the forms under test."""
    shardings, state = shardings_of(states_below(model)), model.state_dict(keep_vars=True)
    return {
        plain_name(name): gather(value, shardings.get(id(value))).detach().clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


@torch.no_grad()
def scramble(model: nn.Module) -> nn.Module:
    """Overwrite all state with different values."""
    for tensor in (*model.parameters(), *(b for b in model.buffers())):
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(9)
    return model


def same_values(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that names and their order are equal, and that plain values are bitwise equal."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert not isinstance(actual[name], DTensor), name
            assert_exact(actual[name], value, name)
        else:
            assert actual[name] == value, name


FORMS: tuple[Form, ...] = (
    Sharded(),
    Sharded(offload_to_cpu=True),
    Local(),
    Local(offload_to_cpu=True),
    Full(),
    Full(offload_to_cpu=True),
    Full(rank0_only=True),
    Full(rank0_only=True, offload_to_cpu=True),
)


SAFE: list[Any] = [DTensor, DeviceMesh, DTensorSpec, TensorMeta, Shard, Replicate]
"""The classes that sharded values contain, for ``torch.load(..., weights_only=True)``."""


COUNT = "norm.num_batches_tracked"
"""A state dict without a version may lack this key, because ``nn.BatchNorm1d`` adds it."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def message(call: Callable[[], object], kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


class LocalMomentum(Optimizer):
    """Keeps a plain tensor with the local shard's shape, a plain vector of another shape, and a number."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                local, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad))
                state = self.state[parameter]
                if not state:
                    state.update(momentum=torch.zeros_like(local), steps=0, history=torch.zeros(11))
                state["steps"] += 1
                state["history"][state["steps"]] = group["lr"]
                local.sub_(state["momentum"].mul_(0.9).add_(grad), alpha=group["lr"])
