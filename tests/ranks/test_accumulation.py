"""Gradients accumulated over microbatches: full or sharded, with and without the all-reduce of a hybrid mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import FSDPModule, fully_shard, no_sync
from composable_fsdp.trace import Operation, Recorder
from tests._internals import Accumulation, find_state
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.peak_memory import FULL, LiveStorages
from tests.helpers.run_ranks import on_ranks
from tests.helpers.training import Play, check_parity


def as_module(model: FSDPModule) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.behaviour("C-07", "A-07")
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@on_ranks("shape")
def test_microbatches_send_no_more_than_they_are_asked_to(shape: tuple[int, ...]) -> None:
    """The fuzzer compares their sums with those of the unsharded model."""
    task, rank = TASKS["routed"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard, fuses=False, mesh=init_device_mesh("cpu", shape))

    @contextmanager
    def without_all_reduce() -> Iterator[None]:
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)

    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "unsharded": lambda: no_sync(model),
        "sharded": lambda: no_sync(model, sharded=True),
        "without all-reduce": without_all_reduce if len(shape) == 2 else nullcontext,
    }
    for name, way in ways.items():
        for route in ((0, 1), (1, 2, 3)):
            model.route = list(route)
            with way(), Recorder() as recorder, counted_collectives() as counts:
                task.loss(model, task.batch_of(0, rank)).backward()
            if way is nullcontext:
                continue
            reduced = {event.group for event in recorder if event.operation is Operation.REDUCE}
            used = {*(f"layers.{k}" for k in route), "root"}  # the side layer belongs to the root
            assert reduced == (set() if name == "unsharded" else used), name
            assert all(p.grad is None for p in model.parameters()), f"{name}: the hook ran too early"
            assert not any(event.operation is Operation.REDUCED for event in recorder), name
            assert counts["all_reduce"] == 0, name
        task.loss(model, task.batch_of(1, rank)).backward()
        assert all(p.grad is not None for p in model.layers[0].parameters()), name
        model.zero_grad()


@pytest.mark.behaviour("C-07", "A-07")
@on_ranks(4)
def test_a_partial_sum_belongs_to_the_next_all_reduce_while_others_are_in_flight() -> None:
    """A reduction that was launched before must not take the sum, although it ends later."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    for limit, pattern in product((2, 3, 4), ("all part all", "part all part all", "all part part all")):
        torch.manual_seed(0)
        model, plain = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        model.set_reduce_scatter_max_input_buffers(limit)  # type: ignore[operator]
        ways = pattern.split()
        batches = torch.randn(len(ways), 4, 3, 4)
        for number, way in enumerate(ways):
            model.set_is_last_backward(number == len(ways) - 1)  # type: ignore[operator]
            model.set_requires_all_reduce(way == "all")  # type: ignore[operator]
            model(batches[number, rank]).square().sum().backward()
            (plain(batches[number]).square().sum() / 4).backward()
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), expected.grad, msg=f"{limit} in flight, {pattern}")  # type: ignore[union-attr]


@pytest.mark.behaviour("C-07")
@on_ranks(2)
def test_a_sum_that_is_in_flight_at_the_next_backward_is_delivered_once() -> None:
    """Its own completion comes after the reduction that took it, and must not make it a pending sum again."""
    task, rank = TASKS["mlp"], dist.get_rank()
    counts = set()
    for in_flight, waits in ((1, True), (1, False), (4, False)):
        model: Any = shard_layers(task.build(), fully_shard)
        model.set_reduce_scatter_max_input_buffers(in_flight)
        with Recorder() as recorder:
            model.set_is_last_backward(waits)
            with no_sync(model, sharded=True):
                task.loss(model, task.batch_of(0, rank)).backward()
            model.set_is_last_backward(True)
            task.loss(model, task.batch_of(1, rank)).backward()
        counts.add(sum(event.operation is Operation.REDUCE for event in recorder))
        model.to(torch.float64)  # refused while gradients are not delivered
    assert len(counts) == 1, f"{counts} reductions: one for each group and backward"


