"""Test that failed steps leave no state and that training continues as if they had not run."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from composable_fsdp import DivergenceError, FSDPModule, PeerError, find_nonfinite, fully_shard, no_sync
from composable_fsdp.errors import LifecycleError, UnsavableStateWarning
from composable_fsdp.plugins.checks.optimizer_checks import OptimizerChecks
from tests._internals import (
    Collective,
    GlooCommunicator,
    GlooWork,
    OperationId,
    ParamGroup,
    StreamLauncher,
    Transfer,
    Watched,
    _WatchedWork,
    communicators,
    connections,
    find,
    is_over_group,
    reopen,
    root_of,
    state_of,
    timeout_of_group,
)
from tests.helpers.failing_steps import (
    Plan,
    assert_same,
    batch,
    build,
    counting_all,
    fail,
    failing_layer,
    fault_of,
    gradients,
    pair,
    step,
)
from tests.helpers.faults import is_last
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import COPIES, IN_COMMON, SOCKETS, TRANSPORTS, Environment

FAILING = 2
"""The index of the failing step, out of ``STEPS`` steps."""
STEPS = 5


def fail_and_continue(plan: Plan) -> None:
    model, undisturbed, optimizers = pair(plan)
    counts: dict[str, int] = {}
    for number in range(STEPS):
        if number == FAILING:
            around = fault_of(plan, model, counts)
            fails = around is not None and (is_last() or not plan.alone)
            if around is not None:
                with pytest.raises(ArithmeticError if fails else (PeerError, DivergenceError)):
                    step(model, plan, number, around if fails else None)
                model.reset_iter_state()
                optimizers[0].zero_grad()
            continue
        step(model, plan, number, lambda: counting_all(model, counts))
        step(undisturbed, plan, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, undisturbed, plan)


@pytest.mark.behaviour("H-01", "H-05", "J-03")
@pytest.mark.parametrize(("point", "transport"), [("gradient", IN_COMMON), ("encode", SOCKETS), ("operation", SOCKETS)])
def test_a_failed_step_in_hybrid_sharding_leaves_no_state(point: str, transport: Environment) -> None:
    for alone, index in ((False, 1), (True, -1)):
        plan = Plan(point, index, 0, 1, alone, True, False, False, point != "gradient", hybrid=True, feedback=alone)
        run_ranks(fail_and_continue, 4, plan, environment=transport)


NAMED = {
    "in forward": Plan("before", 1, 0, 1, False, True, False, False),
    "in backward": Plan("backward", 1, 0, 1, False, True, False, False),
    "in accumulation": Plan("backward", 0, 1, 2, False, True, False, False),
    "in an allocation, with prefetch in flight": Plan("allocation", 1, 0, 1, False, True, True, False),
    "in a reduction": Plan("operation", -1, 0, 1, False, True, False, False),
    "in a hook on a gradient": Plan("gradient", 1, 0, 1, False, True, False, False),
    "in a codec of parameters": Plan("encode", 0, 0, 1, False, True, False, False),
    "in a codec of gradients": Plan("decode", -1, 0, 1, False, True, False, False),
    "in an allocation for neighbours that travel together": Plan("allocation", 0, 0, 1, False, True, False, True),
    "in a codec of neighbours that travel together": Plan("decode", 0, 0, 1, False, True, False, True, True),
    "in backward, with error feedback": Plan("backward", 0, 0, 1, False, True, False, False, feedback=True),
    "in the second microbatch, with error feedback": Plan("before", 1, 1, 2, False, True, False, False, feedback=True),
    "in a codec with error feedback": Plan("encode", 2, 1, 2, False, True, False, False, feedback=True),
}


@pytest.mark.behaviour("H-01", "H-05", "J-03")
@pytest.mark.parametrize(("name", "transport"), list(zip(NAMED, cycle(TRANSPORTS), strict=False)))
def test_reductions_kept_by_fsdp2_after_a_failed_step_are_dropped(name: str, transport: str) -> None:
    run_ranks(fail_and_continue, 2, NAMED[name], environment=TRANSPORTS[transport])


@pytest.mark.behaviour("H-01", "H-05")
@on_ranks(2, environment=SOCKETS)
def test_work_in_flight_ends_before_its_memory_is_freed() -> None:
    """Check that all-gathers in flight keep their memory until gloo's connections are closed."""
    found: set[tuple[bool, int]] = set()
    abandon = ParamGroup.abandon

    def watched(group: ParamGroup) -> None:
        communicator = group.process_groups[0].axes.shard
        assert is_over_group(communicator)
        base: Any = find(communicator, GlooCommunicator)
        found.add((base.is_broken, len(base.kept)))
        abandon(group)

    with mock.patch.object(ParamGroup, "abandon", watched):
        fail_and_continue(Plan("before", 1, 0, 1, True, True, True, False))
    assert found == {(True, 0)}, found


