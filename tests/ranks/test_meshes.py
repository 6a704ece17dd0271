"""Test meshes: the default mesh, hybrid sharding, replication, and ranks outside of the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.errors import MeshError
from composable_fsdp.interop import patch_torch
from tests.helpers.fresh_process import run_script_on_ranks
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_sharded, train_and_compare, values_of


@pytest.mark.behaviour("A-03")
@on_ranks(2, 4)
def test_the_default_mesh_is_all_ranks_unnamed_on_cpu_and_one_for_all_modules() -> None:
    layers: list[Any] = [fully_shard(nn.Linear(3, 5)) for _ in range(2)]
    first, second = (layer.weight for layer in layers)
    mesh = first.device_mesh
    assert mesh.mesh.tolist() == list(range(dist.get_world_size()))
    assert (mesh.ndim, mesh.mesh_dim_names, mesh.device_type) == (1, None, "cpu")
    assert second.device_mesh is mesh
    assert first.placements == (Shard(0),)


WITHOUT_A_PROCESS_GROUP = """
import os
import torch, torch.distributed as dist
from composable_fsdp import fully_shard
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(3, 4))
model(torch.ones(1, 3)).sum().backward()
ranks, rows = model.weight.device_mesh.mesh.tolist(), model.weight.grad.to_local().size(0)
os.write(1, f"ranks {ranks} rows {rows}\\n".encode())  # one write, so that the lines of ranks are not mixed
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
@pytest.mark.behaviour("A-03")
def test_the_default_process_group_is_started_from_the_environment_of_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_A_PROCESS_GROUP)
    assert run_script_on_ranks(program).count("ranks [0, 1] rows 2") == 2


@pytest.mark.behaviour("A-07")
@pytest.mark.parametrize(
    ("task", "shape", "names"),
    [
        ("transformer", (2, 2), ("replicate", "shard")),
        ("tied", (4, 1), ("replicate", "shard")),
        ("mlp", (1, 4), ("outer", "inner")),
        ("mlp", (4,), ("data",)),
        ("wide", (2, 1), None),
    ],
    ids=str,
)
@on_ranks("shape")
def test_every_mesh_trains_with_parity_on_different_data(
    task: str, shape: tuple[int, ...], names: tuple[str, ...] | None
) -> None:
    model, reference = TASKS[task].build(), TASKS[task].build()
    values = values_of(model)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard_layers(model, fully_shard, mesh=mesh)
    assert_sharded(model, values, mesh)
    for parameter in model.parameters():
        assert parameter.device_mesh is mesh
        assert parameter.placements == ((Replicate(), Shard(0)) if len(shape) == 2 else (Shard(0),))
    train_and_compare(model, reference, TASKS[task])


@pytest.mark.behaviour("A-07")
@on_ranks(4)
def test_a_2d_slice_of_a_larger_mesh_averages_over_its_ranks_only() -> None:
    """Check the slice that the error for a 3-d mesh recommends. Different slices do not average their gradients."""
    world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("other", "replicate", "shard"))
    mesh = world["replicate", "shard"]
    model: Any = nn.Linear(3, 5)
    values = values_of(model)
    fully_shard(model, mesh=mesh)
    assert_sharded(model, values, mesh)
    rank = dist.get_rank()
    model(torch.full((1, 3), float(rank))).sum().backward()
    mean = {0: 0.5, 1: 2.5}[rank // 2]
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((5, 3), mean))


@pytest.mark.behaviour("A-07")
@on_ranks(4)
def test_a_mesh_in_another_order_than_the_ranks_trains_with_parity() -> None:
    """Check that the mesh, not the global rank, determines shards."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
    model, reference = TASKS["mlp"].build(), TASKS["mlp"].build()
    values = values_of(model)
    shard_layers(model, fully_shard, mesh=mesh)
    assert_sharded(model, values, mesh)
    train_and_compare(model, reference, TASKS["mlp"])


def _shard_outside() -> str:
    mesh = DeviceMesh("cpu", [0, 2])
    model: Any = nn.Linear(3, 5)
    message = ""
    try:
        fully_shard(model, mesh=mesh)
    except MeshError as error:
        message = str(error)
        assert type(model) is nn.Linear
    else:
        model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.ones(5, 3))
    dist.barrier()
    return message


@pytest.mark.behaviour("A-07")
def test_a_rank_outside_of_the_mesh_gets_an_error_and_the_others_train() -> None:
    messages = run_ranks(_shard_outside, 3)
    assert messages[0] == messages[2] == ""
    assert "rank 1 is not in the mesh [0, 2]" in messages[1]


@pytest.mark.behaviour("A-07")
@on_ranks(4)
def test_groups_of_one_model_may_be_on_different_meshes() -> None:
    rank = dist.get_rank()
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.eye(3))
    fully_shard(model[1], mesh=halves["inner"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model(torch.full((1, 3), float(rank))).sum().backward()
    gradients = [full_gradient(p) for p in model.parameters()]
    assert torch.equal(gradients[0], torch.full((3, 3), 1.5))
    assert torch.equal(gradients[1], torch.full((3, 3), {0: 0.5, 1: 2.5}[rank // 2]))


def full_gradient(parameter: Any) -> torch.Tensor:
    return parameter.grad.full_tensor()


def train_as_replicate() -> None:
    found = []
    for shape in (None, (2, 1)):
        torch.manual_seed(5)
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        if shape is None:
            replicate(model[0])
            replicate(model)
        else:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        assert isinstance(model, FSDPModule) is (shape is not None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().full_tensor() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.behaviour("A-07")
def test_a_mesh_with_one_shard_trains_as_torchs_replicate_which_a_patch_leaves_alone() -> None:
    before = replicate_with_fsdp.replicate
    with patch_torch():
        assert replicate_with_fsdp.replicate is before
    run_ranks(train_as_replicate, 2)
