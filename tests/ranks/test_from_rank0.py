"""Rank 0 alone has the values: other ranks build the model on meta, and hold their shards and one tensor at a time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import CPUOffloadPolicy, fully_shard, to_empty
from composable_fsdp.checkpoint import Full, load_state_dict, state_dict
from composable_fsdp.errors import CheckpointError
from tests.helpers.model_parallel import Pairs, named_mesh, parallelize_pairs
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.peak_memory import Peak
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, assert_sharded, train_and_compare, values_of
from tests.helpers.transports import SOCKETS


def fill_from_rank0(model: nn.Module, full: dict[str, Any]) -> None:
    to_empty(model, device="cpu")
    load_state_dict(model, full if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)


@pytest.mark.behaviour("A-12", "A-15", "F-05")
@pytest.mark.parametrize(
    ("task", "shape", "options"),
    [("tied", (2,), {"offload_policy": CPUOffloadPolicy()}), ("transformer", (2, 2), {})],
    ids=str,
)
@on_ranks("shape")
def test_all_ranks_train_from_the_values_of_rank_0(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", shape)
    reference = TASKS[task].build()
    with torch.device("meta"):
        model = TASKS[task].build()
    shard_layers(model, fully_shard, mesh=mesh, **options)
    fill_from_rank0(model, reference.state_dict())
    assert_sharded(model, values_of(reference), mesh)
    train_and_compare(model, reference, TASKS[task])


@pytest.mark.behaviour("A-06", "A-15", "F-05")
@on_ranks(4)
def test_parameters_may_be_on_a_tensor_parallel_mesh() -> None:
    mesh = named_mesh(dp=2, tp=2)
    reference = Pairs()
    with torch.device("meta"):
        model = Pairs()
    parallelize_pairs(model, mesh["tp"])
    shard_layers(model, fully_shard, mesh=mesh["dp"])
    fill_from_rank0(model, reference.state_dict())
    for name, value in state_dict(model, Full()).items():
        assert_exact(value, values_of(reference)[name], name)


def measure() -> tuple[int, int, int]:
    def build() -> nn.Module:
        model = nn.Sequential()
        model.add_module("layers", nn.ModuleList(nn.Linear(256, 256) for _ in range(8)))
        return model

    full = build().state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = shard_layers(build(), fully_shard)
    gc.collect()
    with Peak() as peak:
        fill_from_rank0(model, full)
    shards = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return peak.bytes, shards, max(p.nbytes for p in model.parameters())


@pytest.mark.behaviour("A-12", "F-05")
def test_other_ranks_hold_their_shards_and_one_tensor() -> None:
    _, *others = run_ranks(measure, 4, environment=SOCKETS)
    for peak, shards, largest in others:
        assert shards < peak < shards + largest + 4096, (peak, shards, largest)


@pytest.mark.behaviour("A-15", "F-05")
@on_ranks(2, environment=SOCKETS)
def test_values_of_another_model_are_an_error_on_all_ranks() -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    with pytest.raises(CheckpointError) as error:
        fill_from_rank0(model, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict())
    assert str(error.value).splitlines() == [
        "the state dict does not fit FSDPSequential. Nothing was loaded.",
        "  of another shape (2):",
        "    1.weight: (2, 2), expected (3, 2)",
        "    1.bias: (2,), expected (3,)",
    ]
