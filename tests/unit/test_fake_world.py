"""Simulated ranks: behaviour beyond the contract, and errors where real ranks would hang."""

from __future__ import annotations

import re

import pytest
import torch

from composable_fsdp.errors import ConfigurationError, UnsupportedError
from tests._internals import Collective, ReduceOp, Transfer
from tests.helpers.fake_world import DeadlockError, FakeCommunicator, FakeWork, FakeWorld, MismatchError
from tests.helpers.transports import in_place


def ranks_of(world: FakeWorld) -> list[FakeCommunicator]:
    return [world.communicator(rank) for rank in range(world.size)]


def gather(comm: FakeCommunicator, *numels: int, dtype: torch.dtype = torch.float32) -> FakeWork:
    inputs = [torch.ones(numel, dtype=dtype) for numel in numels]
    return comm.launch(Collective.ALL_GATHER, [Transfer(input.repeat(comm.size), input) for input in inputs])


def scatter(comm: FakeCommunicator, numel: int, op: ReduceOp = ReduceOp.SUM) -> FakeWork:
    return comm.launch(Collective.REDUCE_SCATTER, [Transfer(torch.empty(numel), torch.ones(numel * comm.size))], op=op)


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


# Time of data movement


def test_data_move_when_the_last_rank_launches_and_not_before() -> None:
    world = FakeWorld(3)
    outputs = [torch.zeros(3) for _ in range(3)]
    works = []
    for comm, output in zip(ranks_of(world), outputs, strict=True):
        assert all(o.tolist() == [0, 0, 0] for o in outputs)
        works.append(comm.launch(Collective.ALL_GATHER, [Transfer(output, torch.tensor([comm.rank + 1.0]))]))
    assert all(o.tolist() == [1, 2, 3] for o in outputs)
    for work in works:
        work.wait()


def test_ranks_may_be_many_collectives_apart() -> None:
    world = FakeWorld(2)
    first, second = ranks_of(world)
    sums = [torch.tensor([float(i)]) for i in range(5)]
    works = [first.launch(Collective.ALL_REDUCE, in_place([tensor])) for tensor in sums]
    for i in range(5):
        second.launch(Collective.ALL_REDUCE, in_place([torch.tensor([10.0 * i])]))
        works[i].wait()
    assert torch.cat(sums).tolist() == [0, 11, 22, 33, 44]


def test_all_communicators_of_a_rank_share_its_sequence() -> None:
    world = FakeWorld(2)
    gather(world.communicator(0), 4)
    work = scatter(world.communicator(0), 4)
    gather(world.communicator(1), 4)
    scatter(world.communicator(1), 4)
    work.wait()


# Deadlock


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


def test_an_early_wait_succeeds_once_all_ranks_have_launched() -> None:
    comms = ranks_of(FakeWorld(2))
    work = gather(comms[0], 4)
    with pytest.raises(DeadlockError):
        work.wait()
    gather(comms[1], 4)
    work.wait()


def test_an_empty_launch_waits_for_no_rank_but_counts_in_the_sequence() -> None:
    first, second = ranks_of(FakeWorld(2))
    first.launch(Collective.ALL_GATHER, []).wait()
    with pytest.raises(MismatchError, match=re.escape("rank 0: all_gather(nothing)\n  rank 1: all_gather(1 transfer")):
        gather(second, 4)


# Mismatch


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


def test_a_rank_that_mismatched_has_not_launched() -> None:
    first, second = ranks_of(FakeWorld(2))
    work = gather(first, 4)
    with pytest.raises(MismatchError):
        gather(second, 5)
    with pytest.raises(DeadlockError, match="rank 1 of 2"):
        work.wait()
    gather(second, 4)
    work.wait()


# Invalid calls


@pytest.mark.parametrize(
    ("output", "input", "text"),
    [
        (torch.empty(2, 4), torch.empty(4), r"output must be 1-d and contiguous, not of shape (2, 4)"),
        (torch.empty(8), torch.empty(8)[::2], r"input must be 1-d and contiguous, not of shape (4,) with strides (2,)"),
        (torch.empty(8), torch.empty(4).half(), "output is torch.float32 and input torch.float16. Cast"),
        (torch.empty(9), torch.empty(4), "output has 9 elements and input 4, but they must be as 2 to 1."),
    ],
)
def test_an_invalid_transfer_is_named(output: torch.Tensor, input: torch.Tensor, text: str) -> None:
    comm = FakeWorld(2).communicator(1)
    good = Transfer(torch.empty(2), torch.empty(1))
    with pytest.raises(ConfigurationError, match=re.escape(f"rank 1, all_gather, transfer 1: {text}")):
        comm.launch(Collective.ALL_GATHER, [good, Transfer(output, input)])


def test_averages_are_refused_for_integers_and_unsupported_backends() -> None:
    with pytest.raises(UnsupportedError, match="reduce_scatter: this world does not average"):
        scatter(FakeWorld(2, averages=False).communicator(0), 4, ReduceOp.AVERAGE)
    with pytest.raises(UnsupportedError, match=re.escape("rank 0, all_reduce: torch.int64 has no average")):
        FakeWorld(2).communicator(0).launch(
            Collective.ALL_REDUCE, in_place([torch.ones(2, dtype=torch.int64)]), op=ReduceOp.AVERAGE
        )


def test_worlds_and_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one rank, not 0"):
        FakeWorld(0)
    for rank in (-1, 2):
        with pytest.raises(ConfigurationError, match=f"rank {rank} is not in a world of 2: use 0 to 1"):
            FakeWorld(2).communicator(rank)


# Settings


def test_the_settings_reach_every_communicator() -> None:
    comm = FakeWorld(2, averages=False, zero_copy_min_bytes=77).communicator(1)
    assert (comm.rank, comm.size, comm.traits.averages, comm.traits.aliases, comm.traits.zero_copy_min_bytes) == (
        1,
        2,
        False,
        False,
        77,
    )
    assert FakeWorld(2).communicator(0).traits.averages


# Arithmetic


def all_reduced(tensors: list[torch.Tensor], op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
    for comm, tensor in zip(ranks_of(FakeWorld(len(tensors))), tensors, strict=True):
        comm.launch(Collective.ALL_REDUCE, in_place([tensor]), op=op)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    return tensors[0]


def test_narrow_floats_are_summed_in_fp32_and_rounded_once() -> None:
    # In bf16 256 + 1 is 256, so a sum in bf16 would stay 256.
    total = all_reduced([torch.tensor([256.0], dtype=torch.bfloat16), *torch.ones(4, 1, dtype=torch.bfloat16)])
    assert total.dtype is torch.bfloat16
    assert total.item() == 260.0


def test_a_thousand_fake_ranks_need_only_the_memory_of_their_tensors() -> None:
    size = 1000
    world = FakeWorld(size)
    shards = [torch.full((2,), float(rank)) for rank in range(size)]
    full = torch.zeros(2 * size)  # all ranks share one output
    works = [comm.launch(Collective.ALL_GATHER, [Transfer(full, shards[comm.rank])]) for comm in ranks_of(world)]
    for work in works:
        work.wait()
    assert full[::2].tolist() == list(range(size))
    assert not world._open
