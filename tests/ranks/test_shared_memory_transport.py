"""Test the shared memory transport: bitwise equal to gloo, bounded memory, errors that name the rank."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.errors import ConfigurationError, DivergenceError, PeerError
from tests._internals import (
    NUM_SLOTS,
    SLOT_BYTES,
    SWITCH,
    Collective,
    Communicator,
    GlooCommunicator,
    SharedMemoryCommunicator,
    Transfer,
    Work,
    communicator_over,
    connect,
    data_parallel_axes,
    find,
    is_over_group,
    part_of,
    smaller_shard_axis,
)
from tests.helpers.rank_process import RanksError
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import in_place, over_gloo

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is for Linux")

LARGE = 5 * SLOT_BYTES // 4
"""The number of fp32 elements that take several rounds."""


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def shared(group: dist.ProcessGroup | None = None) -> SharedMemoryCommunicator:
    communicator = communicator_over(group or world(), "cpu")
    found: SharedMemoryCommunicator | None = find(communicator, SharedMemoryCommunicator)
    assert found is not None
    return found


def new_group(seconds: float = 60) -> dist.ProcessGroup:
    """Return a group of all ranks. Its failures do not affect later tests."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def make_shard(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul_(8).to(dtype)


def compare_with_gloo(seed: int) -> None:
    ours, gloo = shared(), over_gloo(world())
    rank, size = ours.rank, ours.size
    draw = random.Random(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
        slot = SLOT_BYTES // dtype.itemsize
        near = [slot + draw.choice((-1, 0, 1)), slot // (size - 1) + draw.choice((-1, 0, 1)), draw.randrange(4 * slot)]
        numels = [0, 1, draw.randrange(100), draw.randrange(100_000), draw.choice(near)]
        draw.shuffle(numels)
        shards = [make_shard(rank + 10 * k, numel, dtype) for k, numel in enumerate(numels)]
        fulls = [make_shard(rank + 10 * k, numel * size, dtype) for k, numel in enumerate(numels)]
        for results in zip(collectives(ours, shards, fulls), collectives(gloo, shards, fulls), strict=True):
            for mine, theirs in zip(*results, strict=True):
                assert torch.equal(mine, theirs)


def collectives(
    communicator: Communicator, shards: list[torch.Tensor], fulls: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    gathered, exchanged = ([torch.empty_like(full) for full in fulls] for _ in range(2))
    scattered = [torch.empty_like(shard) for shard in shards]
    works = [
        communicator.launch(Collective.ALL_GATHER, [Transfer(*pair) for pair in zip(gathered, shards, strict=True)]),
        communicator.launch(
            Collective.REDUCE_SCATTER, [Transfer(*pair) for pair in zip(scattered, fulls, strict=True)]
        ),
        communicator.launch(Collective.ALL_TO_ALL, [Transfer(*pair) for pair in zip(exchanged, fulls, strict=True)]),
    ]
    for work in works:
        work.wait()
    return [gathered, scattered, exchanged]


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_have_the_bits_that_gloo_gives(world_size: int) -> None:
    for seed in range(2):
        run_ranks(compare_with_gloo, world_size, seed)


@on_ranks(2, 4)
def test_ranks_may_wait_for_two_axes_in_opposite_orders() -> None:
    communicators = [shared(), shared(new_group())]
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        outputs = [torch.empty(size * LARGE) for _ in communicators]
        works = [
            communicator.launch(Collective.ALL_GATHER, [Transfer(output, make_shard(rank + k, LARGE))])
            for k, (communicator, output) in enumerate(zip(communicators, outputs, strict=True))
        ]
        for work in works if rank % 2 else reversed(works):
            work.wait()
        for k, output in enumerate(outputs):
            assert torch.equal(output, torch.cat([make_shard(peer + k, LARGE) for peer in range(size)]))


@on_ranks(2)
def test_staging_memory_does_not_grow() -> None:
    communicator = shared(new_group())
    for _ in range(50):
        works = []
        for numel in (100, 50_000, LARGE):
            full = torch.ones(communicator.size * numel)
            works.append(communicator.launch(Collective.ALL_GATHER, [Transfer(full, torch.ones(numel))]))
            works.append(communicator.launch(Collective.REDUCE_SCATTER, [Transfer(torch.empty(numel), full.clone())]))
        for work in works:
            work.wait()
    # Low slots are written first, and six operations are in flight: two steps of a long one.
    assert not communicator._slots[communicator.rank][12].any()


def wait_in_another_order(count: int, ahead: int) -> None:
    """More operations in flight than there are slots: rank 0 waits for each, the others for the last of many."""
    communicator = shared(new_group())
    rank, size = communicator.rank, communicator.size
    outputs = [torch.empty(size * (LARGE if k % 24 == 0 else 7)) for k in range(count)]
    works: list[Work] = []
    for k, output in enumerate(outputs):
        shard = make_shard(rank + k, output.numel() // size)
        works.append(communicator.launch(Collective.ALL_GATHER, [Transfer(output, shard)]))
        if k % 3 == 0:
            works.append(communicator.launch(Collective.BARRIER, (), "between"))
        if rank == 0 and k >= ahead:
            works[k - ahead].wait()
    for work in works if rank else reversed(works):
        work.wait()
    for k, output in enumerate(outputs):
        assert torch.equal(output, torch.cat([make_shard(peer + k, output.numel() // size) for peer in range(size)]))


@pytest.mark.parametrize("ahead", [3, 100])
def test_more_operations_are_in_flight_than_there_are_slots(ahead: int) -> None:
    run_ranks(wait_in_another_order, 3, NUM_SLOTS + 8, ahead)


@on_ranks(2)
def test_ranks_that_completed_all_slots_stage_again() -> None:
    """Neither has told the other so in a message of a step."""
    communicator = shared(new_group())
    for _ in range(5):
        works = [communicator.launch(Collective.BARRIER, (), "many") for _ in range(NUM_SLOTS)]
        for work in works:
            work.wait()


@on_ranks(2)
def test_a_rank_goes_on_with_80_operations_of_one_that_waits_elsewhere() -> None:
    """Sockets have room for all messages that it leaves unread: also for more operations, with long descriptions."""
    communicator = shared(new_group())
    works = [communicator.launch(Collective.BARRIER, (), f"{k} of " + 500 * "many") for k in range(2 * NUM_SLOTS)]
    for work in works[: max(80, NUM_SLOTS - 2)] if dist.get_rank() == 0 else ():
        work.wait()
    dist.barrier()
    for work in works:
        work.wait()


@on_ranks(2, 4)
def test_all_ranks_map_the_same_shared_memory() -> None:
    communicator = shared()
    rank, size = communicator.rank, communicator.size
    common = communicator.share(size * LARGE).view(size, LARGE)
    assert not common.any()
    communicator.launch(Collective.BARRIER, (), "looking").wait()
    for turn in range(1, 4):
        common[rank] = rank + turn
        communicator.launch(Collective.BARRIER, (), "writing").wait()
        assert all(common[peer].eq(peer + turn).all() for peer in range(size))
        communicator.launch(Collective.BARRIER, (), "reading").wait()
    assert communicator.share(0).numel() == 0


@on_ranks(2)
def test_a_failed_memory_allocation_is_reported_on_all_ranks() -> None:
    communicator = shared(new_group())
    if communicator.rank == 0:
        with pytest.raises(OSError, match=r"cannot be mapped|Invalid argument|File too large"):
            communicator.share(1 << 62)
    else:
        with pytest.raises(PeerError, match=r"cannot be done: rank 0 raised OSError: .* in sharing of memory"):
            communicator.share(1 << 62)


@on_ranks(2)
def test_one_rank_disables_shared_memory_for_all() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv(SWITCH, "0")
        assert find(communicator_over(new_group(), "cpu"), GlooCommunicator) is not None


@on_ranks(4)
def test_ranks_on_several_hosts_use_gloo_between_them() -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, "host_identity", lambda: f"host {rank // 2}")
        assert find(communicator_over(new_group(), "cpu"), GlooCommunicator) is not None
        axes = data_parallel_axes(dist.init_device_mesh("cpu", (2, 2)))
        assert find(axes.shard, SharedMemoryCommunicator) is not None
        assert find(axes.replicate, GlooCommunicator) is not None


@on_ranks(2)
def test_all_ranks_use_gloo_if_shared_memory_fails() -> None:
    def fail(nbytes: int) -> None:
        raise OSError("shared memory is not available")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(connect, "Segment", fail)
        if dist.get_rank() == 0:
            text = rf"rank 1 of 2 met OSError: shared memory is not available.* Set {SWITCH}=0"
            with pytest.warns(UserWarning, match=text):
                communicator = communicator_over(new_group(), "cpu")
        else:
            communicator = communicator_over(new_group(), "cpu")
    assert find(communicator, GlooCommunicator) is not None
    communicator.launch(Collective.ALL_REDUCE, in_place([torch.ones(1)])).wait()


@on_ranks(4)
def test_hybrid_and_smaller_meshes_and_doubles_use_shared_memory() -> None:
    axes = data_parallel_axes(dist.init_device_mesh("cpu", (4,)))
    smaller = smaller_shard_axis(axes, 2)
    assert find(axes.shard, SharedMemoryCommunicator) is not None
    assert is_over_group(axes.shard)
    assert find(smaller, SharedMemoryCommunicator) is not None
    double = communicator_over(part_of(axes.shard.group, 4), "cpu")
    assert find(double, SharedMemoryCommunicator) is not None
    assert double.group is not axes.shard.group
    again = data_parallel_axes(axes.mesh).shard
    assert again is axes.shard, "each process group has one connection"
    with torch.device("meta"):
        model = fully_shard(nn.Linear(8, 8), mesh=axes.mesh)
    model.to_empty(device="cpu")
    assert shared(new_group()).size == 4


def lose_a_rank(numel: int) -> None:
    communicator = shared(new_group())
    full, shard = torch.ones(communicator.size * numel), torch.ones(numel)
    communicator.launch(Collective.REDUCE_SCATTER, [Transfer(shard, full)]).wait()
    if communicator.rank == 1:
        os._exit(3)
    for _ in range(2):
        communicator.launch(Collective.REDUCE_SCATTER, [Transfer(shard, full)]).wait()


@pytest.mark.behaviour("H-03")
@pytest.mark.parametrize("numel", [10, LARGE])
def test_a_killed_rank_is_named_by_all_others_at_once(numel: int) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(lose_a_rank, 4, numel, timeout=30)
    failures = caught.value.failures
    assert "exit code 3" in failures.pop(1)
    assert set(failures) == {0, 2, 3}
    for text in failures.values():
        assert "PeerError: reduce-scatter (operation 2 of ranks [0, 1, 2, 3]) cannot be done: " in text
        assert "rank 1 is gone" in text


@pytest.mark.behaviour("H-03")
@pytest.mark.parametrize("switch", ["1", "0"])
@on_ranks(2)
def test_a_missing_rank_is_an_error_after_the_timeout(switch: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, switch)
        communicator = communicator_over(new_group(seconds=1), "cpu")
    expected = r"all-reduce \(operation 1 of ranks \[0, 1\]\) cannot be done: rank 1 did not come to it in time"
    if communicator.rank == 0:
        with pytest.raises(PeerError, match=expected):
            communicator.launch(Collective.ALL_REDUCE, in_place([torch.ones(1)])).wait()
        if switch == "1":
            with pytest.raises(PeerError, match=r"ranks \[0, 1\] cannot go on together, since all-reduce \(oper"):
                communicator.launch(Collective.ALL_REDUCE, in_place([torch.ones(1)]))
    dist.barrier()
    if communicator.rank == 1 and switch == "1":
        communicator.launch(
            Collective.ALL_REDUCE, in_place([torch.ones(1)])
        ).wait()  # rank 0 had launched this operation
        text = r"all-reduce \(operation 2 .* cannot be done: rank 0 gave up: all-reduce \(operation 1 .* rank 1 did not"
        with pytest.raises(PeerError, match=text):
            communicator.launch(Collective.ALL_REDUCE, in_place([torch.ones(1)])).wait()


@on_ranks(2)
def test_different_operations_on_ranks_are_an_error() -> None:
    eight, four, two = torch.ones(8), torch.ones(4), torch.ones(2)
    calls: dict[str, Callable[[SharedMemoryCommunicator], Work]] = {
        "all-gather (8 bytes in 1 tensors": lambda c: c.launch(Collective.ALL_GATHER, [Transfer(four, two)]),
        "reduce-scatter (16 bytes in 1 tensors": lambda c: c.launch(Collective.REDUCE_SCATTER, [Transfer(four, eight)]),
        "all-gather (16 bytes in 2 tensors": lambda c: c.launch(Collective.ALL_GATHER, [Transfer(four, two)] * 2),
    }
    for name, call in calls.items():
        communicator = shared(new_group())
        work = (
            call(communicator)
            if communicator.rank
            else communicator.launch(Collective.ALL_GATHER, [Transfer(eight, four)])
        )
        with pytest.raises(DivergenceError, match="The order of collectives differs across ranks") as caught:
            work.wait()
        text = str(caught.value)
        assert "rank 0: all-gather (16 bytes in 1 tensors, " in text
        assert f"rank 1: {name}, " in text
        assert "), as operation 1 of ranks [0, 1]" in text


@on_ranks(2)
def test_an_interrupted_wait_can_be_resumed() -> None:
    communicator = shared(new_group())
    output = torch.empty(communicator.size * LARGE)
    if communicator.rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        work = communicator.launch(Collective.ALL_GATHER, [Transfer(output, make_shard(0, LARGE))])
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
    else:
        dist.barrier()
        work = communicator.launch(Collective.ALL_GATHER, [Transfer(output, make_shard(communicator.rank, LARGE))])
    work.wait()
    assert torch.equal(output, torch.cat([make_shard(peer, LARGE) for peer in range(communicator.size)]))


def count_open_files() -> tuple[int, int, int]:
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return (
        sum("composable_fsdp" in link for link in links),
        sum(link.removeprefix("socket:[").removesuffix("]") in unix for link in links),
        Path("/proc/self/maps").read_text().count("composable_fsdp"),
    )


@on_ranks(2)
def test_a_destroyed_process_group_leaves_no_open_files() -> None:
    dist.barrier()
    before = count_open_files()
    for _ in range(3):
        group = new_group()
        communicator = shared(group)
        outputs = [torch.empty(communicator.size * LARGE) for _ in range(4)]
        works = [
            communicator.launch(Collective.ALL_GATHER, [Transfer(output, torch.ones(LARGE))]) for output in outputs
        ]
        for work in works:
            work.wait()
        common = communicator.share(1000)
        files, *sockets_and_maps = zip(count_open_files(), before, strict=True)
        assert files[0] == files[1], "mapped memory needs none"
        assert all(now > then for now, then in sockets_and_maps)
        del communicator, common, works, work
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert count_open_files() == before


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@on_ranks(2)
def test_a_forked_process_leaves_the_sockets_to_its_parent() -> None:
    communicator = shared(new_group())
    child = os.fork()
    if child == 0:
        try:
            communicator.launch(Collective.BARRIER, (), "of a child")
        except PeerError as error:
            os._exit("forked" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    communicator.launch(Collective.BARRIER, (), "of parents").wait()


@on_ranks(2, environment={SWITCH: "off"})
def test_an_unknown_mode_of_shared_memory_is_refused() -> None:
    text = f"^the environment variable {SWITCH} is one of '0', '1', 'copy', not 'off': '0' uses sockets "
    with pytest.raises(ConfigurationError, match=text):
        fully_shard(nn.Linear(2, 2))
