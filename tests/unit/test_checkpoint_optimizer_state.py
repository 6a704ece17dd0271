"""State and settings of optimizers of any form, saved and loaded by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp.checkpoint import load, load_optimizer_state_dict, optimizer_state_dict, save
from composable_fsdp.errors import CheckpointError


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def with_empty_groups(model: nn.Linear, *rates: float) -> torch.optim.Optimizer:
    none, weight, again, bias = rates
    params = ([], [model.weight], [], [model.bias])
    groups = [{"params": p, "lr": lr} for p, lr in zip(params, (none, weight, again, bias), strict=True)]
    return torch.optim.SGD(groups, lr=9.0, momentum=0.5)


@pytest.mark.parametrize("way", ["file", "state dict"])
def test_each_empty_group_has_its_own_settings(tmp_path: Path, way: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = trained(model, with_empty_groups(model, 0.1, 0.2, 0.3, 0.4))
    fresh = with_empty_groups(model, 5.0, 6.0, 7.0, 8.0)
    if way == "file":
        load(save(tmp_path, model, optimizer).path, model, fresh)
    else:
        load_optimizer_state_dict(model, fresh, optimizer_state_dict(model, optimizer))
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2, 0.3, 0.4]


def test_an_empty_group_that_was_not_saved_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fewer: Any = with_empty_groups(model, 0.1, 0.2, 0.3, 0.4)
    fewer.param_groups.pop(0)
    save(tmp_path, model, trained(model, fewer))
    with pytest.raises(CheckpointError, match=r"no saved param_group has the parameters of group 2: \n?"):
        load(tmp_path, model, with_empty_groups(model, 0.1, 0.2, 0.3, 0.4))
    save(tmp_path, model, with_empty_groups(model, 0.1, 0.2, 0.3, 0.4))
    with pytest.raises(CheckpointError, match="param_group of no parameters: members: 0"):
        load(tmp_path, model, fewer)
