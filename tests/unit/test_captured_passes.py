"""Capture of steps into CUDA graphs, on the stand-in for NCCL, which keeps the rules of captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import CommunicationPolicy, CPUOffloadPolicy, ErrorFeedback, Int8, fully_shard
from composable_fsdp.errors import LifecycleError
from tests.helpers.simulated_offload import simulated_offload
from tests.helpers.stream_training import WIDTH, Block, alone, with_unused
from tests.simulation import SimulatedAccelerator, simulated_accelerator
from tests.simulation.nccl import VARIANTS, stands_in

Step = Callable[[], object]


def make(mesh: Any, build: Callable[..., Any] = nn.Sequential, **options: Any) -> tuple[Any, Step]:
    """Return a sharded model, and a function that trains one step."""
    torch.manual_seed(0)
    model = build(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def loss(model: Any) -> torch.Tensor:
    return model(torch.ones(8, WIDTH)).square().sum()


def capture(device: SimulatedAccelerator, step: Step) -> None:
    """Capture ``step`` on a stream of its own, after all work, as ``torch.cuda.graph`` does, and wait for it."""
    torch.cpu.synchronize()
    side: Any = torch.cpu.Stream()
    with torch.cpu.stream(side), device.capture():
        step()
    torch.cpu.synchronize()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_hybrid", [False, True], ids=["sharded", "hybrid"])
def test_a_step_can_be_captured_and_steps_after_it_train(variant: str, is_hybrid: bool) -> None:
    with stands_in(variant, alone=True), alone() as mesh, simulated_accelerator() as device:
        model, step = make(mesh if is_hybrid else mesh["shard"])
        for _ in range(3):
            step()
        before = model[0].layers[0].weight.to_local().clone()
        capture(device, step)
        capture(device, lambda: (loss(model).backward(), loss(model).backward()))
        step()
        assert not torch.equal(model[0].layers[0].weight.to_local(), before)
    assert device.races == []


def hold(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    loss(model).backward()
    model.set_requires_gradient_sync(True)


def leave_in_flight(model: Any) -> None:
    model.set_is_last_backward(False)
    loss(model).backward()
    model.set_is_last_backward(True)


FEEDBACK = CommunicationPolicy(reduce_scatter=ErrorFeedback(Int8()), min_numel=1)
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], object], str]] = {
    "offload": ({"offload_policy": CPUOffloadPolicy()}, id, "the host waits for offloaded gradients. Keep the param"),
    "feedback": ({"comm_policy": FEEDBACK}, id, "the residuals of ErrorFeedback after each.*without ErrorFeedback"),
    "unused": ({"build": with_unused}, id, "which unused parameters have a gradient.*set_reduce_scatter_unused_params"),
    "held": ({}, hold, "gradients of an earlier backward are not reduced.*all microbatches, or none of them"),
    "in flight": ({}, leave_in_flight, r"earlier backward are still being reduced.*set_is_last_backward\(True\)"),
    "gathered": ({}, lambda m: m[0].unshard(), r"gathered before the capture.*Call reshard\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_with_the_reason(name: str) -> None:
    options, prepare, match = REFUSED[name]
    with stands_in("nccl", alone=True), alone() as mesh, simulated_accelerator() as device, simulated_offload():
        model, step = make(mesh["shard"], **options)
        for _ in range(3):
            step()
        prepare(model)
        with pytest.raises(LifecycleError, match=f"captured into a CUDA graph, but .*{match}.*cuda-graphs.md"):
            capture(device, step)
        model.reset_iter_state()
        step()


def test_the_first_forward_and_a_backward_without_its_forward_are_refused() -> None:
    with stands_in("nccl", alone=True), alone() as mesh, simulated_accelerator() as device:
        model, step = make(mesh["shard"])
        with pytest.raises(LifecycleError, match=r"compares ranks on the host.*Run some steps before the capture"):
            capture(device, step)
        model.reset_iter_state()
        step()
        value = loss(model)
        with pytest.raises(LifecycleError, match=r"the forward of this backward was not captured. Capture both"):
            capture(device, value.backward)
