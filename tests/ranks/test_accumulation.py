"""Gradients accumulated over microbatches: full or sharded, with and without the all-reduce of a hybrid mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, no_sync
from composable_fsdp.trace import Operation, Recorder
from tests._internals import Accumulation, find_state
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.peak_memory import FULL, LiveStorages
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import Play, assert_equal_runs, check_parity, local_shard, train

ROUTES = ((0, 1), (1, 2, 3), (3, 1))
"""The layers that each microbatch uses: some are in the first only, some in the second, some in all."""

Setting = Callable[[FSDPModule, int], AbstractContextManager[None]]
"""``(model, microbatch) -> context`` around forward and backward; the last microbatch must deliver."""

LAST = len(ROUTES) - 1


def unsharded(model: FSDPModule, i: int) -> AbstractContextManager[None]:
    return no_sync(as_module(model)) if i < LAST else nullcontext()


def sharded(model: FSDPModule, i: int) -> AbstractContextManager[None]:
    return no_sync(as_module(model), sharded=True) if i < LAST else nullcontext()


def first_in_full_then_by_shards(model: FSDPModule, i: int) -> AbstractContextManager[None]:
    return no_sync(as_module(model), sharded=i == 1) if i < LAST else nullcontext()


def first_by_shards_then_in_full(model: FSDPModule, i: int) -> AbstractContextManager[None]:
    return no_sync(as_module(model), sharded=i == 0) if i < LAST else nullcontext()


def only_some_layers(model: FSDPModule, i: int) -> AbstractContextManager[None]:
    return no_sync(as_module(model).get_submodule("layers"), sharded=True) if i < LAST else nullcontext()


@contextmanager
def sharded_and_in_flight(model: FSDPModule, i: int) -> Iterator[None]:
    """Reductions of one microbatch may still be in flight when the next one begins."""
    model.set_is_last_backward(i == LAST)
    with sharded(model, i):
        yield


@contextmanager
def without_all_reduce(model: FSDPModule, i: int) -> Iterator[None]:
    model.set_requires_all_reduce(i == LAST)
    yield


@contextmanager
def without_all_reduce_and_in_flight(model: FSDPModule, i: int) -> Iterator[None]:
    """Sums over the shard axis may still be in flight when the reduction that adds them is launched."""
    model.set_reduce_scatter_max_input_buffers(100)
    model.set_is_last_backward(i == LAST)
    model.set_requires_all_reduce(i == LAST)
    yield


@contextmanager
def without_all_reduce_of_the_root(model: FSDPModule, i: int) -> Iterator[None]:
    model.set_requires_all_reduce(i == LAST, recurse=False)
    yield


SETTINGS: tuple[Setting, ...] = (
    unsharded,
    sharded,
    first_in_full_then_by_shards,
    first_by_shards_then_in_full,
    only_some_layers,
    sharded_and_in_flight,
    without_all_reduce,
    without_all_reduce_and_in_flight,
    without_all_reduce_of_the_root,
)


def as_module(model: FSDPModule) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def accumulating(setting: Setting) -> Play:
    task = TASKS["routed"]

    def play(model: Any, step: int, rank: int) -> torch.Tensor:
        losses = []
        for i, route in enumerate(ROUTES):
            model.route = list(route)
            context = setting(model, i) if isinstance(model, FSDPModule) else nullcontext()
            with context, Recorder() as recorder, counted_collectives() as counts:
                loss = task.loss(model, task.batch_of(10 * step + i, rank)) / len(ROUTES)
                loss.backward()
            losses.append(loss.detach())
            if isinstance(model, FSDPModule):
                check_sent_bytes(model, setting, i, recorder, counts)
        return torch.stack(losses)

    return play


def check_sent_bytes(model: FSDPModule, setting: Setting, i: int, recorder: Recorder, counts: dict[str, int]) -> None:
    named = dict(as_module(model).named_parameters())
    if i < LAST and setting in (unsharded, sharded, without_all_reduce):
        replicates = any(p.device_mesh.ndim == 2 for p in named.values() if isinstance(p, DTensor))
        if setting is not without_all_reduce or replicates:
            assert all(p.grad is None for p in named.values()), f"{setting.__name__}: the hook ran too early"
            assert not any(e.operation is Operation.REDUCED for e in recorder), setting.__name__
            assert counts["all_reduce"] == 0, setting.__name__
        reduced = {e.group for e in recorder if e.operation is Operation.REDUCE}
        used = {*(f"layers.{k}" for k in ROUTES[i]), "root"}  # the side layer belongs to the root
        assert reduced == (set() if setting is unsharded else used), setting.__name__
    elif i == LAST:
        assert all(isinstance(p.grad, DTensor) for p in named.values()), f"{setting.__name__}: the hook did not run"


def accumulate(mesh_shape: tuple[int, ...], reshard_after_forward: bool | int | None) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = TASKS["routed"].build
    expected = train(
        build(), accumulating(unsharded), ranks=range(world_size), watched=rank, divide=world_size, steps=3
    )
    for setting in SETTINGS:
        model = shard_layers(build(), fully_shard, mesh=mesh, reshard_after_forward=reshard_after_forward)
        model.set_schedule(max_fused_bytes=0)  # unused layers would be fused with adjacent ones
        ours = train(model, accumulating(setting), ranks=[rank], watched=rank, steps=3)
        assert_equal_runs(ours, expected, what=setting.__name__)
        states = [state for module in model.modules() if (state := find_state(module)) is not None]
        assert {state.options.accumulation for state in states} == {Accumulation.REDUCE}


@pytest.mark.behaviour("C-07", "A-07")
@pytest.mark.parametrize(("mesh_shape", "reshard"), [((1,), True), ((2,), True), ((2, 1), None), ((2, 2), None)])
def test_microbatches_summed_in_any_way_train_like_the_large_batch(
    mesh_shape: tuple[int, ...], reshard: bool | int | None
) -> None:
    run_ranks(accumulate, torch.Size(mesh_shape).numel(), mesh_shape, reshard)


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


@pytest.mark.behaviour("C-07", "D-01")
@on_ranks(2)
def test_gradients_accumulate_by_shards_in_the_reduce_dtype() -> None:
    task, rank = TASKS["mlp"], dist.get_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_layers(task.build(), fully_shard, mp_policy=policy)
    for i in range(3):
        with no_sync(model, sharded=True) if i < 2 else nullcontext():
            task.loss(model, task.batch_of(i, rank)).backward()
    totals: dict[str, torch.Tensor] = {}
    for i in range(3):
        plain = task.build().to(torch.bfloat16)
        of_ranks: dict[str, torch.Tensor] = {}
        for r in range(dist.get_world_size()):
            plain.zero_grad()
            x, target = task.batch_of(i, r)
            task.loss(plain, (x.to(torch.bfloat16), target)).backward()
            for name, p in plain.named_parameters():
                of_ranks[name] = of_ranks.get(name, 0) + p.grad.float()
        totals = {name: value + totals.get(name, 0) for name, value in of_ranks.items()}
    for name, parameter in model.named_parameters():
        expected = local_shard(totals[name] / dist.get_world_size(), parameter.grad)
        torch.testing.assert_close(parameter.grad.to_local(), expected, rtol=0, atol=0, msg=name)


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
