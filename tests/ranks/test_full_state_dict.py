"""A full state dict, of plain tensors, loaded into a sharded model by the module's own ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard
from composable_fsdp.testing import run_ranks
from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.helpers.models import shard_layers
from tests.helpers.sharding import exactly, values_of


def uneven() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[2].weight = nn.Parameter(torch.randn(3, 7, dtype=torch.float64))
    return model.double()


def shard_two_layers(model: Any, **options: Any) -> nn.Module:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)  # type: ignore[no-any-return]


def on_one_axis() -> nn.Module:
    return shard_two_layers(uneven())


def on_two_axes() -> nn.Module:
    return shard_two_layers(uneven(), mesh=init_device_mesh("cpu", (2, 2)))


def pairs() -> nn.Module:
    return PAIRS.build()


def beside_tensor_parallelism() -> nn.Module:
    mesh = named_mesh(dp=2, tp=2)
    model = PAIRS.build()
    parallelize_pairs(model, mesh["tp"])
    return shard_layers(model, fully_shard, mesh=mesh["dp"])


def loads_exactly(build: Callable[[], nn.Module], plain: Callable[[], nn.Module], assign: bool) -> None:
    torch.manual_seed(5)
    full = plain().state_dict()
    for value in full.values():
        if value.is_floating_point():
            value.normal_()
    model = build()
    before = {name: value.clone() for name, value in full.items()}
    model.load_state_dict(full, assign=assign)
    values = values_of(model)
    for name in values:
        exactly(values[name], full[name], name)
    assert all(torch.equal(value, before[name]) for name, value in full.items())


@pytest.mark.behaviour("A-12", "H-05")
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_every_rank_takes_its_shards_of_a_full_state_dict(assign: bool) -> None:
    run_ranks(loads_exactly, 2, on_one_axis, uneven, assign)
    run_ranks(loads_exactly, 4, on_two_axes, uneven, assign)
    run_ranks(loads_exactly, 4, beside_tensor_parallelism, pairs, assign)