class Interrupted:
    """A work whose wait raises an interrupt while the operation continues."""

    def wait(self) -> None:
        raise KeyboardInterrupt


def connected() -> GlooCommunicator:
    """Return a communicator that all ranks have connected: the other rank may still be about to when one is."""
    communicator = GlooCommunicator(dist.new_group())
    dist.barrier()
    return communicator


def close_connections_before_raising() -> None:
    """Check that a connection is marked broken only after it is closed."""
    seen: list[str] = []
    close = GlooCommunicator._close

    def watched(connection: GlooCommunicator) -> None:
        seen.append(connection.broken)
        close(connection)
        seen.append(connection.broken)

    with mock.patch.object(GlooCommunicator, "_close", watched):
        waiting = connected()
        waiting.kept[key := (waiting.generation, 1)] = [Interrupted()]
        work = GlooWork(waiting, key, "all-gather")
        decorated = Watched(waiting, None)
        with pytest.raises(KeyboardInterrupt):
            _WatchedWork(decorated, OperationId(waiting.ranks, 1, "all-gather"), work, decorated.end_wait).wait()
        assert waiting.is_broken
        launching = connected()
        no_memory = mock.patch.object(launching, "exchange", side_effect=MemoryError)
        shard = torch.ones(1)
        with no_memory, pytest.raises(MemoryError):
            Watched(launching, None).launch(Collective.ALL_GATHER, [Transfer(shard.repeat(launching.size), shard)])
        assert launching.is_broken
    assert seen == ["", ""] * 2


def keep_memory_until_the_connection_is_closed() -> None:
    """Check that memory lives until the connection is closed."""
    communicator = connected()
    if dist.get_rank() == 0:
        output, own = torch.zeros(1 << 16), torch.ones(1 << 15)
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (output, own)]
        communicator.launch(Collective.ALL_GATHER, [Transfer(output, own)])
        del output, own
        gc.collect()
        assert not any(storage.expired() for storage in storages)
        communicator.abandon()
        gc.collect()
        assert all(storage.expired() for storage in storages)
    dist.barrier()


def keep_unsharded_memory_while_gloo_may_write() -> None:
    """Check that ``reshard`` after an interrupted wait does not free the storage."""
    model: Any = nn.Linear(512, 1024, bias=False)
    fully_shard(model)
    model(torch.ones(1, 512)).sum().backward()
    state = state_of(model)
    group, streams = state.group, root_of(state).streams
    assert group.plan.unsharded_bytes == 512 * 1024 * 4
    StreamLauncher(streams).gather((group,), "")
    with mock.patch.object(GlooWork, "wait", Interrupted.wait), pytest.raises(KeyboardInterrupt):
        group.wait()
    group.reshard()
    assert sum(bucket.unsharded_bytes for bucket in group.buckets) == group.plan.unsharded_bytes
    dist.barrier()
    for communicator in communicators(connections([state])):
        communicator.abandon()
    group.abandon()
    assert sum(bucket.unsharded_bytes for bucket in group.buckets) == 0
    reopen(connections([state]))
    model(torch.ones(1, 512)).sum().backward()
    assert sum(bucket.unsharded_bytes for bucket in group.buckets) == 0


@pytest.mark.behaviour("H-01", "H-05")
@on_ranks(2, environment=SOCKETS)
def test_memory_of_an_abandoned_operation_is_kept_until_gloo_has_finished() -> None:
    close_connections_before_raising()
    keep_memory_until_the_connection_is_closed()
    keep_unsharded_memory_while_gloo_may_write()


