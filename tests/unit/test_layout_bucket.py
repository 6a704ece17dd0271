"""Offsets of the tensors of a bucket in the shard store, in messages, and in the unsharded buffer."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._internals import ALIGNMENT_BYTES, TensorShards, plan_gather, plan_reduce, split_at
from tests.helpers.layouts import (
    DIRECT_BYTES,
    MOST_PADDING,
    NEVER_ZERO_COPY,
    assert_disjoint_and_aligned,
    assert_sent_layout,
    shards_of_one_bucket,
)

FEWER = settings(max_examples=40)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def assert_partition(parts: Iterable[tuple[int, ...]], numbers: range) -> None:
    assert sorted(i for part in parts for i in part) == list(numbers)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans())
def test_the_store_has_the_packed_segments_in_front_without_gaps_that_would_add_much(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int, encoded: bool
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, encoded=encoded)
    assert_partition((layout.zero_copy, layout.packed), range(len(shards)))
    assert_sent_layout(layout, itemsize, encoded=encoded)


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
@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_a_tensor_is_zero_copy_if_it_concatenates_and_its_full_size_reaches_the_threshold(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    for i, s in enumerate(shards):
        expected = s.concatenates and s.numel > 0 and s.numel * itemsize >= zero_copy_min_bytes
        assert (i in layout.zero_copy) == expected


@FEWER
@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_an_all_gather_sends_each_shard_once_and_few_bytes_for_alignment(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    sent = layout.num_shards * sum(s.padded_numel for s in shards)
    assert 0 <= layout.wire_numel - sent <= MOST_PADDING * sent


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans(), st.booleans(), st.data())
def test_the_output_of_a_reduction_has_the_packed_segments_and_flags_in_front_without_gaps_that_would_add_much(
    shards: tuple[TensorShards, ...],
    itemsize: int,
    zero_copy_min_bytes: int,
    flags: bool,
    encoded: bool,
    data: st.DataObject,
) -> None:
    indices = data.draw(st.sets(st.integers(0, len(shards) - 1)).map(sorted))
    layout = plan_reduce(
        *(shards, indices), itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, flags=flags, encoded=encoded
    )
    assert layout.indices == tuple(indices)
    assert layout.shards == tuple(shards[i] for i in indices)
    assert_partition((layout.zero_copy, layout.packed), range(len(indices)))
    assert_sent_layout(layout, itemsize, encoded=encoded)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES)
def test_a_message_has_padding_exactly_where_it_is_longer_than_the_gradients_in_it(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int
) -> None:
    layout = plan_reduce(shards, range(len(shards)), itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes)
    message_numel = shards[0].num_shards * layout.packed_numel
    assert bool(layout.gaps or layout.most_uneven) == (message_numel > sum(shards[k].numel for k in layout.packed))


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans())
def test_flags_are_the_last_segment_of_the_packed_message(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int, flags: bool
) -> None:
    indices = range(len(shards))
    layout = plan_reduce(shards, indices, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, flags=flags)
    assert_partition((layout.zero_copy, layout.packed), indices)
    assert layout.flags_width == (layout.packed_widths[-1] if flags else 0) >= layout.num_flags
    assert layout.gradient_numel == sum(layout.packed_widths[: len(layout.packed)])
    if flags:
        assert layout.flags_offset == layout.gradient_numel


@pytest.mark.parametrize(("encoded", "second"), [(False, 1), (True, ALIGNMENT_BYTES // 2)])
def test_lone_elements_lie_side_by_side_unless_a_codec_encodes_them(encoded: bool, second: int) -> None:
    two = [TensorShards((1,), 0, 1)] * 2
    layout = plan_gather(two, itemsize=2, zero_copy_min_bytes=NEVER_ZERO_COPY, encoded=encoded)
    assert layout.store.offsets == (0, second)
    assert (layout.store.numel, layout.places.offsets) == (2 * second, (0, ALIGNMENT_BYTES // 2))


def test_a_tiny_module_on_many_ranks_sends_what_it_has() -> None:
    """A row of a weight of 64 by 64 and an element of its bias, on 4096 ranks: FSDP2's messages have no gaps either."""
    shards = [TensorShards((64, 64), 0, 4096), TensorShards((64,), 0, 4096)]
    gather = plan_gather(shards, itemsize=2, zero_copy_min_bytes=NEVER_ZERO_COPY)
    reduce = plan_reduce(shards, [0, 1], itemsize=4, zero_copy_min_bytes=NEVER_ZERO_COPY, flags=True)
    assert (gather.packed_widths, reduce.packed_widths) == ((64, 1), (64, 1, 2))


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
