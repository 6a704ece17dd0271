"""``to_empty`` of sharded parameters on the meta device: the same parameter objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import fully_shard, to_empty
from tests.helpers.sharding import fake_ranks

RANKS = 4
WAYS = {"method": lambda m: m.to_empty(device="cpu"), "function": lambda m: to_empty(m, device="cpu")}


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks(RANKS):
        yield


def build() -> nn.Sequential:
    """Return a model on meta with an uneven parameter, a buffer, a frozen parameter, and one that is not sharded."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
        model.register_parameter("own", nn.Parameter(torch.empty(3)))
    weight: Any = model.get_parameter("0.weight")
    weight.origin, weight.grad_dtype = "here", torch.float64
    model.get_parameter("2.bias").requires_grad_(False)
    fully_shard(model[0])
    return fully_shard(model, ignored_params={model.own})  # type: ignore[arg-type]


@pytest.mark.behaviour("A-12")
@pytest.mark.parametrize("way", WAYS)
def test_to_empty_allocates_every_tensor_and_keeps_parameters(way: str) -> None:
    model = build()
    before = dict(model.named_parameters())
    frozen = {name for name, p in before.items() if not p.requires_grad}
    assert WAYS[way](model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p for name, p in before.items() if isinstance(p, DTensor))
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert {p.to_local().device.type for p in after.values() if isinstance(p, DTensor)} == {"cpu"}
    assert {name for name, p in after.items() if not p.requires_grad} == frozen
    weight = after["0.weight"]
    assert (vars(weight)["origin"], weight.grad_dtype) == ("here", torch.float64)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            nn.init.ones_(tensor)
    model(torch.ones(2, 6)).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in after.values() if isinstance(p, DTensor))


@pytest.mark.behaviour("A-12")
def test_parameters_that_have_values_keep_them_in_to_empty_of_the_rest() -> None:
    model = build()
    model[0].to_empty(device="cpu")
    weight: Any = model.get_parameter("0.weight")
    with torch.no_grad():
        weight.fill_(3)
    to_empty(model, device="cpu")
    assert bool((weight.to_local() == 3).all())
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
