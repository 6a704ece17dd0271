"""What one rank cannot read or send of a state dict is the same error on all ranks at once; none waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import (
    Full,
    Local,
    Sharded,
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    state_dict,
)
from composable_fsdp.errors import FSDPError
from tests.helpers.run_ranks import run_ranks


def built(shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


class Locked(nn.Module):
    """Has an extra state that no other process can get."""

    def get_extra_state(self) -> Any:
        return threading.Lock()

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


def errors_of_models(shape: tuple[int, ...], at: int) -> None:
    here = dist.get_rank() == at
    model, _ = built(shape)
    full = state_dict(model, Full())

    def fails(*_: Any) -> None:
        if here:
            raise LookupError(f"the hook of rank {at}")

    hook = model.get_submodule("1").register_state_dict_post_hook(fails)
    text = f"rank {at}: LookupError: the hook of rank {at}"
    refused(text, lambda: state_dict(model, Full()))
    refused(text, lambda: load_state_dict(model, full))
    refused(text, lambda: load_state_dict(model, {}, broadcast_from_rank0=True))
    hook.remove()
    form: Any = "full" if here else Full()
    refused(f"rank {at}: the form of a state dict is Full(), ", lambda: state_dict(model, form))
    text = "only some ranks take the values of rank 0. Pass the same arguments on all ranks."
    refused(text, lambda: load_state_dict(model, full, broadcast_from_rank0=here))
    model.add_module("2", Locked())
    given = state_dict(model, Full(rank0_only=True))
    text = "rank 0: TypeError: cannot pickle '_thread.lock' object"
    refused(text, lambda: load_state_dict(model, given, broadcast_from_rank0=True))


def errors_of_optimizers(shape: tuple[int, ...], at: int) -> None:
    here = dist.get_rank() == at
    model, optimizer = built(shape)
    full = optimizer_state_dict(model, optimizer, Full())
    weight = model.get_parameter("0.weight")

    def refused_in_each_form(text: str) -> None:
        for form in (Sharded(), Local(), Full(), Full(rank0_only=True)):
            refused(text, partial(optimizer_state_dict, model, optimizer, form))

    if here:
        optimizer.state[weight]["kept"] = SimpleNamespace(value=weight.detach())
    refused_in_each_form(f"rank {at}: the state kept of 0.weight is a SimpleNamespace that holds a DTensor")
    optimizer.state[weight].pop("kept", None)
    if here:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    text = f"rank {at}: this AdamW holds parameters that are not the model's, of shapes [(2,)]."
    refused_in_each_form(text)
    refused(text, lambda: load_optimizer_state_dict(model, optimizer, full))
    del optimizer.param_groups[1:]
    broken: Any = {"state": {}, "param_groups": [{"lr": 1.0}]} if here else full
    refused(f"rank {at}: KeyError", lambda: load_optimizer_state_dict(model, optimizer, broken))
    full["param_groups"][0]["schedule"] = threading.Lock()
    text = "rank 0: TypeError: cannot pickle '_thread.lock' object"
    refused(text, lambda: load_optimizer_state_dict(model, optimizer, full, Full(rank0_only=True)))
    load_optimizer_state_dict(model, optimizer, optimizer_state_dict(model, optimizer))


def refused(text: str, call: Callable[[], object]) -> None:
    with pytest.raises(FSDPError) as raised:
        call()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, (type(raised.value), str(raised.value)))
    assert len(set(texts)) == 1, texts
    assert text in str(raised.value)


@pytest.mark.behaviour("F-02", "H-05")
@pytest.mark.parametrize("errors", [errors_of_models, errors_of_optimizers])
def test_an_error_on_one_rank_is_raised_on_all(errors: Callable[..., None]) -> None:
    run_ranks(errors, 2, (2,), 0)
    run_ranks(errors, 4, (2, 2), 3)
