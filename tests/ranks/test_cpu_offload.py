"""CPU offload on a CPU mesh changes nothing. ``tests/gpu`` tests it on accelerators."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as peer

from composable_fsdp import CPUOffloadPolicy, OffloadPolicy, cpu_offload_by_budget, fully_shard
from composable_fsdp.trace import Recorder
from tests._internals import state_of
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.training import OPTIMIZERS, assert_equal_runs, play_task, train


@pytest.mark.behaviour("D-02")
@on_ranks(2)
def test_cpu_offload_on_a_cpu_mesh_changes_nothing() -> None:
    rank = dist.get_rank()
    policies = (OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), peer.CPUOffloadPolicy())
    runs, traces = [], []
    for policy in policies:
        model = shard_layers(TASKS["tied"].build(), fully_shard, offload_policy=policy)
        with Recorder() as recorder:
            runs.append(train(model, play_task("tied"), OPTIMIZERS["adamw-foreach"], ranks=[rank], watched=rank))
        traces.append([(str(event), event.bytes) for event in recorder])
        for parameter in model.parameters():
            assert parameter.device.type == "cpu"
            assert not parameter.grad.to_local().is_pinned()
    for run, trace in zip(runs[1:], traces[1:], strict=True):
        assert_equal_runs(run, runs[0], exact=True)
        assert trace == traces[0]


def offloaded(model: nn.Module) -> set[str]:
    found = {(name, attribute) for name, module in model.named_modules() for attribute in module._parameters}
    groups = {state_of(module).group for module in model.modules() if hasattr(module, "unshard")}
    places = {
        (module, attribute)
        for group in groups
        for parameter in group.parameters
        if isinstance(parameter.offload, CPUOffloadPolicy)
        for module, attribute in parameter.owners
    }
    return {f"{name}.{attribute}" for name, attribute in found if (model.get_submodule(name), attribute) in places}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 4))


@pytest.mark.behaviour("D-02")
@on_ranks(2)
def test_parameters_are_offloaded_by_name() -> None:
    chosen = {"1.0.weight": CPUOffloadPolicy(), "2.bias": peer.CPUOffloadPolicy(), "2.weight": OffloadPolicy()}
    expected = {"1.0.weight", "2.bias"}
    by_policy = build()
    fully_shard(by_policy, policy={nn.Linear}, offload_policy=chosen)  # type: ignore[arg-type]
    as_lists = build()
    fully_shard(list(as_lists), offload_policy=chosen)  # type: ignore[arg-type]
    bottom_up = build()
    fully_shard(bottom_up[1], offload_policy={"0.weight": CPUOffloadPolicy})  # type: ignore[dict-item]
    fully_shard(bottom_up, offload_policy={"2.bias": CPUOffloadPolicy()})
    by_group = build()
    own = {by_group[1]: {"0.weight": CPUOffloadPolicy()}, by_group[2]: {"bias": CPUOffloadPolicy()}}
    fully_shard(by_group, policy=lambda module, _: {"offload_policy": own[module]} if module in own else False)
    models = {"policy": by_policy, "list": as_lists, "bottom up": bottom_up, "own": by_group}
    models["copy"] = copy.deepcopy(by_policy)
    plain = fully_shard(build())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain(x).sum().backward()
    for what, model in models.items():
        assert offloaded(model) == expected, what
        model(x).sum().backward()
        for parameter, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad.full_tensor(), of_plain.grad.full_tensor()), what  # type: ignore[union-attr]
    after = build()  # names and sizes of sharded parameters are those of full ones
    assert cpu_offload_by_budget(fully_shard(after), 500) == cpu_offload_by_budget(build(), 500) != {}
