"""Counts of collectives in the first pass: the library's own checks of ranks are in none of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import composable_fsdp as ours
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import TRANSPORTS

pytestmark = pytest.mark.behaviour("I-03")


class Counted(TorchDispatchMode):
    observes_sharding = True

    def __init__(self) -> None:
        super().__init__()
        self.gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += "allgather" in func.name()
        return func(*args, **(kwargs or {}))


def counts(mode: CommDebugMode) -> dict[str, int]:
    return {operation.__name__: count for operation, count in mode.get_comm_counts().items() if count}


def sharded(shard: Any, **options: Any) -> Any:
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in (*model, model):
        shard(layer, **options)
    return model


def step(shard: Any, *, has_grad: bool = True, **options: Any) -> dict[str, int]:
    model, x = sharded(shard, **options), torch.ones(2, 64, requires_grad=True)
    with warnings.catch_warnings(), CommDebugMode() as mode, torch.set_grad_enabled(has_grad):
        warnings.simplefilter("ignore")  # torch's about views, which the mode makes of outputs
        loss = model(x).sum()
        if has_grad:
            loss.backward()
    return counts(mode)


@on_ranks(2, transports=TRANSPORTS)
def test_checks_of_ranks_are_not_counted_as_collectives_of_the_user() -> None:
    with CommDebugMode() as mode:
        sharded(ours.fully_shard)[0].unshard()
    assert counts(mode) == {"_allgather_base_": 1}, mode.get_comm_counts()
    model = sharded(ours.fully_shard)
    with Counted() as counted:
        model(torch.ones(2, 64))
    assert counted.gathers == 3
    with CommDebugMode() as mode:
        model = nn.Linear(4, 4)
        ours.fully_shard(model, ignored_params=set(model.parameters()))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert counts(mode) == {}
    model = nn.Linear(4, 4)
    with CommDebugMode() as mode:
        ours.fully_shard(model, sync_module_states=True)
    assert counts(mode) == {"broadcast_": 1}


@pytest.mark.parametrize(("ranks", "replicas", "reshard"), [(2, 1, None), (4, 2, None), (4, 1, 2), (4, 2, False)])
@on_ranks("ranks")
def test_a_first_step_has_the_collectives_of_fsdp2(replicas: int, reshard: int | bool | None) -> None:
    world = torch.distributed.get_world_size()
    shape, names = ((replicas, world // replicas), ("replicate", "shard")) if replicas > 1 else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for has_grad in (False, True):
        mine, torchs = (
            step(each.fully_shard, has_grad=has_grad, mesh=mesh, reshard_after_forward=reshard)
            for each in (ours, torch_fsdp)
        )
        assert mine == torchs, has_grad
