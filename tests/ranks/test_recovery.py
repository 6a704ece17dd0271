"""What is left of a step that failed: nothing. Going on is as if it had not been there."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import DivergenceError, PeerError, find_nonfinite, fully_shard
from composable_fsdp.memory import storage
from composable_fsdp.testing import Fault, Raise, inject_faults, run_ranks
from tests.ranks._faults import Layers, is_last
from tests.ranks._sharding import values_of
from tests.transports import COPIES, IN_COMMON, SOCKETS, TRANSPORTS, Environment

FAILING = 2
"""The step that fails, of ``STEPS``."""
STEPS = 5
DEPTH = 3


@dataclass(frozen=True)
class Plan:
    """A point at which a step fails, and how the model is trained.

    Args:
        point: what fails: ``"before"`` or ``"after"`` the forward of a layer, ``"backward"`` at its output, an
            ``"operation"`` that is launched, an ``"allocation"`` of full parameters.
        index: of the layer, the operation or the allocation; counted round.
        microbatch: in which it happens, of those of the step.
        alone: whether only the last rank fails by itself.
    """

    point: str
    index: int
    microbatch: int
    microbatches: int
    alone: bool
    reshard: bool
    prefetch: bool
    merged: bool


plans = st.builds(
    Plan,
    point=st.sampled_from(["before", "after", "backward", "operation", "allocation"]),
    index=st.integers(0, 20),
    microbatch=st.integers(0, 1),
    microbatches=st.integers(1, 2),
    alone=st.sampled_from([False, False, True]),
    reshard=st.booleans(),
    prefetch=st.booleans(),
    merged=st.booleans(),
)


def build(plan: Plan) -> Any:
    model: Any = Layers(DEPTH)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=plan.reshard)
    fully_shard(model, reshard_after_forward=plan.reshard)
    if not plan.merged:
        model.set_max_merged_bytes(0)
    if plan.prefetch:
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
        model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    return model


def batch(number: int, microbatch: int) -> torch.Tensor:
    seed = 100 * number + 10 * microbatch + dist.get_rank()
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))


def step(model: Any, plan: Plan, number: int, around: Callable[[], Any] | None = None) -> None:
    """Gradients of one step. ``around`` is a context for the microbatch of the plan."""
    for microbatch in range(plan.microbatches):
        model.set_requires_gradient_sync(microbatch == plan.microbatches - 1)
        if around is not None and microbatch == plan.microbatch % plan.microbatches:
            with around():
                model(batch(number, microbatch)).square().mean().backward()
        else:
            model(batch(number, microbatch)).square().mean().backward()


# -- points


def _fail(*_: object) -> None:
    raise ArithmeticError("no luck")


@contextmanager
def failing_layer(layer: nn.Module, point: str) -> Iterator[None]:
    if point == "before":
        hook = layer.register_forward_pre_hook(_fail)
    elif point == "after":
        hook = layer.register_forward_hook(_fail)
    else:
        hook = layer.register_forward_hook(lambda module, args, output: output.register_hook(_fail) and None)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def counting_allocations(failing: int | None = None) -> Iterator[list[int]]:
    """The sizes of allocations of full parameters; the one with the number ``failing`` fails."""
    sizes: list[int] = []
    original = storage.allocate_storage

    def allocate(tensor: torch.Tensor, nbytes: int) -> None:
        sizes.append(nbytes)
        if len(sizes) - 1 == failing:
            raise ArithmeticError("no luck, and no memory")
        original(tensor, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "allocate_storage", allocate)
        yield sizes


def fault_of(plan: Plan, model: Any, operations: int, allocations: int) -> Callable[[], Any] | None:
    """A context in which a microbatch fails; None where there is nothing that could."""
    if plan.point == "operation":
        number = plan.index % operations
        return lambda: inject_faults(model, Fault(Raise(ArithmeticError("no luck on the wire")), number=number))
    if plan.point == "allocation":
        return (lambda: counting_allocations(plan.index % allocations)) if allocations else None
    return lambda: failing_layer(model.layers[plan.index % DEPTH], plan.point)


def fail_and_go_on(plan: Plan) -> None:
    model, undisturbed = build(plan), build(plan)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, undisturbed)]
    operations: list[str] = []
    allocations: list[int] = []

    @contextmanager
    def counting() -> Iterator[None]:
        with inject_faults(model) as labels, counting_allocations() as sizes:
            yield
        operations[:], allocations[:] = labels, sizes

    for number in range(STEPS):
        if number == FAILING:
            around = fault_of(plan, model, len(operations), len(allocations))
            fails = around is not None and (is_last() or not plan.alone)
            if around is not None:
                with pytest.raises(ArithmeticError if fails else (PeerError, DivergenceError)):
                    step(model, plan, number, around if fails else None)
                model.reset_iter_state()
                optimizers[0].zero_grad()
            continue
        step(model, plan, number, counting)
        step(undisturbed, plan, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = values_of(undisturbed)
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=f"{name} after {plan}")


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_step_that_failed_leaves_nothing_behind(transport: Environment) -> None:
    examples = int(os.environ.get("COMPOSABLE_FSDP_FAULT_EXAMPLES", "12"))

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(plans)
    def holds(plan: Plan) -> None:
        run_ranks(fail_and_go_on, 2, plan, environment=transport)

    holds()


NAMED = {
    "in forward": Plan("before", 1, 0, 1, False, True, False, False),
    "in backward": Plan("backward", 1, 0, 1, False, True, False, False),
    "in accumulation": Plan("backward", 0, 1, 2, False, True, False, False),
    "in an allocation, with prefetch in flight": Plan("allocation", 1, 0, 1, False, True, True, False),
    "in a reduction": Plan("operation", -1, 0, 1, False, True, False, False),
}


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize("plan", NAMED.values(), ids=NAMED)
def test_what_the_peer_keeps_of_a_failed_step_is_dropped(plan: Plan) -> None:
    run_ranks(fail_and_go_on, 2, plan, environment=COPIES)
    run_ranks(fail_and_go_on, 2, plan, environment=SOCKETS)


# -- a step that some ranks took


def fail_at_the_very_end(agree: bool) -> None:
    """The last rank raises once its gradients are reduced. The others know only if they meet before they step."""
    plan = Plan("gradient hook", 0, 0, 1, True, True, False, False)
    model, undisturbed = build(plan), build(plan)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, undisturbed)]

    def whole_step(number: int) -> None:
        step(model, plan, number)
        if agree:
            find_nonfinite(model)
        optimizers[0].step()
        optimizers[0].zero_grad()

    whole_step(0)
    handle = model.layers[0].weight.register_post_accumulate_grad_hook(_fail) if is_last() else None
    kind, told = (
        (ArithmeticError, "no luck") if is_last() else (PeerError, r"rank 1 raised in the backward of layers\.0")
    )
    with pytest.raises(kind, match=told):
        deque(map(whole_step, (1, 2)))
    if handle is not None:
        handle.remove()
    if agree:
        model.reset_iter_state()
    else:
        with pytest.raises(DivergenceError, match=r"rank 0 took an optimizer step after .* failed on rank 1, so that"):
            model.reset_iter_state()
        model.reset_iter_state()
    optimizers[0].zero_grad()
    model.load_state_dict(undisturbed.state_dict())
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    for number in range(3):
        whole_step(number)
        step(undisturbed, plan, number)
        optimizers[1].step()
        optimizers[1].zero_grad()
    expected = values_of(undisturbed)
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize("agree", [False, True], ids=["steps at once", "meets first"])
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_step_that_only_some_ranks_took_is_told(agree: bool, transport: Environment) -> None:
    run_ranks(fail_at_the_very_end, 2, agree, environment=transport)


# -- often


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fail_often(times: int, *, alone: bool) -> tuple[int, int, int]:
    """What ``times`` failed steps add: bytes of memory, file descriptors, threads."""
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

    for _ in range(20 if not alone else 2):
        fail()
    before = used()
    for _ in range(times):
        fail()
    memory, files, threads = (now - then for now, then in zip(used(), before, strict=True))
    return memory, files, threads


@pytest.mark.behaviour("H-01")
@pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])
def test_two_hundred_failed_steps_leak_nothing(transport: Environment) -> None:
    for memory, files, threads in run_ranks(fail_often, 2, 200, alone=False, environment=transport):
        assert memory <= 1 << 20
        assert files == 0
        assert threads == 0


@pytest.mark.behaviour("H-01")
@pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])
def test_connections_that_were_given_up_are_freed(transport: Environment) -> None:
    for memory, files, threads in run_ranks(fail_often, 2, 20, alone=True, environment=transport):
        assert memory <= 1 << 20
        assert files == 0
        assert threads == 0
