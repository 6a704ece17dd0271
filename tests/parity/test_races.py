"""Training on a simulated accelerator has no races, and the same results in other orders. Each wait is needed."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_fsdp.checkpoint import Full, Sharded, load_state_dict, state_dict
from composable_fsdp.trace import TraceEvent, listeners
from tests._internals import ReductionQueue, layout, pinned_bytes
from tests.helpers.stream_training import BF16, TRAININGS, WIDTH, Block, alone, train, with_unused
from tests.parity.test_fuzz import DrawnPrograms
from tests.planted_faults import EXPLAINED, reached_by, sites, try_fault
from tests.simulation import SimulatedEvent, SimulatedStream, simulated_accelerator
from tests.simulation.nccl import stands_in
from tests.simulation.stream_group import StreamWork
from tests.stream_fuzz import alone as one_of
from tests.stream_fuzz import problems_of

ROWS = {"values of rank 0": "A-15", "offload": "D-02"}
"""Behaviours that need an accelerator, and the trainings that show them."""


def marked(name: str) -> Any:
    rows = [row for start, row in ROWS.items() if name.startswith(start)]
    return pytest.param(name, marks=pytest.mark.behaviour("M-01", "M-02", *rows))


@pytest.mark.parametrize("name", [marked(name) for name in TRAININGS])
def test_training_has_no_races_and_the_same_results_in_another_order(name: str) -> None:
    with simulated_accelerator(records=True) as device:
        TRAININGS[name]()
    assert [str(race) for race in device.races] == []
    assert device.run_late(seed=len(name)) == []


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
def test_fsdp2_of_torch_has_neither(is_bf16: bool) -> None:
    options: dict[str, Any] = {"mp_policy": TorchMixedPrecisionPolicy(**BF16)} if is_bf16 else {}
    with alone() as mesh, simulated_accelerator(records=True) as device:
        train(mesh["shard"], library=torch_fully_shard, **options)
    assert [str(race) for race in device.races] == []
    assert [device.run_late(seed) for seed in range(5)] == [[]] * 5


def test_drawn_programs_have_neither() -> None:
    drawn = [program for program in DrawnPrograms(8, 2).map_drawn() if program.placing is None]
    with one_of(2, rank=1) as meshes:
        assert [problems_of(program, meshes, orders=2) for program in drawn] == [[]] * len(drawn)


@pytest.mark.parametrize("name", ["unfused, hybrid", "after exceptions, hybrid"])
def test_events_and_works_are_freed_without_the_garbage_collector(name: str) -> None:
    """It runs in any thread, also in that of the watchdog, where the end of an event makes a context on device 0."""
    made, alive = count(), WeakSet[object]()
    gc.collect()

    def noting(kind: type[Any]) -> Any:
        original = kind.__init__

        def initialize(self: object, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            alive.add(self)
            next(made)

        return mock.patch.object(kind, "__init__", initialize)

    gc.disable()
    try:
        with noting(SimulatedEvent), noting(StreamWork), stands_in("nccl2", alone=True), simulated_accelerator():
            TRAININGS[name]()
        assert list(alive) == []
    finally:
        gc.enable()
    assert next(made) > 50


@pytest.mark.parametrize("limit", [None, 2])
def test_backwards_that_leave_reductions_in_flight_have_neither(limit: int | None) -> None:
    seen: list[bool] = []
    send = ReductionQueue.send

    def noting(queue: Any, state: Any, *, at_end: bool = False) -> None:
        seen.append(queue.are_in_flight)
        send(queue, state, at_end=at_end)

    def prepare(model: Any) -> None:
        model.set_schedule(prefetch_limit=2, max_fused_bytes=0)
        if limit is not None:
            model.set_reduce_scatter_max_input_buffers(limit)

    with (
        mock.patch.object(ReductionQueue, "send", noting),
        alone() as mesh,
        simulated_accelerator(records=True) as device,
    ):
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        earlier = dict.fromkeys(range(3), 2)
        train(mesh["shard"], prepare=prepare, earlier=earlier, hold="set_is_last_backward", mp_policy=precision)
    assert {True, False} == set(seen)
    assert (device.races, device.run_late(seed=1)) == ([], [])


@pytest.mark.parametrize("how", ["flags", "a hook", "hooks of parameters"])
def test_the_host_waits_for_flags_of_unused_parameters_only_after_the_last_launch(how: str) -> None:
    order = list[str]()

    def note(event: TraceEvent) -> None:
        order.append(event.operation.name)

    def noting_waits(owner: Any) -> Any:
        wait = owner.synchronize

        def synchronize(self: Any) -> None:
            order.append("wait")
            wait(self)

        return mock.patch.object(owner, "synchronize", synchronize)

    with alone() as mesh, simulated_accelerator() as device:
        model: Any = with_unused(*(Block() for _ in range(4)))
        for block in model:
            fully_shard(block, mesh=mesh["shard"])
            if how == "a hook":
                block.set_all_reduce_hook(lambda output: output.add_(1))
            if how == "hooks of parameters":
                for parameter in block.parameters():
                    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        fully_shard(model, mesh=mesh["shard"])
        model.set_schedule(max_fused_bytes=0)
        model.set_reduce_scatter_max_input_buffers(1)
        with noting_waits(SimulatedEvent), noting_waits(SimulatedStream):
            for _ in range(2):
                order.clear()
                listeners.append(note)
                model(torch.randn(8, WIDTH)).square().sum().backward()
                listeners.remove(note)
        gradients = [parameter.grad is not None for parameter in model[0].unused.parameters()]
    assert gradients == [how == "a hook"] * 2
    last_launch = max(index for index, each in enumerate(order) if each in ("REDUCE", "UNSHARD"))
    waits = [index for index, each in enumerate(order) if each == "wait"]
    assert waits, "the flags are read"
    assert (waits[0] > last_launch) == (how != "hooks of parameters"), order
    assert device.races == []


def test_pinned_memory_in_several_flats_has_neither_and_wastes_a_tenth() -> None:
    sizes = list[int]()

    def noting(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, pin_memory=pin_memory, **kwargs)
        if pin_memory:
            sizes.append(made.nbytes)
        return made

    empty = torch.empty
    with (
        mock.patch.object(layout, "_UNCUT_BYTES", 0),
        alone() as mesh,
        simulated_accelerator(records=True) as device,
        mock.patch.object(torch, "empty", noting),
    ):
        # Plans are cached: no other test has this width.
        train(mesh["shard"], build=with_wide, offload_policy=CPUOffloadPolicy(), make_optimizer=torch.optim.SGD)
    assert (device.races, device.run_late(seed=1)) == ([], [])
    assert sum(map(pinned_bytes, sizes)) <= 1.1 * sum(sizes)


def with_wide(*blocks: Any) -> nn.Sequential:
    """Return a model of ``blocks`` twice as wide inside: with its biases, a block is just above a power of two."""
    for block in blocks:
        block.layers = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
    return nn.Sequential(*blocks)


@pytest.mark.behaviour("F-06")
@pytest.mark.parametrize("form", [Sharded(offload_to_cpu=True), Full(offload_to_cpu=True)], ids=["sharded", "full"])
def test_states_go_between_host_and_device(form: Sharded | Full) -> None:
    with alone() as mesh, simulated_accelerator(records=True) as device:
        models = [shard_blocks(mesh["shard"]) for _ in range(2)]
        for model in models:
            model(torch.randn(8, WIDTH)).sum().backward()
        with torch.no_grad():
            for parameter in models[0].parameters():
                parameter.add_(1)
        state = state_dict(models[0], form)
        values = [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]
        assert all(device.block_of(value, "a test").is_host for value in values if value.numel())  # type: ignore[union-attr]
        load_state_dict(models[1], state, form)
        for parameter, original in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert not device.block_of(parameter.to_local(), "a test").is_host  # type: ignore[union-attr]
            if isinstance(form, Sharded):  # without other processes, a full state has other ranks' shards at random
                assert torch.equal(parameter.to_local(), original.to_local())
        for model in models:
            model(torch.randn(8, WIDTH)).sum().backward()
    assert (device.races, device.run_late(seed=1)) == ([], [])


def shard_blocks(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


PLANTED = "unfused, hybrid"
ELSEWHERE = {
    "CommStream.wait_for_current": "branches on streams",
    "Calibration._end_step": "an optimizer that does not wait on the host",
    "_wait_for": "measured times",
}
"""What needs the functions whose calls this training reaches and does not need. ``python -m tests.planted_faults`` runs
others."""


@pytest.mark.behaviour("M-01")
def test_each_wait_of_a_training_is_needed() -> None:
    reached = reached_by(PLANTED)
    outcomes = {site: try_fault(site, [PLANTED], orders=0) for site in sites() if site.key in reached}
    assert len(outcomes) > 8
    unnoticed = {site.function for site, outcome in outcomes.items() if not any(outcome)}
    assert unnoticed - ELSEWHERE.keys() == {name.partition(":")[0] for name in EXPLAINED} & unnoticed
