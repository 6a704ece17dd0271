"""Test the five strategies by name, also several in one model, against ``DistributedDataParallel``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import ShardingStrategy, clip_grad_norm_, fully_shard
from composable_fsdp.checkpoint import load, save
from composable_fsdp.errors import ConfigurationError, MeshError
from composable_fsdp.wrap import by_class
from tests._internals import ParameterState, state_of
from tests.helpers.models import TASKS, Block
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact, sharded, values_of
from tests.helpers.training import OPTIMIZERS, Run, assert_equal_runs, play_task, train

# The number of replicas and shards for 4 ranks on 2 hosts, and whether parameters stay in memory after forward.
MEANING = {
    ShardingStrategy.FULL_SHARD: (1, 4, False),
    ShardingStrategy.SHARD_GRAD_OP: (1, 4, True),
    ShardingStrategy.NO_SHARD: (4, 1, True),
    ShardingStrategy.HYBRID_SHARD: (2, 2, False),
    ShardingStrategy.HYBRID_SHARD_ZERO2: (2, 2, True),
}


def clip(model: nn.Module, step: int) -> None:
    if isinstance(model, DistributedDataParallel):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    else:
        norm = clip_grad_norm_(model, 0.05)
    assert norm > 0.05, step


def train_on_this_rank(model: nn.Module, task: str) -> Run:
    rank = dist.get_rank()
    run = train(model, play_task(task), OPTIMIZERS["adamw-fused"], ranks=[rank], watched=rank, between=clip)
    for values in (run.parameters, run.gradients):
        for name in list(values):
            values[name.removeprefix("module.")] = values.pop(name)  # type: ignore[assignment]
    return run


@pytest.mark.behaviour("B-02")
@pytest.mark.parametrize("task", ["transformer", "tied"])
@on_ranks(4)
def test_every_strategy_trains_and_clips_like_ddp(task: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    expected = train_on_this_rank(DistributedDataParallel(TASKS[task].build()), task)
    for strategy, (replicas, shards, stays) in MEANING.items():
        model = fully_shard(TASKS[task].build(), policy={Block}, strategy=strategy)
        block = state_of(model.get_submodule("layers.0"))
        (pgs,) = block.group.process_groups
        assert (pgs.replicate.size, pgs.axes.shard.size) == (replicas, shards), strategy
        TASKS[task].loss(model, TASKS[task].batch_of(0, 0))
        kept = block.group.parameter_state is ParameterState.UNSHARDED
        assert kept == stays, strategy
        sharded(model).reset_iter_state()
        assert_equal_runs(train_on_this_rank(model, task), expected, what=strategy.name)


@pytest.mark.behaviour("B-02")
@on_ranks(4)
def test_a_mesh_whose_groups_are_destroyed_is_made_again() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for _ in range(2):
        model: Any = fully_shard(nn.Linear(4, 4), strategy="HYBRID_SHARD")
        model(torch.ones(1, 4)).sum().backward()
        mesh = model.weight.device_mesh
        assert mesh.get_local_rank(0) < 2
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)


@pytest.mark.behaviour("B-02")
@on_ranks(2)
def test_an_unsuitable_mesh_is_refused_before_changes() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    model = TASKS["chain"].build()
    with pytest.raises(MeshError, match="strategy=HYBRID_SHARD shards within a host and replicates over hosts, but"):
        fully_shard(model, policy={nn.Linear}, strategy="HYBRID_SHARD")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(MeshError, match="strategy=NO_SHARD replicates over all ranks, but the mesh given replicates"):
        fully_shard(model, policy=by_class(nn.Linear, strategy="NO_SHARD"), mesh=mesh)
    with pytest.raises(ConfigurationError, match=r"FULL_SHARD frees .* but reshard_after_forward=False keeps them."):
        fully_shard(model, strategy="FULL_SHARD", reshard_after_forward=False)
    assert not any(hasattr(p, "placements") for p in model.parameters()), "a refused call must change nothing"


MIXED: dict[str, dict[str, Any]] = {
    "sharded blocks under a replicated model": {
        "policy": by_class(Block, strategy="FULL_SHARD"),
        "strategy": "NO_SHARD",
    },
    "replicated blocks under a sharded model": {
        "policy": by_class(Block, strategy="NO_SHARD"),
        "strategy": "FULL_SHARD",
    },
    "every one of them": {
        "policy": lambda module, name: {
            "": {"strategy": "NO_SHARD"},
            "embedding": {"strategy": "SHARD_GRAD_OP"},
            "layers.0": {"strategy": "FULL_SHARD"},
            "layers.1": {"strategy": "HYBRID_SHARD"},
            "head": {"strategy": "HYBRID_SHARD_ZERO2"},
        }.get(name, False)
    },
}


@pytest.mark.behaviour("B-03")
@pytest.mark.parametrize("task", ["transformer", "tied"])
@on_ranks(4)
def test_several_strategies_in_one_model_train_clip_and_save(task: str, tmp_path: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    expected = train_on_this_rank(DistributedDataParallel(TASKS[task].build()), task)
    for what, options in MIXED.items():
        model = fully_shard(TASKS[task].build(), **options)
        assert_equal_runs(train_on_this_rank(model, task), expected, what=what)
        path = tmp_path / what.replace(" ", "_")
        save(path, model, step=1)
        other = TASKS[task].build()
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        load(path, fully_shard(other, policy={Block}, strategy="FULL_SHARD"))
        values = values_of(model)
        for name, value in values_of(other).items():
            assert_exact(value, values[name], f"{what}, {name}")
