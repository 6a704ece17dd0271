"""Test the assignment of matrices to ranks, and of matrices to buckets, on shapes alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests._internals import (
    AxisCut,
    OwnerPlans,
    Slot,
    Tiling,
    Unit,
    assign_owners,
    axis_cuts,
    cut_buckets,
    data_parallel_placements,
    make_exchanges,
    message_limit,
    newton_schulz_cost,
    replicas_together,
    tiling_of,
)
from tests.helpers.sharding import fake_ranks

LLAMA_70B = 80 * [*2 * [(8192, 8192)], *2 * [(1024, 8192)], *2 * [(28672, 8192)], (8192, 28672)]
"""The matrices of the layers of a Llama of 70 B parameters."""

COSTS = st.lists(st.floats(0.5, 100), min_size=1, max_size=40)


def loads(costs: Sequence[float], owners: list[int], ranks: int) -> list[float]:
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]


def test_owners_of_a_70b_model_are_balanced_on_1024_ranks() -> None:
    costs = [newton_schulz_cost(*shape) for shape in LLAMA_70B]
    for replicas in (8, 16):  # hybrid sharding: replicas that do not share the work
        ranks = 1024 // replicas
        of_ranks = loads(costs, assign_owners(costs, ranks), ranks)
        assert max(of_ranks) <= 1.10 * sum(costs) / ranks
    # 560 matrices on 1,024 owners: no assignment of whole matrices is faster than the largest one.
    assert max(loads(costs, assign_owners(costs, 1024), 1024)) == max(costs)


def test_a_70b_model_is_sent_in_balanced_buckets() -> None:
    costs = [newton_schulz_cost(*shape) for shape in LLAMA_70B]
    nbytes = [2 * prod(shape) for shape in LLAMA_70B]
    owners = assign_owners(costs, 64)
    limit = message_limit(256 << 20, max(nbytes))
    buckets = cut_buckets(costs, owners, nbytes.__getitem__, lambda i: nbytes[i] // 64, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(costs)))
    assert len(buckets) > 3
    for bucket in buckets:
        owned = [sum(nbytes[i] for i in bucket if owners[i] == rank) for rank in range(64)]
        assert max(owned) <= limit
    full = [costs[i] for i in buckets[0]]
    of_ranks = loads(full, [owners[i] for i in buckets[0]], 64)
    assert max(of_ranks) <= 1.10 * sum(of_ranks) / 64


@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_matrices_that_exceed_bucket_bytes_are_computed_together(shape: tuple[int, ...]) -> None:
    """A bucket of one matrix would be computed by one rank, while all others wait."""
    with fake_ranks(prod(shape)):
        mesh = init_device_mesh("cpu", shape)
        placements = [*[Replicate()] * (len(shape) - 1), Shard(0)]
        parameters = [distribute_tensor(torch.zeros(64, 32), mesh, placements) for _ in range(8)]
        slot = Slot(tiling_of(parameters[0]), torch.bfloat16)
        ((exchange, _),) = make_exchanges(parameters, lambda _: [Unit((slot,), (slot,), 1.0)], bucket_bytes=slot.nbytes)
        assert len(exchange.buckets) == 1
        assert sorted(exchange.owners) == [*range(8)]


def test_a_plan_is_made_once_and_keeps_its_parameters() -> None:
    """Otherwise another parameter could get the ``id`` of one that is gone, and its plan."""
    plans, calls, parameters = OwnerPlans(1), list[int](), [torch.zeros(4, 6)]
    alive = weakref.ref(parameters[0])

    def units() -> list[list[Unit]]:
        slot = Slot(tiling_of(parameters[0]), torch.bfloat16)
        calls.append(1)
        return [[Unit((slot,), (slot,), 1.0)]]

    for forms in ([], [], ["new state"], ["new state"]):
        plans.of(parameters, units, forms)
    assert len(calls) == 2
    parameters.clear()
    assert alive() is not None


@given(COSTS, st.integers(1, 9))
def test_the_largest_load_is_within_the_bound_of_greedy_assignment(costs: list[float], ranks: int) -> None:
    owners = assign_owners(costs, ranks)
    assert len(owners) == len(costs)
    assert set(owners) <= set(range(ranks))
    lower = max(max(costs), sum(costs) / ranks)
    assert max(loads(costs, owners, ranks)) <= (sum(costs) / ranks + max(costs)) + 1e-6
    assert max(loads(costs, owners, ranks)) >= lower - 1e-6


@given(COSTS, st.integers(1, 9), st.integers(1, 300), st.data())
def test_buckets_hold_each_matrix_once_and_keep_the_limit(costs, ranks: int, bucket_bytes: int, data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=len(costs), max_size=len(costs)))
    owners = assign_owners(costs, ranks)
    limit = message_limit(bucket_bytes, max(sizes))
    buckets = cut_buckets(costs, owners, sizes.__getitem__, lambda i: -(-sizes[i] // ranks), limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(costs)))
    for bucket in buckets:
        assert max(loads(sizes, [owners[i] if i in bucket else -1 for i in range(len(costs))], ranks)) <= limit
        assert sum(-(-sizes[i] // ranks) for i in bucket) <= limit
    ends = [(min(costs[i] for i in a), max(costs[i] for i in b)) for a, b in pairwise(buckets)]
    assert all(last >= first for last, first in ends)


@given(st.integers(1, 64), st.integers(1, 100), st.integers(1, 1000))
def test_replicas_share_the_work_if_the_copies_fit(replicas: int, largest: int, limit: int) -> None:
    together = replicas_together(replicas, largest, limit)
    assert replicas % together == 0
    assert together == 1 or together * largest <= limit
    larger = [n for n in range(together + 1, replicas + 1) if replicas % n == 0]
    assert all(n * largest > limit for n in larger)


@given(st.integers(0, 11), st.integers(0, 7), st.integers(1, 4), st.integers(1, 3), st.data())
def test_boxes_of_all_ranks_tile_each_block_of_a_tensor(rows: int, columns: int, first: int, second: int, data) -> None:
    cuts = data.draw(
        st.sampled_from(
            [
                (AxisCut(0, 0),),
                (AxisCut(0, 0), AxisCut(1, 1)),
                (AxisCut(1, 0), AxisCut(0, 0)),
                (AxisCut(0, 0, 2), AxisCut(1, 0)),
                (AxisCut(1, 1),),
            ]
        )
    )
    tiling = Tiling((rows, columns), (first, second), cuts)
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    height, width = data.draw(st.integers(0, rows - top)), data.draw(st.integers(0, columns - left))
    slot = Slot(tiling, torch.float32, (top, left), (height, width))
    whole = torch.arange(rows * columns).view(rows, columns)
    found = torch.full((height, width), -1)
    owner = (first - 1, second - 1)
    for coordinate in ((i, j) for i in range(first) for j in range(second)):
        part = tiling.extent(coordinate).take(whole)
        if slot.comes_from(coordinate, owner):
            for box in slot.boxes(coordinate):
                assert (found[box.slices] == -1).all()
                found[box.slices] = box.of_part(part)
    assert torch.equal(found, whole[top : top + height, left : left + width])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(2, 4))
def test_rows_of_tensor_parallel_parameters_are_those_that_fully_shard_leaves(rows, data: int, tensor: int) -> None:
    placements = data_parallel_placements(1, 0, [Shard(0)], [tensor])
    sizes = (data, tensor)
    tiling = Tiling((rows,), sizes, axis_cuts(placements, sizes, is_parameter=True))
    for i in range(data):
        for j in range(tensor):
            whole = torch.arange(rows)
            for rank, ranks in ((j, tensor), (i, data)):
                whole = dict(enumerate(whole.chunk(ranks))).get(rank, whole[:0])
            assert torch.equal(tiling.extent((i, j)).take(torch.arange(rows)), whole)
