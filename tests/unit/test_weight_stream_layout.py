"""Layouts of streams: what a bucket is packed from is what it unpacks to, and names map to tensors."""

from __future__ import annotations

import pickle
from itertools import pairwise, product, zip_longest
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp.plugins.weight_stream import JoinPart, PackedLayout, PackedTensor
from composable_fsdp.plugins.weight_stream.packed_layout import (
    HEADER_BYTES,
    Distribution,
    MessageLayout,
    Slot,
    fill_buckets,
    placed,
)
from composable_fsdp.plugins.weight_stream.weight_names import Named, Unit, units_of
from tests.helpers.fresh_process import run_program

DTYPES = st.sampled_from([torch.int8, torch.float16, torch.float32, torch.int64, torch.complex128])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    """Draw a tensor with up to one model-parallel cut, as ``fully_shard`` may cut it again."""
    shape = draw(SHAPES)
    if not shape:
        return Distribution(())
    dims = st.integers(0, len(shape) - 1)
    inner = draw(st.lists(st.tuples(dims, st.integers(2, 3), st.integers(1, 2)), max_size=1))
    return Distribution(shape, draw(dims), draw(st.integers(1, 4)), tuple(inner))


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=6))
def test_a_bucket_has_no_gaps_and_every_tensor_is_aligned(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    named = [Named([str(i)], shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
    layout, offsets = placed(units_of(named, None))
    assert [tensor.name for tensor in layout.tensors] == [each.names[0] for each in named]
    assert [tensor.offset for tensor in layout.tensors] == offsets
    spans = sorted(
        (tensor.offset, tensor.offset + each.nbytes) for tensor, each in zip(layout.tensors, named, strict=True)
    )
    for (_, end), (begin, _) in pairwise(spans):
        assert end == begin
    assert layout.nbytes == -(-sum(each.nbytes for each in named) // 16) * 16
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for i, (name, view) in enumerate(pickle.loads(pickle.dumps(layout)).unpack(packed).items()):
        view.copy_(values_of(*tensors[i], i))
        assert name == str(i)
    for i, view in enumerate(layout.unpack(packed).values()):
        assert torch.equal(view, values_of(*tensors[i], i))


@settings(deadline=None)
@given(st.lists(st.tuples(distributions(), DTYPES), min_size=1, max_size=4), st.integers(0, 100))
def test_the_rows_of_all_ranks_make_the_full_tensors(tensors, seed: int) -> None:
    """Lay out tensors of one distribution over axes as one message, write every rank's row, and unpack."""
    first = tensors[0][0]
    alike = [(d, t) for d, t in tensors if (d.num_shards, axes_of(d)) == (first.num_shards, axes_of(first))]
    named = [Named([str(i)], d.shape, dtype) for i, (d, dtype) in enumerate(alike)]
    layout, offsets = placed(units_of(named, None))
    is_sharded = first.num_shards > 1
    slots = [
        Slot(i, dtype, d, d.padded_numel * dtype.itemsize, offset)
        for i, ((d, dtype), offset) in enumerate(zip(alike, offsets, strict=True))
    ]
    route = tuple(range(len(axes_of(first))))
    message = MessageLayout.of(route, is_sharded, slots)
    ends = sorted((slot.offset, slot.offset + slot.row_bytes) for slot in message.slots)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    assert all(begin >= HEADER_BYTES and end <= message.width for begin, end in ends)
    assert all(slot.offset % slot.dtype.itemsize == 0 for slot in message.slots)

    sizes = axes_of(first)
    rows = torch.full((*reversed(sizes), message.width), 77, dtype=torch.uint8)
    for at in product(*map(range, sizes)):
        row = rows[tuple(reversed(at))]
        for slot in message.slots:
            part = shard_of(slot.tensor, values_of(slot.tensor.shape, slot.dtype, seed + slot.source), at, is_sharded)
            data = (
                part.contiguous().reshape(-1).view(torch.uint8) if part.numel() else torch.empty(0, dtype=torch.uint8)
            )
            assert data.numel() <= slot.row_bytes
            row[slot.offset : slot.offset + data.numel()] = data
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    message.unpack(rows, packed)
    for i, view in enumerate(layout.unpack(packed).values()):
        assert torch.equal(view, values_of(alike[i][0].shape, alike[i][1], seed + i)), i


def axes_of(tensor: Distribution) -> tuple[int, ...]:
    return (*([tensor.num_shards] if tensor.num_shards > 1 else []), *(ranks for _, ranks, _ in tensor.inner))


def shard_of(tensor: Distribution, full: torch.Tensor, at: tuple[int, ...], is_sharded: bool) -> torch.Tensor:
    """Return the shard of the rank at ``at`` by ``torch.chunk``, block by block for a strided cut."""
    inner = at[1:] if is_sharded else at
    for (dim, ranks, blocks), rank in zip(tensor.inner, inner, strict=True):
        pieces = [chunk_of(block, ranks, rank, dim) for block in full.chunk(blocks, dim)]
        full = torch.cat(pieces, dim)
    return chunk_of(full, tensor.num_shards, at[0], tensor.dim) if is_sharded else full


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


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.permutations(range(4)))
def test_a_join_of_the_parts_of_a_split_is_the_tensor(rows: list[int], order: list[int]) -> None:
    shape = (sum(rows), 3)
    (split,) = units_of([Named(["x"], shape, torch.float32)], {"x": {f"x{i}": n for i, n in enumerate(rows)}})
    layout, _ = placed([split])
    full = values_of(shape, torch.float32, 0)
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    packed[: full.nbytes] = full.view(-1).view(torch.uint8)
    parts = layout.unpack(packed)
    assert torch.equal(torch.cat(list(parts.values())), full)

    order = [i for i in order if i < len(rows)]
    named = [Named([f"x{i}"], tuple(parts[f"x{i}"].shape), torch.float32) for i in order]
    (join,) = units_of(named, {f"x{i}": JoinPart("x", i, len(rows)) for i in order})
    assert [order[k] for k in join.members] == list(range(len(rows)))
    assert join.tensors == (PackedTensor("x", shape, torch.float32),)
    assert join.nbytes == full.nbytes


def test_a_name_of_a_tied_parameter_that_is_kept_counts() -> None:
    named = [Named(["a", "b", "c"], (2,), torch.float32)]
    assert units_of(named, None)[0].aliases == {"b": "a", "c": "a"}
    (unit,) = units_of(named, {"a": None, "b": "new"})
    assert unit == Unit((0,), (PackedTensor("new", (2,), torch.float32),), 8, {"c": "new"})
    assert units_of(named, lambda name: None) == []


@pytest.mark.parametrize(
    "packed", [torch.zeros(15, dtype=torch.uint8), torch.zeros(4), torch.zeros(32, dtype=torch.uint8)[::2]], ids=str
)
def test_a_layout_refuses_memory_that_is_not_of_its_kind(packed: torch.Tensor) -> None:
    layout = PackedLayout((PackedTensor("x", (4,), torch.float32),), 16)
    text = r"^a layout of 16 bytes needs a contiguous uint8 tensor of shape \(16,\), not"
    with pytest.raises(ValueError, match=text):
        layout.unpack(packed)
    with pytest.raises(ValueError, match=r"^'x' is not aligned: packed begins 1 bytes after that of its storage\.$"):
        layout.unpack(torch.zeros(17, dtype=torch.uint8)[1:])


def test_extents_of_parts_tile_the_tensor() -> None:
    tensor = Distribution((6, 5), 1, 2, ((0, 2, 1), (1, 2, 1)))
    seen = torch.zeros(6, 5)
    for _, extent, _ in tensor.parts():
        for box in extent.boxes():
            seen[box.slices] += 1
    assert seen.eq(1).all()
    assert prod(tensor.shape) <= tensor.padded_numel * 2 * 4


def test_the_package_imports_streams_on_first_use() -> None:
    program = (
        "import sys, composable_fsdp; assert not any('weight_stream' in name for name in sys.modules); "
        "composable_fsdp.stream_full_params; assert 'composable_fsdp.plugins.weight_stream.stream' in sys.modules"
    )
    done = run_program(program)
    assert done.returncode == 0, done.stderr
