"""Costs of collectives and computation: given, measured, and without effect on results."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.profiler import profile

from composable_fsdp import CommunicationPolicy, CommunicationState, FSDPModule, fully_shard
from composable_fsdp.codecs import ErrorFeedback, Int8
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, DivergenceError
from composable_fsdp.plugins.tuning import AxisCosts, CollectiveCost, Costs
from composable_fsdp.trace import Operation, Recorder
from tests._internals import MessageSizes, state_of
from tests.helpers.run_ranks import run_ranks
from tests.helpers.sharding import sharded
from tests.helpers.transports import COPIES, SOCKETS, TRANSPORTS, Environment

WIDTH = 512
LAYERS = ["0", "1", "2"]


def build(*, mesh: DeviceMesh | None = None, **options: Any) -> FSDPModule:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in LAYERS]
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    return sharded(fully_shard(nn.Sequential(*blocks), mesh=mesh, **options))


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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if two_axes else None
    model = build(mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)  # type: ignore[attr-defined]
    bits, choices = [], []
    for number, table in enumerate(tables):
        model.set_schedule(costs=table)
        bits.append(step(model, optimizer, number).numpy().tobytes())
        choice = model.schedule().choice
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
        model.set_schedule(costs=costs_of(latency))
        for number in range(2):
            step(model, optimizer, number)
        with Recorder() as recorder:
            step(model, optimizer, 2)
        counts.append(sum(event.operation is Operation.REDUCE for event in recorder))
    assert counts == [6, 3], "two gradient buckets in each of three groups, and one"
    choice = model.schedule().choice
    assert choice is not None
    assert choice.settings.grad_buckets == 1


@pytest.mark.parametrize("transport", [COPIES, SOCKETS], ids=["copies", "sockets"])
def test_a_long_latency_gives_fewer_reductions(transport: Environment) -> None:
    run_ranks(count_messages, 2, environment=transport)


def give_other_costs() -> None:
    model = build()
    with pytest.raises(
        DivergenceError,
        match=r"^set_schedule: rank 1 was given other costs than rank 0\. The first difference: \"latency\": 0\.002, "
        r"in place of \"latency\": 0\.001,\. Ranks that choose by other costs launch other collectives\.",
    ):
        model.set_schedule(costs=costs_of(1e-3 * (1 + dist.get_rank())))
    assert model.schedule().options.costs is None


def test_a_rank_with_other_costs_is_named() -> None:
    run_ranks(give_other_costs, 2, environment=SOCKETS)


def read_a_file_on_one_rank(path: str) -> None:
    model = build()
    if dist.get_rank() == 0:
        costs_of(1e-3).save(path)
    with pytest.raises(
        DivergenceError, match=r"^set_schedule: rank 1 was given other costs than rank 0.*no costs: .*other"
    ):
        model.set_schedule(costs=path if dist.get_rank() == 0 else f"{path} of other hosts")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        model.set_schedule(costs="nowhere")
    model.set_schedule(costs=path)
    assert model.schedule().options.costs == costs_of(1e-3)


def test_a_file_that_one_rank_lacks_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(read_a_file_on_one_rank, 2, str(tmp_path / "costs.json"), environment=SOCKETS)


def calibrate() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)  # type: ignore[attr-defined]
    known = build()
    known_optimizer = torch.optim.SGD(known.parameters(), 1e-4)  # type: ignore[attr-defined]
    for number in range(6):
        if number == 1:
            model.calibrate()
        assert step(model, optimizer, number).equal(step(known, known_optimizer, number))
        assert (model.schedule().options.costs is None) == (number < 3)
    costs = model.schedule().options.costs
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
    assert model.schedule().choice is not None


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_measured_costs_are_the_same_on_all_ranks_and_change_no_result(transport: Environment) -> None:
    run_ranks(calibrate, 2, environment=transport)


def test_calibrate_needs_a_step() -> None:
    run_ranks(refuse_no_steps, 2, environment=SOCKETS)


def refuse_no_steps() -> None:
    with pytest.raises(ConfigurationError, match=r"^steps must be an int of at least 1, not 0\.$"):
        build().calibrate(steps=0)


def give_costs_below_the_root() -> None:
    model = build()
    model.set_schedule(costs=costs_of(1e-3))
    inner = sharded(model[0])  # type: ignore[index]
    inner.set_schedule(costs=replace(costs_of(1e-3), forward={}, backward={}))
    with pytest.raises(ConfigurationError, match=r"Call set_schedule on the root\.$"):
        model(torch.randn(4, WIDTH))  # type: ignore[operator]


def test_costs_are_those_of_the_root() -> None:
    run_ranks(give_costs_below_the_root, 2, environment=SOCKETS)


def refuse_costs() -> None:
    model = build()
    with pytest.raises(ArgumentTypeError, match=r"^costs must be Costs, the path of a file or None, not dict\.$"):
        model.set_schedule(costs={})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"have the mesh axes \['dp'\], but not 'shard'\. Add it"):
        model.set_schedule(costs=replace(costs_of(1e-3), axes={"dp": costs_of(1e-3).axis("dp")}))
    with pytest.raises(
        ConfigurationError, match=r"mesh axes that the model does not have: 'dp'\. Its mesh axes are 'rep"
    ):
        model.set_schedule(
            costs=replace(costs_of(1e-3), axes={name: costs_of(1e-3).axis("") for name in ("dp", "shard")})
        )
    with pytest.raises(ConfigurationError, match=r"groups that the model does not have: '3'\. Its groups are '0', '1'"):
        model.set_schedule(costs=replace(costs_of(1e-3), backward={"2": 1e-3, "3": 1e-3}))
    assert model.schedule().options.costs is None
    times = dict.fromkeys(LAYERS if dist.get_rank() else reversed(LAYERS), 1e-2)
    model.set_schedule(costs=replace(costs_of(1e-3), forward=times))


def test_costs_that_do_not_fit_the_model_are_refused_when_given_and_their_order_is_free() -> None:
    run_ranks(refuse_costs, 2, environment=SOCKETS)


def calibrate_with_short_axes(shape: tuple[int, ...]) -> None:
    model = build(mesh=init_device_mesh("cpu", shape))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)  # type: ignore[attr-defined]
    model.calibrate(steps=1)
    for number in range(3):
        step(model, optimizer, number)
    choice, costs = model.schedule().choice, model.schedule().options.costs
    assert choice is not None
    assert costs is not None
    assert set(costs.axes) == ({"replicate"} if dist.get_world_size() > 1 else set())


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1)])
def test_an_axis_of_one_rank_needs_no_costs(shape: tuple[int, ...]) -> None:
    run_ranks(calibrate_with_short_axes, shape[0], shape, environment=SOCKETS)


def calibrate_two_meshes() -> None:
    ranks = list(range(dist.get_world_size()))
    other = DeviceMesh.from_group(cast(dist.ProcessGroup, dist.new_group(ranks)), "cpu")
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in LAYERS]
    fully_shard(blocks[1], mesh=other)
    model = sharded(fully_shard(nn.Sequential(*blocks)))
    model.calibrate(steps=1)
    for _ in range(3):
        model(torch.randn(4, WIDTH)).sum().backward()  # type: ignore[operator]
    costs = model.schedule().options.costs
    assert costs is not None
    assert set(costs.axes) == {"shard", "shard 2"}
    model.set_schedule(costs=costs)
    with pytest.raises(ConfigurationError, match=r"have the mesh axes \['shard'\], but not 'shard 2'"):
        model.set_schedule(costs=replace(costs, axes={"shard": costs.axis("shard")}))


def test_meshes_without_names_have_costs_of_their_own() -> None:
    run_ranks(calibrate_two_meshes, 2, environment=SOCKETS)


PAUSE = 0.2


def calibrate_beside_other_work() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)  # type: ignore[attr-defined]
    step(model, optimizer, 0)
    model[0][0].register_forward_hook(lambda *_: None if torch.is_grad_enabled() else time.sleep(PAUSE))  # type: ignore[index]
    model.calibrate()
    for number in range(3):
        time.sleep(PAUSE)  # loading data
        step(model, optimizer, number)
        with torch.no_grad():
            model(torch.randn(4, WIDTH))  # type: ignore[operator]
    costs = model.schedule().options.costs
    assert costs is not None
    assert max([*costs.forward.values(), *costs.backward.values()]) < PAUSE


def test_only_the_computation_of_forward_and_backward_is_measured() -> None:
    run_ranks(calibrate_beside_other_work, 2, environment=SOCKETS)


def count_choices(recorder: Recorder) -> int:
    return sum(event.operation is Operation.CHOOSE for event in recorder)


def accumulate() -> None:
    model = build()
    model.set_schedule(costs=costs_of(5e-3))
    counts = []
    with Recorder() as recorder:
        for number in range(8):
            model.set_requires_gradient_sync(number % 2 == 1)
            model(torch.randn(4, WIDTH)).sum().backward()  # type: ignore[operator]
            counts.append(count_choices(recorder))
    assert counts == [0, 0, *[1] * 6], "the first order is known, then gradients are held, then there is one choice"
    choice = model.schedule().choice
    assert choice is not None
    assert choice.settings.grad_buckets == 1, "as if the gradients were reduced"


def test_accumulation_neither_influences_a_choice_nor_repeats_it() -> None:
    run_ranks(accumulate, 2, environment=SOCKETS)


class Alternating(nn.Sequential):
    """Runs its first two modules in either order."""

    swaps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (1, 0, 2) if self.swaps else (0, 1, 2):
            x = self[index](x)
        return x


def see_a_choice_in_traces() -> None:
    model = build()
    step(model, torch.optim.SGD(model.parameters(), 1e-4), 0)  # type: ignore[attr-defined]
    model.set_schedule(costs=costs_of(5e-3))
    with Recorder() as recorder, profile() as profiled:
        model(torch.randn(4, WIDTH))  # type: ignore[operator]
    choice = model.schedule().choice
    assert choice is not None
    (event,) = (event for event in recorder if event.operation is Operation.CHOOSE)
    assert event.group == choice.summary
    assert event.group.startswith("zero_copy=")
    assert event.bytes == choice.peak_bytes
    assert event.begin < event.end
    assert f"FSDP::choose_schedule ({choice.summary})" in {each.name for each in profiled.events() or ()}


def test_a_choice_is_in_the_trace_and_in_profiles() -> None:
    run_ranks(see_a_choice_in_traces, 2, environment=SOCKETS)


def measure_again() -> None:
    model, known = build(), build()
    tables: list[Costs] = []
    optimizers = [torch.optim.SGD(each.parameters(), 1e-4) for each in (model, known)]  # type: ignore[attr-defined]
    for number in range(12):
        if number % 4 == 0:
            model.calibrate(steps=1)
        losses = [step(each, optimizer, number) for each, optimizer in zip((model, known), optimizers, strict=True)]
        assert losses[0].equal(losses[1])
        costs = model.schedule().options.costs
        if costs is not None and costs not in tables:
            tables.append(costs)
    assert known.schedule().options.costs is None, "nothing is measured before calibrate()"
    assert len(tables) == 3
    gathered: list[list[Costs]] = [[]] * 2
    dist.all_gather_object(gathered, tables)
    assert gathered[0] == gathered[1]


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_costs_that_are_measured_again_are_the_same_on_all_ranks(transport: Environment) -> None:
    run_ranks(measure_again, 2, environment=transport)


class Sleeping(nn.Linear):
    """Takes another time on each rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 * dist.get_rank())
        return super().forward(x)


