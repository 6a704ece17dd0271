"""After steps that failed: going on without recovery, after a step that only some ranks took, and very often."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from composable_fsdp import DivergenceError, LifecycleError, PeerError, find_nonfinite
from composable_fsdp.testing import run_ranks
from tests.helpers.failing_steps import Plan, assert_same, build, fail, failing_layer, fault_of, gradients, pair, step
from tests.helpers.faults import is_last
from tests.helpers.transports import IN_COMMON, SOCKETS, TRANSPORTS, Environment

# -- without recovery


def go_on_at_once(plan: Plan) -> None:
    """A step fails, and the next one begins all the same: it is right, or an error says what to do."""
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
    kind, told = GOES_ON[plan.point, plan.alone]
    if kind:
        with pytest.raises(kind, match=told):
            step(model, plan, 2)
        model.reset_iter_state()
        optimizers[0].zero_grad()
    for number in (3, 4):
        train(number)
    assert_same(model, undisturbed, plan)


UNENDED = "backward pass under 'root' has not ended.* Call reset_iter_state"
PARTED = f"cannot go on together|gave up|differs across ranks|cannot be done|{UNENDED}"

GOES_ON: dict[tuple[str, bool], tuple[tuple[type[Exception], ...], str]] = {
    ("before", False): ((), ""),
    ("before", True): ((PeerError, DivergenceError, LifecycleError), PARTED),
    ("backward", False): ((LifecycleError,), UNENDED),
    ("backward", True): ((LifecycleError,), UNENDED),
}
"""What the next step comes to, by the point that failed and whether it failed on one rank only."""


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize(("point", "alone"), GOES_ON)
@pytest.mark.parametrize("transport", [IN_COMMON, SOCKETS], ids=["in common", "sockets"])
def test_to_go_on_without_recovery_is_right_or_an_error(point: str, alone: bool, transport: Environment) -> None:
    plan = Plan(point, 1, 0, 1, alone, True, False, False)
    run_ranks(go_on_at_once, 2, plan, environment=transport)


# -- a step that some ranks took


def fail_at_the_very_end(agree: bool) -> None:
    """The last rank raises once its gradients are reduced. The others know only if they meet before they step."""
    plan = Plan("gradient hook", 0, 0, 1, True, True, False, False)
    model, undisturbed, optimizers = pair(plan)

    def whole_steps(*numbers: int) -> None:
        for number in numbers:
            gradients(model, plan, number)
            if agree:
                find_nonfinite(model)
            optimizers[0].step()
            optimizers[0].zero_grad()

    whole_steps(0)
    handle = model.layers[0].weight.register_post_accumulate_grad_hook(fail) if is_last() else None
    kind, told = (
        (ArithmeticError, "no luck") if is_last() else (PeerError, r"rank 1 raised in the backward of layers\.0")
    )
    with pytest.raises(kind, match=told):
        whole_steps(1, 2)
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
        whole_steps(number)
        gradients(undisturbed, plan, number)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_same(model, undisturbed, plan)


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

    for _ in range(times if not alone else 2):  # the allocator takes as long to settle
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
