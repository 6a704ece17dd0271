"""Test the warnings of ranks that wait for others, and the end of a program on all ranks together."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from composable_fsdp import PeerError, set_wait_warning, shutdown
from composable_fsdp.testing import run_ranks
from tests._internals import missing_ranks, watchdog
from tests.helpers.faults import build, is_last, step
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment


@contextmanager
def warned(seconds: float) -> Iterator[list[str]]:
    """Set the time of the first warning, and return what is logged inside."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("composable_fsdp")
    logger.addHandler(handler)
    set_wait_warning(seconds)
    try:
        yield records
    finally:
        set_wait_warning(30.0)
        logger.removeHandler(handler)


def stand_still() -> None:
    time.sleep(1.8)


def wait_for_a_late_rank() -> list[str]:
    model = build()
    step(model)
    with warned(0.1) as records:
        if is_last():
            stand_still()
        step(model)
    return records


@pytest.mark.behaviour("H-07")
@pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])
def test_a_long_wait_warns_whom_it_waits_for_and_where_that_rank_is(transport: Environment) -> None:
    records, others = run_ranks(wait_for_a_late_rank, 2, environment=transport)
    [first] = records  # the next one comes after 2 seconds
    assert first.startswith("rank 0 has waited 1."), first
    assert " s for rank 1 in all-gather of " in first
    assert "\n  rank 1 is at work" in first
    assert "(1 step done), and executes " in first
    assert first.endswith("test_wait_warning.py:37 in stand_still: time.sleep(1.8)")
    assert others == []


def wait_in_full_tensor() -> list[str]:
    model = build()
    step(model)
    weight = next(model.parameters())
    weight.full_tensor()  # the first call imports for long
    with warned(0.1) as records, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(watchdog, "_STACK_SECONDS", 0.1)
        if is_last():
            stand_still()
        weight.full_tensor()
    return records


@pytest.mark.behaviour("H-07")
def test_a_call_of_full_tensor_on_one_rank_warns() -> None:
    records, _ = run_ranks(wait_in_full_tensor, 2)
    assert records[0].startswith("rank 0 has waited "), records
    assert " in wait_in_full_tensor: weight.full_tensor().\n  rank 1 is at work" in records[0]
    assert records[0].endswith("in stand_still: time.sleep(1.8)")


def train_and_shut_down(batches: int) -> None:
    model = build()
    for _ in range(batches):
        step(model)
    shutdown()


def run_a_batch_more() -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for seconds in ("_ASK_AFTER", "_ASK_AGAIN"):
            monkeypatch.setattr(missing_ranks, seconds, 0.5)
        with pytest.raises(PeerError) as caught:
            train_and_shut_down(2 if is_last() else 3)
        return str(caught.value)


@pytest.mark.behaviour("H-07")
@pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])
def test_a_batch_more_on_one_rank_ends_the_program_on_all(transport: Environment) -> None:
    begin = time.monotonic()
    waiting, ended = run_ranks(run_a_batch_more, 2, environment=transport)
    assert time.monotonic() - begin < 30.0
    assert ended.startswith(
        "composable_fsdp.shutdown(): rank 0 did not make this call, and cannot any more.\n  rank 0 waits in all-gather"
    )
    assert ended.endswith(
        "(2 steps done), which needs rank 1\nAll ranks must make it, after as many batches as the others."
    )
    assert waiting == ended


def shut_down_together() -> bool:
    model = build()
    if is_last():
        time.sleep(0.2)
    step(model)
    shutdown()
    return dist.is_initialized()


@pytest.mark.behaviour("H-07")
def test_ranks_that_end_together_destroy_their_process_groups() -> None:
    assert run_ranks(shut_down_together, 2) == [False, False]
