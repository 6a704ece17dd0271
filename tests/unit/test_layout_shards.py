"""Sharding of dims over ranks: owners, placements, and blocks after several cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests._internals import (
    Cut,
    ShardExtent,
    ShardLayout,
    TensorShards,
    data_parallel_placements,
    shard_within,
    take_shard,
)
from tests.helpers.layouts import tensor_shards


@given(tensor_shards())
def test_the_shards_of_all_ranks_are_the_chunks_of_the_tensor(shards: TensorShards) -> None:
    chunks = torch.empty(shards.shape).chunk(shards.num_shards, shards.dim)
    shapes = [shards.shard_shape(r) for r in range(shards.num_shards)]
    assert shapes[: len(chunks)] == [tuple(chunk.shape) for chunk in chunks]
    assert all(shape[shards.dim] == 0 for shape in shapes[len(chunks) :])
    assert sum(map(prod, shapes)) == shards.numel


@given(tensor_shards())
def test_contiguous_pieces_are_the_memory_of_the_tensor_plus_padding(shards: TensorShards) -> None:
    full = torch.arange(shards.numel).view(shards.shape)
    owned = [full.narrow(shards.dim, r.start, len(r)) for r in map(shards.layout.owned_by, range(shards.num_shards))]
    if shards.concatenates:
        assert torch.cat([piece.reshape(-1) for piece in owned]).tolist() == list(range(shards.numel))
        assert shards.full_numel == shards.num_shards * shards.padded_numel >= shards.numel
    else:
        assert shards.full_numel == shards.numel


@given(tensor_shards())
@example(TensorShards((1, 5), 1, 2))
def test_pieces_concatenate_only_if_all_dims_before_the_sharded_one_have_size_one(shards: TensorShards) -> None:
    assert shards.concatenates == all(length == 1 for length in shards.shape[: shards.dim])


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
    assert shard_within(0, [_StridedShard(1, split_factor=2)], [2]) == Shard(0)


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
    """Return whether placements, applied from left to right, can describe the shards. They cannot if a shorter piece
    has rows on more data-parallel ranks than a longer piece before it. For example, 7 rows in pieces of 4 and 3 give 2,
    2, 0 and 1, 1, 1 rows on 3 ranks."""
    for rank in range(data):
        counts = [len(chunk(chunk(list(range(length)), inner, i), data, rank)) for i in range(inner)]
        if counts != [len(chunk(list(range(sum(counts))), inner, i)) for i in range(inner)]:
            return False
    return True


def test_placements_are_exact_for_up_to_two_ranks_per_axis() -> None:
    assert all(can_describe(n, data, inner) for n in range(200) for data in (1, 2) for inner in (1, 2))
    assert not can_describe(7, 3, 2)


SOME_SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """Draw a shape, and a dim, a number of ranks and a number of blocks for each mesh axis."""
    shape = draw(SOME_SHAPES)
    axes = st.tuples(st.integers(0, max(0, len(shape) - 1)), st.integers(1, 4), st.integers(1, 3))
    return shape, draw(st.lists(axes, max_size=3)) if shape else []


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def torch_chunk(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """Compute a chunk with torch, independently of the library. Torch omits empty chunks at the end."""
    if tensor.size(dim) == 0:
        return tensor
    pieces = tensor.chunk(count, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


def cut_with_torch(shape: tuple[int, ...], parts: list[Cut]) -> torch.Tensor:
    tensor = numbered(shape)
    for dim, count, index, blocks in parts:
        pieces = [torch_chunk(torch_chunk(tensor, dim, blocks, b), dim, count, index) for b in range(blocks)]
        tensor = torch.cat(pieces, dim) if tensor.size(dim) else tensor
    return tensor


def all_ranks(axes: list[tuple[int, int, int]]) -> list[list[Cut]]:
    indices = product(*(range(count) for _, count, _ in axes))
    return [[Cut(d, n, i, b) for (d, n, b), i in zip(axes, index, strict=True)] for index in indices]


@given(cut_tensors())
@pytest.mark.behaviour("F-07")
def test_each_local_shard_is_a_chunk_of_chunks_and_boxes_of_all_ranks_tile_the_tensor(drawn) -> None:
    shape, axes = drawn
    seen = torch.zeros(shape, dtype=torch.int64)
    for parts in all_ranks(axes):
        extent, expected = ShardExtent.after(shape, parts), cut_with_torch(shape, parts)
        assert extent.local_shape == tuple(expected.shape)
        assert torch.equal(extent.take(numbered(shape)), expected)

        part = torch.full(extent.local_shape, -1)
        for offsets, local_offsets, sizes in extent.boxes():
            here = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            seen[here] += 1
            there = tuple(slice(o, o + n) for o, n in zip(local_offsets, sizes, strict=True))
            part[there] = numbered(shape)[here]
        assert torch.equal(part, extent.take(numbered(shape)))
    assert bool((seen == 1).all())


def test_a_local_shard_in_one_block_is_a_view() -> None:
    full = numbered((6, 4))
    part = ShardExtent.after((6, 4), [Cut(0, 2, 1), Cut(1, 2, 0)]).take(full)
    assert part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


@given(cut_tensors(), st.integers(1, 30))
@pytest.mark.behaviour("F-11")
def test_pieces_and_runs_tile_a_box_in_its_order_and_pieces_span_no_more_than_asked(drawn, limit: int) -> None:
    shape, axes = drawn
    full = numbered(shape)
    for parts in all_ranks(axes):
        extent = ShardExtent.after(shape, parts)
        for box in extent.boxes():
            pieces = list(box.pieces(shape, limit))
            found = [taken(full, p.offsets, p.sizes).reshape(-1) for p in pieces]
            assert torch.equal(torch.cat(found), taken(full, box.offsets, box.sizes).reshape(-1))
            assert all(len(f) == 1 or f[-1] - f[0] < limit for f in found)
            length, starts = box.runs(shape)
            elements = [element for start in starts for element in range(start, start + length)]
            assert elements == taken(full, box.offsets, box.sizes).reshape(-1).tolist()
            for piece, values in zip(pieces, found, strict=True):
                part = taken(extent.take(full), piece.local_offsets, piece.sizes)
                assert torch.equal(part.reshape(-1), values)


def taken(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
