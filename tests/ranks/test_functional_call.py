"""Test ``torch.func.functional_call``, which computes with the values that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize

from composable_fsdp import ParameterError, fully_shard
from composable_fsdp.testing import run_ranks
from tests.helpers.transports import TRANSPORTS

WIDTH = 4
WHENS = ("first", "between steps", "between forward and backward")
"""The times of the call: before the model has run, and later."""

Values = Mapping[str, Any]


class Negated(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


class Net(nn.Module):
    """Has tied weights, a parametrized weight, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.first[1].weight = self.first[0].weight
        parametrize.register_parametrization(self.last[0], "weight", Negated())
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(x))) * self.scale
        return out


def new_model(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def others() -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in new_model(4).named_parameters()}


def all_values(model: nn.Module, x: torch.Tensor) -> Any:
    return functional_call(model, others(), (x,))


def without_grad(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return functional_call(model, others(), (x,))


def parameters(model: nn.Module, x: torch.Tensor) -> Any:
    return functional_call(model, dict(new_model(4).named_parameters()), (x,))


def some_values(model: nn.Module, x: torch.Tensor) -> Any:
    names = "first.0.weight", "scale"
    return functional_call(model, {name: others()[name] for name in names}, (x,))


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


CALLS: tuple[Callable[[nn.Module, torch.Tensor], Any], ...] = (
    all_values,
    without_grad,
    parameters,
    some_values,
    gradients_of_values,
    gradients_by_transform,
    ensemble,
)


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


def compute_with_given_values(groups: str, reshard: bool) -> None:
    x, own = inputs_of(9), inputs_of(dist.get_rank())
    for call, when in product(CALLS, WHENS):
        what = f"{call.__name__}, {when}"
        model, reference = shard(new_model(), groups=groups, reshard=reshard), new_model()
        if when == "between steps":
            check_step(what, model, reference, model(x), x)
        out = model(x) if when == "between forward and backward" else None
        for _ in range(2):
            given = call(model, own)
            torch.testing.assert_close(given, call(reference, own), msg=lambda text, w=what: f"{w}: {text}")  # type: ignore[misc]
        assert all(parameter.grad is None for parameter in model.parameters()), what
        check_step(what, model, reference, model(x) if out is None else out, x)
        check_step(what, model, reference, model(x), x)


@pytest.mark.parametrize(
    ("transport", "groups", "reshard"),
    [
        ("in common", "one", True),
        ("sockets", "one", False),
        ("in common", "several", False),
        ("sockets", "several", True),
    ],
)
def test_functional_call_computes_with_the_given_values(transport: str, groups: str, reshard: bool) -> None:
    run_ranks(compute_with_given_values, 2, groups, reshard, environment=TRANSPORTS[transport])


def refuse_sharded_values() -> None:
    x = inputs_of(0)
    calls = {
        "values": lambda model, values: functional_call(model, values, (x,)),
        "parameters": lambda model, values: functional_call(
            model, {name: nn.Parameter(value) for name, value in values.items()}, (x,)
        ),
        "transform": lambda model, values: grad(partial(energy, model))(values),
    }

    def energy(model: nn.Module, values: Values) -> Any:
        return functional_call(model, dict(values), (x,)).square().sum()

    for call, is_first in product(calls.values(), (True, False)):
        model, reference = shard(new_model(), groups="one", reshard=True), new_model()
        if not is_first:
            check_step("before", model, reference, model(x), x)
        values = {name: value.detach() * 2 for name, value in model.named_parameters()}
        with pytest.raises(
            ParameterError, match=r"^functional_call was given a sharded value for parameter '.*give value\.full_tensor"
        ):
            call(model, values)
        check_step("after the error", model, reference, model(x), x)
        full = {name: value.full_tensor() for name, value in values.items()}  # type: ignore[attr-defined]
        torch.testing.assert_close(functional_call(model, full, (x,)), functional_call(reference, full, (x,)))

    model = shard(new_model(), groups="one", reshard=False)
    values = {name: value.detach() * 2 for name, value in model.named_parameters()}
    out = model(x)  # which leaves the parameters unsharded
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        functional_call(model, values, (x,))
    assert any("give full ones: value.full_tensor()" in note for note in getattr(caught.value, "__notes__", ("",)))
    check_step("after an error of DTensor", model, new_model(), out, x)


def test_functional_call_refuses_sharded_values() -> None:
    run_ranks(refuse_sharded_values, 2)
