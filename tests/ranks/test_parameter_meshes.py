"""Test ``shard_placement_fn`` with a mesh per parameter: experts and dense layers in one group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult as TorchResult
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ConfigurationError
from tests._internals import ShardPlacementResult, state_of
from tests.helpers.experts import MIXTURE, NUM_EXPERTS, Experts, place_experts
from tests.helpers.model_parallel import full_run, named_mesh, play
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact, expected_shard, sharded, values_of
from tests.helpers.training import OPTIMIZERS, Play, assert_equal_runs, train


def train_experts(result: Callable[[Shard, DeviceMesh], object], dim: int, **options: object) -> None:
    """Train dense layers on the data of four ranks, and each expert on the data of the two ranks that hold it."""
    rank, all_ranks = dist.get_rank(), range(4)
    mesh = named_mesh(edp=2, ep=2)
    data = mesh["edp", "ep"]._flatten("dp")
    model, reference = MIXTURE.build(), MIXTURE.build()
    experts = place_experts(model, mesh["ep"])
    values = values_of(reference)
    shard_layers(
        model,
        fully_shard,
        mesh=data,
        shard_placement_fn=lambda p: result(Shard(dim), mesh["edp"]) if p in experts else None,
        **options,
    )
    for name, parameter in model.named_parameters():
        part, cuts = values[name], (Shard(0),)
        if "experts" in name:
            part = expected_shard(part, mesh.get_local_rank("ep"), 2, 0)
            part = expected_shard(part, mesh.get_local_rank("edp"), 2, dim)
            cuts = (Shard(dim) if dim else _StridedShard(0, split_factor=2), Shard(0))  # type: ignore[assignment]
            assert parameter.device_mesh.mesh_dim_names == ("edp", "ep"), name
        else:
            part = expected_shard(part, rank, 4, 0)
            assert parameter.device_mesh == data, name
        assert parameter.placements == cuts, name
        assert_exact(parameter.to_local().detach(), part, name)
    for name, value in values_of(model).items():
        assert_exact(value, values[name], name)
    if not options:
        assert len(state_of(model.get_submodule("layers.0")).group.process_groups) == 2

    step = play(MIXTURE)

    def step_as_rank(each: nn.Module, number: int, of_rank: int) -> torch.Tensor:
        first = NUM_EXPERTS // 2 * (of_rank % 2)
        for module in each.modules():
            if isinstance(module, Experts):
                module.held = slice(first, first + NUM_EXPERTS // 2)
        return step(each, number, of_rank)

    def average_over_two(each: Any, _: int) -> None:
        for name, parameter in each.named_parameters():
            if "experts" in name:
                parameter.grad.mul_(2)  # train() divides all gradients by four

    ours = train(model, step_as_rank, OPTIMIZERS["adam-foreach"], ranks=[rank], watched=rank)
    expected = train(
        reference,
        step_as_rank,
        OPTIMIZERS["adam-foreach"],
        ranks=all_ranks,
        watched=rank,
        divide=4,
        between=average_over_two,
    )
    assert_equal_runs(full_run(ours), expected, what=f"{dim}, {options}")


def make_torch_result(placement: Shard, mesh: DeviceMesh) -> TorchResult:
    return TorchResult(placement, FSDPMeshInfo(mesh, shard_mesh_dim=0))


@pytest.mark.behaviour("A-05", "A-06", "C-01", "C-03")
@on_ranks(4)
def test_experts_on_their_own_mesh_train_with_parity_in_one_group_with_dense_layers() -> None:
    train_experts(ShardPlacementResult, 1)
    train_experts(make_torch_result, 0)
    train_experts(ShardPlacementResult, 1, reshard_after_forward=2)
    train_experts(ShardPlacementResult, 1, reshard_after_forward=False)


@pytest.mark.behaviour("A-05", "A-07")
@on_ranks(4)
def test_parameters_of_one_group_may_be_hybrid_and_others_sharded() -> None:
    """Replicate biases over pairs of ranks and shard weights over all: every gradient averages over all ranks."""
    mesh = named_mesh(replicate=2, shard=2)
    both = mesh["replicate", "shard"]._flatten("all")
    rank = dist.get_rank()
    infos: list[Callable[[], object]] = [
        lambda: ShardPlacementResult(None, mesh),
        lambda: TorchResult(Shard(-1), HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)),
    ]
    for result in infos:
        model, reference = TASKS["mlp"].build(), TASKS["mlp"].build()
        shard_layers(model, fully_shard, mesh=both, shard_placement_fn=lambda p: result() if p.ndim == 1 else None)  # noqa: B023
        for name, parameter in model.named_parameters():
            expected = (Shard(0),) if parameter.ndim == 2 else (Replicate(), Shard(0))
            assert parameter.placements == expected, name
        step: Play = play(TASKS["mlp"])
        ours = train(model, step, ranks=[rank], watched=rank)
        expected_run = train(reference, step, ranks=range(4), watched=rank, divide=4)
        assert_equal_runs(full_run(ours), expected_run)


@pytest.mark.behaviour("A-05", "C-07", "D-01")
@on_ranks(4)
def test_every_mesh_of_a_group_accumulates_and_reduces_in_the_same_precision() -> None:
    """Check that a gradient is the mean over the ranks of its own mesh. Small integers are exact in bf16."""
    mesh = named_mesh(edp=2, ep=2)
    data = mesh["edp", "ep"]._flatten("dp")
    rank = dist.get_rank()
    dense, expert = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model: Any = nn.Sequential(dense, expert)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.eye(3))
    own = expert.weight
    fully_shard(
        model,
        mesh=data,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        shard_placement_fn=lambda p: ShardPlacementResult(None, mesh["edp"]) if p is own else None,
    )
    for sync in (False, True):
        sharded(model).set_requires_gradient_sync(sync)
        out = model(torch.full((1, 3), float(rank)))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        if not sync:
            assert [p.grad for p in model.parameters()] == [None, None]
    for linear, mean in ((dense, 1.5), (expert, {0: 1.0, 1: 2.0}[rank % 2])):
        gradient: Any = linear.weight.grad
        assert_exact(gradient.full_tensor(), torch.full((3, 3), 2 * mean), f"{mean}")


class ExchangedExperts(nn.Module):
    """Dense layer, then one expert for each half of the tokens: the own one, or both if there is no ``group``."""

    def __init__(self, group: dist.ProcessGroup | None, held: slice) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(2, 4, 4)[held].clone())
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        if self.group is None:
            return torch.cat([torch.tanh(part @ expert) for part, expert in zip(x.chunk(2), self.experts, strict=True)])
        x = all_to_all_single_autograd(x.contiguous(), None, None, self.group)
        x = torch.tanh(x @ self.experts[0])
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


@pytest.mark.behaviour("A-05", "D-01")
@on_ranks(4)
def test_experts_that_exchange_tokens_divide_by_their_own_factor() -> None:
    """Train experts that get the tokens of two ranks by SGD, whose steps grow with gradients, and compare."""
    mesh, rank = named_mesh(edp=2, ep=2), dist.get_rank()
    data = mesh["edp", "ep"]._flatten("dp")
    held = mesh.get_local_rank("ep")
    inputs = [torch.randn(6, 4, generator=torch.Generator().manual_seed(each)) for each in range(4)]
    for factor in (None, 8.0):
        reference: Any = ExchangedExperts(None, slice(None))
        model: Any = ExchangedExperts(mesh.get_group("ep"), slice(held, held + 1))
        own = model.experts
        fully_shard(
            model,
            mesh=data,
            shard_placement_fn=lambda p: ShardPlacementResult(Shard(1), mesh["edp"], divide=4) if p is own else None,  # noqa: B023
        )
        if factor is not None:
            sharded(model).set_gradient_divide_factor(factor)  # for the dense layer only
        ours = torch.optim.SGD(model.parameters(), 0.5)
        theirs = torch.optim.SGD(reference.parameters(), 0.5)
        for _ in range(3):
            model(inputs[rank]).square().mean().backward()
            (sum(reference(x).square().mean() for x in inputs) / 4).backward()
            if factor is not None:
                for p in reference.dense.parameters():
                    p.grad.div_(2)
            for name, parameter in model.named_parameters():
                expected = reference.get_parameter(name).grad
                expected = expected[held : held + 1] if name == "experts" else expected
                torch.testing.assert_close(parameter.grad.full_tensor(), expected, msg=name)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("factor", [0, -1.0, "2", True])
def test_a_divide_factor_must_be_a_positive_number(factor: Any) -> None:
    match = f"divide of a ShardPlacementResult must be a positive number, not {factor!r}"
    with pytest.raises(ConfigurationError, match=match):
        ShardPlacementResult(None, cast(DeviceMesh, None), divide=factor)
