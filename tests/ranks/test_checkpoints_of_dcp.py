"""Checkpoints that torch's functions write are loaded here, and ours by torch's functions: values and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import load, load_optimizer_state_dict, save
from tests.helpers.checkpoint_worlds import all_ranks_raise
from tests.helpers.run_ranks import on_ranks

Groups = Iterable[dict[str, Any]]

OPTIMIZERS: dict[str, Callable[[Groups, float], torch.optim.Optimizer]] = {
    "SGD": lambda groups, lr: torch.optim.SGD(groups, lr=lr),
    "SGD with momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "SGD, tensor lr": lambda groups, lr: torch.optim.SGD(groups, lr=torch.tensor(lr), foreach=False),
    "AdamW": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, amsgrad=True),
    "AdamW, tensor lr": lambda groups, lr: torch.optim.AdamW(groups, lr=torch.tensor(lr), foreach=False),
    "AdamW, fused": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True),
    "Adagrad": lambda groups, lr: torch.optim.Adagrad(groups, lr=lr),
}


class Net(nn.Module):
    """Names of which one begins with another, ``head`` and ``head.state``, and a name like torch's key."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = nn.Linear(5, 7)
        self.head.state = nn.Linear(7, 3)
        self.param_groups = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.param_groups(self.head.state(self.head(x)))


def built(name: str, lr: float) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    for module in (model.head.state, model.head, model.param_groups, model):
        fully_shard(module)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "weight_decay": 0.01, "note": {"a": [1, 2], "b": "x"}}]
    groups.append({"params": parameters[2:], "weight_decay": 0.0, "note": {"a": [], "b": "y"}})
    return model, OPTIMIZERS[name](groups, lr)


def trained(name: str) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = built(name, 0.003)
    for step in range(2):
        model(torch.full((2, 5), 1.0 + step + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optim = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model), "optimizer": optim}


def assert_equal(found: Any, wanted: Any) -> None:
    for own, other in zip(found[0].parameters(), wanted[0].parameters(), strict=True):
        assert torch.equal(own.to_local(), other.to_local())
        state, expected = found[1].state.get(own, {}), wanted[1].state.get(other, {})
        assert {k: v for k, v in state.items() if v is not None}.keys() == {
            k: v for k, v in expected.items() if v is not None
        }.keys()
        for key, value in expected.items():
            if value is not None:
                pair = [each.to_local() if hasattr(each, "to_local") else each for each in (state[key], value)]
                assert torch.equal(*pair), key
    for group, expected in zip(found[1].param_groups, wanted[1].param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}
        assert type(group["lr"]) is type(expected["lr"])


def ours_to_torch(name: str, folder: Path) -> None:
    wanted, found = trained(name), built(name, 9.0)
    path = save(folder / name, *wanted).path
    state = state_by_torch(*found, flat=False)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(*found, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_equal(found, wanted)


def torch_to_ours(name: str, folder: Path) -> None:
    for form in ("nested", "flattened", "at the top level", "compiled"):
        wanted, found = trained(name), built(name, 9.0)
        state = state_by_torch(*wanted, flat=form in ("flattened", "at the top level"))
        if form == "at the top level":  # torchtitan's form
            state = {**state.pop("model"), **state, "lr_scheduler": {"last_epoch": 3}}
        if form == "compiled":
            state["model"] = {f"_orig_mod.{key}": value for key, value in state["model"].items()}
            optim = state["optimizer"]
            optim["state"] = {f"_orig_mod.{key}": value for key, value in optim["state"].items()}
            for group in optim["param_groups"]:
                group["params"] = [f"_orig_mod.{key}" for key in group["params"]]
        dcp.save(state, checkpoint_id=folder / f"{name} {form}")
        load(folder / f"{name} {form}", *found)
        assert_equal(found, wanted)


@pytest.mark.behaviour("F-07", "F-09")
@on_ranks(1, 2)
def test_torch_reads_ours_and_ours_torchs_for_each_optimizer(tmp_path: Path) -> None:
    for name in OPTIMIZERS:
        ours_to_torch(name, tmp_path)
        torch_to_ours(name, tmp_path)


@pytest.mark.behaviour("F-09", "F-12")
@on_ranks(2)
def test_settings_by_parameter_that_make_no_group_and_flattened_state_in_memory_are_named(tmp_path: Path) -> None:
    wanted = trained("AdamW")
    dcp.save(state_by_torch(*wanted, flat=True), checkpoint_id=tmp_path / "flat")
    model, _ = built("AdamW", 9.0)
    one = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with all_ranks_raise(r"saved settings differ within one group: head\.weight, head\.bias, head\.state\.weight, "):
        load(tmp_path / "flat", model, one)
    fewer = torch.optim.AdamW(list(model.parameters())[:2], amsgrad=True)
    with all_ranks_raise(r"param_group of head\.state\.bias: members: 1"):
        load(tmp_path / "flat", model, fewer)
    with all_ranks_raise("a state dict of an optimizer has 'state' and 'param_groups'; this one has not"):
        load_optimizer_state_dict(*wanted, state_by_torch(*wanted, flat=True)["optimizer"])
