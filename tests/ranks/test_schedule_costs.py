"""Costs of collectives and computation: given, measured, and without effect on results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import AxisCosts, CollectiveCost, Costs, FSDPModule, fully_shard
from composable_fsdp.errors import ConfigurationError, DivergenceError
from composable_fsdp.testing import run_ranks
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.sharding import sharded
from tests.helpers.transports import COPIES, SOCKETS, TRANSPORTS, Environment

WIDTH = 512
LAYERS = ["0", "1", "2"]


def build(*, two_axes: bool = False) -> FSDPModule:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in LAYERS]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if two_axes else None
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return sharded(fully_shard(nn.Sequential(*blocks), mesh=mesh))


def costs_of(latency: float, seconds: float = 1e-2) -> Costs:
    cost = CollectiveCost(latency, 1e10)
    times = dict.fromkeys(LAYERS, seconds)
    return Costs({"": AxisCosts(cost, cost, cost)}, times, times, copy_bandwidth=1e10)


def step(model: FSDPModule, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    torch.manual_seed(10 * number + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(4, WIDTH)).square().sum()  # type: ignore[operator]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(tables: list[Costs | None], *, two_axes: bool = False) -> tuple[list[bytes], list[str]]:
    """Train a step with each table. Return the bits of losses and parameters, and the choices."""
    model = build(two_axes=two_axes)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)  # type: ignore[attr-defined]
    bits, choices = [], []
    for number, table in enumerate(tables):
        model.set_costs(table)
        bits.append(step(model, optimizer, number).numpy().tobytes())
        choice = model.schedule_choice()
        choices.append("" if choice is None else str(choice.settings))
    bits += [p.detach().to_local().numpy().tobytes() for p in model.parameters()]  # type: ignore[attr-defined]
    return bits, choices


ABSURD = [costs_of(5e-3), costs_of(0.0), costs_of(1e6), costs_of(1.0, seconds=0.0), costs_of(1e-9, seconds=1e6), None]


def compare_tables(two_axes: bool) -> None:
    known, none = train([None] * (1 + len(ABSURD)), two_axes=two_axes)
    chosen, choices = train([None, *ABSURD], two_axes=two_axes)
    assert chosen == known, "the bits of losses and parameters"
    assert none == [""] * (1 + len(ABSURD))
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, choices)
    assert gathered == [choices] * dist.get_world_size()
    assert choices[0] == choices[-1] == "", "no costs"
    assert all(choices[1:-1])


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_any_table_of_costs_gives_the_same_bits(transport: Environment) -> None:
    run_ranks(compare_tables, 2, False, environment=transport)


def test_any_table_of_costs_gives_the_same_bits_on_a_hybrid_mesh() -> None:
    run_ranks(compare_tables, 4, True, environment=SOCKETS)


def count_messages() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)  # type: ignore[attr-defined]
    counts = []
    for latency in (0.0, 5e-3):
        model.set_costs(costs_of(latency))
        for number in range(2):
            step(model, optimizer, number)
        with Recorder() as recorder:
            step(model, optimizer, 2)
        counts.append(sum(event.operation is Operation.REDUCE for event in recorder))
    assert counts == [6, 3], "two gradient buckets in each of three groups, and one"
    choice = model.schedule_choice()
    assert choice is not None
    assert choice.settings.grad_buckets == 1


@pytest.mark.parametrize("transport", [COPIES, SOCKETS], ids=["copies", "sockets"])
def test_a_long_latency_gives_fewer_reductions(transport: Environment) -> None:
    run_ranks(count_messages, 2, environment=transport)


def give_other_costs() -> None:
    model = build()
    with pytest.raises(
        DivergenceError,
        match=r"^set_costs: rank 1 was given other costs than rank 0\. The first difference: \"latency\": 0\.002, in "
        r"place of \"latency\": 0\.001,\. Ranks that choose by other costs launch other collectives\.",
    ):
        model.set_costs(costs_of(1e-3 * (1 + dist.get_rank())))
    assert model.costs() is None


def test_a_rank_with_other_costs_is_named() -> None:
    run_ranks(give_other_costs, 2, environment=SOCKETS)


def calibrate() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)  # type: ignore[attr-defined]
    known = build()
    known_optimizer = torch.optim.SGD(known.parameters(), 1e-4)  # type: ignore[attr-defined]
    for number in range(6):
        if number == 1:
            model.calibrate()
        assert step(model, optimizer, number).equal(step(known, known_optimizer, number))
        assert (model.costs() is None) == (number < 3)
    costs = model.costs()
    assert costs is not None
    assert costs.source == "measured on this job of 2 ranks"
    assert set(costs.forward) == set(costs.backward) == set(LAYERS)
    assert all(0 < times[name] < 10 for times in (costs.forward, costs.backward) for name in LAYERS)
    for axis in costs.axes.values():
        for cost in (axis.all_gather, axis.reduce_scatter, axis.all_reduce):
            assert 0 <= cost.latency < 0.1
            assert 1e6 < cost.bandwidth < 1e13
    gathered: list[Costs | None] = [None, None]
    dist.all_gather_object(gathered, costs)
    assert gathered == [costs, costs]
    assert model.schedule_choice() is not None


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_measured_costs_are_the_same_on_all_ranks_and_change_no_result(transport: Environment) -> None:
    run_ranks(calibrate, 2, environment=transport)


def test_calibrate_needs_a_step() -> None:
    run_ranks(refuse_no_steps, 2, environment=SOCKETS)


def refuse_no_steps() -> None:
    with pytest.raises(ConfigurationError, match=r"^steps must be an int of at least 1, not 0\.$"):
        build().calibrate(steps=0)


def set_costs_below_the_root() -> None:
    model = build()
    model.set_costs(costs_of(1e-3))
    inner = sharded(model[0])  # type: ignore[index]
    inner.set_costs(replace(costs_of(1e-3), source="other"))
    with pytest.raises(ConfigurationError, match="Call set_costs on the root only"):
        model(torch.randn(4, WIDTH))  # type: ignore[operator]


def test_costs_are_those_of_the_root() -> None:
    run_ranks(set_costs_below_the_root, 2, environment=SOCKETS)
