"""Cutting of flat tensors in page-locked memory, whose allocator rounds up to powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp import CPUOffloadPolicy, OffloadPolicy
from tests._internals import PlanOptions, cut_pinned, pinned_bytes, pinned_waste, plan_group
from tests.helpers.layouts import spec_of

MIB = 1 << 20
SIZES = st.lists(st.tuples(*[st.integers(0, 40 * MIB)] * 2), min_size=1, max_size=7).map(tuple)


def taken(sizes: tuple[tuple[int, ...], ...], runs: list[range]) -> int:
    return sum(pinned_bytes(sum(sizes[k][column] for k in run)) for run in runs for column in range(len(sizes[0])))


@given(st.integers(0, 1 << 40))
def test_pinned_memory_is_the_next_power_of_two(nbytes: int) -> None:
    found = pinned_bytes(nbytes)
    assert (found == 0) == (nbytes == 0)
    assert found & (found - 1) == 0
    assert nbytes <= found < 2 * max(nbytes, 1)


@given(SIZES)
def test_runs_waste_a_tenth_or_as_little_as_any_and_no_fewer_do(sizes: tuple[tuple[int, ...], ...]) -> None:
    runs, count, total = cut_pinned(sizes), len(sizes), sum(map(sum, sizes))
    assert [k for run in runs for k in run] == list(range(count))
    every = [
        [range(begin, end) for begin, end in zip((0, *cuts), (*cuts, count), strict=True)]
        for number in range(count)
        for cuts in combinations(range(1, count), number)
    ]
    enough = max(1.1 * total, min(taken(sizes, each) for each in every))
    assert total < MIB or taken(sizes, runs) <= enough
    assert all(taken(sizes, each) > enough for each in every if len(each) < len(runs))


def planned(sizes: Sequence[int], offload: OffloadPolicy) -> tuple[int, float]:
    """Return the number of buckets of parameters of ``sizes`` in MiB on one rank, and the part that is wasted."""
    fp32 = torch.float32
    specs = tuple(
        replace(spec_of(f"{k}", (size, MIB // 4), 0, fp32), gradient_dtype=None, offload=offload)
        for k, size in enumerate(sizes)
    )
    buckets = plan_group(specs, (PlanOptions(1, 0, 0),)).buckets
    return len(buckets), pinned_waste(buckets) / (2 * sum(b.shard_bytes for b in buckets))


BLOCK = (64, 64, 64, 64, 172, 172, 172)
"""The weights of a transformer block, in MiB."""


def test_a_group_of_1_125_gib_wastes_at_most_a_tenth_in_few_buckets() -> None:
    sizes = (*BLOCK, *BLOCK[:4], 124)
    assert sum(sizes) * MIB == 9 << 27
    assert pinned_bytes(sum(sizes) * MIB) > 1.77 * sum(sizes) * MIB, "what one flat tensor takes"
    count, waste = planned(sizes, CPUOffloadPolicy())
    assert 1 < count <= 3
    assert waste <= 0.1
    assert planned(sizes, CPUOffloadPolicy(pin_memory=False)) == planned(sizes, OffloadPolicy()) == (1, 0.0)


def test_flags_and_norms_add_no_power_of_two() -> None:
    assert planned((64, 64), CPUOffloadPolicy()) == (1, 0.0)
    assert planned((64, 64, 1), CPUOffloadPolicy()) == (2, 0.0)
