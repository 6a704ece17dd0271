"""Test the warnings of ranks that wait for others, and the end of a program on all ranks together."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from composable_fsdp import PeerError, shutdown
from tests._internals import Collective, OrderCheck, Transfer, communicator_over, compare, watchdog
from tests.helpers.faults import build, is_last, step
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment
from tests.helpers.warned import find_warning, release_after, wait_for_release, warned
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, stands_in
from tests.simulation.rules import ContractViolation

STANDS_STILL = r' in wait_for_release: world_store\(\)\.wait\(\["released"\]\)'
LATE = (
    r"rank 0 has waited \d+\.\d s for rank 1 in all-gather of [^\n]*\n"
    rf"  rank 1 is at work.*\(1 step done\), and executes .*warned\.py:\d+{STANDS_STILL}"
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


def train_and_shut_down(batches: int) -> None:
    model = build()
    for _ in range(batches):
        step(model)
    shutdown()


def run_a_batch_more() -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for seconds in ("_ASK_AFTER", "_ASK_AGAIN"):
            monkeypatch.setattr(watchdog, seconds, 0.5)
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
    assert ended.endswith("(2 steps done)\nAll ranks must make it, after as many batches as the others.")
    assert waiting == ended


@pytest.mark.behaviour("H-07")
@on_ranks(2)
def test_ranks_that_end_together_destroy_their_process_groups() -> None:
    model = build()
    if is_last():
        time.sleep(0.2)
    step(model)
    shutdown()
    assert not dist.is_initialized()


TIMEOUT = 8.0
LATE_COMPARISON = r"rank 1 has waited \d+\.\d s for rank 0 in a new one [^\n]*\.\n  rank 0 [^\n]*"


def compare_while_another_rank_launches(variant: str) -> tuple[float, str, list[str]]:
    """Wait for a comparison on rank 1, while rank 0 launches an operation without comparing it."""
    with warned(30.0) as records, suppress(ContractViolation), stands_in(variant) as contract, simulated_accelerator():
        group = dist.new_group(backend=contract.backend, timeout=timedelta(seconds=TIMEOUT))
        communicator = communicator_over(group, "cpu")

        def gather(label: str) -> None:
            communicator.launch(Collective.ALL_GATHER, [Transfer(torch.zeros(4), torch.ones(2))], label).wait()

        gather("first")
        compare([group], OrderCheck("always" if is_last() else "off"))
        try:
            gather("a new one" if is_last() else "as before")
        except PeerError as error:
            return time.monotonic(), str(error), records
        except RuntimeError:  # rank 1 has ended the connection
            return time.monotonic(), "", records
    assert contract.ended_at is not None
    return contract.ended_at, "", records


@pytest.mark.behaviour("H-03", "H-07")
@pytest.mark.parametrize("variant", VARIANTS)
def test_waits_are_warned_of_and_end_with_an_error_before_nccl_ends_the_process(variant: str) -> None:
    launched, waited = run_ranks(compare_while_another_rank_launches, 2, variant, environment=SOCKETS)
    at, error, (warning,) = waited
    assert re.fullmatch(LATE_COMPARISON, warning), warning
    assert 0.5 * TIMEOUT <= float(warning.split()[4]) < 0.8 * TIMEOUT
    assert "a new one" in error
    assert at < launched[0]
