"""Checkpoints of parameters that have one name and several meshes, as experts of their own on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from composable_fsdp import ShardPlacementResult, fully_shard
from composable_fsdp.checkpoint import load, load_safetensors, save, save_safetensors
from tests.helpers.checkpoint_worlds import all_ranks_raise
from tests.helpers.run_ranks import on_ranks, run_ranks


def mixture(placement: Any, expert_of_rank: Any, *, dense_on: str = "all") -> nn.Module:
    """Return a dense layer on all ranks and an ``expert`` on half of them, with the value ``expert_of_rank(index)``.

    With ``dense_on="data"`` the dense layer is on the same half; with ``"expert"``, on one rank of each half.
    """
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = nn.Sequential(nn.Linear(3, 3))
    model.add_module("expert", nn.Linear(5, 4))
    for parameter in model.get_submodule("expert").parameters():
        nn.init.constant_(parameter, expert_of_rank(mesh.get_local_rank("expert")))
    own = set(model.get_submodule("expert").parameters())
    apart = ShardPlacementResult(placement, mesh["data"])
    dense = mesh._flatten("all") if dense_on == "all" else mesh[dense_on]
    return fully_shard(model, mesh=dense, shard_placement_fn=lambda p: apart if p in own else None)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def experts(folder: Path) -> None:
    for placement in (None, Shard(0)):
        different = mixture(placement, lambda index: index)
        text = "on several meshes, with other values on rank 1 than on rank 0, but only one is saved. Give"
        for call in (lambda m: save(folder / "no", m), lambda m: save_safetensors(m, folder / "no")):
            with all_ranks_raise(text) as raised:
                call(different)
            assert "expert." in str(raised.value)
            dist.barrier()
            assert [path.name for path in folder.glob("no/*") if path.name != ".lock"] == []
    for step, placement in enumerate((None, Shard(0))):
        alike = mixture(placement, lambda index: 7)  # replicas that the program keeps equal
        expected = values(alike)
        save(folder, alike, step=step)
        save_safetensors(alike, folder / "files")
        for loads in (lambda m: load(folder, m), lambda m: load_safetensors(m, folder / "files")):
            fresh = mixture(placement, lambda index: index)
            loads(fresh)
            assert all(map(torch.equal, values(fresh), expected))


@pytest.mark.behaviour("F-07")
@on_ranks(4)
def test_experts_on_as_many_ranks_as_dense_layers_are_compared_too(tmp_path: Path) -> None:
    for dense_on in ("data", "expert"):
        for call in (lambda m: save(tmp_path / "no", m), lambda m: save_safetensors(m, tmp_path / "no")):
            with all_ranks_raise("expert.* on several meshes, with other values on rank 1 than on rank 0"):
                call(mixture(None, lambda index: index, dense_on=dense_on))
        alike = mixture(None, lambda index: 7, dense_on=dense_on)
        expected = values(alike)
        save(tmp_path / dense_on, alike)
        fresh = mixture(None, lambda index: index, dense_on=dense_on)
        load(tmp_path / dense_on, fresh)
        assert all(map(torch.equal, values(fresh), expected))


@pytest.mark.behaviour("F-07")
def test_experts_of_one_name_with_other_values_are_refused(tmp_path: Path) -> None:
    run_ranks(experts, 4, tmp_path)
