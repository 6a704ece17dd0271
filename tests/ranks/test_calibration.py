"""``calibrate`` where ranks are not alike: it is interrupted on one, or they have other clocks, loads or costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard
from composable_fsdp.errors import DivergenceError, PeerError
from composable_fsdp.plugins.tuning import AxisCosts, CollectiveCost, Costs
from tests._internals import Calibration
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import SOCKETS, TRANSPORTS, Environment

WIDTH = 64
LAYERS = ["0", "1", "2"]
STEPS = 4


def build(*, hybrid: bool = False) -> Any:
    shape, names = ((2, 2), ("replicate", "shard")) if hybrid else ((dist.get_world_size(),), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in LAYERS))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: Any, number: int) -> torch.Tensor:
    torch.manual_seed(10 * number + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(4, WIDTH)).square().sum()
    loss.backward()
    model.zero_grad()
    return loss.detach()


def one_table(model: Any) -> Any:
    """Return the costs of ``model``, if any, after a check that all ranks have the same."""
    found: list[Costs | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, model.schedule().options.costs)
    assert found == found[:1] * len(found)
    return found[0]


# -- interrupted


def interrupt(kind: type[BaseException], *_: object) -> None:
    raise kind("interrupted")


@contextmanager
def interrupted(model: Any, point: str, kind: type[BaseException]) -> Any:
    """Interrupt a step of this rank at ``point``."""
    if point == "collective":
        with mock.patch("composable_fsdp.plugins.tuning.calibration.measure_collective", partial(interrupt, kind)):
            yield
        return
    register = model[1].register_forward_pre_hook if point == "forward" else model[1].register_full_backward_pre_hook
    handle = register(partial(interrupt, kind))
    try:
        yield
    finally:
        handle.remove()


def interrupt_one_rank(point: str, kind: type[BaseException], at: int) -> None:
    model, known = build(), build()
    is_interrupted = dist.get_rank() == dist.get_world_size() - 1
    around = interrupted(model, point, kind) if is_interrupted else nullcontext()
    calls = [partial(model.calibrate, steps=STEPS), *(partial(step, model, number) for number in range(at + 1))]
    if point == "collective":
        del calls[1:]
    for call in calls[:-1]:
        call()
    with pytest.raises(kind if is_interrupted else (PeerError, DivergenceError)), around:
        calls[-1]()
    model.reset_iter_state()
    assert model.schedule().options.costs is None, "the measurement has ended"
    model.calibrate(steps=STEPS)
    for number in range(2 * STEPS):
        assert step(model, number).equal(step(known, number))
        one_table(model)
    assert model.schedule().options.costs is not None, "another one ran on all ranks"


@pytest.mark.parametrize("point", ["forward", "backward", "collective"])
@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
def test_an_interruption_on_one_rank_ends_the_measurement_on_all(point: str, kind: type[BaseException]) -> None:
    at = {"forward": 0, "backward": STEPS - 1, "collective": 0}[point]
    run_ranks(interrupt_one_rank, 2, point, kind, at, environment=SOCKETS)


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_an_interruption_on_one_of_four_ranks_ends_the_measurement_on_all(transport: Environment) -> None:
    run_ranks(interrupt_one_rank, 4, "backward", ArithmeticError, 1, environment=transport)


# -- other clocks and loads


def calibrate_with_another_clock(clock: Callable[[float], float], hybrid: bool) -> None:
    model = build(hybrid=hybrid)
    is_other = dist.get_rank() == dist.get_world_size() - 1
    real = time.perf_counter
    around = mock.patch("time.perf_counter", partial(read, clock, real)) if is_other else nullcontext()
    with around:
        model.calibrate(steps=3)
        for number in range(5):
            step(model, number)
    costs = one_table(model)
    assert set(costs.forward) == set(costs.backward) == set(LAYERS)
    assert model.schedule().choice is not None
    choices: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(choices, str(model.schedule().choice))
    assert len(set(choices)) == 1


def read(clock: Callable[[float], float], real: Callable[[], float]) -> float:
    return clock(real())


def faster(seconds: float) -> float:
    return 3 * seconds - 1e9


def slower(seconds: float) -> float:
    return seconds / 3 + 1e9


def stopped(seconds: float) -> float:
    return 1.0


def backwards(seconds: float) -> float:
    return -seconds


@pytest.mark.parametrize("clock", [faster, slower, stopped, backwards])
def test_ranks_with_different_clocks_agree_on_one_table(clock: Callable[[float], float]) -> None:
    run_ranks(calibrate_with_another_clock, 2, clock, False, environment=SOCKETS)


@pytest.mark.parametrize("hybrid", [False, True])
def test_four_ranks_with_different_clocks_agree_on_one_table(hybrid: bool) -> None:
    run_ranks(calibrate_with_another_clock, 4, faster, hybrid, environment=SOCKETS)


PAUSE = 0.1


def calibrate_beside_a_loaded_rank() -> None:
    model = build()
    for number in range(8):  # ranks compare their operations in the first steps, and wait for each other to do so
        step(model, number)
    if dist.get_rank() == 1:
        model[1][0].register_forward_hook(lambda *_: time.sleep(PAUSE))
    model.calibrate(steps=2)
    for number in range(4):
        step(model, number)
    costs = one_table(model)
    assert costs.forward["1"] > 0.8 * PAUSE, "all ranks wait for the loaded one"
    assert max(costs.forward["0"], costs.forward["2"]) < PAUSE, "whose waits are in no other group"
    choice = model.schedule().choice
    assert choice.seconds > 0.8 * PAUSE


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_table_has_the_computation_of_the_slowest_rank(ranks: int) -> None:
    run_ranks(calibrate_beside_a_loaded_rank, ranks, environment=SOCKETS)


# -- the host's work


def calibrate_beside_slow_hooks() -> None:
    model = build()
    step(model, 0)
    real = Calibration.leave

    def leave(*arguments: Any, **options: Any) -> None:
        time.sleep(PAUSE / 10)  # as if the runtime worked so long
        real(*arguments, **options)

    with mock.patch.object(Calibration, "leave", leave):
        model.calibrate(steps=2)
        for number in range(4):
            step(model, number)
    costs = one_table(model)
    for times in (costs.forward, costs.backward):
        assert all(seconds > PAUSE / 10 for seconds in times.values())


def test_the_work_of_hooks_is_part_of_the_costs_where_waits_block_the_host() -> None:
    run_ranks(calibrate_beside_slow_hooks, 2, environment=SOCKETS)


# -- other costs


def give_costs(other_rank: int, hybrid: bool) -> None:
    model = build(hybrid=hybrid)
    cost = CollectiveCost(2e-3 if dist.get_rank() == other_rank else 1e-3, 1e10)
    with pytest.raises(DivergenceError, match=rf"^set_schedule: rank {other_rank} was given other costs.*latency"):
        model.set_schedule(costs=Costs({"": AxisCosts(cost, cost, cost)}))
    assert model.schedule().options.costs is None


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_rank_with_other_costs_is_named(hybrid: bool) -> None:
    run_ranks(give_costs, 4, 2, hybrid, environment=SOCKETS)
