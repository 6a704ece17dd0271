"""``ShardLayout`` shards a dim like DTensor's placements. The tests do not communicate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests._internals import ShardLayout, TensorShards, cuts, data_parallel_placements, shard_within, take_shard

SHAPES = [
    ((8,), 0),
    ((7,), 0),
    ((2,), 0),
    ((0, 3), 0),
    ((5, 3), 0),
    ((3, 5), 1),
    ((2, 9, 3), 1),
    ((2, 3, 4), 2),
    ((1, 1), 1),
]
MESHES = [(1,), (2,), (4,), (6,), (1, 4), (2, 3), (3, 2)]


@contextmanager
def process_group(backend: str, rank: int, world_size: int) -> Iterator[None]:
    """Initialize a default process group with the ``fake`` backend, which simulates other ranks."""
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_every_rank_owns_the_shard_of_its_dtensor(mesh_shape: tuple[int, ...]) -> None:
    world_size, num_shards = torch.Size(mesh_shape).numel(), mesh_shape[-1]
    for rank in range(world_size):
        with process_group("fake", rank, world_size):
            mesh = init_device_mesh("cpu", mesh_shape)
            shard_rank = mesh.get_local_rank(mesh.ndim - 1)
            for shape, dim in SHAPES:
                shards, placements = TensorShards(shape, dim, num_shards), data_parallel_placements(mesh.ndim, dim)
                local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
                owned = shards.layout.owned_by(shard_rank)
                assert local_shape == shards.shard_shape(shard_rank)
                assert offset[dim] == owned.start
                assert not any(offset[:dim])
                assert not any(offset[dim + 1 :])

                full = torch.arange(shards.numel, dtype=torch.float32).view(shape)
                expected = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
                piece = torch.empty(shards.padded_numel)
                take_shard(shards, full, shard_rank, piece)
                assert torch.equal(piece[: expected.numel()].view(local_shape), expected)


def test_an_axis_is_strided_if_an_inner_axis_shards_the_same_dim() -> None:
    assert shard_within(0, [], []) == Shard(0)
    assert shard_within(0, [Replicate(), Shard(1)], [4, 2]) == Shard(0)
    assert shard_within(0, [Shard(0)], [1]) == Shard(0)
    assert shard_within(1, [Shard(1)], [2]) == _StridedShard(1, split_factor=2)
    assert shard_within(1, [Shard(1), Shard(0), Shard(1)], [2, 5, 3]) == _StridedShard(1, split_factor=6)
    assert shard_within(0, [_StridedShard(0, split_factor=3), Shard(0)], [2, 3]) == _StridedShard(0, split_factor=6)
    assert cuts(_StridedShard(1, split_factor=2), 1)
    assert not cuts(_StridedShard(1, split_factor=2), 0)


def read(
    rows: list[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> list[int]:
    """Return the rows of a 1-d tensor that DTensor assigns to a rank. It applies placements from left to right."""
    for placement, size, rank in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            pieces = [chunk(rows, int(placement.split_factor), i) for i in range(int(placement.split_factor))]
            rows = [row for piece in pieces for row in chunk(piece, size, rank)]
        elif isinstance(placement, Shard):
            rows = chunk(rows, size, rank)
    return rows


def chunk(rows: list[int], size: int, rank: int) -> list[int]:
    owned = ShardLayout(len(rows), size).owned_by(rank)
    return rows[owned.start : owned.stop]


axis_sizes = st.integers(1, 6)


@given(st.integers(0, 60), axis_sizes, axis_sizes, st.integers(1, 2))
def test_the_placements_describe_the_shards_of_all_ranks(length: int, data: int, inner: int, ndim: int) -> None:
    """The inner axis is sharded first, then its shards are sharded over the data-parallel axis."""
    assume(can_describe(length, data, inner))
    placements = data_parallel_placements(ndim, 0, (Shard(0),), (inner,))
    sizes = (2, data, inner)[-len(placements) :]
    held = []
    for coordinate in product(*(range(size) for size in sizes)):
        rows = chunk(list(range(length)), inner, coordinate[-1])
        rows = chunk(rows, data, coordinate[-2])
        assert read(list(range(length)), placements, sizes, coordinate) == rows
        held += rows
    assert sorted(held) == sorted(list(range(length)) * ndim)


def can_describe(length: int, data: int, inner: int) -> bool:
    """Return whether placements, applied from left to right, can describe the shards.

    They cannot if a shorter piece has rows on more data-parallel ranks than a longer piece before it. For example, 7
    rows in pieces of 4 and 3 give 2, 2, 0 and 1, 1, 1 rows on 3 ranks.
    """
    for rank in range(data):
        counts = [len(chunk(chunk(list(range(length)), inner, i), data, rank)) for i in range(inner)]
        if counts != [len(chunk(list(range(sum(counts))), inner, i)) for i in range(inner)]:
            return False
    return True


def test_placements_are_exact_for_up_to_two_ranks_per_axis() -> None:
    assert all(can_describe(n, data, inner) for n in range(200) for data in (1, 2) for inner in (1, 2))
    assert not can_describe(7, 3, 2)
