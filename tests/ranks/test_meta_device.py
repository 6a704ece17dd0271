"""Test models that are built on the meta device, sharded, and then given memory and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import composable_fsdp as ours
from composable_fsdp import fully_shard
from composable_fsdp.errors import ParameterError
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import adamw, assert_sharded, initialise, train_and_compare, values_of

MODELS_AND_MESHES = [("mlp", (2,)), ("mlp", (2, 2)), ("mlp", (3,)), ("tied", (4,)), ("tied", (2, 1)), ("wide", (3,))]


def build_on_meta(task: str, mesh: DeviceMesh, **options: object) -> Any:
    with torch.device("meta"):
        model = TASKS[task].build()
    assert all(p.is_meta for p in model.parameters())
    return shard_layers(model, fully_shard, mesh=mesh, **options)


@pytest.mark.behaviour("A-12")
@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize(("task", "shape"), MODELS_AND_MESHES, ids=str)
@on_ranks("shape")
def test_a_model_from_meta_trains_with_parity(task: str, shape: tuple[int, ...], assigns: bool) -> None:
    """Give it memory and values, or assign a sharded state dict."""
    mesh = init_device_mesh("cpu", shape)
    model, reference = build_on_meta(task, mesh), TASKS[task].build()
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    values = values_of(reference)
    if assigns:
        keys = model.load_state_dict(
            shard_layers(TASKS[task].build(), fully_shard, mesh=mesh).state_dict(), assign=True
        )
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    else:
        model.to_empty(device="cpu")
        initialise(model, values)
    assert_sharded(model, values, mesh)
    before = [id(p) for p in model.parameters()]
    optimizer = adamw(model.parameters())
    TASKS[task].loss(model, TASKS[task].batch_of(0, dist.get_rank())).backward()
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert held == before == [id(p) for p in model.parameters()], "the optimizer has the parameters of the model"
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    train_and_compare(model, reference, TASKS[task])


@pytest.mark.behaviour("A-12")
@on_ranks(2)
def test_assigning_between_steps_trains_with_parity() -> None:
    task = TASKS["mlp"]
    mesh = init_device_mesh("cpu", (2,))
    source = shard_layers(task.build(), fully_shard, mesh=mesh)
    model, reference = shard_layers(task.build(), fully_shard, mesh=mesh, reshard_after_forward=False), task.build()
    optimizer = adamw(model.parameters())
    task.loss(model, task.batch_of(5, dist.get_rank())).backward()
    optimizer.step()
    with torch.no_grad():
        task.loss(model, task.batch_of(6, dist.get_rank()))
    model.load_state_dict(source.state_dict(), assign=True)
    train_and_compare(model, reference, task)


@pytest.mark.behaviour("A-12")
@on_ranks(2)
def test_a_forward_on_meta_is_a_recoverable_error_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, reference = build_on_meta("mlp", mesh), TASKS["mlp"].build()
    batch = TASKS["mlp"].batch_of(0, dist.get_rank())
    messages = []
    for _ in range(2):
        with pytest.raises(ParameterError) as error:
            model(*batch[:-1])
        messages.append(str(error.value))
        model.to_empty(device="cpu")
        for name in ("scale", "layers.1.weight"):
            owner, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            if len(messages) == 1:
                owner._parameters[attribute] = nn.Parameter(owner._parameters[attribute].to("meta"))
    initialise(model, values_of(reference))
    train_and_compare(model, reference, TASKS["mlp"])
    assert all("['scale']" in message for message in messages)
    assert "layers" not in messages[1]


@pytest.mark.behaviour("A-12")
@on_ranks(2)
def test_a_meta_parameter_beside_real_ones_is_named_and_leaves_these_their_values() -> None:
    """Leave the first or a later parameter of a bucket on meta, with torch's FSDP2 and with this library."""
    for library in (torch_fsdp, ours):
        _name_and_keep(library)


def _name_and_keep(library: Any) -> None:
    x = torch.ones(2, 4)
    for name, other in (("bias", "weight"), ("weight", "bias")):
        torch.manual_seed(0)
        plain = nn.Linear(4, 4)
        model, refused = (_move_one_to_meta(plain, name) for _ in range(2))
        library.fully_shard(refused)
        with pytest.raises(RuntimeError, match=rf"meta device: \['{name}'\]"):
            refused(x)
        library.fully_shard(model)
        setattr(model, name, nn.Parameter(torch.zeros_like(getattr(model, name), device="cpu")))
        nn.init.zeros_(getattr(plain, name))
        torch.testing.assert_close(model(x), plain(x), msg=f"{other} has changed")


def _move_one_to_meta(plain: nn.Module, name: str) -> nn.Module:
    module = copy.deepcopy(plain)
    setattr(module, name, nn.Parameter(getattr(module, name).to("meta")))
    return module
