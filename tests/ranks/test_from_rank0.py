"""Test ``shard_from_rank0``: rank 0 has the values, and other ranks never hold more than their shards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import CPUOffloadPolicy, DivergenceError, fully_shard, shard_from_rank0
from composable_fsdp.checkpoint import Full, state_dict
from composable_fsdp.errors import ConfigurationError, ParameterError
from tests.helpers.model_parallel import Pairs, named_mesh, parallelize_pairs
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.peak_memory import Peak
from tests.helpers.run_ranks import run_ranks
from tests.helpers.sharding import assert_exact, assert_sharded, full_value, train_and_compare, values_of
from tests.helpers.transports import SOCKETS


def build_on_rank0(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        return build()


def shard_all_layers(model: nn.Module, **options: Any) -> None:
    shard_layers(model, fully_shard, **options)


def train_from_rank0(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", shape)
    reference = TASKS[task].build()
    model = build_on_rank0(TASKS[task].build)
    assert shard_from_rank0(model, shard_all_layers, mesh=mesh, **options) is model
    assert_sharded(model, values_of(reference), mesh)
    train_and_compare(model, reference, TASKS[task])


@pytest.mark.behaviour("A-12", "A-15")
@pytest.mark.parametrize(
    ("task", "shape", "options"),
    [
        ("mlp", (2,), {}),
        ("tied", (2,), {"offload_policy": CPUOffloadPolicy()}),
        ("transformer", (2, 2), {}),
        ("mlp", (1,), {}),
    ],
    ids=str,
)
def test_all_ranks_train_from_the_values_of_rank_0(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    run_ranks(train_from_rank0, prod(shape), task, shape, options)


class Everything(nn.Module):
    """Has all kinds of tensors and attributes that other ranks must receive, and an ignored module."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 3), 1.0 + seed))
        self.tied = self.weight
        self.expanded = nn.Parameter(torch.full((1, 3), 2.0 + seed).expand(4, 3), requires_grad=False)
        self.narrow = nn.Parameter(torch.full((3,), 3.0 + seed, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.full((3,), 4.0 + seed))
        self.register_buffer("count", torch.tensor(5 + seed))
        # A constructor may create a buffer on a real device whatever the default device is.
        self.register_buffer("table", torch.full((2,), 6.0 + seed, device="cpu"), persistent=False)
        self.ignored = nn.Linear(3, 3)
        self.ignored.register_buffer("mean", self.get_buffer("mean"))
        self.weight.tag = "mine"  # type: ignore[attr-defined]
        self.narrow.grad_dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (x @ self.weight.t()).sum() + self.get_buffer("mean").sum()
        return out


def shard_everything() -> None:
    rank = dist.get_rank()
    first = Everything(0)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = Everything(rank)
    given = {n: p.detach().clone() for n, p in first.named_parameters() if not n.startswith("ignored")}
    shard_from_rank0(model, lambda m: fully_shard(m, ignored_modules=[m.ignored]))
    for name, value in given.items():
        assert isinstance(model.get_parameter(name), DTensor), name
        assert_exact(full_value(model.get_parameter(name)), value, name)
    assert model.tied is model.weight
    assert model.weight.tag == "mine"  # type: ignore[attr-defined]
    assert model.narrow.grad_dtype is torch.float32
    assert not model.expanded.requires_grad
    for name in ("mean", "count", "table", "ignored.mean"):
        assert_exact(model.get_buffer(name), first.get_buffer(name), name)
    assert model.ignored.get_buffer("mean") is model.get_buffer("mean")
    assert type(model.ignored.weight) is nn.Parameter
    weights = [torch.empty(3, 3) for _ in range(2)]
    dist.all_gather(weights, model.ignored.weight.detach())
    assert torch.equal(*weights)
    model(torch.randn(2, 3)).backward()


@pytest.mark.behaviour("A-11", "A-15")
def test_shard_from_rank0_keeps_shared_tensors_buffers_attributes_and_ignored_modules() -> None:
    run_ranks(shard_everything, 2)


def shard_parts_of_a_model() -> None:
    """Check that a partly sharded model has rank 0's values in its sharded and its plain parts."""
    reference = TASKS["transformer"].build()
    values = values_of(reference)

    def shard(model: nn.Module) -> None:
        fully_shard(model.get_submodule("layers.0"))
        fully_shard([model.get_submodule("norm"), model.get_submodule("head")])

    model = shard_from_rank0(build_on_rank0(TASKS["transformer"].build), shard)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == name.startswith(("layers.0", "norm", "head")), name
        assert_exact(full_value(parameter), values[name], name)
    batch = TASKS["transformer"].batch_of(0, 0)
    torch.testing.assert_close(TASKS["transformer"].loss(model, batch), TASKS["transformer"].loss(reference, batch))


@pytest.mark.behaviour("A-09", "A-15")
def test_a_model_may_be_sharded_in_parts() -> None:
    run_ranks(shard_parts_of_a_model, 2)


def shard_tensor_parallel() -> None:
    mesh = named_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    reference = Pairs()
    values = values_of(reference)
    torch.manual_seed(0)
    model = build_on_rank0(Pairs)

    def shard(model: nn.Module) -> None:
        parallelize_pairs(model, mesh["tp"])
        shard_all_layers(model, mesh=mesh["dp"])

    shard_from_rank0(model, shard)
    for name, value in state_dict(model, Full()).items():
        assert_exact(value, values[name], name)


@pytest.mark.behaviour("A-06", "A-15")
def test_parameters_may_be_placed_on_a_tensor_parallel_mesh_on_the_way() -> None:
    run_ranks(shard_tensor_parallel, 4)


def measure() -> tuple[int, int, int]:
    def build() -> nn.Module:
        model = nn.Sequential()
        model.add_module("layers", nn.ModuleList(nn.Linear(256, 256) for _ in range(8)))
        return model

    model = build_on_rank0(build)
    gc.collect()
    with Peak() as peak:
        shard_from_rank0(model, shard_all_layers)
    shards = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return peak.bytes, shards, max(p.nbytes for p in model.parameters())


@pytest.mark.behaviour("A-12")
def test_other_ranks_hold_their_shards_and_one_tensor() -> None:
    _, *others = run_ranks(measure, 4, environment=SOCKETS)
    for peak, shards, largest in others:
        assert shards < peak < shards + largest + 4096, (peak, shards, largest)


def collect_refusals() -> list[str]:
    texts = []
    rank = dist.get_rank()

    def refused(kind: type[Exception], model: nn.Module, *args: Any) -> None:
        with pytest.raises(kind) as error:
            shard_from_rank0(model, *args)
        texts.append(str(error.value))

    refused(ParameterError, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    refused(ParameterError, nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2, device="meta")))
    refused(DivergenceError, build_on_rank0(lambda: nn.Sequential(nn.Linear(2, 2 + rank), nn.Linear(2 + rank, 2))))
    refused(ConfigurationError, fully_shard(nn.Linear(2, 2)))
    refused(ConfigurationError, build_on_rank0(lambda: nn.Linear(2, 2)), nn.Module.train)
    return texts


@pytest.mark.behaviour("A-15")
def test_a_disagreement_is_an_error_on_all_ranks() -> None:
    first, second = run_ranks(collect_refusals, 2, environment=SOCKETS)
    assert first == second
    too_many, too_few, other, sharded, nothing = first
    assert (
        "these have values on rank 1 too: ['0.weight', '0.bias', '1.weight', '1.bias']. Build the model on" in too_many
    )
    assert "sends what rank 0 has, but there these are on meta and have no values: ['0.bias', '0.weight'," in too_few
    assert "The first difference in what was given to shard_from_rank0:\n  rank 0: 0.weight: float32 (2, 2)" in other
    assert "was given Linear sharded already. Give it the model before fully_shard" in sharded
    assert "called a function that sharded nothing in Linear: it must call fully_shard" in nothing
