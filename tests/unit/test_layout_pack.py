"""Copies between full tensors, shards and messages, and round trips through the layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import fully_shard
from tests._internals import (
    AllGatherBuffers,
    Collective,
    GatherLayout,
    PlanOptions,
    ReduceLayout,
    TensorShards,
    pack_gradient,
    pack_messages,
    plan_gather,
    plan_group,
    plan_reduce,
    plan_slices,
    take_shard,
    unpack_parameter,
)
from tests.helpers.fake_world import FakeWorld
from tests.helpers.layouts import DIRECT_BYTES, shards_of_one_bucket, spec_of, tensor_shards
from tests.helpers.sharding import fake_ranks

FEWER = settings(max_examples=40)
FLOATS = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
UNTOUCHED = -1.0  # no test tensor has this value


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """Return a tensor with consecutive values. ``dtype`` must be able to represent them."""
    return torch.arange(start, start + prod(shape)).to(dtype).view(tuple(shape))


@st.composite
def laid_out(draw: st.DrawFn, values: Tensor) -> Tensor:
    """Draw strides for ``values``: the dims may be permuted in memory, with or without gaps."""
    order = draw(st.permutations(range(values.ndim)))
    inverse = sorted(range(values.ndim), key=order.__getitem__)
    gap = draw(st.integers(1, 2))
    shape = [values.shape[d] for d in order]
    memory = values.new_full([*shape[:-1], shape[-1] * gap], UNTOUCHED)[..., ::gap]
    return memory.copy_(values.permute(order)).permute(inverse)


def piece_of(shards: TensorShards, full: Tensor, rank: int) -> Tensor:
    """Return the shard of ``rank`` by definition: its elements, contiguous, then padding with zeros."""
    owned = shards.layout.owned_by(rank)
    flat = full.narrow(shards.dim, owned.start, len(owned)).reshape(-1)
    return torch.cat([flat, flat.new_zeros(shards.padded_numel - flat.numel())])


def column_block(num_rows: int, width: int, fill: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    message = torch.full((num_rows, width + 5), fill, dtype=dtype)
    return message, message[:, 3 : 3 + width]


@given(tensor_shards(), st.integers(0, 9))
def test_unpacking_restores_the_tensor_and_writes_nothing_else(shards: TensorShards, spare: int) -> None:
    full = numbered(shards.shape)
    _, rows = column_block(shards.num_shards, shards.padded_numel, 0.0)
    for rank in range(shards.num_shards):
        take_shard(shards, full, rank, rows[rank])
    place = torch.full((shards.full_numel + spare,), UNTOUCHED)
    unpack_parameter(shards, rows, place)
    assert torch.equal(place[: shards.numel].view(shards.shape), full)
    assert bool((place[shards.full_numel :] == UNTOUCHED).all())


class CountKernels(TorchDispatchMode):
    """Records the names of operators that move or make data. Views are excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@FEWER
@given(tensor_shards())
def test_packing_and_unpacking_take_at_most_two_copies_and_one_for_even_or_contiguous_pieces(shards) -> None:
    gradient, place = numbered(shards.shape), torch.empty(shards.full_numel)
    _, rows = column_block(shards.num_shards, shards.padded_numel, 0.0)
    with CountKernels() as packing:
        pack_gradient(shards, gradient, rows)
    with CountKernels() as unpacking:
        unpack_parameter(shards, rows, place)
    assert {*packing.names, *unpacking.names} == {"copy_"}
    assert len(packing.names) <= (1 if shards.layout.is_even else 2)
    assert len(unpacking.names) <= (1 if shards.concatenates or shards.layout.is_even else 2)


def store_of(layout: GatherLayout, fulls: Sequence[Tensor], rank: int) -> Tensor:
    store = torch.zeros(layout.store.numel, dtype=fulls[0].dtype)
    for shards, offset, full in zip(layout.shards, layout.store.offsets, fulls, strict=True):
        take_shard(shards, full, rank, store[offset : offset + shards.padded_numel])
    return store


def gather(layout: GatherLayout, stores: Sequence[Tensor], buffer: Tensor, regions: Sequence[int]) -> None:
    """Simulate an all-gather with its copies. ``regions`` are the lengths of the parameters' regions in ``buffer``."""
    for i in layout.zero_copy:
        start, length, place = layout.store.offsets[i], layout.shards[i].padded_numel, layout.places.offsets[i]
        arrived = torch.cat([store[start : start + length] for store in stores])
        assert arrived.numel() <= regions[i]
        buffer[place : place + arrived.numel()] = arrived
    if layout.packed_numel:
        rows = torch.cat([store[: layout.packed_numel] for store in stores]).view(len(stores), layout.packed_numel)
        for i in layout.packed:
            start, length, place = layout.store.offsets[i], layout.shards[i].padded_numel, layout.places.offsets[i]
            unpack_parameter(layout.shards[i], rows[:, start : start + length], buffer[place : place + regions[i]])