def continue_without_recovery(plan: Plan) -> None:
    """Fail in a step and continue without recovery: the next steps are correct, or an error explains what to do."""
    model, undisturbed, optimizers = pair(plan)

    def train(number: int) -> None:
        step(model, plan, number)
        gradients(undisturbed, plan, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    train(0)
    fails = is_last() or not plan.alone
    with pytest.raises(ArithmeticError if fails else (PeerError, DivergenceError)):
        step(model, plan, 1, fault_of(plan, model, {}) if fails else None)
    optimizers[0].zero_grad()
    kind, text = OUTCOMES[plan.point, plan.alone]
    if kind:
        with pytest.raises(kind, match=text):
            step(model, plan, 2)
        model.reset_iter_state()
        optimizers[0].zero_grad()
    for number in (3, 4):
        train(number)
    assert_same(model, undisturbed, plan)


UNENDED = "backward pass under 'root' has not ended.* Call reset_iter_state"
ANY_END = f"cannot go on together|gave up|differs across ranks|cannot be done|{UNENDED}"

OUTCOMES: dict[tuple[str, bool], tuple[tuple[type[Exception], ...], str]] = {
    ("before", False): ((), ""),
    ("before", True): ((PeerError, DivergenceError, LifecycleError), ANY_END),
    ("backward", False): ((LifecycleError,), UNENDED),
    ("backward", True): ((LifecycleError,), UNENDED),
}
"""The error of the next step, by the point of failure and whether it failed on one rank only."""


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize(("point", "alone", "transport"), [(*key, [IN_COMMON, SOCKETS][key[1]]) for key in OUTCOMES])
def test_continuing_without_recovery_is_correct_or_an_error(point: str, alone: bool, transport: Environment) -> None:
    plan = Plan(point, 1, 0, 1, alone, True, False, False)
    run_ranks(continue_without_recovery, 2, plan, environment=transport)


TEXTS = {
    "before forward": r"called reset_iter_state\(\) \(",
    "between forward and backward": r"called reset_iter_state\(\) between a forward and its backward \(",
    "after backward": r"called reset_iter_state\(\) \(",
}


def fail_outside_of_passes(place: str) -> None:
    """Raise in the program of the last rank, in the third step. Both ranks begin it again."""

    def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, failing: str = "") -> None:
        def reach(here: str) -> None:
            if here == failing and is_last():
                fail()

        torch.manual_seed(10 * number + dist.get_rank())
        reach("before forward")
        loss = model(torch.randn(4, 8)).square().mean()
        reach("between forward and backward")
        loss.backward()
        reach("after backward")
        find_nonfinite(model)
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    undisturbed, other = build()
    for number in range(5):
        train(undisturbed, other, number)
        if number == 2:
            text = rf"rank {dist.get_world_size() - 1} {TEXTS[place]}"
            kind, text = (ArithmeticError, "test failure") if is_last() else (PeerError, text)
            with pytest.raises(kind, match=text):
                train(model, optimizer, number, place)
            cast(FSDPModule, model).reset_iter_state()
            optimizer.zero_grad()
        train(model, optimizer, number)
    for name, expected in undisturbed.state_dict().items():
        assert torch.equal(model.state_dict()[name].to_local(), expected.to_local()), name


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize(("place", "transport"), list(zip(TEXTS, TRANSPORTS, strict=True)))
def test_a_rank_that_raises_outside_of_passes_begins_the_step_again_with_all(place: str, transport: str) -> None:
    """With hybrid sharding, the last operation of the rank that raised is over other ranks than that of the others."""
    run_ranks(fail_outside_of_passes, 2, place, environment=TRANSPORTS[transport])
    run_ranks(fail_outside_of_passes, 4, place, environment=SOCKETS)


