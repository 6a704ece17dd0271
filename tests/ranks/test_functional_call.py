"""Test ``torch.func.functional_call``, which computes with the values that it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize

from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ParameterError
from tests.helpers.run_ranks import on_ranks

WIDTH = 4
WHENS = ("first", "between steps", "between forward and backward")
"""The times of the call: before the model has run, and later."""

Values = Mapping[str, Any]


class Negated(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.first[1].weight = self.first[0].weight
        parametrize.register_parametrization(self.last[0], "weight", Negated())
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


def new_model(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def others() -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in new_model(4).named_parameters()}


def some_values(model: nn.Module, x: torch.Tensor) -> Any:
    return functional_call(model, {name: others()[name] for name in ("first.0.weight", "scale")}, (x,))


def gradients_of_values(model: nn.Module, x: torch.Tensor) -> Any:
    values = {name: value.requires_grad_() for name, value in others().items()}
    functional_call(model, values, (x,)).square().sum().backward()
    return torch.cat([value.grad.flatten() for value in values.values() if value.grad is not None])


def gradients_by_transform(model: nn.Module, x: torch.Tensor) -> Any:
    found = grad(lambda values: functional_call(model, values, (x,)).square().sum())(others())
    return torch.cat([value.flatten() for value in found.values()])


def ensemble(model: nn.Module, x: torch.Tensor) -> Any:
    values, _ = stack_module_state([new_model(seed) for seed in (4, 5)])
    return vmap(lambda own: functional_call(model, own, (x,)))(values)


def others_as(model: nn.Module) -> dict[str, Any]:
    """Return other values, sharded as the parameters of ``model``."""
    other = new_model(4)
    if isinstance(model, FSDPModule):
        shard(other, groups="several" if isinstance(cast(Net, model).last, FSDPModule) else "one", reshard=True)
    return {name: value.detach() * 2 for name, value in other.named_parameters()}


def call_with(model: nn.Module, values: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Return the output, and check that ``values`` are as they were, and not full ones."""
    given = dict(values)
    out: torch.Tensor = functional_call(model, values, (x,))
    assert all(values[name] is value for name, value in given.items())
    return out


def sharded_and_full_values(model: nn.Module, x: torch.Tensor) -> Any:
    return call_with(model, {"first.0.weight": others_as(model)["first.0.weight"], "scale": others()["scale"]}, x)


def gradients_of_sharded_values(model: nn.Module, x: torch.Tensor) -> Any:
    """Return the gradients of sharded values, which are means over the ranks."""
    values = {name: value.requires_grad_() for name, value in others_as(model).items()}
    found: Any = torch.autograd.grad(call_with(model, values, x).square().sum(), list(values.values()))
    if isinstance(model, FSDPModule):
        assert [each.placements for each in found] == [each.placements for each in values.values()]
        return torch.cat([each.full_tensor().flatten() for each in found])
    full = torch.cat([each.flatten() for each in found])
    dist.all_reduce(full)
    return full / dist.get_world_size()


def gradients_of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    values = others_as(model)
    return grad(lambda own: call_with(model, values, own).square().sum())(x)


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "all values": lambda model, x: functional_call(model, others(), (x,)),
    "without gradients": torch.no_grad()(lambda model, x: functional_call(model, others(), (x,))),
    "parameters": lambda model, x: functional_call(model, dict(new_model(4).named_parameters()), (x,)),
    "some values": some_values,
    "gradients of values": gradients_of_values,
    "gradients by transform": gradients_by_transform,
    "ensemble": ensemble,
    "sharded values": lambda model, x: call_with(model, others_as(model), x),
    "sharded, without gradients": torch.no_grad()(lambda model, x: call_with(model, others_as(model), x)),
    "sharded parameters": lambda model, x: call_with(
        model, {name: nn.Parameter(value) for name, value in others_as(model).items()}, x
    ),
    "sharded and full values": sharded_and_full_values,
    "gradients of sharded values": gradients_of_sharded_values,
    "gradients of inputs": gradients_of_inputs,
}


def shard(model: Net, *, groups: str, reshard: bool) -> Net:
    if groups == "several":
        fully_shard(model.first, reshard_after_forward=reshard)
        fully_shard(model.last, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def check_step(what: str, model: nn.Module, reference: nn.Module, out: torch.Tensor, x: torch.Tensor) -> None:
    """Check the output and the gradients of ``model`` after a forward of ``x``, which is the same on all ranks."""
    expected = reference(x)
    torch.testing.assert_close(out, expected, msg=lambda text: f"{what}: {text}")
    out.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), same in zip(model.named_parameters(), reference.parameters(), strict=True):
        full = parameter.grad.full_tensor() if parameter.grad is not None else None  # type: ignore[attr-defined]
        torch.testing.assert_close(full, same.grad, msg=lambda text, name=name: f"{what}, {name}: {text}")  # type: ignore[misc]
    model.zero_grad()
    reference.zero_grad()


