"""Forwards without gradients before, between and after training steps leave training unchanged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import DivergenceError, MixedPrecisionPolicy, PeerError, fully_shard
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import values_of
from tests.helpers.transports import TRANSPORTS

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


WIDTH = 16


def linears(dtype: torch.dtype | None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    policy = MixedPrecisionPolicy(dtype)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with torch.inference_mode():  # tensors made here must not be inference tensors
        for layer in (*model, model):
            fully_shard(layer, mp_policy=policy)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_linears(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def change_shards(model: nn.Module, factor: float) -> None:
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            parameter.mul_(factor)
    dist.barrier()


@torch.no_grad()
def infer_unequally(model: Any, mode: str, *, by_hand: bool) -> None:
    """Run forwards on rank 1 only, which must not see what rank 0 writes to its shards."""
    x, modules = torch.ones(3, WIDTH), (*model, model)
    expected = model(x).clone()
    for module in modules:
        module.reshard()
        module.set_reshard_after_forward(False)
        if by_hand:
            module.unshard()
    if not by_hand:
        model(x)
    with MODES[mode]():
        for _ in range(2 * dist.get_rank()):
            assert torch.equal(model(x), expected)
    dist.barrier()
    change_shards(model, 2.0)
    with MODES[mode]():
        for _ in range(dist.get_rank()):
            assert torch.equal(model(x), expected)
    dist.barrier()
    change_shards(model, 0.5)
    for module in modules:
        module.reshard()


@torch.no_grad()
def infer_after_pass(model: Any, mode: str, previous_pass: str) -> None:
    """Keep parameters unsharded after a training pass; rank 1 runs forwards with them, rank 0 none."""
    x, modules = torch.ones(3, WIDTH), (*model, model)
    expected = model(x).clone()
    for module in modules:
        module.reshard()
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
    with torch.enable_grad():
        loss = model(x).square().mean()
    for is_changed in (False, True):
        if previous_pass == "backward" and not is_changed:
            loss.backward()
        with MODES[mode]():
            for _ in range(2 * dist.get_rank()):
                assert torch.equal(model(x), expected)
        dist.barrier()
        if previous_pass == "backward":
            change_shards(model, 0.5 if is_changed else 2.0)
    if previous_pass == "forward":
        loss.backward()
    for module in modules:
        module.set_reshard_after_backward(True)
        module.reshard()
    model.zero_grad()


def go_on_unequally(model: Any, optimizer: torch.optim.Optimizer) -> None:
    if dist.get_rank() == 0:
        train_linears(model, optimizer)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(3, WIDTH))


@pytest.mark.behaviour("C-10", "J-04")
@on_ranks(2, transports=TRANSPORTS)
def test_ranks_may_run_different_numbers_of_forwards_that_communicate_nothing() -> None:
    for dtype in (None, torch.bfloat16):
        model, optimizer = linears(dtype)
        for mode in MODES:
            for by_hand in (True, False):
                infer_unequally(model, mode, by_hand=by_hand)
            for previous_pass in ("forward", "backward"):
                infer_after_pass(model, mode, previous_pass)
        found, wanted = train_linears(model, optimizer), train_linears(*linears(dtype))
        for name, value in found.items():
            assert torch.equal(value, wanted[name]), name
        infer_unequally(model, "no_grad", by_hand=True)  # parameters gathered after a step must not be gathered again
    model, optimizer = linears(None)
    with pytest.raises((DivergenceError, PeerError), match=r"(?s)rank 1: all-gather of .* in forward"):
        go_on_unequally(model, optimizer)
    model.reset_iter_state()
    train_linears(model, optimizer)


@pytest.mark.behaviour("C-10")
@on_ranks(2)
def test_all_groups_are_sharded_after_a_validation_forward() -> None:
    """With the default, a group stays unsharded only after a forward with gradients, and only the root's."""
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    fully_shard(model)
    for mode in MODES.values():
        with mode():
            model(torch.ones(1, 3))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(torch.ones(1, 3))
    assert [name for name, p in model.named_parameters() if not isinstance(p, DTensor)] == ["1.weight", "1.bias"]
    model.reshard()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