@pytest.mark.behaviour("C-07", "C-03")
@on_ranks(2)
def test_accumulation_by_shards_keeps_no_full_gradient() -> None:
    task, rank = TASKS["wide"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard)
    full_bytes = [768 * 1024 * 4, 1027 * 768 * 4]
    shards = [768 * 1024 * 4 // 2, 1028 * 768 * 4 // 2]
    live = LiveStorages()  # the memory of the model itself does not count
    for step in range(2):
        with no_sync(model, sharded=True):
            task.loss(model, task.batch_of(step, rank)).backward()
        live.check("by shards", least=1_000_000, expected=shards)
    model.zero_grad()
    live.check("after zero_grad", least=1_000_000, expected=[])
    for step in range(2):
        with no_sync(model):
            task.loss(model, task.batch_of(step, rank)).backward()
        live.check("in full", least=FULL, expected=full_bytes)
    model.zero_grad()
    live.check("after zero_grad", least=1_000_000, expected=[])


def give_up(model: FSDPModule, step: int, rank: int, how: str, sharded: bool, in_flight: bool) -> None:
    task, module = TASKS["mlp"], as_module(model)
    model.set_is_last_backward(not in_flight)
    with no_sync(module, sharded=sharded):
        task.loss(module, task.batch_of(step + 50, rank)).backward()
    if how == "zero_grad":
        module.zero_grad()
    else:
        model.reset_iter_state()
    model.set_is_last_backward(True)


def giving_up(how: str, sharded: bool, in_flight: bool) -> Play:
    task = TASKS["mlp"]

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if isinstance(model, FSDPModule):
            give_up(model, step, rank, how, sharded, in_flight)
        loss = task.loss(model, task.batch_of(step, rank))
        loss.backward()
        return loss.detach()

    return play


@pytest.mark.behaviour("C-07", "H-01")
@on_ranks(2)
def test_zero_grad_and_reset_drop_accumulated_gradients() -> None:
    for how in ("zero_grad", "reset_iter_state"):
        for sharded in (False, True):
            for in_flight in (False, True):
                what = f"{how}, sharded={sharded}, in_flight={in_flight}"
                check_parity(TASKS["mlp"].build, giving_up(how, sharded, in_flight), steps=3, what=what)
    model = shard_layers(TASKS["mlp"].build(), fully_shard)
    model.zero_grad()  # before any forward
    model.set_is_last_backward(False)
    TASKS["mlp"].loss(model, TASKS["mlp"].batch_of(0, 0)).backward()
    model.zero_grad()  # while the last reductions are in flight
    TASKS["mlp"].loss(model, TASKS["mlp"].batch_of(0, 0)).sum().backward()
    model.set_is_last_backward(True)
    with pytest.raises(RuntimeError, match="raised inside the context"), no_sync(model):
        raise RuntimeError("raised inside the context")
    states = [state for module in model.modules() if (state := find_state(module)) is not None]
    assert {state.options.accumulation for state in states} == {Accumulation.REDUCE}


@pytest.mark.behaviour("C-07", "C-05")
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_freezing_between_microbatches_keeps_accumulated_gradients(sharded: bool) -> None:
    task = TASKS["mlp"]

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        losses = []
        for i in range(3):
            model.get_submodule("layers.0").requires_grad_(i == 0)
            model.get_submodule("layers.1").requires_grad_(i != 0)
            is_held = isinstance(model, FSDPModule) and i < 2
            with no_sync(model, sharded=sharded) if is_held else nullcontext():
                loss = task.loss(model, task.batch_of(10 * step + i, rank))
                loss.backward()
            losses.append(loss.detach())
        model.requires_grad_(True)
        return torch.stack(losses)

    check_parity(task.build, play, shard=fully_shard, steps=2)
