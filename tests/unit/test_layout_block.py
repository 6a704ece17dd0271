"""Blocks of tensors, compared with slices of a tensor of element numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests._internals import Cut, ShardExtent

SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """Draw a shape, and a dim, a number of ranks and a number of blocks for each mesh axis."""
    shape = draw(SHAPES)
    axes = st.tuples(st.integers(0, max(0, len(shape) - 1)), st.integers(1, 4), st.integers(1, 3))
    return shape, draw(st.lists(axes, max_size=3)) if shape else []


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def chunk(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """Compute a chunk with torch, independently of the library. Torch omits empty chunks at the end."""
    if tensor.size(dim) == 0:
        return tensor
    pieces = tensor.chunk(count, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


def cut_with_torch(shape: tuple[int, ...], cuts: list[Cut]) -> torch.Tensor:
    tensor = numbered(shape)
    for dim, count, index, blocks in cuts:
        parts = [chunk(chunk(tensor, dim, blocks, b), dim, count, index) for b in range(blocks)]
        tensor = torch.cat(parts, dim) if tensor.size(dim) else tensor
    return tensor


def all_ranks(axes: list[tuple[int, int, int]]) -> list[list[Cut]]:
    indices = product(*(range(count) for _, count, _ in axes))
    return [[Cut(d, n, i, b) for (d, n, b), i in zip(axes, index, strict=True)] for index in indices]


@given(cut_tensors())
@pytest.mark.behaviour("F-07")
def test_each_local_shard_is_a_chunk_of_chunks(drawn) -> None:
    shape, axes = drawn
    for cuts in all_ranks(axes):
        extent, expected = ShardExtent.after(shape, cuts), cut_with_torch(shape, cuts)
        assert extent.local_shape == tuple(expected.shape)
        assert torch.equal(extent.take(numbered(shape)), expected)


@given(cut_tensors())
@pytest.mark.behaviour("F-07")
def test_the_boxes_of_all_ranks_tile_the_tensor(drawn) -> None:
    shape, axes = drawn
    seen = torch.zeros(shape, dtype=torch.int64)
    for cuts in all_ranks(axes):
        extent = ShardExtent.after(shape, cuts)
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
def test_pieces_tile_a_box_in_its_order_and_span_no_more_than_asked(drawn, limit: int) -> None:
    shape, axes = drawn
    full = numbered(shape)
    for cuts in all_ranks(axes):
        extent = ShardExtent.after(shape, cuts)
        for box in extent.boxes():
            pieces = list(box.pieces(shape, limit))
            found = [taken(full, p.offsets, p.sizes).reshape(-1) for p in pieces]
            assert torch.equal(torch.cat(found), taken(full, box.offsets, box.sizes).reshape(-1))
            assert all(len(f) == 1 or f[-1] - f[0] < limit for f in found)
            for piece, values in zip(pieces, found, strict=True):
                part = taken(extent.take(full), piece.local_offsets, piece.sizes)
                assert torch.equal(part.reshape(-1), values)


@given(cut_tensors())
@pytest.mark.behaviour("F-11")
def test_runs_are_the_positions_of_the_elements_of_a_block(drawn) -> None:
    shape, axes = drawn
    for cuts in all_ranks(axes):
        for box in ShardExtent.after(shape, cuts).boxes():
            length, starts = box.runs(shape)
            found = [element for start in starts for element in range(start, start + length)]
            assert found == taken(numbered(shape), box.offsets, box.sizes).reshape(-1).tolist()


def taken(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
