"""Errors for invalid meshes and placements, and gradients of DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.testing import assert_close

from composable_fsdp import DataParallelMeshDims, fully_shard
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, MeshError, ParameterError
from tests._internals import ModelParallel, ShardPlacementResult, named_data_parallel_axes
from tests.helpers.refusals import assert_refused

pytestmark = pytest.mark.usefixtures("one_rank")


def mesh_of(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)


def place_linear(mesh: DeviceMesh, *placements: Placement) -> nn.Linear:
    module = nn.Linear(3, 4)
    for name, parameter in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return module


Dims = DataParallelMeshDims


@pytest.mark.behaviour("A-06")
@pytest.mark.parametrize("kind", [Dims, peer.DataParallelMeshDims])
def test_dims_without_any_name_are_refused(kind: type) -> None:
    with pytest.raises(ValueError, match=r"shard|replicate"):
        kind()
    with pytest.raises(ConfigurationError, match=r"name of a mesh dim in shard or replicate"):
        Dims(shard=(), replicate=())


@pytest.mark.behaviour("A-06")
def test_a_name_that_counts_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\['dp'\] more than once"):
        Dims(shard="dp", replicate="dp")
    with pytest.raises(ConfigurationError, match=r"\['a'\] more than once"):
        Dims(shard=("a", "b", "a"))


@pytest.mark.behaviour("A-06")
@pytest.mark.parametrize("dims", ["dp", ("dp",), 0, Dims], ids=repr)
def test_dims_of_a_wrong_type_are_refused(dims: object) -> None:
    match = rf"dp_mesh_dims must be a DataParallelMeshDims, not {type(dims).__name__}"
    assert_refused(ConfigurationError, match, nn.Linear(3, 4), mesh=mesh_of("dp"), dp_mesh_dims=dims)


@pytest.mark.behaviour("A-06")
def test_dims_need_a_mesh_that_has_them() -> None:
    dims = Dims(shard="dp")
    model = nn.Linear(3, 4)
    assert_refused(ConfigurationError, r"pass that mesh as mesh=", model, dp_mesh_dims=dims)
    assert_refused(ArgumentTypeError, r"DeviceMesh, not str", model, mesh="dp", dp_mesh_dims=dims)
    nameless = init_device_mesh("cpu", (1, 1))
    assert_refused(MeshError, r"the mesh has none: give it mesh_dim_names", model, mesh=nameless, dp_mesh_dims=dims)
    dims = Dims(shard=("dp", "other"), replicate="another")
    match = r"names \['another', 'other'\], but the dims of the mesh are \['dp', 'tp'\]"
    assert_refused(MeshError, match, model, mesh=mesh_of("dp", "tp"), dp_mesh_dims=dims)


@pytest.mark.behaviour("A-06")
def test_names_may_come_in_any_order() -> None:
    mesh = mesh_of("a", "tp", "b")
    module = fully_shard(place_linear(mesh, *[Replicate()] * 3), mesh=mesh, dp_mesh_dims=Dims(shard=("b", "a")))
    assert isinstance(module.weight, DTensor)
    assert sum(placement == Shard(0) for placement in module.weight.placements) == 1


@pytest.mark.behaviour("A-06")
def test_plain_parameters_and_those_on_another_mesh_are_named() -> None:
    mesh, dims = mesh_of("dp", "tp"), Dims(shard="dp")
    match = r"must be a DTensor on the mesh.*'weight' is a plain tensor.*distribute_module\(module, mesh\)"
    assert_refused(ParameterError, match, nn.Linear(3, 4), mesh=mesh, dp_mesh_dims=dims)
    match = r"'0\.weight' is on DeviceMesh\(.*tp.*distribute_module"
    model = nn.Sequential(place_linear(mesh["tp"], Shard(0)))
    assert_refused(ParameterError, match, model, mesh=mesh, dp_mesh_dims=dims)


@pytest.mark.behaviour("A-06")
@pytest.mark.parametrize("dims", [Dims(shard="dp"), Dims(replicate="dp"), Dims(shard="tp", replicate="dp")], ids=repr)
def test_parameters_that_are_not_replicated_on_data_parallel_dims_are_named(dims: DataParallelMeshDims) -> None:
    mesh = mesh_of("dp", "tp")
    match = r"parameter 'weight' is placed S.*0.* on the data-parallel mesh dim 'dp'; it must be Replicate\(\)"
    assert_refused(ParameterError, match, place_linear(mesh, Shard(0), Replicate()), mesh=mesh, dp_mesh_dims=dims)


@pytest.mark.behaviour("A-06")
def test_unrelated_meshes_are_shown_with_the_remedy() -> None:
    mesh = mesh_of("dp", "tp")
    match = r"slices of one mesh.*mesh\['dp'\] and mesh\['tp'\] of init_device_mesh.*Got .* and "
    assert_refused(MeshError, match, place_linear(mesh["tp"], Shard(0)), mesh=init_device_mesh("cpu", (1,)))
    assert_refused(MeshError, match, place_linear(mesh["tp"], Shard(0)))  # the default mesh is not a slice


torch_result: Any = getattr(_fsdp_common, "ShardPlacementResult", ShardPlacementResult)  # torch 2.11 has none


@pytest.mark.behaviour("A-05")
@pytest.mark.parametrize("info", [None, 0, "dp", Shard(0), (0, 1)], ids=repr)
def test_a_placement_result_without_a_mesh_is_shown(info: object) -> None:
    match = rf"ShardPlacementResult for parameter 'weight' whose mesh_info is a {type(info).__name__}.*DeviceMesh"
    result = ShardPlacementResult(Shard(0), info)  # type: ignore[arg-type]
    assert_refused(ConfigurationError, match, nn.Linear(3, 4), shard_placement_fn=lambda p: result)


@pytest.mark.behaviour("A-05")
def test_torchs_mesh_infos_must_shard_over_the_last_dim() -> None:
    mesh = mesh_of("a", "b")
    model = nn.Linear(3, 4)

    def check_refused(info: object, match: str) -> None:
        result = torch_result(Shard(0), info)
        assert_refused(ConfigurationError, match, model, shard_placement_fn=lambda p: result)

    check_refused(DDPMeshInfo(mesh["a"], replicate_mesh_dim=0), r"'weight'.*mesh_info is a DDPMeshInfo")
    turned = r"'weight'.*\(replicate, shard\)"
    check_refused(HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1), turned)
    check_refused(FSDPMeshInfo(mesh, shard_mesh_dim=0), turned)
    check_refused(FSDPMeshInfo(mesh, shard_mesh_dim=1), turned)  # the info does not say that the other dim replicates


@pytest.mark.behaviour("A-05")
@pytest.mark.parametrize("placement", [Replicate(), Partial(), 0, "Shard(0)"], ids=repr)
def test_a_placement_result_with_another_placement_than_a_shard_is_shown(placement: object) -> None:
    result = ShardPlacementResult(placement, mesh_of("dp"))  # type: ignore[arg-type]
    match = r"shard_placement_fn returned .* for parameter 'weight'; it must return Shard\(dim\)"
    assert_refused(ConfigurationError, match, nn.Linear(3, 4), shard_placement_fn=lambda p: result)


@pytest.mark.behaviour("A-05")
def test_a_placement_result_with_a_3d_mesh_or_a_dim_out_of_range_is_refused() -> None:
    mesh = mesh_of("a", "b", "c")
    result = ShardPlacementResult(Shard(0), mesh)
    assert_refused(MeshError, r"1-d .* or 2-d .*, not 3-d", nn.Linear(3, 4), shard_placement_fn=lambda p: result)
    far = ShardPlacementResult(Shard(2), mesh["a"])
    assert_refused(ParameterError, r"'weight' .* has no dim 2", nn.Linear(3, 4), shard_placement_fn=lambda p: far)


def test_several_names_are_one_axis_and_unnamed_ones_are_left_out() -> None:
    mesh = mesh_of("a", "b", "tp")
    axes = named_data_parallel_axes(mesh, Dims(shard=("a", "b")))
    assert axes.mesh.ndim == 1
    axes = named_data_parallel_axes(mesh, Dims(replicate="a", shard="b"))
    assert axes.mesh.mesh_dim_names == ("a", "b")


@pytest.mark.behaviour("C-16")
def test_a_gradient_with_the_placement_of_its_parameter_is_not_copied() -> None:
    mesh = mesh_of("tp")
    inner = ModelParallel(mesh, (Shard(0),), (4, 3))
    local = torch.randn(4, 3)
    gradient = DTensor.from_local(local, mesh, [Shard(0)])
    assert inner.local_gradient(gradient, torch.float32).data_ptr() == local.data_ptr()


@pytest.mark.behaviour("C-16", "J-02")
@pytest.mark.parametrize("arrives", [Replicate(), Partial(), Partial("avg")], ids=str)
def test_the_local_tensor_is_the_gradient_on_data_parallel_dims(arrives: Placement) -> None:
    mesh = mesh_of("dp", "tp")
    inner = ModelParallel(mesh, (Replicate(), Shard(0)), (4, 3), frozenset({0}))
    local = torch.randn(4, 3)
    gradient = DTensor.from_local(local, mesh, [arrives, Shard(0)])
    assert inner.local_gradient(gradient, torch.float32).data_ptr() == local.data_ptr()


@pytest.mark.behaviour("C-16", "J-02")
def test_a_pending_sum_over_a_model_parallel_dim_has_the_dtype_of_sums() -> None:
    mesh = mesh_of("dp", "tp")
    inner = ModelParallel(mesh, (Replicate(), Replicate()), (4, 3), frozenset({0}))
    local = torch.randn(4, 3).bfloat16()
    gradient = DTensor.from_local(local, mesh, [Partial(), Partial()])
    summed = inner.local_gradient(gradient, torch.float32)
    assert summed.dtype is torch.float32
    assert_close(summed, local.float())
    pending_over_data_alone = DTensor.from_local(local, mesh, [Partial(), Replicate()])
    assert inner.local_gradient(pending_over_data_alone, torch.float32).dtype is torch.bfloat16
