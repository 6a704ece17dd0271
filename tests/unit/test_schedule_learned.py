"""Costs that are measured without a call: in virtual time, on a simulated network whose true costs are known."""

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
from tests._internals import StepTimes
from tests.helpers.sharding import sharded

DEVICE = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS, WIDTH, LAYERS, ROWS = 64, 4096, 2, 8192
LATENCY_US, BYTES_PER_US = 20.0, 5e4
STEPS_TO_LEARN = 7


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


def test_costs_are_measured_in_the_third_and_fourth_step_and_are_the_true_ones(network: Any) -> None:
    check_costs(network)


def check_costs(network: Any) -> None:
    """Learn the costs of ``network``, and compare them with the true ones."""
    model = build(network)
    step = stepper(model, network)
    for number in range(4):
        assert model.costs() is None, number
        step()
    step()
    costs = model.costs()
    assert costs is not None
    assert costs.source == f"measured on this job of {RANKS} ranks"
    (axis,) = costs.axes.values()
    for cost in (axis.all_gather, axis.reduce_scatter):
        assert cost.latency == pytest.approx(LATENCY_US * 1e-6, rel=0.01)
        assert cost.bandwidth == pytest.approx(BYTES_PER_US * 1e6, rel=0.01)
    flops = 2 * 2 * ROWS * WIDTH * 2 * WIDTH
    assert list(costs.forward) == [str(layer) for layer in range(LAYERS)], "the root has no parameters of its own"
    assert list(costs.forward.values()) == pytest.approx([flops / 450e12] * LAYERS, rel=0.05)
    assert model.schedule_choice() is not None


def test_the_choice_tells_the_measured_time_beside_the_predicted_one(network: Any) -> None:
    model = build(network)
    times = [s() for s in [stepper(model, network)] * 9]
    choice = model.schedule_choice()
    assert choice is not None
    assert choice.measured_seconds == pytest.approx(times[-1], rel=0.01)
    assert choice.seconds == pytest.approx(times[-1], rel=0.05)
    assert f"measured         {1e3 * choice.measured_seconds:.2f} ms per step" in str(choice)  # type: ignore[operator]


def test_a_network_that_changes_is_measured_again_within_seven_steps(network: Any) -> None:
    model = build(network)
    step = stepper(model, network)
    for _ in range(9):
        step()
    before = model.schedule_choice()
    network.latency = 5000.0
    slow = step()
    for _ in range(STEPS_TO_LEARN - 2):
        step()
    after = model.schedule_choice()
    assert before is not None
    assert after is not None
    assert after.settings.grad_buckets < before.settings.grad_buckets
    assert step() < 0.8 * slow
    costs = model.costs()
    assert costs is not None
    (axis,) = costs.axes.values()
    assert axis.all_gather.latency == pytest.approx(5e-3, rel=0.01)


def test_nothing_is_measured_if_the_user_has_given_costs_or_asked_for_deterministic_algorithms(network: Any) -> None:
    given, deterministic = build(network), build(network)
    given.set_costs(None)
    for _ in range(8):
        stepper(given, network)()
    assert given.costs() is None
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(8):
            stepper(deterministic, network)()
    finally:
        torch.use_deterministic_algorithms(False)
    assert deterministic.costs() is None


def test_nothing_is_measured_on_a_device_whose_events_have_no_times(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module("sim.device").Event, "elapsed_time")
    model = build(network)
    for _ in range(8):
        stepper(model, network)()
    assert model.costs() is None


def test_settings_of_the_user_are_kept(network: Any) -> None:
    model = build(network)
    model.set_prefetch_limit(0)
    for _ in range(6):
        stepper(model, network)()
    choice = model.schedule_choice()
    assert choice is not None
    assert choice.settings.prefetch_limit == 0


def test_a_step_that_measures_takes_no_longer_than_two(network: Any) -> None:
    model = build(network)
    times = [s() for s in [stepper(model, network)] * 9]
    assert max(times[2:]) <= 2 * times[1]


class Steps:
    """Steps with given times, of which a ``StepTimes`` compares some, as an iteration does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr("time.perf_counter", lambda: self.now)
        self.times = StepTimes(DEVICE)
        self.compared: list[int] = []
        """The steps that have compared times."""

    def run(self, count: int, seconds: Callable[[int], float], synchronized: Callable[[int], bool] = bool) -> list[int]:
        """Run steps ``1`` to ``count``, and restart after each change. Return the steps that have seen one."""
        changes = []
        for number in range(1, count + 1):
            has_changed = self.times.has_changed()
            if has_changed is not None:
                self.compared.append(number)
            if has_changed:
                changes.append(number)
                self.times.restart(has_changed=False)
            self.times.begin_step()
            self.now += seconds(number)
            self.times.end_step(synchronized=synchronized(number))
        return changes


@pytest.fixture(name="steps")
def _steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_steps_of_nearly_equal_times_have_not_changed_and_are_compared_rarely(steps: Steps) -> None:
    assert steps.run(300, lambda number: 1.0 + 0.09 * (number % 2)) == []
    assert len(steps.compared) < 40
    assert [number for number in steps.compared if number > 70] == [131, 195, 259]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_two_steps_in_a_row_of_another_time_are_a_change(steps: Steps, factor: float) -> None:
    assert steps.run(20, lambda number: factor if number >= 10 else 1.0)[:1] == [13]


def test_one_slow_step_is_no_change(steps: Steps) -> None:
    assert steps.run(60, lambda number: 5.0 if number % 7 == 0 else 1.0) == []


def test_steps_that_hold_gradients_are_not_compared(steps: Steps) -> None:
    is_last = [False, False, True]
    times = steps.run(
        60, lambda number: 2.0 if is_last[number % 3] else 1.0, synchronized=lambda number: is_last[number % 3]
    )
    assert times == []
    assert steps.compared, "those with a reduction are compared"


def test_measurements_that_change_no_settings_become_rare(steps: Steps) -> None:
    changes = steps.run(5000, lambda number: 1.0 + number // 7 % 3)
    assert len([number for number in changes if number < 300]) >= 8
    assert len([number for number in changes if number > 1000]) <= 5
