"""State dict methods of the modules themselves: copies, chosen forms, hooks, full state dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import fully_shard, to_empty
from composable_fsdp.checkpoint import Full, Local, load_state_dict, state_dict, state_dict_form
from composable_fsdp.errors import ConfigurationError
from tests.helpers.checkpoint_worlds import local
from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.helpers.models import shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, values_of
from tests.helpers.state_dicts import (
    COUNT,
    Everything,
    build,
    full_state_of,
    message,
    same_values,
    scramble,
    sgd,
    shard,
    train,
)
from tests.helpers.transports import TRANSPORTS


@pytest.mark.behaviour("F-02")
@on_ranks(2, transports=TRANSPORTS)
def test_the_models_own_state_dict_can_be_copied_and_aliases_the_parameters() -> None:
    """Copy the state, as averages of weights and best checkpoints do, also of a model made on meta."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    with torch.device("meta"):
        model = shard(Everything(), mesh)
    with pytest.warns(UserWarning, match="scratch"):
        to_empty(model, device="cpu")
    model.load_state_dict(shard(build(), mesh).state_dict())
    for trained in (model, shard(build(), mesh, wrap="before", reshard_after_forward=False)):
        holder = nn.Sequential(trained)
        before = full_state_of(holder)
        best = copy.deepcopy(holder.state_dict())
        train(trained, sgd(trained))
        assert not any(torch.equal(v, before[n]) for n, v in full_state_of(holder).items() if n.endswith("flag"))
        parameters = holder.state_dict(keep_vars=True)
        assert {id(p) for p in holder.parameters()} <= {id(value) for value in parameters.values()}
        for name, value in holder.state_dict().items():
            if isinstance(value, DTensor):
                parameter = parameters[name]
                assert not value.requires_grad
                assert value.placements == parameter.placements
                assert local(value).data_ptr() == local(parameter).data_ptr(), name
                assert local(value).shape == local(parameter).shape, f"{name} on rank {rank}"
        holder.load_state_dict(best)
        same_values(full_state_of(holder), before)


@pytest.mark.behaviour("F-10")
@on_ranks(2)
def test_a_context_manager_chooses_the_form_of_the_models_own_state_dict() -> None:
    model = shard(build(), wrap="before")
    expected, outside = full_state_of(model), set(vars(model))
    with state_dict_form(model, Full()):
        same_values(model.state_dict(), expected)
        with state_dict_form(model, Local()):
            local = copy.deepcopy(model.state_dict())
            assert local["layers.0.weight"].shape == (4 if dist.get_rank() == 0 else 3, 5)
            scramble(model).load_state_dict(local)
            same_values(full_state_of(model), expected)
        same_values(model.state_dict(), expected)
        assert model.state_dict(keep_vars=True)["flag"] is model.flag
        holder = nn.Sequential(model)
        same_values(holder.state_dict(), {f"0.{name}": value for name, value in expected.items()})
        scramble(model).load_state_dict(expected)
        keys = model.load_state_dict({}, strict=False)
        assert set(keys.missing_keys) == set(expected) - {COUNT}
        assigned = message(lambda: model.load_state_dict(expected, assign=True), ConfigurationError)
    wrapper: Any = checkpoint_wrapper(model)
    with state_dict_form(wrapper, Full()):
        same_values(wrapper.state_dict(), expected)
        scramble(model)
        wrapper.load_state_dict(expected)
    same_values(full_state_of(model), expected)
    with pytest.raises(KeyError, match="from the body"), state_dict_form(model, Full(rank0_only=True)):
        model.state_dict().pop("from the body")
    assert set(vars(model)) == outside
    assert isinstance(model.state_dict()["flag"], DTensor)
    assert "cannot assign=True" in assigned


class Noted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[Any] = []
        self.extra = torch.zeros(1)
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: self.seen.append(sorted(state)))
        self.register_load_state_dict_post_hook(lambda module, keys: self.seen.append(list(keys.missing_keys)))

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


@pytest.mark.behaviour("F-04")
@on_ranks(2)
def test_load_hooks_of_modules_run_and_extra_state_is_set() -> None:
    for streams in (False, True):
        first = Noted()
        model = fully_shard(nn.Sequential(first, nn.Linear(3, 1)))
        values: dict[str, Any] = {name: torch.ones_like(v) for name, v in state_dict(model, Full()).items()}
        values["0._extra_state"] = torch.full((5,), 2.0)
        load_state_dict(model, {} if streams and dist.get_rank() else values, broadcast_from_rank0=streams)
        assert first.seen == [["0._extra_state", "0.bias", "0.weight"], []]
        assert_exact(first.extra, torch.full((5,), 2.0), "extra state")
        same_values(state_dict(model, Full()), values)


def uneven() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[2].weight = nn.Parameter(torch.randn(3, 7, dtype=torch.float64))
    return model.double()


def shard_two_layers(model: Any, **options: Any) -> nn.Module:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def on_one_axis() -> nn.Module:
    return shard_two_layers(uneven())


def pairs() -> nn.Module:
    return PAIRS.build()


def beside_tensor_parallelism() -> nn.Module:
    mesh = named_mesh(dp=2, tp=2)
    model = PAIRS.build()
    parallelize_pairs(model, mesh["tp"])
    return shard_layers(model, fully_shard, mesh=mesh["dp"])


def loads_exactly(build: Callable[[], nn.Module], plain: Callable[[], nn.Module], assign: bool) -> None:
    torch.manual_seed(5)
    full = plain().state_dict()
    for value in full.values():
        if value.is_floating_point():
            value.normal_()
    model = build()
    before = {name: value.clone() for name, value in full.items()}
    model.load_state_dict(full, assign=assign)
    values = values_of(model)
    for name in values:
        assert_exact(values[name], full[name], name)
    assert all(torch.equal(value, before[name]) for name, value in full.items())


@pytest.mark.behaviour("A-12", "H-05")
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_every_rank_takes_its_shards_of_a_full_state_dict(assign: bool) -> None:
    run_ranks(loads_exactly, 2, on_one_axis, uneven, assign)
    run_ranks(loads_exactly, 4, beside_tensor_parallelism, pairs, assign)