@pytest.mark.behaviour("H-01")
@on_ranks(2, transports=TRANSPORTS)
def test_a_reset_without_a_failure_forgets_nothing() -> None:
    """One rank has taken more steps, of a model of its own. Both keep what they know of the order of modules."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(2)]
    if is_last():
        alone = fully_shard(nn.Linear(4, 4), mesh=meshes[1])
        alone(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
    with mock.patch.object(root_of(state_of(model)).planner, "forget") as forget:
        cast(FSDPModule, model).reset_iter_state()
    forget.assert_not_called()
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize(("agree", "transport"), [(False, "copies"), (True, "in common"), (True, "sockets")])
@on_ranks(2, environment="transport")
def test_a_step_on_some_ranks_only_is_an_error(agree: bool) -> None:
    """Raise on the last rank after its gradients are reduced.

    Other ranks detect this before their step only if they communicate before it.
    """
    plan = Plan("gradient hook", 0, 0, 1, True, True, False, False)
    model, undisturbed, optimizers = pair(plan)

    def complete_steps(*numbers: int) -> None:
        for number in numbers:
            gradients(model, plan, number)
            if agree:
                find_nonfinite(model)
            optimizers[0].step()
            optimizers[0].zero_grad()

    complete_steps(0)
    handle = model.layers[0].weight.register_post_accumulate_grad_hook(fail) if is_last() else None
    kind, text = (
        (ArithmeticError, "test failure") if is_last() else (PeerError, r"rank 1 raised in the backward of layers\.0")
    )
    with pytest.raises(kind, match=text):
        complete_steps(1, 2)
    if handle is not None:
        handle.remove()
    if agree:
        model.reset_iter_state()
    else:
        text = r"rank 0 took an optimizer step after .* failed on rank 1, so that .*reset, rank 0: 2, rank 1: 1\)"
        with pytest.raises(DivergenceError, match=text):
            model.reset_iter_state()
        model.reset_iter_state()
    optimizers[0].zero_grad()
    model.load_state_dict(undisturbed.state_dict())
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    for number in range(3):
        complete_steps(number)
        gradients(undisturbed, plan, number)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_same(model, undisturbed, plan)


class Refused(torch.optim.SGD):
    refuses = False

    def step(self, closure: Any = None) -> Any:
        if self.refuses:
            fail()
        return super().step(closure)


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize(
    ("alone", "passes", "transport"),
    [(True, "forward", "in common"), (True, "unshard", "sockets"), (False, "forward", "copies")],
)
@on_ranks(2, environment="transport")
def test_a_pass_after_a_step_that_raised_is_refused(alone: bool, passes: str) -> None:
    """Raise in the optimizer's third step, on one rank or on all, and catch it there."""
    plan = Plan("", 0, 0, 1, alone, True, False, False)
    model, undisturbed = build(plan), build(plan)
    optimizer, other = Refused(model.parameters(), lr=0.1), torch.optim.SGD(undisturbed.parameters(), lr=0.1)

    def complete(number: int, steps: bool = True) -> None:
        for each, its in ((model, optimizer), (undisturbed, other)):
            gradients(each, plan, number)
            if steps:
                its.step()
            its.zero_grad()

    complete(0)
    complete(1)
    gradients(model, plan, 2)
    optimizer.refuses = fails = is_last() or not alone
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        optimizer.step()
    optimizer.refuses = False
    kind: type[Exception] = DivergenceError if fails else PeerError
    text = "raised in a step of Refused, so that it holds parameters of 2 optimizer steps.* hold those of 3"
    for _ in range(2 if fails and alone else 1):
        with pytest.raises(kind, match=f"rank {dist.get_rank() if fails else 1} {text}"):
            model.layers[1].unshard() if passes == "unshard" else model(torch.ones(2, 16))
    if alone:
        with pytest.raises(DivergenceError, match=r"rank 0 took .* failed on rank 1.*rank 0: 3, rank 1: 2\)"):
            model.reset_iter_state()
        model.load_state_dict(undisturbed.state_dict())
    else:
        model.reset_iter_state()
    for number in (3, 4):
        complete(number)
    optimizer.refuses = True
    gradients(model, plan, 5)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.refuses = False
    gradients(undisturbed, plan, 5)
    for its in (optimizer, other):  # repeated with success
        its.step()
        its.zero_grad()
    complete(6)
    assert_same(model, undisturbed, plan)


@pytest.mark.behaviour("H-01")
@on_ranks(2)
def test_a_step_has_succeeded_although_a_warning_after_it_raises() -> None:
    """As programs that turn warnings into errors see it: all ranks hold the parameters after the step."""
    model = build(Plan("", 0, 0, 1, False, True, False, False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 16)).sum().backward()
    patched = mock.patch.object(OptimizerChecks, "after_step", side_effect=UnsavableStateWarning)
    with patched, pytest.raises(UnsavableStateWarning):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()


