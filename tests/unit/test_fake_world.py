"""Simulated ranks: behaviour beyond the contract, and errors where real ranks would hang."""

from __future__ import annotations

import pytest
import torch

from tests._internals import Collective, ReduceOp, Transfer
from tests.helpers.fake_world import DeadlockError, FakeCommunicator, FakeWork, FakeWorld, MismatchError


def ranks_of(world: FakeWorld) -> list[FakeCommunicator]:
    return [world.communicator(rank) for rank in range(world.size)]


def gather(comm: FakeCommunicator, *numels: int, dtype: torch.dtype = torch.float32) -> FakeWork:
    inputs = [torch.ones(numel, dtype=dtype) for numel in numels]
    return comm.launch(Collective.ALL_GATHER, [Transfer(input.repeat(comm.size), input) for input in inputs])


def scatter(comm: FakeCommunicator, numel: int, op: ReduceOp = ReduceOp.SUM) -> FakeWork:
    return comm.launch(Collective.REDUCE_SCATTER, [Transfer(torch.empty(numel), torch.ones(numel * comm.size))], op=op)


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


def test_an_early_wait_names_the_collective_and_the_missing_ranks() -> None:
    world = FakeWorld(6)
    comms = ranks_of(world)
    for comm in comms:
        gather(comm, 1)
    gather(comms[0], 4, 2)
    work = gather(comms[2], 4, 2)
    with pytest.raises(DeadlockError) as error:
        work.wait()
    assert message(error) == (
        "rank 2 waits for its collective 1, all_gather(2 transfers: float32 4 -> 24, float32 2 -> 12), which "
        "ranks 1, 3-5 of 6 did not launch. Real ranks would wait for ever. Let every simulated rank launch before one "
        "of them waits."
    )


def test_a_mismatch_shows_both_sides_with_their_ranks() -> None:
    comms = ranks_of(FakeWorld(4))
    for comm in comms:
        gather(comm, 1)
    for comm in comms[:3]:
        gather(comm, 4)
    with pytest.raises(MismatchError) as error:
        scatter(comms[3], 4)
    assert message(error) == (
        "ranks disagree on their collective 1 (the first is 0):\n"
        "  ranks 0-2: all_gather(1 transfer: float32 4 -> 16)\n"
        "  rank 3: reduce_scatter(sum, 1 transfer: float32 16 -> 4)"
    )


def test_ranks_must_agree_on_sizes_dtypes_number_of_transfers_and_operation() -> None:
    def launch_differently(rank: int, what: str) -> None:
        comm = world.communicator(rank)
        match what, rank:
            case "size", 1:
                gather(comm, 5)
            case "dtype", 1:
                gather(comm, 4, dtype=torch.bfloat16)
            case "number", 1:
                gather(comm, 4, 4)
            case "operation", _:
                scatter(comm, 4, ReduceOp.AVERAGE if rank else ReduceOp.SUM)
            case _:
                gather(comm, 4)

    for what in ("size", "dtype", "number", "operation"):
        world = FakeWorld(2)
        launch_differently(0, what)
        with pytest.raises(MismatchError):
            launch_differently(1, what)
