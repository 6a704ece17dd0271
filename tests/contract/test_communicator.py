"""The contract of communicators: one suite for loopback, simulated ranks, gloo and shared memory. A case is the program
that one rank runs. It launches collectives, yields, then waits and checks the results. Simulated ranks take turns at
each yield; real ranks run concurrently. For a new communicator, add one ``test_`` function that runs the cases on
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests._internals import (
    Collective,
    Communicator,
    LoopbackCommunicator,
    ReduceOp,
    SharedMemoryCommunicator,
    Transfer,
    Work,
    communicator_over,
    find,
)
from tests.helpers.fake_world import FakeWorld
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import in_place, over_gloo

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8)

Case = Callable[[Communicator], Iterator[None]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the data that ``rank`` sends. It has small integers, so that sums are exact in every dtype and order."""
    return (torch.arange(numel) % 5 + rank + 1).to(dtype)


def gathered(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([values(rank, numel, dtype) for rank in range(size)])


def summed(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    total = size * values(0, numel, torch.int64) + sum(range(size))
    return total.to(dtype)


def chunk(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    return tensor.chunk(comm.size)[comm.rank]


KINDS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def transfer_of(kind: Collective, comm: Communicator, numel: int, dtype: torch.dtype) -> tuple[Transfer, torch.Tensor]:
    """Return a transfer in which the part of each rank has ``numel`` elements, and the output that it should give."""
    if kind is Collective.ALL_GATHER:
        input, expected = values(comm.rank, numel, dtype), gathered(comm.size, numel, dtype)
    else:
        total = numel * comm.size
        input = values(comm.rank, total, dtype)
        if kind is Collective.REDUCE_SCATTER:
            expected = chunk(summed(comm.size, total, dtype), comm)
        else:
            expected = torch.cat([chunk(values(rank, total, dtype), comm) for rank in range(comm.size)])
    return Transfer(torch.full(expected.shape, 99).to(dtype), input), expected


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=0)


@case
def properties_of_the_communicator_are_valid(comm: Communicator) -> Iterator[None]:
    assert 0 <= comm.rank < comm.size
    assert isinstance(comm.traits.averages, bool)
    assert comm.traits.zero_copy_min_bytes >= 0
    assert isinstance(comm.traits.aliases, bool)
    assert isinstance(comm.traits.widens, bool)
    yield


@case
def each_collective_gives_every_rank_its_part_in_every_dtype(comm: Communicator) -> Iterator[None]:
    for kind, dtype in product(KINDS, FLOATS + INTEGERS):
        transfer, expected = transfer_of(kind, comm, 7, dtype)
        sent = transfer.input.clone()
        work = comm.launch(kind, [transfer])
        yield
        work.wait()
        assert_exact(transfer.output, expected)
        assert kind is Collective.REDUCE_SCATTER or torch.equal(transfer.input, sent)


@case
def all_gather_accepts_an_input_that_is_part_of_the_output(comm: Communicator) -> Iterator[None]:
    for dtype in FLOATS + INTEGERS:
        output = torch.full((7 * comm.size,), 99).to(dtype)
        input = chunk(output, comm)
        input.copy_(values(comm.rank, 7, dtype))
        work = comm.launch(Collective.ALL_GATHER, [Transfer(output, input)])
        yield
        work.wait()
        assert_exact(output, gathered(comm.size, 7, dtype))


@case
def ranks_that_alias_share_memory_and_barriers_synchronize_them(comm: Communicator) -> Iterator[None]:
    yield
    if not comm.traits.aliases or comm.size == 1:
        return
    aliasing = cast(SharedMemoryCommunicator, comm)
    for dtype in FLOATS + INTEGERS:
        memory = aliasing.share(7 * comm.size * dtype.itemsize).view(dtype)
        assert_exact(memory, torch.zeros(7 * comm.size, dtype=dtype))
        aliasing.launch(Collective.BARRIER, (), "read").wait()
        chunk(memory, comm).copy_(values(comm.rank, 7, dtype))
        aliasing.launch(Collective.BARRIER, (), "written").wait()
        assert_exact(memory, gathered(comm.size, 7, dtype))


@case
def a_widening_reduce_scatter_sums_in_fp32(comm: Communicator) -> Iterator[None]:
    for dtype in (torch.bfloat16, torch.float16):
        input = (values(comm.rank, 5 * comm.size, torch.float32) / 3).to(dtype)
        output = torch.full((5,), 99.0)
        work = comm.launch(Collective.REDUCE_SCATTER, [Transfer(output, input)]) if comm.traits.widens else None
        yield
        if work is None:
            continue
        work.wait()
        expected = torch.zeros(5 * comm.size)
        for rank in range(comm.size):
            expected += (values(rank, 5 * comm.size, torch.float32) / 3).to(dtype).float()
        assert_exact(output, chunk(expected, comm))


@case
def all_gather_writes_only_its_output(comm: Communicator) -> Iterator[None]:
    buffer = torch.full((5 * comm.size + 4,), -1.0)
    work = comm.launch(Collective.ALL_GATHER, [Transfer(buffer[2:-2], values(comm.rank, 5, torch.float32))])
    yield
    work.wait()
    assert_exact(buffer[2:-2], gathered(comm.size, 5, torch.float32))
    assert_exact(buffer[[0, 1, -2, -1]], torch.full((4,), -1.0))


@case
def one_collective_takes_tensors_of_several_sizes_and_dtypes(comm: Communicator) -> Iterator[None]:
    for kind in KINDS:
        pairs = zip((3, 0, 1, 1000, 8, 2, 0), FLOATS + INTEGERS, strict=True)
        made = [transfer_of(kind, comm, numel, dtype) for numel, dtype in pairs]
        work = comm.launch(kind, [transfer for transfer, _ in made])
        yield
        work.wait()
        for transfer, expected in made:
            assert_exact(transfer.output, expected)


@case
def one_reduce_scatter_takes_tensors_of_one_dtype(comm: Communicator) -> Iterator[None]:
    sizes = (3, 1000, 0, 8, 3 << 17, 2)  # 1.5 MiB for each rank among small ones
    fulls = [values(comm.rank + 10 * k, numel * comm.size, torch.float32) for k, numel in enumerate(sizes)]
    outputs = [torch.empty(numel) for numel in sizes]
    work = comm.launch(Collective.REDUCE_SCATTER, [Transfer(*each) for each in zip(outputs, fulls, strict=True)])
    yield
    work.wait()
    for k, (numel, output) in enumerate(zip(sizes, outputs, strict=True)):
        expected = chunk(summed(comm.size, numel * comm.size, torch.float32), comm) + 10 * k * comm.size
        assert_exact(output, expected)


@case
def all_reduce_sums_in_place(comm: Communicator) -> Iterator[None]:
    tensors = [values(comm.rank, 11, dtype) for dtype in FLOATS + INTEGERS]
    work = comm.launch(Collective.ALL_REDUCE, in_place(tensors))
    yield
    work.wait()
    for tensor in tensors:
        assert_exact(tensor, summed(comm.size, 11, tensor.dtype))


@case
def a_communicator_that_averages_divides_by_its_size(comm: Communicator) -> Iterator[None]:
    if not comm.traits.averages:
        return
    for dtype in FLOATS:
        scattered = Transfer(torch.empty(6, dtype=dtype), values(comm.rank, 6 * comm.size, dtype))
        reduced = values(comm.rank, 6, dtype)
        works = [
            comm.launch(Collective.REDUCE_SCATTER, [scattered], op=ReduceOp.AVERAGE),
            comm.launch(Collective.ALL_REDUCE, in_place([reduced]), op=ReduceOp.AVERAGE),
        ]
        yield
        for work in works:
            work.wait()
        mean = summed(comm.size, 6 * comm.size, torch.float64) / comm.size
        assert_close(scattered.output, chunk(mean, comm).to(dtype))
        assert_close(reduced, mean[:6].to(dtype))


@case
def all_tensors_of_a_collective_may_be_empty(comm: Communicator) -> Iterator[None]:
    for dtype in FLOATS + INTEGERS:
        nothing = torch.empty(0, dtype=dtype)
        works = [
            comm.launch(Collective.ALL_GATHER, [Transfer(nothing, nothing.clone())]),
            comm.launch(Collective.REDUCE_SCATTER, [Transfer(nothing.clone(), nothing.clone())]),
            comm.launch(Collective.ALL_REDUCE, in_place([nothing.clone()])),
        ]
        yield
        for work in works:
            work.wait()


@case
def an_empty_list_completes_without_communication(comm: Communicator) -> Iterator[None]:
    comm.launch(Collective.ALL_GATHER, []).wait()
    comm.launch(Collective.REDUCE_SCATTER, []).wait()
    comm.launch(Collective.ALL_REDUCE, in_place([])).wait()
    yield


@case
def many_launches_may_precede_waits_in_any_order(comm: Communicator) -> Iterator[None]:
    launched: list[tuple[Work, torch.Tensor, torch.Tensor]] = []
    for numel in range(1, 21):
        for kind in KINDS:
            transfer, expected = transfer_of(kind, comm, numel, torch.float32)
            launched.append((comm.launch(kind, [transfer]), transfer.output, expected))
        everywhere = values(comm.rank, numel, torch.float32)
        work = comm.launch(Collective.ALL_REDUCE, in_place([everywhere]))
        launched.append((work, everywhere, summed(comm.size, numel, torch.float32)))
    yield
    for work, actual, expected in reversed(launched):
        work.wait()
        assert_exact(actual, expected)


@case
def a_collective_reads_results_of_completed_collectives(comm: Communicator) -> Iterator[None]:
    tensor = torch.full((4,), float(comm.rank + 1))
    expected = sum(range(1, comm.size + 1))
    for _ in range(3):
        work = comm.launch(Collective.ALL_REDUCE, in_place([tensor]))
        yield
        work.wait()
        assert_exact(tensor, torch.full((4,), float(expected)))
        expected *= comm.size


@case
def a_work_may_be_waited_for_more_than_once(comm: Communicator) -> Iterator[None]:
    tensor = values(comm.rank, 4, torch.float32)
    made = [transfer_of(kind, comm, 4, torch.float32) for kind in KINDS]
    works = [comm.launch(kind, [transfer]) for kind, (transfer, _) in zip(KINDS, made, strict=True)]
    works.append(comm.launch(Collective.ALL_REDUCE, in_place([tensor])))
    yield
    for work in works * 2:
        work.wait()
    for transfer, expected in made:
        assert_exact(transfer.output, expected)
    assert_exact(tensor, summed(comm.size, 4, torch.float32))


@case
def large_tensors_are_transferred_completely(comm: Communicator) -> Iterator[None]:
    kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    made = [transfer_of(kind, comm, 1 << 16, torch.float32) for kind in kinds]
    works = [comm.launch(kind, [transfer]) for kind, (transfer, _) in zip(kinds, made, strict=True)]
    yield
    for work in works:
        work.wait()
    for transfer, expected in made:
        assert_exact(transfer.output, expected)


def run_in_turn(function: Case, communicators: list[Communicator]) -> None:
    """Run all ranks in one process: each runs to its next yield before any rank continues."""
    runs = [function(comm) for comm in communicators]
    while runs:
        unfinished = [run for run in runs if next(run, "over") is None]
        assert len(unfinished) in (0, len(runs)), "all ranks must yield the same number of times"
        runs = unfinished


def run_on_process_group(name: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    communicator = over_gloo(group)
    for _ in CASES[name](communicator):
        pass
    dist.barrier()  # a rank that drops its connections may end those that others still make


def run_in_shared_memory(name: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    communicator = communicator_over(group, "cpu")
    assert find(communicator, SharedMemoryCommunicator) is not None
    for _ in CASES[name](communicator):
        pass


every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_loopback(name: str) -> None:
    run_in_turn(CASES[name], [LoopbackCommunicator()])


@every_case
@pytest.mark.parametrize("size", [1, 3])
def test_fake(name: str, size: int) -> None:
    backend = FakeWorld(size)
    run_in_turn(CASES[name], [backend.communicator(rank) for rank in range(size)])


@pytest.mark.multiprocess
@every_case
def test_gloo(name: str) -> None:
    run_ranks(run_on_process_group, 3, name)


@pytest.mark.multiprocess
@every_case
def test_shared_memory(name: str) -> None:
    run_ranks(run_in_shared_memory, 3, name)
