"""Test the faults that the watchdog reports, compared with late ranks, caught exceptions and interrupts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import PeerError, fully_shard
from tests._internals import PATIENCE
from tests.helpers.faults import Layers, build, error_of, inject_fault, is_last, step
from tests.helpers.injected_faults import Delay, Fault, inject_faults
from tests.helpers.known_watchdog import known_watchdog
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.slack import slack
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment

LATE = PATIENCE + 1.5
"""Seconds of delay that let other ranks query the late rank and get an answer."""

both_transports = pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])


class Recomputing(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


class FallingBack(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.layers[0](x.unsqueeze(0)[:, :, :3])
        except RuntimeError:
            x = self.layers[0](x)
        return self.layers[2](self.layers[1](x))


@pytest.mark.behaviour("G-03", "H-03")
@pytest.mark.parametrize(("kind", "transport"), [(Recomputing, IN_COMMON), (FallingBack, SOCKETS)])
@on_ranks(2, environment="transport")
def test_ranks_wait_for_one_that_has_only_caught_exceptions(kind: type[Layers]) -> None:
    model: Any = kind()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for number in range(3):
        if number == 2 and is_last():
            time.sleep(LATE)
        step(model)
    watchdog: Any = known_watchdog()
    assert not watchdog.report().failure


@pytest.mark.behaviour("G-03", "H-01")
@on_ranks(2, environment=SOCKETS)
def test_ranks_wait_for_a_late_one_after_a_recovery() -> None:
    """Check that a recovery clears the operation that a rank waited for, although operations are renumbered from 0."""
    model: Any = build()
    with inject_fault("raises in forward", model), pytest.raises((ArithmeticError, PeerError)):
        step(model)
    model.reset_iter_state()
    with inject_faults(model) as labels:
        step(model)
    for number in range(len(labels)):
        watchdog: Any = known_watchdog()
        assert watchdog.here.waiting is None
        with inject_faults(model, Fault(Delay(LATE), rank=0, number=number) if number % 4 == 0 else Fault(Delay(0.0))):
            step(model)


@on_ranks(2, environment=SOCKETS)
def test_a_long_wait_that_ended_is_not_reported() -> None:
    model: Any = build()
    step(model)
    if is_last():
        time.sleep(2 * PATIENCE)
    step(model)
    watchdog: Any = known_watchdog()
    assert watchdog.report().waiting is None


def interrupt_a_forward() -> str:
    """Interrupt a forward with Ctrl-C, or another exception that is no ``Exception``, and continue the program."""
    model = build()
    step(model)
    error = KeyboardInterrupt if is_last() else PeerError
    hook = model.layers[1].register_forward_pre_hook(_interrupt) if is_last() else None
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        step(model)
    assert time.monotonic() - begin < 5.0 * slack()
    if hook is not None:
        hook.remove()
    model.reset_iter_state()
    step(model)
    return str(caught.value)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.behaviour("H-01", "H-03", "H-06")
@both_transports
def test_a_rank_whose_forward_was_interrupted_is_named(transport: Environment) -> None:
    error, _ = run_ranks(interrupt_a_forward, 2, environment=transport)
    assert "rank 1 was interrupted in the forward of root" in error


def compute_while_others_give_up() -> tuple[str, str]:
    """Raise on rank 2 and give up on rank 0 while rank 1 computes until both have closed their connections."""
    model = build()
    step(model)
    hooks: list[Any] = []
    if dist.get_rank() == 1:
        hooks.append(model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(2 * LATE)))
    with inject_fault("raises in forward", model):
        error = error_of(lambda: step(model))
    for hook in hooks:
        hook.remove()
    model.reset_iter_state()
    step(model)
    return error.kind, error.text


@pytest.mark.behaviour("H-01", "H-05")
@both_transports
def test_a_rank_busy_during_a_failure_gets_the_error_later(transport: Environment) -> None:
    *error, failed = run_ranks(compute_while_others_give_up, 3, environment=transport)
    assert failed == ("ArithmeticError", "test failure")
    for kind, text in error:
        assert kind == "PeerError"
        assert "rank 2 raised ArithmeticError: test failure in the forward of layers.1" in text


@pytest.mark.behaviour("H-03")
@on_ranks(2, environment=SOCKETS)
def test_roots_that_share_a_backward_count_it_once() -> None:
    roots: list[Any] = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))]
    for root in roots:
        fully_shard(root)
    for _ in range(3):
        roots[1](roots[0](torch.ones(1, 4))).sum().backward()
    watchdog: Any = known_watchdog()
    assert watchdog.here.steps == 3
    assert not watchdog.passes
