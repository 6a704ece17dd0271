"""Packed parameters that one strided copy moves to their offsets."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from tests._internals import NEVER_ZERO_COPY, GatherLayout, TensorShards, find_runs, plan_gather

SHAPES = st.lists(st.tuples(st.sampled_from([0, 3, 4, 16]), st.sampled_from([1, 4])), min_size=1, max_size=12)


def layout_of(shapes: list[tuple[int, ...]], num_shards: int = 4, itemsize: int = 2) -> GatherLayout:
    shards = [TensorShards(shape, 0, num_shards) for shape in shapes]
    return plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=NEVER_ZERO_COPY)


@given(SHAPES, st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_runs_have_each_parameter_once_where_it_is_on_the_wire_and_in_the_buffer(
    shapes: list[tuple[int, ...]], num_shards: int, itemsize: int
) -> None:
    layout = layout_of(shapes, num_shards, itemsize)
    found = [
        (run.start + k * run.width, run.place + k * run.step, run.padded_numel)
        for run in find_runs(layout)
        for k in range(run.count)
    ]
    starts = accumulate(layout.packed_widths[:-1], initial=0)
    assert found == [
        (start, layout.places.offsets[i], layout.shards[i].padded_numel)
        for start, i in zip(starts, layout.packed, strict=True)
    ]


def test_equal_adjacent_segments_are_one_run_even_with_gaps_between_them() -> None:
    layout = layout_of([(16,)] * 48)
    assert not layout.in_chunks
    assert [run.count for run in find_runs(layout)] == [48]


def test_a_different_shape_ends_a_run() -> None:
    assert [run.count for run in find_runs(layout_of([(64,), (64,), (8, 8), (32, 8), (64,)]))] == [3, 1, 1]