def parameters_in(layout: GatherLayout, buffer: Tensor) -> list[Tensor]:
    places = zip(layout.shards, layout.places.offsets, strict=True)
    return [buffer[place : place + shards.numel].view(shards.shape) for shards, place in places]


@given(shards_of_one_bucket(), st.sampled_from([torch.int8, torch.int16, torch.float32, torch.float64]), DIRECT_BYTES)
def test_gathering_the_shards_of_all_ranks_gives_back_the_parameters(shards, dtype, zero_copy_min_bytes: int) -> None:
    layout = plan_gather(shards, itemsize=dtype.itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    fulls = [numbered(s.shape, dtype, start=17 * i) for i, s in enumerate(shards)]
    stores = [store_of(layout, fulls, rank) for rank in range(layout.num_shards)]
    buffer = torch.full((layout.places.numel,), UNTOUCHED).to(dtype)
    gather(layout, stores, buffer, [s.full_numel for s in shards])
    for parameter, full in zip(parameters_in(layout, buffer), fulls, strict=True):
        assert torch.equal(parameter, full)


@given(st.data(), st.sampled_from([(8, 4), (8, 2), (6, 3), (6, 2), (9, 3), (4, 2), (5, 1)]), DIRECT_BYTES)
def test_gathering_from_a_smaller_mesh_restores_the_parameters_at_the_same_offsets(
    data: st.DataObject, sizes: tuple[int, int], zero_copy_min_bytes: int
) -> None:
    larger, smaller = sizes
    drawn = data.draw(st.lists(tensor_shards(larger), min_size=1, max_size=4))
    dtype = torch.float32
    specs = tuple(spec_of("w", s.shape, s.dim, dtype) for s in drawn)
    (bucket,) = plan_group(specs, (PlanOptions(larger, zero_copy_min_bytes, zero_copy_min_bytes),)).buckets
    layout = plan_slices(bucket, smaller, zero_copy_min_bytes).gather
    fulls = [numbered(s.shape, dtype, start=17 * i) for i, s in enumerate(drawn)]
    stores = [store_of(layout, fulls, rank) for rank in range(smaller)]
    buffer = torch.full((bucket.gather.places.numel,), UNTOUCHED)
    gather(layout, stores, buffer, [s.full_numel for s in bucket.gather.shards])
    for parameter, full in zip(parameters_in(bucket.gather, buffer), fulls, strict=True):
        assert torch.equal(parameter, full)


def message_of(layout: ReduceLayout, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Return one rank's packed message. If the layout has no padding, the memory is not initialized to zero."""
    num_shards = layout.shards[0].num_shards
    garbage = 0.0 if layout.gaps or layout.most_uneven else float("nan")
    message = torch.full((num_shards, layout.packed_numel), garbage, dtype=dtype)
    for k in layout.packed:
        start, length = layout.output.offsets[k], layout.shards[k].padded_numel
        pack_gradient(layout.shards[k], gradients[k], message[:, start : start + length])
    return message.view(-1)


@given(shards_of_one_bucket(), FLOATS, FLOATS, DIRECT_BYTES, st.data())
def test_reducing_the_gradients_of_all_ranks_leaves_each_with_its_shard_of_the_sum(
    shards: tuple[TensorShards, ...],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    zero_copy_min_bytes: int,
    data: st.DataObject,
) -> None:
    num_ranks = shards[0].num_shards
    indices = data.draw(st.sets(st.integers(0, len(shards) - 1), min_size=1).map(sorted))
    layout = plan_reduce(shards, indices, itemsize=reduce_dtype.itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def gradient(rank: int, k: int) -> Tensor | None:
        if k in layout.packed and data.draw(st.integers(0, 9), label=f"rank {rank} used {k}") == 0:
            return None
        small = torch.randint(-7, 8, layout.shards[k].shape, generator=generator)  # so that every dtype sums exactly
        return small.to(dtype)

    gradients = [[gradient(rank, k) for k in range(len(indices))] for rank in range(num_ranks)]
    outputs = torch.zeros(num_ranks, layout.output.numel, dtype=reduce_dtype)  # row r is the result of rank r
    if layout.packed_numel:
        summed = torch.stack([message_of(layout, mine, reduce_dtype) for mine in gradients]).sum(0)
        outputs[:, : layout.packed_numel] = summed.view(num_ranks, layout.packed_numel)
    for k in layout.zero_copy:
        start, length = layout.output.offsets[k], layout.shards[k].padded_numel
        sent = [mine[k].reshape(-1).to(reduce_dtype) for mine in gradients]  # type: ignore[union-attr]
        outputs[:, start : start + length] = torch.stack(sent).sum(0).view(num_ranks, length)

    for k, s in enumerate(layout.shards):
        total = sum((g for mine in gradients if (g := mine[k]) is not None), start=torch.zeros(s.shape, dtype=dtype))
        start = layout.output.offsets[k]
        for rank in range(num_ranks):
            reduced = outputs[rank, start : start + s.padded_numel]
            assert torch.equal(reduced, piece_of(s, total, rank).to(reduce_dtype))


HOST = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@example([[(0, torch.float32), (0, torch.bfloat16)]])
@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=3), min_size=1, max_size=4))
def test_every_gather_gets_its_payloads_from_every_rank(shapes: list[list[tuple[int, torch.dtype]]]) -> None:
    ranks = [
        [
            AllGatherBuffers(
                [], [torch.full((numel,), 10 * rank + k).to(dtype) for k, (numel, dtype) in enumerate(payloads)]
            )
            for payloads in shapes
        ]
        for rank in range(2)
    ]
    world = FakeWorld(len(ranks))
    communicators = [world.communicator(rank) for rank in range(len(ranks))]
    works = [
        c.launch(Collective.ALL_GATHER, pack_messages(gathers, c, HOST))
        for gathers, c in zip(ranks, communicators, strict=True)
    ]
    for work in works:
        work.wait()
    for gathers in ranks:
        for i, gather in enumerate(gathers):
            assert len(gather.rows) == len(shapes[i])
            for k, rows in enumerate(gather.rows):
                sent = torch.stack([from_rank[i].payloads[k] for from_rank in ranks])
                assert rows.dtype == sent.dtype
                assert torch.equal(rows, sent)


