"""State dicts across meshes, with tensor parallelism, and of experts on their own mesh."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composable_fsdp import ShardPlacementResult, fully_shard
from composable_fsdp.checkpoint import Full, Sharded, load_state_dict, state_dict
from composable_fsdp.errors import ConfigurationError
from tests.helpers.experts import MIXTURE, sharded_mixture
from tests.helpers.model_parallel import named_mesh
from tests.helpers.models import seeded
from tests.helpers.run_ranks import on_ranks
from tests.helpers.state_dicts import FORMS, build, full_state_of, same_values, scramble, sgd, shard, train


@pytest.mark.behaviour("F-04")
@on_ranks(4)
def test_sharded_values_may_have_other_meshes_and_placements() -> None:
    model = shard(build(), init_device_mesh("cpu", (4,)))
    train(model, sgd(model))
    expected = full_state_of(model)
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    target = scramble(shard(build(), hybrid))
    load_state_dict(target, state_dict(model))
    same_values(full_state_of(target), expected)
    load_state_dict(scramble(model), state_dict(target, Sharded(offload_to_cpu=True)))
    same_values(full_state_of(model), expected)
    for placements in ((Replicate(), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())):
        mixed = {
            name: distribute_tensor(value, hybrid, placements)
            if isinstance(value, torch.Tensor) and value.ndim
            else value
            for name, value in expected.items()
        }
        load_state_dict(scramble(model), mixed)
        same_values(full_state_of(model), expected)
    same_ranks = DeviceMesh("cpu", [0, 1, 2, 3])
    load_state_dict(model, state_dict(scramble(shard(build(), same_ranks))))
    assert float(full_state_of(model)["flag"]) == 9


class ExpertOnEachRank(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.expert = nn.Linear(3, 3)
        nn.init.constant_(self.dense.weight, 5)
        nn.init.constant_(self.expert.weight, index)


@pytest.mark.behaviour("F-02", "F-04", "F-05")
@on_ranks(4)
def test_experts_on_another_mesh_are_in_every_form_but_that_of_rank_0() -> None:
    mesh = named_mesh(edp=2, ep=2)
    data, index, rank = mesh["edp", "ep"]._flatten("dp"), mesh.get_local_rank("ep"), dist.get_rank()

    def plain_experts() -> nn.Module:
        model = seeded(ExpertOnEachRank, index=index)()
        own, apart = set(model.get_submodule("expert").parameters()), ShardPlacementResult(None, mesh["edp"])
        return fully_shard(model, mesh=data, shard_placement_fn=lambda p: apart if p in own else None)

    distinct = seeded(ExpertOnEachRank, index=index)().state_dict()
    in_one_tensor = partial(sharded_mixture, mesh, None)
    for make, expected in ((in_one_tensor, MIXTURE.build().state_dict()), (plain_experts, distinct)):
        for form in FORMS:
            fresh = scramble(make())
            if isinstance(form, Full) and form.rank0_only and make is plain_experts:
                with pytest.raises(ConfigurationError, match="rank 0 has not all of them"):
                    state_dict(make(), form)
                with pytest.raises(ConfigurationError, match="rank 0 has not all of them"):
                    load_state_dict(fresh, expected, form)
                continue
            found = copy.deepcopy(state_dict(make(), form))
            if isinstance(form, Full):
                same_values(found, expected if rank == 0 or not form.rank0_only else {})
            load_state_dict(fresh, found, form)
            same_values(full_state_of(fresh), expected)
    some = nn.Sequential(nn.Linear(3, 3))
    if index == 0:
        some.append(fully_shard(nn.Linear(3, 3), mesh=mesh["edp"]))
    with pytest.raises(ConfigurationError, match="rank 0 has not all of them"):  # ranks without the expert waited
        state_dict(fully_shard(some, mesh=data), Full(rank0_only=True))
