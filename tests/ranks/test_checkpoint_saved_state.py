"""Optimizers in checkpoints on disk: plain tensors for shards, and other groups on each rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import load, save
from composable_fsdp.testing import run_ranks
from tests.helpers.checkpoint_worlds import raising_alike
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.state_dicts import LocalMomentum, build, shard, train


def momenta(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {n: optimizer.state[p]["momentum"].clone() for n, p in model.named_parameters() if p in optimizer.state}


def trained() -> tuple[nn.Module, Optimizer]:
    model = shard(build())
    optimizer = LocalMomentum(model.parameters())
    train(model, optimizer)
    return model, optimizer


def saves(folder: Path) -> None:
    save(folder, *trained())


def loads(folder: Path) -> None:
    model, optimizer = trained()
    expected = momenta(model, optimizer)
    for state in optimizer.state.values():
        state["momentum"].zero_()
    load(folder, model, optimizer)
    found = momenta(model, optimizer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert not isinstance(found[name], DTensor)
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.behaviour("F-07", "F-09")
def test_plain_state_of_the_shards_shape_is_saved_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(saves, 2, tmp_path)
    for num_ranks in (2, 3):
        run_ranks(loads, num_ranks, tmp_path)


class RowScales(Optimizer):
    """Keeps plain state of a shape that is not the shard's, with other values on each rank."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["energy"] = parameter.grad.to_local().square().sum(0)


def differs(folder: Path) -> None:
    model = shard_layers(TASKS["mlp"].build(), fully_shard)
    optimizer = RowScales(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + dist.get_rank())
    optimizer.step()
    with raising_alike(r"energy is a plain tensor with other values on rank 1 than on rank 0, but only one is saved"):
        save(folder, model, optimizer)
    assert not list(folder.glob("step-*"))


@pytest.mark.behaviour("F-09")
def test_plain_state_that_differs_is_refused(tmp_path: Path) -> None:
    run_ranks(differs, 2, tmp_path)


def stages(folder: Path) -> None:
    """Each rank has another stage of a pipeline, with a rate of its own; both have the same norm."""
    rank = dist.get_rank()

    def stage() -> tuple[nn.ModuleDict, Optimizer]:
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 3), "norm": nn.LayerNorm(3)})
        own: dict[str, Any] = {"params": list(model[f"stage{rank}"].parameters()), "lr": 0.1 + rank}
        return model, torch.optim.AdamW([own, {"params": list(model["norm"].parameters())}])

    model, optimizer = stage()
    model["norm"](model[f"stage{rank}"](torch.ones(2, 3))).square().sum().backward()
    optimizer.step()
    save(folder, model, optimizer)
    fresh, fresh_optimizer = stage()
    load(folder, fresh, fresh_optimizer)
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.1 + rank, 1e-3]
    for (name, new), old in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(new, old), name
        assert torch.equal(fresh_optimizer.state[new]["exp_avg"], optimizer.state[old]["exp_avg"]), name


@pytest.mark.behaviour("F-09")
def test_optimizers_of_the_stages_of_a_pipeline_are_one_checkpoint(tmp_path: Path) -> None:
    run_ranks(stages, 2, tmp_path)