def test_a_single_payload_is_sent_without_a_copy() -> None:
    payload = torch.ones(3)
    (transfer,) = pack_messages([AllGatherBuffers([], [payload])], FakeWorld(2).communicator(0), HOST)
    assert transfer.input is payload


class ChunkCats(TorchDispatchMode):
    """Keeps the results of the operation that copies gradients to the rows of all ranks, each time that it is called.
    Memory that is allocated holds NaN, to show what is not written."""

    observes_sharding = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty and result.is_floating_point():
            result.fill_(float("nan"))
        if func.overloadpacket is torch.ops.aten._chunk_cat:
            self.rows.append(result.clone())
        return result


def rows_of_gradients(rows: int, columns: int) -> list[torch.Tensor]:
    """Train a linear layer on the first of 4 ranks, and return the rows that one operation writes, with NaN before."""
    cats = ChunkCats()
    with fake_ranks(4):
        model = nn.Linear(columns, rows)
        fully_shard(model)
        with cats:
            (model(torch.ones(1, columns)) * torch.arange(1.0, rows + 1)).sum().backward()
    return cats.rows


@pytest.mark.parametrize(("columns", "gaps"), [(3, 0), (101, 1)])
def test_one_operation_writes_gradients_and_the_zeros_between_them(columns: int, gaps: int) -> None:
    """Three rows of the weight for each rank, which is aligned if it is long enough for that to add little."""
    (rows,) = rows_of_gradients(10, columns)
    values, numel = torch.cat([torch.arange(1.0, 11), torch.zeros(2)]).view(4, 3), 3 * columns
    weight, zeros, bias, more_zeros, flags = rows.split([numel, gaps, 3, gaps, 2 + 2 * gaps], dim=1)
    assert torch.equal(weight, values.repeat_interleave(columns, dim=1))
    assert torch.equal(bias, values)
    assert zeros.eq(0).all()
    assert more_zeros.eq(0).all()
    assert flags.eq(1).all()


@pytest.mark.parametrize(("rows", "fused"), [(512, True), (511, False)])
def test_a_large_gradient_is_not_padded_by_a_further_copy_on_a_host(rows: int, fused: bool) -> None:
    assert bool(rows_of_gradients(rows, 300)) == fused