@pytest.mark.behaviour("H-01")
@on_ranks(2)
def test_closures_compute_inside_of_a_step() -> None:
    model = build(Plan("", 0, 0, 1, False, True, False, False))
    optimizer = torch.optim.LBFGS(list(model.parameters()), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
        return cast(torch.Tensor, loss)

    for _ in range(2):
        optimizer.step(closure)


ORDERS: dict[str, tuple[str, ...]] = {
    "reset": ("reset",),
    "optimizer's zero_grad, reset": ("zero", "reset"),
    "zeros, reset": ("zeros", "reset"),
    "model's zero_grad, reset": ("zero of model", "reset"),
    "reset, step": ("reset", "step"),
    "zero_grad, reset, step": ("zero", "reset", "step"),
    "zeros of model, reset, zero_grad": ("zeros of model", "reset", "zero"),
}


def recover_in_all_orders(held: str, point: str, alone_from: int | None = None) -> None:
    """Fail at each group, recover in each order, and compare with a model that has not failed.

    A failure of one rank takes a second. It is tried in every other order, the first of which is ``alone_from``, and in
    each of these at one layer.
    """
    alone = alone_from is not None
    plan = Plan(point, 0, 0, 1, alone, True, False, False)
    model, undisturbed, (optimizer, other) = pair(plan)
    actions: dict[str, Callable[[], object]] = {
        "reset": model.reset_iter_state,
        "zero": optimizer.zero_grad,
        "zeros": partial(optimizer.zero_grad, set_to_none=False),
        "zero of model": model.zero_grad,
        "zeros of model": partial(model.zero_grad, set_to_none=False),
        "step": optimizer.step,
    }
    layers = list(model.layers)
    cases = [(order, layer) for order in ORDERS.values() for layer in layers]
    if alone:
        cases = [(order, layers[i % len(layers)]) for i, order in enumerate(ORDERS.values())][alone_from::2]
    for number, (order, layer) in enumerate(cases, 1):
        model.set_is_last_backward(held != "in flight")
        if held:
            with no_sync(model, sharded=held == "shards") if held != "in flight" else nullcontext():
                gradients_of(model, number + 50)
        fails = is_last() or not alone
        with pytest.raises(ArithmeticError if fails else (PeerError, DivergenceError)):
            fail_in(model, number + 90, failing_layer(layer, point) if fails else nullcontext())
        model.set_is_last_backward(True)
        for action in order:
            actions[action]()
        for each, its in ((model, optimizer), (undisturbed, other)):
            gradients_of(each, number)
            its.step()
            its.zero_grad()
        assert_same(model, undisturbed, plan)


def fail_in(model: Any, number: int, around: AbstractContextManager[None]) -> None:
    with around:
        gradients_of(model, number)
    find_nonfinite(model)


def gradients_of(model: Any, number: int) -> None:
    model(batch(number, 0)).square().mean().backward()


@pytest.mark.behaviour("H-01", "C-07")
@pytest.mark.parametrize("held", ["", "full", "shards", "in flight"], ids=lambda held: f"held {held}")
@pytest.mark.parametrize(("point", "transport"), [("before", IN_COMMON), ("backward", SOCKETS)])
def test_recovery_gives_the_same_values_in_each_order(point: str, held: str, transport: Environment) -> None:
    run_ranks(recover_in_all_orders, 2, held, point, environment=transport)


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize(
    ("held", "transport", "first"),
    [("", IN_COMMON, 0), ("full", SOCKETS, 1), ("in flight", COPIES, 0), ("in flight", SOCKETS, 1)],
    ids=["nothing, in common", "full, sockets", "in flight, copies", "in flight, sockets"],
)
def test_recovery_after_a_failure_of_one_rank_gives_the_same_values_in_each_order(
    held: str, transport: Environment, first: int
) -> None:
    run_ranks(recover_in_all_orders, 2, held, "backward", first, environment=transport)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fail_often(times: int, alone: bool) -> tuple[int, int, int]:
    """Return the memory in bytes, file descriptors and threads that ``times`` failed steps add."""
    plan = Plan("backward", 1, 0, 1, alone, True, False, False)
    model = build(plan)

    def fail() -> None:
        fails = is_last() or not alone
        with pytest.raises(ArithmeticError if fails else PeerError):
            step(model, plan, 0, (lambda: failing_layer(model.layers[1], "backward")) if fails else None)
        model.reset_iter_state()
        model.zero_grad()

    def used() -> tuple[int, int, int]:
        gc.collect()
        return resident(), len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(times if not alone else 2):  # the allocator needs this many steps to settle
        fail()
    before = used()
    for _ in range(times):
        fail()
    memory, files, threads = (now - then for now, then in zip(used(), before, strict=True))
    return memory, files, threads


@pytest.mark.behaviour("H-01")
@pytest.mark.parametrize(
    ("times", "alone", "transport"),
    [(200, False, IN_COMMON), (5, True, SOCKETS), (3, True, IN_COMMON)],
    ids=["failed steps", "abandoned connections", "abandoned connections in common"],
)
def test_failed_steps_and_abandoned_connections_leak_nothing(times: int, alone: bool, transport: Environment) -> None:
    for memory, files, threads in run_ranks(fail_often, 2, times, alone, environment=transport):
        assert memory <= 1 << 20
        assert (files, threads) == (0, 0)


@on_ranks(2)
def test_recovery_knows_the_timeout_of_groups_without_a_cpu_backend() -> None:
    for backend in ("gloo", "cuda:gloo", "cpu:gloo,cuda:gloo"):
        assert timeout_of_group(dist.new_group([0, 1], timedelta(seconds=77), backend)) == 77.0
