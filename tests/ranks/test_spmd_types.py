"""Test parameters with types of the package ``spmd_types``, beside a model without parallelism."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims as Dims
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from composable_fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, no_sync, unsharded_params
from composable_fsdp.errors import ParameterError
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import full_value

spmd = pytest.importorskip("spmd_types", reason="needs spmd_types: make install")
typecheck = pytest.importorskip("spmd_types.checker").typecheck
FEATURES = 6


class Full(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Parameter(torch.randn(FEATURES, FEATURES))
        self.within = nn.Parameter(torch.randn(2 * FEATURES, FEATURES))
        self.frozen = nn.Parameter(torch.randn(FEATURES), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.before + self.frozen) @ self.within.t()


class Typed(nn.Module):
    """``Full`` with ``within`` cut over tensor-parallel ranks. ``kind`` is the type of the other parameters there."""

    def __init__(self, full: Full, group: dist.ProcessGroup, kind: Any) -> None:
        super().__init__()
        self.group, self.kind = group, kind
        self.before = copy.deepcopy(full.before)
        self.within = nn.Parameter(full.within.detach().chunk(2)[group.rank()].clone())
        self.frozen = copy.deepcopy(full.frozen)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        assert not isinstance(self.within, DTensor)
        self.seen = [dict(spmd.get_local_type(p)) for p in (self.before, self.within)]
        hidden = x @ self.before + self.frozen
        if self.kind is spmd.I:
            hidden = spmd.redistribute(hidden, self.group, src=spmd.I, dst=spmd.R)
        return spmd.redistribute(hidden @ self.within.t(), self.group, src=spmd.S(1), dst=spmd.I)


def annotated(full: Full, types: DeviceMesh, kind: Any) -> Any:
    model = Typed(full, types.get_group("tp"), kind)
    with spmd.set_current_mesh(types):
        for parameter, on_tp in ((model.before, kind), (model.within, spmd.S(0)), (model.frozen, kind)):
            spmd.assert_type(parameter, {"dp": spmd.R, "tp": on_tp})
    return model


def batch(step: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + row)
    return torch.randn(4, FEATURES, generator=generator), torch.randn(4, 2 * FEATURES, generator=generator)


def train(kind: Any, sizes: tuple[int, ...]) -> None:
    """Train with microbatches over 2 data-parallel ranks, each of which is 2 tensor-parallel ones."""
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    types = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = Full()
    model = annotated(full, types, kind)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="replicate"))
    assert isinstance(model.within, DTensor)
    assert model.within.shape == full.within.shape
    assert not hasattr(model.within, "_local_type")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (full, model)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):
            for row in range(2):
                x, wanted = batch(2 * step + micro, row)
                (mse_loss(full(x), wanted) / 2).backward()
            x, wanted = batch(2 * step + micro, types.get_local_rank("dp"))
            if micro == 0:
                with no_sync(model):
                    mse_loss(model(x), wanted).backward()
            else:
                mse_loss(model(x), wanted).backward()
        for name in ("before", "within"):
            assert_close(full_value(getattr(model, name).grad), getattr(full, name).grad)
        for optimizer in optimizers:
            optimizer.step()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert_close(whole, full.state_dict())
    with unsharded_params(model):
        assert_close(full_value(model.within), full.within.detach())
    check_types(model, types, kind)


def check_types(model: Any, types: DeviceMesh, kind: Any) -> None:
    dp, tp = (spmd.MeshAxis.of(types.get_group(name)) for name in ("dp", "tp"))
    x, _ = batch(9, types.get_local_rank("dp"))
    with spmd.set_current_mesh(types), typecheck(strict_mode="strict", local=True):
        spmd.assert_type(x, {dp: spmd.V, tp: kind})
        loss = model(x).sum()
        assert model.seen == [{dp: spmd.R, tp: kind}, {dp: spmd.R, tp: spmd.V}]
        assert dict(spmd.get_local_type(loss)) == {dp: spmd.V, tp: spmd.I}
        with spmd.no_typecheck():
            loss.backward()


class Experts(nn.Module):
    def __init__(self, dense: torch.Tensor, expert: torch.Tensor) -> None:
        super().__init__()
        self.dense, self.expert = nn.Parameter(dense.clone()), nn.Parameter(expert.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.dense @ self.expert[0]


def train_experts() -> None:
    """Shard dense and expert parameters, typed on different meshes, in one group, as torchtitan does."""
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(0)
    weight, experts = torch.randn(FEATURES, FEATURES), torch.randn(2, FEATURES, FEATURES)
    own = sparse.get_local_rank("ep")
    model: Any = Experts(weight, experts[own : own + 1])
    with spmd.set_current_mesh(dense):
        spmd.assert_type(model.dense, {"dp": spmd.R})
    with spmd.set_current_mesh(sparse):
        spmd.assert_type(model.expert, {"edp": spmd.R, "ep": spmd.S(0)})
    infos: list[Any] = [_get_mesh_info(dense, Dims(shard="dp")), _get_mesh_info(sparse, Dims(shard="edp"))]
    expert = model.expert

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(1 if parameter is expert else 0), infos[parameter is expert])

    fully_shard(model, mesh=dense, dp_mesh_dims=DataParallelMeshDims(shard="dp"), shard_placement_fn=place)
    model.set_gradient_divide_factor(1.0)
    assert model.expert.shape == experts.shape
    assert model.expert.placements == (Shard(1), Shard(0))
    model(batch(0, dist.get_rank())[0]).square().sum().backward()
    weight.requires_grad_()
    experts.requires_grad_()
    for rank in range(4):
        (batch(0, rank)[0] @ weight @ experts[rank % 2]).square().sum().backward()
    for name, reference in (("dense", weight), ("expert", experts)):
        assert reference.grad is not None
        assert_close(full_value(getattr(model, name).grad), reference.grad)


@pytest.mark.behaviour("J-02")
@on_ranks(4)
def test_parameters_with_types_of_spmd_types_train_as_the_model_without_parallelism() -> None:
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)  # in spmd_types
    train(spmd.I, (1, 2, 2))
    train(spmd.R, (2, 1, 2))
    train_experts()
    check_mixed_precision()
    check_errors()


def check_mixed_precision() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = annotated(Full(), mesh, spmd.R)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), mp_policy=policy)
    model(batch(0, 0)[0]).sum().backward()
    assert model.within.placements[1] == Shard(0)
    assert model.before.placements == (Shard(0), Replicate())
    assert model.before.grad.dtype == torch.float32


def check_errors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    group = {name: mesh.get_group(name) for name in ("dp", "tp")}

    def attempt(types: dict[Any, Any], **arguments: Any) -> None:
        linear = nn.Linear(4, 4, bias=False)
        spmd.assert_type(linear.weight, types)
        fully_shard(linear, **{"mesh": mesh, "dp_mesh_dims": dims, **arguments})

    both = {group["dp"]: spmd.R, group["tp"]: spmd.I}
    with pytest.raises(ParameterError, match=r"'weight' of Linear has types.*need the mesh of all axes.*dp_mesh_dims"):
        attempt(both, mesh=mesh["dp"], dp_mesh_dims=None)
    with pytest.raises(ParameterError, match=r"'weight' has types.*are not on all axes, and .*set_current_mesh"):
        attempt({group["tp"]: spmd.I})
    with pytest.raises(ParameterError, match=r"I on the data-parallel axis .* would reduce its gradients twice"):
        attempt({**both, group["dp"]: spmd.I})
    with pytest.raises(ParameterError, match="V on the axis 'tp' does not say which dim is sharded"):
        attempt({**both, group["tp"]: spmd.V})
    with spmd.set_current_mesh(mesh):
        attempt({group["tp"]: spmd.I})
        with pytest.raises(ParameterError, match="but none on the axis 'tp'"):
            attempt({group["dp"]: spmd.R})
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    with pytest.raises(ParameterError, match=r"S\(0\)\}, but .* is no axis of the mesh"):
        attempt({other.get_group("ep"): spmd.S(0)})
