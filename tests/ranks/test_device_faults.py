"""Test faults of one rank over a backend that is asynchronous and hangs, as NCCL does: the error on every other rank.

The faults are some of those of ``test_faults.py``. The host waits for nothing but the device.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composable_fsdp.errors import PeerError
from tests._internals import Collective, OrderCheck, Transfer, communicator_over, compare
from tests.helpers.counted_collectives import compared
from tests.helpers.faults import (
    LONG_TIMEOUT,
    SHORT_TIMEOUT,
    Layers,
    RaisedError,
    build,
    error_of,
    inject_fault,
    is_last,
    step,
)
from tests.helpers.hanging_backend import HANGING, HangingGroup, hanging_device
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.slack import slack

LIMIT = 6.0
"""Seconds until all ranks know of a fault."""
GRACE = 0.1


def train(fault: str) -> RaisedError:
    """Run four steps without a fault, then two with ``fault``, each with a synchronization of the host.

    At "first", a step like an earlier one is launched without a comparison, and ends at the timeout of the backend.
    """
    with hanging_device() as device:
        model = build(LONG_TIMEOUT, HANGING)
        model.set_order_check("always")

        def steps() -> None:
            for _ in range(2):
                step(model)
                device.synchronize()

        steps()
        steps()
        device.grace = GRACE
        with inject_fault(fault, model):
            return error_of(steps)


def check(error: RaisedError, limit: float = LIMIT) -> None:
    assert error.text, "no rank raised an error"
    assert error.seconds < limit * slack()


@pytest.mark.behaviour("G-01", "H-01", "H-05")
@pytest.mark.parametrize("fault", ["swaps modules", "skips a module", "has other gradients"])
@pytest.mark.filterwarnings("ignore:Forward order differs from that of the first iteration")
def test_a_rank_with_another_operation_is_named(fault: str) -> None:
    for error in run_ranks(train, 2, fault):
        check(error)
        assert error.kind == "DivergenceError"
        assert re.search(r"\n  rank 0: .* of layers\..*\n  rank 1: .* of layers\.", error.text), error.text


def gather_different_sizes(level: str) -> RaisedError:
    group = dist.new_group(timeout=timedelta(seconds=SHORT_TIMEOUT), backend=HANGING)
    with hanging_device() as device:
        communicator = communicator_over(group, "cpu")
        compare([group], OrderCheck(level))
        shard = torch.ones(4 + dist.get_rank())
        device.grace = GRACE

        def gather() -> None:
            for _ in range(2):
                communicator.launch(
                    Collective.ALL_GATHER, [Transfer(torch.empty(2 * shard.numel()), shard)], "all-gather of odd"
                ).wait()
                device.synchronize()

        return error_of(gather)


@pytest.mark.behaviour("G-01", "H-05")
def test_different_sizes_are_found_before_the_launch() -> None:
    for error in run_ranks(gather_different_sizes, 2, "first"):
        check(error, 1.0)
        assert error.kind == "DivergenceError"
        assert "rank 0: all-gather of odd (16 bytes in 1 tensors" in error.text
        assert "rank 1: all-gather of odd (20 bytes in 1 tensors" in error.text


@pytest.mark.behaviour("G-01")
@on_ranks(2)
def test_training_compares_only_new_operations_and_equals_the_unsharded_model() -> None:
    with hanging_device() as device:
        model = build(backend=HANGING)
        full: Any = Layers()
        group = model.layers[0].weight.device_mesh.get_group()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, full)]
        counts = []
        for _ in range(14):
            step(model, optimizers[0])
            device.synchronize()
            for rank in range(dist.get_world_size()):
                (full(torch.ones(2, 16) + rank).square().mean() / dist.get_world_size()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            counts.append(compared(group))
        for ours, theirs in zip(model.parameters(), full.parameters(), strict=True):
            torch.testing.assert_close(ours.to_local(), theirs.chunk(2)[dist.get_rank()])
        assert counts[0] > 0
        assert any(before == after for before, after in pairwise(counts)), "a step like an earlier one compares nothing"


@contextmanager
def watched_aborts() -> Iterator[list[str]]:
    threads: list[str] = []
    abort = HangingGroup.abort

    def noting(group: HangingGroup) -> None:
        threads.append(threading.current_thread().name)
        abort(group)

    with mock.patch.object(HangingGroup, "abort", noting):
        yield threads


def recover(fault: str) -> RaisedError:
    """Train after ``fault`` of the last rank, or of all, in a step whose operations are compared."""
    with hanging_device() as device, watched_aborts() as aborts:
        model: Any = build(LONG_TIMEOUT, HANGING)
        full: Any = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.set_order_check("always")  # at "first", a step like an earlier one is launched without a comparison
        for _ in range(2):
            step(model)
        device.synchronize()
        with ExitStack() as stack:
            if fault == "raises on all ranks":
                stack.callback(model.layers[1].register_forward_pre_hook(fail).remove)
            else:
                stack.enter_context(inject_fault(fault, model))
            error = error_of(lambda: step(model))
        model.reset_iter_state()
        optimizer.zero_grad()
        step(model)
        device.synchronize()
        for rank in range(dist.get_world_size()):
            (full(torch.ones(2, 16) + rank).square().mean() / dist.get_world_size()).backward()
        for ours, theirs in zip(model.parameters(), full.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.to_local(), theirs.grad.chunk(2)[dist.get_rank()])
        assert aborts == [], "nothing was launched that another rank did not launch"
        return error


def fail(*_: object) -> None:
    raise ArithmeticError("test failure")


@pytest.mark.behaviour("H-01", "H-05")
@pytest.mark.parametrize("fault", ["has other gradients", "raises in forward", "raises in backward"])
def test_training_goes_on_after_a_fault_that_is_found_before_a_launch(fault: str) -> None:
    first, last = run_ranks(recover, 2, fault)
    check(first)
    if fault == "has other gradients":
        assert first.kind == last.kind == "DivergenceError"
    else:
        assert (first.kind, last.kind) == ("PeerError", "ArithmeticError")
        assert re.search(r"cannot be done: rank 1 raised .*in the (forward|backward) of", first.text), first.text


@pytest.mark.behaviour("H-01")
def test_training_goes_on_after_all_ranks_raised_at_the_same_operation() -> None:
    assert {error.kind for error in run_ranks(recover, 2, "raises on all ranks")} == {"ArithmeticError"}


def stop_at_different_operations() -> tuple[str, list[str]]:
    """Raise in forward on the last rank, and after the step on the others. Return the error of the reset."""
    with hanging_device() as device, watched_aborts() as aborts:
        model = build(LONG_TIMEOUT, HANGING)
        for _ in range(4):
            step(model)
        device.synchronize()
        device.grace = GRACE
        with inject_fault("raises in forward", model):
            failed = error_of(lambda: step(model))
        if not is_last():
            assert failed.text == ""
            model.layers[0].register_forward_pre_hook(fail)
            assert error_of(lambda: step(model)).kind == "ArithmeticError"
        error = error_of(model.reset_iter_state)
        model.layers[0]._forward_pre_hooks.clear()
        with pytest.raises(PeerError, match="were aborted, so their results are undefined"):
            step(model)
        return error.text, aborts


@pytest.mark.behaviour("H-01")
def test_ranks_that_stopped_at_different_operations_end_the_job_with_the_reason() -> None:
    for text, aborts in run_ranks(stop_at_different_operations, 2):
        assert re.search(r"cannot connect again .* restart it from a checkpoint", text), text
        places = re.search(r"over each process group:\n  rank 0: (\d+)\n  rank 1: (\d+)$", text)
        assert places, text
        assert int(places[1]) > int(places[2])
        assert aborts == ["MainThread"], "only a thread of the program touches the device"