def calibrate_beside_a_model_parallel_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    blocks = [Sleeping(WIDTH, WIDTH, bias=False) for _ in LAYERS]
    for block in blocks:
        parallelize_module(block, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        fully_shard(block, mesh=mesh["dp"])
    model = sharded(fully_shard(nn.Sequential(*blocks), mesh=mesh["dp"]))
    model.calibrate(steps=1)
    for _ in range(3):
        model(torch.randn(4, WIDTH)).sum().backward()  # type: ignore[operator]
    gathered: list[Costs | None] = [None] * 4
    dist.all_gather_object(gathered, model.schedule().options.costs)
    assert gathered[0] is not None
    assert gathered == [gathered[0]] * 4
    assert gathered[0].forward["0"] > 0.005, "a median of ranks that wait 0 to 30 ms"


def test_model_parallel_ranks_agree_on_costs() -> None:
    run_ranks(calibrate_beside_a_model_parallel_axis, 4, environment=SOCKETS)


def run_a_forward_on_one_rank() -> None:
    model = build(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)  # type: ignore[attr-defined]
    step(model, optimizer, 0)
    model(torch.randn(4, WIDTH)).sum().backward()  # type: ignore[operator]
    model.calibrate(steps=1)
    for _ in range(3 * (1 - dist.get_rank())):
        model(torch.randn(4, WIDTH))  # type: ignore[operator]
    for number in range(4):
        step(model, optimizer, number)
    assert model.schedule().options.costs is not None


def test_forwards_of_one_rank_that_gather_nothing_measure_nothing() -> None:
    run_ranks(run_a_forward_on_one_rank, 2, environment=SOCKETS)


def alternate() -> None:
    model = sharded(fully_shard(Alternating(*build())))  # type: ignore[misc]
    model.set_schedule(costs=costs_of(5e-3))
    counts = []
    with Recorder() as recorder:
        for swaps in (False, False, True, False, True, False, True, True, True):
            model.swaps = swaps  # type: ignore[attr-defined]
            model(torch.randn(4, WIDTH)).sum().backward()  # type: ignore[operator]
            counts.append(count_choices(recorder))
    assert counts == [0, *[1] * 7, 2], "a choice for the first order, and for one that came twice in a row"


def test_orders_that_alternate_do_not_repeat_a_choice() -> None:
    run_ranks(alternate, 2, environment=SOCKETS)


FEEDBACK = CommunicationPolicy(reduce_scatter=ErrorFeedback(Int8()), min_numel=1)


def change_messages() -> None:
    model, known = build(comm_policy=FEEDBACK), build(comm_policy=FEEDBACK)
    for each in (model, known):
        optimizer = torch.optim.SGD(each.parameters(), 1e-4)  # type: ignore[attr-defined]
        for number in range(4):
            if number == 2 and each is model:
                for block in model:  # type: ignore[attr-defined]
                    group = state_of(block).group
                    group.process_groups[0].message_sizes = MessageSizes(zero_copy=False)
                    before = group.plan
                    group.rebuild()
                    assert group.plan != before
            step(each, optimizer, number)
    states = [CommunicationState(each).state_dict() for each in (model, known)]  # type: ignore[arg-type]
    assert states[0].keys() == states[1].keys() != set()
    for name, state in states[0].items():
        assert state["rounds"] == states[1][name]["rounds"] == 4
        assert state["residual"].to_local().equal(states[1][name]["residual"].to_local())


def test_other_message_sizes_keep_the_residuals_of_error_feedback() -> None:
    run_ranks(change_messages, 2, environment=SOCKETS)


class Optional(nn.Module):
    """A block of which one layer is used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(256, 512), nn.Linear(512, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = cast(torch.Tensor, self.down(self.up(x).relu()))
        return y + self.extra(x) if dist.get_rank() == 0 else y


def choose_with_other_parameters() -> list[str]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Optional() for _ in range(3)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    draws, chosen = random.Random(0), []
    for _ in range(12):
        model(torch.ones(2, 256, requires_grad=True)).sum().backward()
        cost = CollectiveCost(10 ** draws.uniform(-6, -2), 10 ** draws.uniform(8, 10.5))
        seconds = dict.fromkeys("012", 10 ** draws.uniform(-4.5, -1.5))
        model.set_schedule(costs=Costs({"": AxisCosts(cost, cost, cost)}, seconds, seconds, copy_bandwidth=1e10))
        model(torch.ones(2, 256, requires_grad=True)).sum().backward()
        chosen.append(str(model.schedule().choice))
    return chosen


def test_ranks_that_use_different_parameters_choose_the_same() -> None:
    first, second = run_ranks(choose_with_other_parameters, 2, environment=SOCKETS)
    assert first == second
    assert len(set(first)) > 3
