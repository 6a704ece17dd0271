"""Saved settings of an optimizer's groups."""

from __future__ import annotations

import pytest
import torch

from tests._internals import lacking, restored


@pytest.mark.behaviour("F-09")
def test_saved_settings_count_and_tensors_go_to_the_device_of_the_group() -> None:
    group = {
        "params": [torch.zeros(2)],
        "param_names": ["own"],
        "lr": torch.tensor(1.0, device="meta"),
        "momentum": 0.9,
    }
    saved = {"params": ["a"], "param_names": ["other"], "lr": torch.tensor(0.1), "initial_lr": 0.2}
    found = restored(group, saved, [3])
    assert found.pop("lr").device.type == "meta"
    assert found == {"params": [3], "param_names": ["own"], "momentum": 0.9, "initial_lr": 0.2}


@pytest.mark.behaviour("F-09")
def test_only_what_the_optimizer_has_defaults_for_can_be_lacking() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2)])
    saved = dict(optimizer.param_groups[0])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "initial_lr" in optimizer.param_groups[0]
    assert lacking(optimizer, 0, saved) == []
    del saved["lr"], saved["momentum"]
    assert lacking(optimizer, 0, saved) == ["param_group 0 has settings that the saved one lacks: lr, momentum"]
