"""Sharded and unsharded parameters after ``fully_shard`` on a single rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from tests.helpers.sharding import assert_exact, sharded, values_of

pytestmark = pytest.mark.usefixtures("one_rank")


class Zoo(nn.Module):
    """Has many kinds of parameters. ``seen`` holds the parameters in the last forward by name."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(4, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.strided = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(1, 3).expand(4, 3), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(4, 3).bfloat16())
        self.integers = nn.Parameter(torch.arange(7), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.register_parameter("none", None)
        self.inner = nn.Linear(3, 3)
        self.seen: dict[str, nn.Parameter] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = dict(self.named_parameters(remove_duplicate=False))
        weight = self.plain + self.transposed + self.strided + self.expanded + self.narrow
        return self.inner(x + self.frozen) @ weight.t() * self.integers.sum() * self.flags.sum()


def step(module: nn.Module) -> None:
    module(torch.randn(2, 3)).sum().backward()


@pytest.mark.behaviour("A-02", "A-17")
def test_names_order_dtypes_and_requires_grad_survive_sharding_and_unsharding() -> None:
    module = Zoo()
    before = {name: (p.dtype, p.requires_grad, p.shape) for name, p in module.named_parameters()}
    keys = list(module.state_dict())
    fully_shard(module)
    at_rest = dict(module.named_parameters())
    for _ in range(2):
        step(module)
        for parameters in (at_rest, module.seen):
            assert list(parameters) == list(before)
            assert {name: (p.dtype, p.requires_grad, p.shape) for name, p in parameters.items()} == before
            tensors: list[torch.Tensor] = list(parameters.values())
            assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in tensors)
        assert all(isinstance(p, DTensor) for p in at_rest.values())
        assert not any(isinstance(p, DTensor) for p in module.seen.values())
        assert all(p is at_rest[name] for name, p in module.named_parameters()), (
            "parameters must be sharded after backward"
        )
        assert list(module.state_dict()) == keys


@pytest.mark.behaviour("A-02", "A-17")
def test_values_survive_sharding_and_unsharding() -> None:
    module = Zoo()
    values = values_of(module)
    fully_shard(module)
    for name, value in values_of(module).items():
        assert_exact(value, values[name], name)
    sharded(module).unshard()
    for name, parameter in module.named_parameters():
        assert not isinstance(parameter, DTensor), name
        assert_exact(parameter.detach(), values[name], name)


@pytest.mark.behaviour("A-17", "D-01")
def test_a_precision_policy_does_not_cast_integers_and_bools() -> None:
    module = Zoo()
    before = {name: p.dtype for name, p in module.named_parameters()}
    fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    step(module)
    assert {name: p.dtype for name, p in module.named_parameters()} == before
    floats = {name for name, dtype in before.items() if dtype.is_floating_point}
    assert {name: p.dtype for name, p in module.seen.items()} == before | dict.fromkeys(floats, torch.bfloat16)


@pytest.mark.behaviour("A-02")
def test_user_attributes_of_parameters_are_on_both_forms() -> None:
    module, marker = Zoo(), object()
    for name, parameter in module.named_parameters():
        parameter.origin = name  # type: ignore[attr-defined]
        parameter.marker = marker  # type: ignore[attr-defined]
    fully_shard(module)
    step(module)
    for parameters in (dict(module.named_parameters()), module.seen):
        assert {name: vars(p)["origin"] for name, p in parameters.items()} == {name: name for name in parameters}
        assert all(vars(p)["marker"] is marker for p in parameters.values())


@pytest.mark.behaviour("A-02", "A-18")
@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda module: module.to(torch.float64), id="to(dtype)"),
        pytest.param(lambda module: module.to_empty(device="cpu"), id="to_empty"),
        pytest.param(lambda module: module.load_state_dict(module.state_dict(), assign=True), id="assign"),
    ],
)
def test_attributes_survive_a_conversion(convert: Callable[[nn.Module], object]) -> None:
    module = nn.Linear(3, 3)
    module.weight.origin = "here"  # type: ignore[attr-defined]
    fully_shard(module)
    convert(module)
    assert vars(module.weight).get("origin") == "here"
    sharded(module).unshard()
    assert vars(module.weight).get("origin") == "here"


class Tied(nn.Module):
    """Has one tensor with three names, two of them in one module, and one module with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.alias = nn.Parameter(torch.randn(5, 3))
        self.embedding.weight = self.head.weight = self.alias
        self.layer = nn.Linear(3, 3)
        self.again = self.layer
        self.in_forward: list[bool] = []

    @property
    def is_tied(self) -> bool:
        return self.head.weight is self.embedding.weight and self.alias is self.head.weight and self.again is self.layer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.in_forward.append(self.is_tied and not isinstance(self.head.weight, DTensor))
        return self.head(self.again(self.layer(self.embedding(tokens))))


@pytest.mark.behaviour("A-02", "A-10")
def test_parameters_shared_within_a_group_are_one_object_before_during_and_after_forward() -> None:
    module = Tied()
    names = [name for name, _ in module.named_parameters()]
    fully_shard(module)
    for _ in range(2):
        assert module.is_tied
        assert isinstance(module.alias, DTensor)
        assert [name for name, _ in module.named_parameters()] == names
        module(torch.tensor([[1, 2]])).sum().backward()
    assert module.in_forward == [True, True]
    assert module.alias.grad is not None
    sharded(module).unshard()
    assert module.is_tied
    assert not isinstance(module.alias, DTensor)


class Swaps(nn.Module):
    """Records every assignment to ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.assigned: list[Any] = []
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.assigned.append(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.assigned[-1] is self.weight
        return x @ self.assigned[-1] + self.bias


@pytest.mark.behaviour("A-14")
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "inside the group"])
def test_a_module_that_overrides_setattr_sees_every_swap(nested: bool) -> None:
    module = Swaps()
    original = module.weight
    model = fully_shard(nn.Sequential(module) if nested else module, reshard_after_forward=True)
    at_rest = module.weight
    assert module.assigned[0] is original
    assert module.assigned[-1] is at_rest
    del module.assigned[1:]
    model(torch.randn(2, 3)).sum().backward()
    kinds = [isinstance(value, DTensor) for value in module.assigned[1:]]
    assert kinds == [False, True, False, True], "parameters must alternate between unsharded and sharded"
    assert module.assigned[-1] is at_rest
    sharded(model).unshard()
    assert not isinstance(module.assigned[-1], DTensor)
    sharded(model).reshard()
    assert module.assigned[-1] is at_rest


class Costly(nn.Linear):
    """Counts the registrations of parameters."""

    registrations = 0

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        type(self).registrations += 1
        super().register_parameter(name, param)


@pytest.mark.behaviour("A-14")
def test_a_module_that_does_not_override_setattr_pays_nothing_for_swaps() -> None:
    module = Costly(3, 3)
    fully_shard(module)
    Costly.registrations = type(module).registrations = 0
    step(module)
    assert (Costly.registrations, type(module).registrations) == (0, 0)


def test_parameters_are_on_the_mesh_that_was_given_also_if_an_equal_one_is_in_use() -> None:
    meshes = [DeviceMesh("cpu", [0]) for _ in range(2)]
    assert meshes[0] == meshes[1]
    models = [fully_shard(nn.Linear(4, 4), mesh=mesh) for mesh in meshes]
    for model, mesh in zip(models, meshes, strict=True):
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.device_mesh is mesh
