"""Devices of parameters and buffers, and the errors if devices are ambiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard
from composable_fsdp.errors import MeshError, ParameterError
from tests._internals import data_parallel_axes, full_mesh, like, on_other_accelerators, shard_over_axes

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.behaviour("A-13")
def test_parameters_on_a_device_that_is_not_the_meshs_are_all_named() -> None:
    other = nn.Linear(3, 3)
    with FakeTensorMode():  # creates tensors of a device that does not exist
        other.weight, other.bias = (nn.Parameter(torch.empty(3, device="cuda")) for _ in range(2))
    model = nn.Sequential(nn.Linear(3, 3), other)
    match = (
        r"of Sequential are neither on CPU nor on cpu.*: \{'1\.weight': 'cuda:0', '1\.bias': 'cuda:0'\}\. "
        r"Pass device='cpu' to have"
    )
    with pytest.raises(ParameterError, match=match):
        fully_shard(model)
    assert type(model) is nn.Sequential


@pytest.mark.behaviour("A-13")
def test_only_cpu_and_meta_parameters_are_moved_by_default() -> None:
    devices = {name: torch.device(name) for name in ("cpu", "meta", "cuda:0", "cuda:1", "xpu:0")}
    assert on_other_accelerators(devices, torch.device("cuda:1")) == {"cuda:0": "cuda:0", "xpu:0": "xpu:0"}


@pytest.mark.behaviour("A-13")
@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda:1"), "meta"], ids=repr)
def test_a_device_that_contradicts_the_mesh_is_refused(device: torch.device | str) -> None:
    match = (
        rf"^device='{device}' contradicts the mesh, whose ranks compute on cpu\. Leave device out, or build the mesh"
    )
    with pytest.raises(MeshError, match=match):
        fully_shard(nn.Linear(3, 3), device=device)


@pytest.mark.behaviour("A-03")
@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo", "cpu")],
    ids=["native", "staged", "none"],
)
def test_the_default_mesh_is_on_the_accelerator_if_a_backend_is_native_to_it(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: str
) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(full_mesh, "known_meshes", dict)
    monkeypatch.setattr(full_mesh, "init_device_mesh", lambda kind, shape: made.append(kind))
    full_mesh.default_mesh()
    assert made == [device]


@pytest.mark.behaviour("D-02")
def test_offloaded_shards_take_gradients_and_state_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    axes = data_parallel_axes(init_device_mesh("cuda", (1,)))
    sharding = shard_over_axes(torch.ones(4, 4), axes, 0)
    parameter: Any = nn.Parameter(sharding.wrap_shard(torch.ones(4, 4)))
    parameter.grad = sharding.wrap_shard(torch.ones(4, 4))
    state: Any = like(parameter, torch.ones(4, 4, dtype=torch.bfloat16))
    for tensor in (parameter, parameter.grad, state):
        assert (tensor.device.type, tensor.to_local().device.type) == ("cpu", "cpu")
    assert (state.shape, state.dtype, state.placements) == ((4, 4), torch.bfloat16, parameter.placements)


@pytest.mark.behaviour("A-13")
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), 0], ids=repr)
def test_the_device_of_the_mesh_may_be_named(device: torch.device | str | int) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), device=device)
    model(torch.ones(2, 3)).sum().backward()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