@pytest.mark.parametrize(
    ("ranks", "transport", "groups", "reshard"),
    [
        (2, "in common", "one", True),
        (2, "sockets", "one", False),
        (2, "sockets", "several", True),
        (1, "sockets", "several", True),
    ],
)
@on_ranks("ranks", environment="transport")
def test_functional_call_computes_with_the_given_values(groups: str, reshard: bool) -> None:
    """Make each call before the model has run, between its steps, and between a forward and its backward."""
    x, own = inputs_of(9), inputs_of(dist.get_rank())
    for name, call in CALLS.items():
        model, reference = shard(new_model(), groups=groups, reshard=reshard), new_model()
        for when in WHENS:
            what = f"{name}, {when}"
            out = model(x) if when == "between forward and backward" else None
            for _ in range(2):
                given = call(model, own)
                torch.testing.assert_close(given, call(reference, own), msg=lambda text, w=what: f"{w}: {text}")  # type: ignore[misc]
            assert all(parameter.grad is None for parameter in model.parameters()), what
            check_step(what, model, reference, model(x) if out is None else out, x)
        check_step(f"{name}, at the end", model, reference, model(x), x)


class CallsWithValues(nn.Module):
    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.twice = twice
        self.values: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.twice:
            x = self.last(x)
        return functional_call(self.last, self.values, (x,)) if self.values else self.last(x)


@on_ranks(2)
def test_modules_can_be_called_with_values_inside_a_forward() -> None:
    x = inputs_of(0).float()
    for twice, reshard in product((False, True), (False, True)):
        what = f"twice={twice}, reshard={reshard}"
        torch.manual_seed(5)
        model = CallsWithValues(twice=twice)
        reference = copy.deepcopy(model)
        for module in (model.first, model.last, model):
            fully_shard(module, reshard_after_forward=reshard)
        for _ in range(2):  # from the second step on, ``last`` is all-gathered ahead
            check_step(what, model, reference, model(x), x)
        own = {name: value.detach() + 1 for name, value in model.last.named_parameters()}
        full = {name: value.full_tensor() for name, value in own.items()}  # type: ignore[attr-defined]
        reference.values = full
        for values in [full] if twice and not reshard else [full, own]:
            model.values = dict(values)
            for _ in range(2):
                check_step(what, model, reference, model(x), x)
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), what
        if twice and not reshard:
            model.values = own
            with pytest.raises(RuntimeError, match="got mixed") as caught:
                model(x)
            assert str(caught.value).count("give full ones: value.full_tensor()") == 1
        model.values, reference.values = {}, {}
        check_step(what, model, reference, model(x), x)


@on_ranks(2)
def test_values_can_be_given_when_unsharded_parameters_are_out_of_date() -> None:
    x = inputs_of(0)
    model, reference = shard(new_model(), groups="one", reshard=False), new_model()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    check_step("before", model, reference, model(x), x)
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        each(x).square().sum().backward()
        with torch.no_grad():
            each(x)  # which leaves the parameters unsharded
        optimizer.step()
    for name in ("sharded, without gradients", "all values"):
        torch.testing.assert_close(CALLS[name](model, x), CALLS[name](reference, x))
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.zero_grad()
    reference.zero_grad()
    check_step("after", model, reference, model(x), x)


@on_ranks(2)
def test_sharded_values_are_cast_as_parameters_are() -> None:
    x = inputs_of(dist.get_rank()).float()
    model = new_model().float()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    values = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    out = call_with(model, values, x)
    torch.testing.assert_close(out, model(x), rtol=0, atol=0)
    out.square().sum().backward()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        found, expected = (cast(DTensor, each.grad).full_tensor() for each in (values[name], parameter))
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05, msg=lambda text, n=name: f"{n}: {text}")  # type: ignore[misc]


@on_ranks(4)
def test_values_of_tensor_parallel_parameters_can_be_sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(6)
    reference = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH))
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = inputs_of(mesh.get_local_rank("dp")).float()
    values, same = (
        {name: (value.detach() * 2 + 1).requires_grad_() for name, value in each.named_parameters()}
        for each in (model, reference)
    )
    torch.testing.assert_close(call_with(model, values, x), call_with(reference, same, x))
    out, expected = call_with(model, values, x), call_with(reference, same, x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, value in values.items():
        gradient = cast(torch.Tensor, same[name].grad)
        dist.all_reduce(gradient)
        torch.testing.assert_close(cast(DTensor, value.grad).full_tensor(), gradient / dist.get_world_size())


@on_ranks(2)
def test_functional_call_refuses_sharded_values_of_another_mesh_and_in_transforms() -> None:
    x = inputs_of(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))

    def energy(model: nn.Module, values: Values) -> Any:
        return functional_call(model, dict(values), (x,)).square().sum()

    def on_another_mesh(model: nn.Module, values: Values) -> Any:
        elsewhere: dict[str, Any] = {
            name: distribute_tensor(value.full_tensor(), mesh) for name, value in values.items()
        }
        return functional_call(model, elsewhere, (x,))

    def in_transform(model: nn.Module, values: Values) -> Any:
        return grad(partial(energy, model))(values)

    for call, is_first in product((on_another_mesh, in_transform), (True, False)):
        model, reference = shard(new_model(), groups="one", reshard=True), new_model()
        if not is_first:
            check_step("before", model, reference, model(x), x)
        values = {name: value.detach() * 2 for name, value in model.named_parameters()}
        message = r"^functional_call was given a sharded value for parameter '.*must be on the mesh of the parameter"
        with pytest.raises(ParameterError, match=message):
            call(model, values)
        check_step("after the error", model, reference, model(x), x)
        full = {name: value.full_tensor() for name, value in values.items()}  # type: ignore[attr-defined]
        torch.testing.assert_close(functional_call(model, full, (x,)), functional_call(reference, full, (x,)))
