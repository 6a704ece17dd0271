"""Test the warnings of ranks that wait for others, and the end of a program on all ranks together."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch.distributed as dist

from composable_fsdp import PeerError, shutdown
from tests._internals import missing_ranks, watchdog
from tests.helpers.faults import build, is_last, step
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment
from tests.helpers.warned import find_warning, release_after, wait_for_release, warned

STANDS_STILL = r' in wait_for_release: world_store\(\)\.wait\(\["released"\]\)'
LATE = (
    r"rank 0 has waited \d+\.\d s for rank 1 in all-gather of [^\n]*\n"
    rf"  rank 1 is at work.*\(1 step done\), and executes .*warned\.py:\d+{STANDS_STILL}"
)
FULL_TENSOR = (
    r"rank 0 has waited \d+\.\d s in .* in wait_in_full_tensor: weight\.full_tensor\(\)\.\n"
    rf"  rank 1 is at work.*{STANDS_STILL}"
)


def wait_for_a_late_rank() -> list[str]:
    model = build()
    step(model)
    with warned(0.1) as records:
        if is_last():
            wait_for_release()
        else:
            release_after(records, LATE)
        step(model)
    return records


@pytest.mark.behaviour("H-07")
@pytest.mark.parametrize("transport", [SOCKETS, IN_COMMON], ids=["sockets", "in common"])
def test_a_long_wait_warns_whom_it_waits_for_and_where_that_rank_is(transport: Environment) -> None:
    records, others = run_ranks(wait_for_a_late_rank, 2, environment=transport)
    assert find_warning(records, LATE), records
    seconds = [float(record.split()[4]) for record in records]
    assert all(later >= 1.9 * earlier for earlier, later in pairwise([0.5, *seconds])), records
    assert others == []


def wait_in_full_tensor() -> list[str]:
    model = build()
    step(model)
    weight = next(model.parameters())
    weight.full_tensor()  # the first call imports for long
    with warned(0.1) as records, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(watchdog, "_STACK_SECONDS", 0.1)
        if is_last():
            wait_for_release()
        else:
            release_after(records, FULL_TENSOR)
        weight.full_tensor()
    return records


@pytest.mark.behaviour("H-07")
def test_a_call_of_full_tensor_on_one_rank_warns() -> None:
    records, _ = run_ranks(wait_in_full_tensor, 2)
    assert find_warning(records, FULL_TENSOR), records


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
    assert time.monotonic() - begin < 300.0  # not the 1800 s of the call
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
