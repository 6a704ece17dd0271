"""Test kinds of modules, and changes to them after sharding."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import fully_shard
from composable_fsdp.errors import PlainParameterWarning
from tests.helpers.models import TASKS, Batch, Task, seeded, shard_layers, squared_error
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, sharded, train_and_compare, values_of


class Recurrent(nn.Module):
    """Uses ``nn.LSTM``, whose ``__setattr__`` must update a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(5, 7, num_layers=2, batch_first=True), nn.LSTM(7, 3, bidirectional=True)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


def sequences(generator: torch.Generator) -> Batch:
    return torch.randn(2, 6, 5, generator=generator), torch.randn(2, 6, 3, generator=generator)


LSTM = Task(seeded(Recurrent), sequences, squared_error)


@pytest.mark.behaviour("A-14")
@pytest.mark.parametrize(("nested", "reshard"), [(True, True), (True, False), (False, None), (False, True)])
@on_ranks(2, 4)
def test_lstms_train_with_parity(nested: bool, reshard: bool | None) -> None:
    model, reference = LSTM.build(), LSTM.build()
    if nested:
        shard_layers(model, fully_shard, reshard_after_forward=reshard)
    else:
        fully_shard(model, reshard_after_forward=reshard)
    train_and_compare(model, reference, LSTM)
    for layer in model.get_submodule("layers").children():
        assert isinstance(layer, nn.LSTM)
        assert all(isinstance(weight, DTensor) for weight in layer._flat_weights)


def doubled(task: Task) -> Task:
    return Task(task.build, lambda g: tuple(t.double() for t in task.batch(g)), nn.functional.mse_loss)


@pytest.mark.behaviour("A-18")
@pytest.mark.parametrize(
    ("ranks", "task_name", "unsharded"), [(2, "mlp", False), (2, "mlp", True), (4, "mlp", False), (3, "wide", False)]
)
@on_ranks("ranks")
def test_to_dtype_between_steps_keeps_training_with_parity(task_name: str, unsharded: bool) -> None:
    task = TASKS[task_name]
    model, reference = task.build(), task.build()
    shard_layers(model, fully_shard)
    train_and_compare(model, reference, task, steps=1)
    before, parameters = values_of(model), [id(p) for p in model.parameters()]
    if unsharded:
        sharded(model).unshard()
    model.to(torch.float64)
    reference.to(torch.float64)
    assert [id(p) for p in model.parameters()] == parameters
    with torch.no_grad():
        for name, value in values_of(model).items():
            assert_exact(value, before[name].double(), name)
            reference.get_parameter(name).copy_(value)
    train_and_compare(model, reference, doubled(task), steps=2, rtol=1e-9, atol=1e-9)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.own = nn.Linear(4, 4)
        self.adapters = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for adapter in self.adapters.values():
            x = adapter(x)
        return self.own(self.head(self.base(x)))


def add_adapters_late(add: bool) -> list[str]:
    model = Adapted()
    fully_shard(model.base)
    fully_shard(model, ignored_modules=[model.own])
    model.own = nn.Linear(4, 4).requires_grad_(False) if add else model.own
    if add:
        model.adapters.update({f"a{i}": nn.Linear(4, 4) for i in range(3)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert all(issubclass(warning.category, PlainParameterWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.behaviour("A-11", "H-02")
def test_parameters_added_after_sharding_are_named_once_and_ignored_ones_never() -> None:
    (text,), _ = run_ranks(add_adapters_late, 2, add=True)
    assert text.startswith(
        "6 parameters were added to Adapted after fully_shard, such as 'adapters.a0.weight'. They are plain"
    )
    assert run_ranks(add_adapters_late, 2, add=False) == [[], []]
    assert run_ranks(add_adapters_late, 1, add=True) == [[]], "with one rank no replicas can diverge"
