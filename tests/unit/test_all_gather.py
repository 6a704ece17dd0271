"""All-gathers: what a failed launch frees, and messages whose tensors are kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import fully_shard
from tests._internals import (
    AllGather,
    AllGatherBuffers,
    CachedPart,
    Collective,
    CommStreams,
    GradientState,
    OwnedBuffer,
    Pooled,
    StreamLauncher,
    TensorShards,
    Traits,
    Transfer,
    cached_message,
    plan_gather,
)
from tests.helpers.fake_world import FakeCommunicator, FakeWorld
from tests.helpers.sharding import fake_ranks

CPU = torch.device("cpu")


class ShmSocket:
    """A communicator whose operations never complete, or which cannot launch."""

    traits = Traits()
    size = 2

    def __init__(self, *, works: bool) -> None:
        self._works = works

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str) -> ShmSocket:
        if not self._works:
            raise MemoryError(label)
        return self


class ProcessGroups:
    def __init__(self, wire: ShmSocket) -> None:
        self.gather = wire


class Bucket:
    """A bucket whose parameters are all zero-copy."""

    cached_part = None
    needs_barrier = False

    def __init__(self, wire: ShmSocket) -> None:
        self.pgs = ProcessGroups(wire)
        self.is_freed = False

    def allocate_gather(self) -> None: ...

    def prepare_gather(self, cast: None) -> AllGatherBuffers:
        return AllGatherBuffers([Transfer(torch.zeros(4), torch.ones(2))], [])

    def free(self) -> None:
        self.is_freed = True


class Group:
    name = "a"
    slices = ()
    gradient_state = GradientState.NONE

    def __init__(self, buckets: list[Any]) -> None:
        self.axes = SimpleNamespace(device=CPU)
        self.buckets, self.last_gather = buckets, None

    def needs_gather(self) -> bool:
        return True


@pytest.mark.behaviour("H-01")
@pytest.mark.parametrize("first_works", [True, False])
def test_memory_is_freed_after_a_failed_launch_unless_it_is_in_flight(first_works: bool) -> None:
    buckets: list[Any] = [Bucket(ShmSocket(works=first_works)), Bucket(ShmSocket(works=False))]
    group: Any = Group(buckets)
    with pytest.raises(MemoryError, match="all-gather of a"):
        StreamLauncher(CommStreams(CPU)).gather([group], "all-gather of a")
    assert [bucket.is_freed for bucket in buckets] == [not first_works] * 2


RANKS = 2


def part_of(widths: Sequence[int], *, rank: int, dtype: torch.dtype = torch.float32) -> CachedPart:
    """Return a bucket of vectors whose shards have ``widths`` elements. Values start from 100 times the rank."""
    shards = [TensorShards((RANKS * width,), 0, RANKS) for width in widths]
    layout = plan_gather(shards, itemsize=dtype.itemsize, zero_copy_min_bytes=1 << 30)
    packed = torch.arange(100.0 * rank, 100.0 * rank + sum(widths))
    buffer = OwnedBuffer(layout.places.numel, dtype, packed.device)
    places = [
        buffer.region(offset, RANKS * width).view(RANKS, width)
        for offset, width in zip(layout.places.offsets, widths, strict=True)
    ]
    part = CachedPart(packed, dtype, buffer, places)
    buffer.free()
    return part


class Slab(FakeCommunicator):
    """Allocates slices of larger tensors, as a user's communicator may."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel + 5, dtype=dtype, device=device)[5:]


aligned = st.lists(st.integers(1, 4).map(lambda n: 8 * n), min_size=1, max_size=4)
any_width = st.lists(st.integers(0, 20), min_size=1, max_size=4)
alike = st.builds(lambda width, count: [width] * count, st.integers(1, 9), st.integers(2, 5))


@example([[8, 8, 8], [0]], torch.float32, FakeCommunicator)
@given(
    st.lists(aligned | any_width | alike, min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([FakeCommunicator, Slab]),
)
def test_full_parameters_are_made_of_all_ranks_shards_again_and_again(buckets, dtype: torch.dtype, kind) -> None:
    ranks = [[part_of(widths, rank=rank, dtype=dtype) for widths in buckets] for rank in range(RANKS)]
    world = FakeWorld(RANKS)
    communicators = [kind(world, rank) for rank in range(RANKS)]
    launches = []
    for parts, communicator in zip(ranks, communicators, strict=True):
        of_rank: list[Any] = [
            SimpleNamespace(pgs=SimpleNamespace(gather=communicator), cached_part=part) for part in parts
        ]
        launches.append(AllGather(of_rank, torch.device("cpu")))
        assert launches[-1].is_of(of_rank)
    for step in range(2):
        for part in (part for parts in ranks for part in parts):
            part.packed.add_(step)  # like an optimizer
        for launch in launches:
            launch.begin("")
            launch.allocate()
        sent = [launch.launch() for launch in launches]
        for work, launch, parts in zip(sent, launches, ranks, strict=True):
            assert all(part.buffer.nbytes == 0 for part in parts), "no buffer may be allocated before data arrives"
            work.wait()
            launch.finish()
        for parts in ranks:
            for i, (part, widths) in enumerate(zip(parts, buckets, strict=True)):
                for begin, width, place in zip(accumulate(widths, initial=0), widths, part.places, strict=False):
                    shards = [of_rank[i].packed[begin : begin + width].to(dtype) for of_rank in ranks]
                    assert torch.equal(place, torch.stack(shards))
                part.buffer.free()


def test_gathers_with_copies_or_over_other_ranks_are_not_cached() -> None:
    one, other = FakeWorld(RANKS).communicator(0), FakeWorld(RANKS).communicator(0)
    part = part_of([8, 16], rank=0)
    assert cached_message([part, part], [one, one]) is not None
    assert cached_message([], []) is None
    assert cached_message([part, None], [one, one]) is None
    assert cached_message([part, part], [one, other]) is None


@pytest.mark.parametrize(("width", "dtype", "other"), [(8, torch.float32, torch.bfloat16), (7, torch.int8, torch.int8)])
def test_payloads_that_do_not_fit_one_message_are_refused(width: int, dtype: torch.dtype, other: torch.dtype) -> None:
    """Those of two dtypes, and those of single bytes between which there are gaps."""
    parts = [part_of([width], rank=0, dtype=each) for each in (dtype, other)]
    assert cached_message(parts, [FakeWorld(RANKS).communicator(0)] * 2) is None


def test_messages_are_allocated_by_the_latest_chosen_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    pooled: list[int] = []
    allocate = Pooled.allocate

    def noting(self: Pooled, numel: int, *args: Any) -> torch.Tensor:
        pooled.append(numel)
        return allocate(self, numel, *args)

    monkeypatch.setattr(Pooled, "allocate", noting)
    with fake_ranks(RANKS):
        model: Any = fully_shard(nn.Linear(8, 8))
        for chosen in (False, True, False):
            model.set_allocate_memory_from_process_group_for_comm(chosen)
            pooled.clear()
            model(torch.ones(1, 8))
            model.reshard()
            assert bool(pooled) is chosen
