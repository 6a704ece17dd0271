"""Offsets of the tensors of a bucket in the shard store, in messages, and in the unsharded buffer."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._internals import (
    ALIGNMENT_BYTES,
    TensorShards,
    plan_gather,
    plan_reduce,
    split_at,
)
from tests.helpers.layouts import (
    DIRECT_BYTES,
    NEVER_ZERO_COPY,
    assert_disjoint_and_aligned,
    assert_packed_first,
    shards_of_one_bucket,
)

FEWER = settings(max_examples=40)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def assert_partition(parts: Iterable[tuple[int, ...]], numbers: range) -> None:
    """Check that every number is in exactly one part."""
    assert sorted(i for part in parts for i in part) == list(numbers)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_the_store_has_disjoint_aligned_segments_with_the_packed_ones_in_front(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    lengths = [s.padded_numel for s in shards]
    assert_partition((layout.zero_copy, layout.packed), range(len(shards)))
    assert_disjoint_and_aligned(layout.store.offsets, lengths, layout.store.numel, itemsize)
    assert_packed_first(layout, itemsize)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_offsets_are_disjoint_and_aligned_and_fit_the_padded_gather_of_every_tensor(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    lengths = [s.full_numel for s in shards]
    assert_disjoint_and_aligned(layout.places.offsets, lengths, layout.places.numel, itemsize)
    for i in layout.zero_copy:
        assert shards[i].full_numel == shards[i].padded_numel * layout.num_shards


@FEWER
@given(shards_of_one_bucket(), ITEMSIZES)
def test_offsets_do_not_depend_on_zero_copy(shards: tuple[TensorShards, ...], itemsize: int) -> None:
    all_direct = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=0)
    all_packed = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=NEVER_ZERO_COPY)
    assert all_direct.places == all_packed.places
    assert all_direct.store.numel == all_packed.store.numel


@FEWER
@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_a_tensor_is_zero_copy_if_it_concatenates_and_its_full_size_reaches_the_threshold(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    for i, s in enumerate(shards):
        expected = s.concatenates and s.numel > 0 and s.numel * itemsize >= zero_copy_min_bytes
        assert (i in layout.zero_copy) == expected


@FEWER
@given(shards_of_one_bucket(), ITEMSIZES)
def test_threshold_zero_packs_only_unaligned_tensors_and_a_huge_one_packs_all(
    shards: tuple[TensorShards, ...], itemsize: int
) -> None:
    nothing_small = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=0)
    assert all(not shards[i].concatenates or not shards[i].numel for i in nothing_small.packed)
    all_small = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=NEVER_ZERO_COPY)
    assert all_small.zero_copy == ()
    assert all_small.packed_numel == all_small.store.numel


@FEWER
@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_an_all_gather_sends_each_shard_once_plus_alignment(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    padding = layout.wire_numel - layout.num_shards * sum(s.padded_numel for s in shards)
    assert 0 <= padding * itemsize < layout.num_shards * max(1, len(layout.packed)) * ALIGNMENT_BYTES


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.data())
def test_the_output_of_a_reduction_has_disjoint_aligned_segments_with_the_packed_ones_in_front(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int, data: st.DataObject
) -> None:
    indices = data.draw(st.sets(st.integers(0, len(shards) - 1)).map(sorted))
    layout = plan_reduce(shards, indices, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    assert layout.indices == tuple(indices)
    assert layout.shards == tuple(shards[i] for i in indices)
    lengths = [s.padded_numel for s in layout.shards]
    assert_partition((layout.zero_copy, layout.packed), range(len(indices)))
    assert_disjoint_and_aligned(layout.output.offsets, lengths, layout.output.numel, itemsize)
    assert_packed_first(layout, itemsize)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_only_even_gradients_that_concatenate_are_zero_copy(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_reduce(shards, range(len(shards)), itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    for k, s in enumerate(shards):
        large = s.numel > 0 and s.numel * itemsize >= zero_copy_min_bytes
        assert (k in layout.zero_copy) == (large and s.concatenates and s.layout.is_even)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_a_message_has_padding_exactly_where_it_is_longer_than_the_gradients_in_it(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_reduce(shards, range(len(shards)), itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    message_numel = shards[0].num_shards * layout.packed_numel
    assert bool(layout.gaps or layout.most_uneven) == (message_numel > sum(shards[k].numel for k in layout.packed))


def aligned(numel: int, itemsize: int) -> int:
    step = ALIGNMENT_BYTES // itemsize
    return -(-numel // step) * step


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans())
def test_flags_are_the_last_segment_of_the_packed_message(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int, flags: bool
) -> None:
    indices = range(len(shards))
    layout = plan_reduce(shards, indices, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, flags=flags)
    assert_partition((layout.zero_copy, layout.packed), indices)
    lengths = [s.padded_numel for s in shards] + [layout.num_flags] * flags
    offsets = (*layout.output.offsets, *[layout.flags_offset] * flags)
    assert_disjoint_and_aligned(offsets, lengths, layout.output.numel, itemsize)
    assert layout.flags_width == aligned(layout.num_flags, itemsize)
    assert layout.gradient_numel == sum(layout.packed_widths[: len(layout.packed)])
    if flags:
        assert layout.flags_offset == layout.gradient_numel


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans())
def test_a_message_is_in_chunks_if_all_its_gradients_have_elements_and_are_sharded_on_the_first_dim(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int, flags: bool
) -> None:
    layout = plan_reduce(
        shards, range(len(shards)), itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, flags=flags
    )
    assert layout.in_chunks == all(shards[k].dim == 0 and shards[k].numel for k in layout.packed)


def test_a_reduction_without_gradients_is_empty() -> None:
    layout = plan_reduce([TensorShards((4,), 0, 2)], [], itemsize=4, zero_copy_min_bytes=0)
    assert (layout.zero_copy, layout.packed, layout.packed_numel, layout.output.numel) == ((), (), 0, 0)
    assert (layout.gaps, layout.most_uneven) == ((), 0)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_a_lone_element_takes_one_aligned_step(itemsize: int) -> None:
    layout = plan_gather([TensorShards((1,), 0, 1)] * 2, itemsize=itemsize, zero_copy_min_bytes=0)
    assert layout.store.offsets == (0, ALIGNMENT_BYTES // itemsize)
    assert layout.store.numel * itemsize == 2 * ALIGNMENT_BYTES


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6), st.integers(0, 3), st.randoms())
def test_pieces_are_the_intervals_and_the_gaps_between_them(
    gaps_and_lengths: list[tuple[int, int]], last_gap: int, random: Random
) -> None:
    intervals, end = [], 0
    for gap, length in gaps_and_lengths:
        intervals.append((end + gap, end + gap + length))
        end += gap + length
    random.shuffle(intervals)
    begins, ends = [begin for begin, _ in intervals], [end for _, end in intervals]
    widths, pieces = split_at(begins, ends, end + last_gap)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    assert sum(widths) == end + last_gap
    assert [(starts[i], starts[i] + widths[i]) for i in pieces] == intervals
    assert all(widths[i] for i in range(len(widths)) if i not in pieces)
