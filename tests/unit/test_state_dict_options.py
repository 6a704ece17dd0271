"""Forms of state dicts without process groups: options, unsharded modules and optimizer settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp.checkpoint import (
    Full,
    Local,
    Sharded,
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    state_dict,
    state_dict_form,
)
from composable_fsdp.errors import CheckpointError, ConfigurationError
from tests._internals import lacking, restored


@pytest.mark.behaviour("F-02")
@pytest.mark.parametrize(
    ("form", "option", "message"),
    [
        (Sharded, "rank0_only", "rank0_only is an option of Full, not of Sharded, which has"),
        (Local, "rank0_only", "rank0_only is an option of Full, not of Local, which has"),
        (Full, "offload", "offload is no option of any form, not of Full, which has"),
    ],
)
def test_an_option_of_another_form_names_the_form(form: Callable[..., object], option: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        form(**{option: True})


@pytest.mark.behaviour("F-02", "F-04")
@pytest.mark.parametrize("form", [Full(), Full(rank0_only=True), Sharded(), Local()], ids=str)
def test_a_module_that_is_not_sharded_has_every_form(form: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    found = state_dict(model, form)
    assert found.keys() == model.state_dict().keys()
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with state_dict_form(other, form):
        other.load_state_dict(found)
        assert all(torch.equal(value, found[name]) for name, value in other.state_dict().items())
    assert "state_dict" not in vars(other)
    with pytest.raises(CheckpointError, match=r"fit Sequential. Nothing was loaded.\n  missing \(1\):\n    0.bias: "):
        load_state_dict(other, {name: value for name, value in found.items() if name != "0.bias"}, form)


@pytest.mark.behaviour("F-04")
def test_an_expanded_buffer_is_loaded_into_memory_of_its_own() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for module, value in ((model, 7.0), (other, 0.0)):
        module.register_buffer("same", torch.tensor([value]).expand(4))
    load_state_dict(other, {**state_dict(model), "same": torch.arange(4.0, dtype=torch.float64)})
    assert torch.equal(other.get_buffer("same"), torch.arange(4.0))
    assert torch.equal(other.weight, model.weight)


@pytest.mark.behaviour("F-09")
def test_optimizers_of_a_module_that_is_not_sharded() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    found = optimizer_state_dict(model, optimizer)
    assert found["param_groups"][0]["params"] == ["weight", "bias"]
    assert list(found["state"]) == ["weight", "bias"]
    fresh = torch.optim.SGD([model.bias, model.weight], lr=1.0, momentum=0.9)
    load_optimizer_state_dict(model, fresh, found)
    assert fresh.param_groups[0]["lr"] == 0.1
    assert torch.equal(fresh.state[model.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])
    with pytest.raises(CheckpointError, match="holds parameters that are not the model's, of shapes"):
        optimizer_state_dict(nn.Linear(3, 3), optimizer)


@pytest.mark.behaviour("F-09")
def test_saved_settings_take_precedence_and_tensors_move_to_the_device_of_the_group() -> None:
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
def test_only_options_with_optimizer_defaults_may_be_missing() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2)])
    saved = dict(optimizer.param_groups[0])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "initial_lr" in optimizer.param_groups[0]
    assert lacking(optimizer, 0, saved) == []
    del saved["lr"], saved["momentum"]
    assert lacking(optimizer, 0, saved) == ["param_group 0 has settings that the saved one lacks: lr, momentum"]
