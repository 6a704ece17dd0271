"""The model of torch's caching allocator in the benchmarks."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MB = 1 << 20


@pytest.fixture(name="Allocator")
def _allocator() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("sim.allocator").Allocator


@pytest.mark.parametrize(
    ("nbytes", "reserved"), [(1, 2 * MB), (MB, 2 * MB), (MB + 1, 20 * MB), (10 * MB, 10 * MB), (15 * MB - 1, 16 * MB)]
)
def test_a_first_request_reserves_a_segment_by_its_size(Allocator: Any, nbytes: int, reserved: int) -> None:
    allocator = Allocator()
    block = allocator.allocate(nbytes, "stream")
    assert allocator.reserved == reserved
    assert block.size >= nbytes
    assert block.size % 512 == 0


def test_small_requests_share_a_segment_and_freed_memory_is_used_again(Allocator: Any) -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(512, "stream") for _ in range(4096)]
    assert allocator.reserved == 2 * MB
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated == 0
    allocator.allocate(MB, "stream")
    allocator.allocate(MB, "stream")
    assert allocator.reserved == 2 * MB, "neighbours are merged"


def test_growing_sizes_fragment_segments_but_not_expandable_ones(Allocator: Any) -> None:
    segments, expandable = Allocator(), Allocator(expandable=True)
    for allocator in (segments, expandable):
        for size in range(20, 200, 20):
            allocator.free(allocator.allocate(size * MB, "stream"))
    assert segments.reserved == sum(range(20, 200, 20)) * MB
    assert expandable.reserved == 180 * MB


@pytest.mark.parametrize("expandable", [False, True])
def test_random_requests_never_overlap_and_end_with_nothing_allocated(Allocator: Any, expandable: bool) -> None:
    allocator, numbers, blocks = Allocator(expandable=expandable), random.Random(0), list[Any]()
    for _ in range(3000):
        if blocks and numbers.random() < 0.5:
            allocator.free(blocks.pop(numbers.randrange(len(blocks))))
        else:
            blocks.append(allocator.allocate(int(2 ** numbers.uniform(0, 26)), numbers.choice("ab")))
        assert allocator.allocated == sum(block.size for block in blocks) <= allocator.reserved
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated == 0
    free = [block for pool in allocator._free.values() for block in pool]
    assert sum(block.size for block in free) == allocator.reserved
    if expandable:
        assert len(free) == len(allocator._free), "each segment is one free block again"


def test_recorded_allocations_are_played_as_they_were(Allocator: Any) -> None:
    reserved_memory = importlib.import_module("reserved_memory")
    recorder, direct, played, draw = reserved_memory.Recorder(), Allocator(), Allocator(), random.Random(0)
    pairs: list[tuple[int, Any]] = []
    for _ in range(300):
        if pairs and draw.random() < 0.4:
            number, block = pairs.pop(draw.randrange(len(pairs)))
            recorder.free(number)
            direct.free(block)
        else:
            nbytes, stream = draw.randrange(1, 30 * MB), draw.choice("ab")
            pairs.append((recorder.allocate(nbytes, stream), direct.allocate(nbytes, stream)))
    events, blocks = recorder.take(), dict[int, Any]()
    reserved_memory.play(events, played, blocks)
    assert (played.reserved, played.allocated) == (direct.reserved, direct.allocated)
    assert {number for number, *_ in reserved_memory.in_use(events)} == blocks.keys() == {n for n, _ in pairs}
