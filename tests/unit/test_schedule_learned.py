"""Nothing is measured without a call, and ``calibrate`` finds the true costs of a simulated network in virtual time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests._internals import (
    gather_messages,
    gradient_messages,
    state_of,
)
from tests.helpers.sharding import sharded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS, WIDTH, LAYERS, ROWS = 64, 4096, 2, 8192
LATENCY_US, BYTES_PER_US = 20.0, 5e4


@contextmanager
def virtual_network() -> Iterator[Any]:
    """Yield a simulated network of which this process is a rank, with its ``mesh``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        simulated: ModuleType = importlib.import_module("sim.network")
        device: ModuleType = importlib.import_module("sim.device")
        network = simulated.Network(device.Device(flops=450e6, bandwidth=3.5e6), BYTES_PER_US, LATENCY_US)
        with simulated.simulated_ranks(network, RANKS) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
            network.mesh = mesh
            with device.Charging(network.device):
                yield network


@pytest.fixture(name="network")
def _network() -> Iterator[Any]:
    with virtual_network() as network:
        yield network


def build(network: Any) -> FSDPModule:
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    for block in blocks:
        fully_shard(block, mesh=network.mesh)
    return sharded(fully_shard(nn.Sequential(*blocks), mesh=network.mesh))


def stepper(model: Any, network: Any) -> Callable[[], float]:
    """Return a function that runs a step and returns its virtual seconds."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def step() -> float:
        network.finish()
        model(x).sum().backward()
        return float(network.finish()) * 1e-6

    return step


def test_nothing_is_measured_or_chosen_without_a_call(network: Any) -> None:
    model = build(network)
    times = [s() for s in [stepper(model, network)] * 12]
    assert model.schedule().options.costs is None
    assert model.schedule().choice is None
    assert times[2:] == [times[1]] * 10, "no step measures anything"


def test_by_default_a_group_has_one_message_in_each_direction(network: Any) -> None:
    model = build(network)
    step = stepper(model, network)
    step()
    with Recorder() as recorder:
        step()
    reduced = [event.group for event in recorder if event.operation is Operation.REDUCE]
    assert sorted(reduced) == [str(layer) for layer in range(LAYERS)]
    plans = [state_of(block).group.plan for block in model]  # type: ignore[attr-defined]
    assert [(gather_messages(plan), gradient_messages(plan)) for plan in plans] == [(1, (1,))] * LAYERS


def test_calibrate_finds_the_true_costs(network: Any) -> None:
    check_costs(network)


def check_costs(network: Any) -> None:
    """Learn the costs of ``network``, and compare them with the true ones."""
    model = build(network)
    step = stepper(model, network)
    step()
    model.calibrate()
    for number in range(2):
        step()
        assert model.schedule().options.costs is None, number
    step()
    costs = model.schedule().options.costs
    assert costs is not None
    assert costs.source == f"measured on this job of {RANKS} ranks"
    (axis,) = costs.axes.values()
    for cost in (axis.all_gather, axis.reduce_scatter):
        assert cost.latency == pytest.approx(LATENCY_US * 1e-6, rel=0.01)
        assert cost.bandwidth == pytest.approx(BYTES_PER_US * 1e6, rel=0.01)
    flops = 2 * 2 * ROWS * WIDTH * 2 * WIDTH
    assert list(costs.forward) == [str(layer) for layer in range(LAYERS)], "the root has no parameters of its own"
    assert list(costs.forward.values()) == pytest.approx([flops / 450e12] * LAYERS, rel=0.05)
    assert model.schedule().choice is not None


def allow_memory(patch: pytest.MonkeyPatch) -> None:
    """Let choices take more memory, so that reducing large groups in buckets is one of them."""
    patch.setattr("composable_fsdp.plugins.tuning.choose.EXTRA_BYTES", 1 << 40)


def test_a_network_that_changes_is_measured_again_by_another_call(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_memory(monkeypatch)
    model = build(network)
    step = stepper(model, network)
    step()

    def calibrated() -> tuple[Any, float]:
        model.calibrate()
        for _ in range(4):
            step()
        return model.schedule().choice, step()

    before, _ = calibrated()
    network.latency = 5000.0
    slow = step()
    after, seconds = calibrated()
    assert after.settings.grad_buckets < before.settings.grad_buckets
    assert seconds < 0.8 * slow
    assert after.seconds == pytest.approx(seconds, rel=0.05)
    costs = model.schedule().options.costs
    assert costs is not None
    (axis,) = costs.axes.values()
    assert axis.all_gather.latency == pytest.approx(5e-3, rel=0.01)


def test_no_table_of_costs_goes_back_to_the_default(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_memory(monkeypatch)
    model = build(network)
    step = stepper(model, network)
    times = [step(), step()]
    plans = [state_of(block).group.plan for block in model]  # type: ignore[attr-defined]
    model.calibrate()
    for _ in range(4):
        step()
    assert [state_of(block).group.plan for block in model] != plans, "a choice took effect"  # type: ignore[attr-defined]
    model.set_schedule(costs=None)
    step()
    assert model.schedule().choice is None
    assert [state_of(block).group.plan for block in model] == plans  # type: ignore[attr-defined]
    assert step() == times[1]


def test_settings_of_the_user_are_kept(network: Any) -> None:
    model = build(network)
    model.set_schedule(prefetch_limit=0)
    model.calibrate()
    for _ in range(4):
        stepper(model, network)()
    choice = model.schedule().choice
    assert choice is not None
    assert choice.settings.prefetch_limit == 0


def test_a_step_that_measures_takes_no_longer_than_two(network: Any) -> None:
    model = build(network)
    step = stepper(model, network)
    times = [step(), step()]
    model.calibrate()
    assert max(step() for _ in range(5)) <= 2 * times[1]
