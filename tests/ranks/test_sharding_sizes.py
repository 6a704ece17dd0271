"""Test parameters of all sizes: their shards after ``fully_shard``, and training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composable_fsdp import fully_shard
from tests.helpers.models import TASKS, Task, seeded, shard_layers, squared_error, vectors
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_sharded, train_and_compare, values_of


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.strided = nn.Parameter(torch.randn(7, 10)[:, ::2])
        self.channels_last = nn.Parameter(torch.randn(3, 5, 2, 2).to(memory_format=torch.channels_last))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.permutation = nn.Parameter(torch.tensor([4, 0, 3, 1, 2]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, True, False, True]), requires_grad=False)
        self.encoder = nn.Linear(7, 5)
        self.decoder = nn.Linear(7, 5)
        self.decoder.weight = self.encoder.weight
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.decoder.weight is self.encoder.weight and not isinstance(self.encoder.weight, DTensor))
        h = x[:, self.permutation] @ (self.transposed + self.strided).t() * self.mask + self.frozen
        h = self.decoder(torch.tanh(self.encoder(h) @ self.encoder.weight))
        return F.conv2d(h[:, :, None, None].expand(-1, -1, 2, 2), self.channels_last).flatten(1)


ODD = Task(seeded(Odd), vectors(5, 3), squared_error)


@pytest.mark.behaviour("A-02", "A-10", "A-17")
@on_ranks(2, 4)
def test_unusual_parameters_are_sharded_and_train_with_parity() -> None:
    model, reference = ODD.build(), ODD.build()
    values = values_of(model)
    names = [name for name, _ in model.named_parameters()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    assert_sharded(model, values, mesh)
    train_and_compare(model, reference, ODD)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.decoder.weight is model.encoder.weight
    assert model.seen == [True] * len(model.seen) != []


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight.t()).abs()


@pytest.mark.behaviour("A-17")
@on_ranks(2, 4)
def test_complex_parameters_train_with_parity() -> None:
    task = Task(seeded(Complex), vectors(5, 7), squared_error)
    model, reference = task.build(), task.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = values_of(model)
    fully_shard(model, mesh=mesh)
    assert_sharded(model, values, mesh)
    train_and_compare(model, reference, task)


class Dims(nn.Module):
    """Has parameters of two to four dims whose sizes 2 and 4 do not divide, small and large ones in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, (2, 3))
        self.heads = nn.Parameter(torch.randn(2, 5, 7))
        self.row = nn.Parameter(torch.randn(1, 9))
        self.linear = nn.Linear(9, 7)
        self.wide = nn.Parameter(torch.randn(7, 40_001) / 200)  # more than 1 MiB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x.view(-1, 3, 2, 3)).flatten(1)
        h = torch.einsum("bi,hjk,ij->bhk", h, self.heads, self.linear.weight[:6, :5]).sum(1)
        return self.linear(torch.tanh(h @ self.linear.weight) + self.row) @ self.wide[:, 39_990:]


DIMS = Task(seeded(Dims), vectors(18, 11), squared_error)

PLACEMENTS: dict[str, Callable[[nn.Parameter], Shard | None]] = {
    "Shard(1)": lambda p: Shard(1) if p.ndim > 1 else None,
    "Shard(-1)": lambda p: Shard(-1),
    "Shard(-2)": lambda p: Shard(-2) if p.ndim > 1 else Shard(-1),
    "each its own": lambda p: {4: Shard(2), 3: Shard(-3), 2: Shard(1), 1: None}[p.ndim],
}


@pytest.mark.behaviour("A-05")
@pytest.mark.parametrize(
    ("placement", "ranks", "reshard"),
    [
        ("Shard(1)", 4, False),
        ("Shard(-1)", 3, False),
        ("Shard(-2)", 2, False),
        ("each its own", 4, True),
    ],
)
@on_ranks("ranks")
def test_other_dims_even_and_uneven_train_with_parity(placement: str, reshard: bool) -> None:
    model, reference = DIMS.build(), DIMS.build()
    values = values_of(model)
    choose = PLACEMENTS[placement]
    asked = {name: choose(p) or Shard(0) for name, p in model.named_parameters()}
    dims = {name: shard.dim % values[name].ndim for name, shard in asked.items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=choose, reshard_after_forward=reshard)
    assert_sharded(model, values, mesh, dims)
    train_and_compare(model, reference, DIMS)


@pytest.mark.behaviour("A-05")
@on_ranks(2)
def test_the_placement_function_sees_every_original_parameter_once() -> None:
    model = TASKS["tied"].build()
    originals = {id(p): p for p in model.parameters()}
    asked: list[nn.Parameter] = []

    def choose(parameter: nn.Parameter) -> Shard:
        asked.append(parameter)
        return Shard(0)

    shard_layers(model, fully_shard, shard_placement_fn=choose)
    assert len(asked) == len(originals)
    assert {id(p) for p in asked} == set(originals)
