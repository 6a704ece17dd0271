"""Test parameters that are frozen in all or some groups at any time, and inputs with and without gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import FSDPModule, checkpoint, fully_shard, no_sync
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.assert_trace import ledger
from tests.helpers.models import TASKS, Transformer, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.training import check_parity, play_task
from tests.helpers.transports import TRANSPORTS


def frozen_transformer(*prefixes: str) -> nn.Module:
    model = seeded(Transformer, tied=False, depth=3)()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


FROZEN = {
    "a whole group": ("layers.1.",),
    "the first groups": ("embedding", "layers.0.", "layers.1."),
    "part of every group": ("layers.0.qkv", "layers.0.norm", "layers.1.mlp", "layers.2.out", "norm"),
    "all but one parameter": ("embedding", "layers.", "norm.bias", "head"),
    "the last groups": ("layers.2.", "norm", "head"),
}


@pytest.mark.behaviour("C-05")
@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (2, False), (4, 2)])
@on_ranks("world_size")
def test_frozen_parameters_stay_as_they_are_and_the_others_train(reshard: bool | int | None) -> None:
    for what, prefixes in FROZEN.items():
        with Recorder() as recorder:
            build = partial(frozen_transformer, *prefixes)
            model = check_parity(build, play_task("transformer"), what=what, reshard_after_forward=reshard)
        assert ledger(recorder) == {}, what
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert frozen == [name for name, _ in model.named_parameters() if name.startswith(prefixes)]
        reduced = {e.group for e in recorder if e.operation is Operation.REDUCE}
        if what == "a whole group":
            assert reduced == {"root", "layers.0", "layers.2"}  # no collective runs for the frozen group


@pytest.mark.behaviour("C-05")
@on_ranks(2)
def test_frozen_groups_that_are_kept_are_gathered_once_and_after_changes() -> None:
    task, gathered = TASKS["transformer"], []
    at_rest: dict[nn.Module, list[nn.Parameter]] = {}
    build = partial(frozen_transformer, "layers.0.", "layers.1.")

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        parameters = at_rest.setdefault(model, list(model.get_submodule("layers.1").parameters()))
        if step == 2:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.clamp_(-0.05, 0.05)
        with Recorder() as recorder:
            loss = task.loss(model, task.batch_of(step, rank))
            loss.backward()
        if isinstance(model, FSDPModule):
            gathered.append({event.group for event in recorder if event.operation is Operation.UNSHARD})
        return loss.detach()

    def shard(model: Any) -> None:
        shard_layers(model, fully_shard, reshard_after_forward=False)
        model.set_reshard_after_backward(False)

    check_parity(build, play, shard=shard, steps=4)
    trained = {"root", "layers.2"}
    assert gathered == [{*trained, "layers.0", "layers.1"}, trained, {*trained, "layers.1"}, trained]


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


LOOKS: dict[str, Callable[[FSDPModule], object]] = {
    "nobody": lambda model: None,
    "unshard": lambda model: model.unshard(),
    "a checkpoint": lambda model: checkpoint.state_dict(cast(nn.Module, model)),
    "load_state_dict": lambda model: cast(nn.Module, model).load_state_dict(cast(nn.Module, model).state_dict()),
}
"""The first call that can detect that parameters were frozen."""


@pytest.mark.behaviour("C-05", "C-07")
@on_ranks(2, transports=TRANSPORTS)
def test_parameters_can_be_frozen_while_gradients_are_in_flight() -> None:
    for summed, look in itertools.product(("reduced", "sharded", "unsharded"), LOOKS):
        freeze_in_flight(summed, look)


def freeze_in_flight(summed: str, look: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = seeded(Layered)(), seeded(Layered)()
    fully_shard(model)

    def step(of: nn.Module, microbatch: int, of_rank: int, factor: float) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * microbatch + of_rank))
        (of(x).square().mean() * factor).backward()

    for microbatch in range(3):
        is_last = microbatch == 2
        model.set_is_last_backward(is_last)
        if microbatch == 1:  # the gradients of the first layer may still be in flight
            for frozen in (model, reference):
                frozen.get_submodule("first").requires_grad_(False)
            LOOKS[look](model)
        holds = summed != "reduced" and not is_last
        with no_sync(model, sharded=summed == "sharded") if holds else nullcontext():
            step(model, microbatch, rank, 1.0)
        for other in range(size):
            step(reference, microbatch, other, 1 / size)
    for (name, parameter), unsharded in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert unsharded.grad is not None, name
        torch.testing.assert_close(parameter.grad.full_tensor(), unsharded.grad, msg=f"{summed}, {look}: {name}")


def freeze_between(flips: bool, *, reshard: bool | int) -> None:
    """Check, as in torch, that backward skips parameters frozen since forward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = seeded(Layered)(), seeded(Layered)()
    for layer in (*model.children(), model):
        fully_shard(layer, reshard_after_forward=reshard)
    for _ in range(3):
        batches = torch.randn(size, 3, 6, generator=torch.Generator().manual_seed(0))
        for each in (model, reference):
            each.zero_grad()
            each.second.requires_grad_(not flips)
        loss = model(batches[rank]).square().mean()
        expected = torch.stack([reference(batch).square().mean() for batch in batches]).mean()
        for each in (model, reference):
            each.second.requires_grad_(flips)
        loss.backward()
        expected.backward()
        for (name, parameter), unsharded in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (parameter.grad is None) == (unsharded.grad is None), name
            if parameter.grad is not None and unsharded.grad is not None:
                torch.testing.assert_close(parameter.grad.full_tensor(), unsharded.grad)


@pytest.mark.behaviour("C-05")
@pytest.mark.parametrize("flips", [False, True], ids=["frozen", "thawed"])
@on_ranks(2, transports=TRANSPORTS)
def test_parameters_can_be_frozen_between_forward_and_backward(flips: bool) -> None:
    freeze_between(flips, reshard=True)


@pytest.mark.behaviour("C-05")
@on_ranks(4)
def test_parameters_can_be_frozen_between_forward_and_backward_beside_their_slices() -> None:
    freeze_between(False, reshard=2)
    freeze_between(True, reshard=2)


@pytest.mark.behaviour("C-05")
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_parameters_frozen_while_unsharded_train_once_they_are_thawed(reshard: bool) -> None:
    """Freeze a layer in one form, and thaw it in the other, before any all-gather has followed."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in (model[0], model[1]):
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for frozen in (model[2], model[1], model):
        loss = model(torch.ones(1, 4)).square().sum()
        frozen.requires_grad_(False)
        loss.backward()
        assert isinstance(model[2].weight, DTensor)
        frozen.requires_grad_(True)
        model.zero_grad()
        for _ in range(2):
            model(torch.ones(1, 4)).square().sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            model.zero_grad()
