"""Layouts of streams: what a bucket is packed from is what it unpacks to, and names map to tensors."""

from __future__ import annotations

import pickle
from itertools import pairwise, product, zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plugins.weight_stream import JoinPart, PackedLayout, PackedTensor
from composable_fsdp.plugins.weight_stream.packed_layout import (
    Distribution,
    MessageLayout,
    Slot,
    fill_buckets,
    placed,
)
from composable_fsdp.plugins.weight_stream.weight_names import Named, Unit, units_of

DTYPES = st.sampled_from([torch.int8, torch.float16, torch.float32, torch.int64, torch.complex128])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


CUTS = st.lists(st.tuples(st.integers(0, 2), st.integers(2, 4), st.integers(1, 2)), max_size=2)


def distribution(shape: tuple[int, ...], cuts: list[tuple[int, int, int]], dtype: torch.dtype) -> Distribution:
    """Return a tensor with cuts of model-parallel axes, and the last one of ``fully_shard``. A scalar becomes 1-d."""
    shape = shape or ((1,) if cuts else ())
    own = [(dim % len(shape), ranks, blocks) for dim, ranks, blocks in cuts]
    return Distribution(shape, dtype, tuple((*own[:-1], (*own[-1][:2], 1)) if own else ()))


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=6))
def test_a_bucket_has_no_gaps_and_every_tensor_is_aligned(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    named = [Named([str(i)], shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
    layout, offsets = placed(units_of(named, None))
    assert [tensor.offset for tensor in layout.tensors] == [offset for _, offset in offsets]
    spans = [(tensor.offset, tensor.offset + tensor.nbytes) for tensor in layout.tensors]
    for (_, end), (begin, _) in pairwise(spans):
        assert end == begin
    assert layout.nbytes == -(-sum(tensor.nbytes for tensor in layout.tensors) // 16) * 16
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name, view in pickle.loads(pickle.dumps(layout)).unpack(packed).items():
        view.copy_(values_of(*tensors[int(name)], int(name)))
    for name, view in layout.unpack(packed).items():
        assert torch.equal(view, values_of(*tensors[int(name)], int(name)))


@settings(deadline=None)
@given(CUTS, st.lists(st.tuples(SHAPES, st.integers(0, 2), DTYPES), min_size=1, max_size=4), st.integers(0, 100))
def test_the_rows_of_all_ranks_make_the_full_tensors(cuts, tensors, seed: int) -> None:
    """Lay out tensors over the same axes as one message, write every rank's row, and unpack."""
    made = [distribution(shape, [(dim + more, *cut) for dim, *cut in cuts], dtype) for shape, more, dtype in tensors]
    _, offsets = placed(units_of([Named([str(i)], d.shape, d.dtype) for i, d in enumerate(made)], None))
    slots = [Slot(unit.members[0], made[unit.members[0]], offset) for unit, offset in offsets]
    route = tuple(reversed(range(len(cuts)))) if seed % 2 else tuple(range(len(cuts)))
    message = MessageLayout.of(route, slots)
    ends = sorted((slot.offset, slot.offset + slot.tensor.row_bytes) for slot in message.slots)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    assert all(end <= message.width for _, end in ends)
    assert all(slot.offset % slot.tensor.dtype.itemsize == 0 for slot in message.slots)

    sizes = [ranks for _, ranks, _ in cuts]
    axes = sorted(route, reverse=True)
    rows = torch.full((*(sizes[route.index(axis)] for axis in axes), message.width), 77, dtype=torch.uint8)
    for at in product(*map(range, sizes)):
        row = rows[tuple(at[route.index(axis)] for axis in axes)]
        for slot in message.slots:
            part = values_of(slot.tensor.shape, slot.tensor.dtype, seed + slot.source)
            for (dim, ranks, blocks), rank in zip(slot.tensor.cuts, at, strict=True):
                part = torch.cat([chunk_of(block, ranks, rank, dim) for block in part.chunk(blocks, dim)], dim)
            data = part.contiguous().reshape(-1).view(torch.uint8) if part.numel() else row[:0]
            assert data.numel() <= slot.tensor.row_bytes
            row[slot.offset : slot.offset + data.numel()] = data
    layout, _ = placed(unit for unit, _ in offsets)
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    message.unpack(rows, packed)
    for name, view in layout.unpack(packed).items():
        assert torch.equal(view, values_of(made[int(name)].shape, made[int(name)].dtype, seed + int(name))), name


def chunk_of(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    chunks = tensor.chunk(count, dim) if tensor.size(dim) else ()
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_buckets_tile_the_units_and_exceed_the_limit_only_alone(costs: list[int], limit: int) -> None:
    buckets = fill_buckets(costs, limit)
    assert [i for bucket in buckets for i in bucket] == list(range(len(costs)))
    for bucket, after in zip_longest(buckets, buckets[1:]):
        total = sum(costs[i] for i in bucket)
        assert total <= limit or len(bucket) == 1
        assert after is None or total + costs[after.start] > limit


def test_parts_are_joined_in_the_order_of_their_indices() -> None:
    named = [Named([f"x{i}"], (rows, 3), torch.float32) for i, rows in enumerate((2, 0, 4))]
    parts = {f"x{i}": JoinPart("x", index, 3) for i, index in enumerate((1, 2, 0))}
    (join,) = units_of(named, parts.get)
    assert (join.members, join.tensors) == ((2, 0, 1), (PackedTensor("x", (6, 3), torch.float32),))


def test_a_name_of_a_tied_parameter_that_is_kept_counts() -> None:
    named = [Named(["a", "b", "c"], (2,), torch.float32)]
    assert units_of(named, None)[0].aliases == {"b": "a", "c": "a"}
    (unit,) = units_of(named, {"b": "new", "c": "c"}.get)
    assert unit == Unit((0,), (PackedTensor("new", (2,), torch.float32),), {"c": "new"})
    assert units_of(named, lambda name: None) == []
    with pytest.raises(
        ConfigurationError, match=r"^key_map joins or splits one of the names \['a', 'b', 'c'\] of a tied"
    ):
        units_of(named, lambda name: {"y": 1, "z": 1} if name == "c" else "x")
    two = [*named, Named(["d"], (2,), torch.float32)]
    for names in {"a": "x", "b": "y", "d": "y"}, {"a": "x", "d": "y", "b": "y"}:
        with pytest.raises(ConfigurationError, match=r"^the stream would have two tensors called 'y'\. Change key_map"):
            units_of(two, names.get)


def test_a_layout_refuses_memory_of_another_size() -> None:
    layout = PackedLayout((PackedTensor("x", (4,), torch.float32),), 16)
    for packed in torch.zeros(15, dtype=torch.uint8), torch.zeros(4):
        with pytest.raises(ValueError, match=r"^a layout of 16 bytes needs a uint8 tensor of shape \(16,\), not "):
            layout.unpack(packed)
