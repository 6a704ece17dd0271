"""Transfers of tensors in several pieces through staging memory."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests._internals import StagedRange, plan_rounds

CAPACITY = 1 << 12

extents = st.lists(
    st.builds(StagedRange, st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 15)), max_size=6
)


@given(extents)
def test_pieces_tile_every_tensor_in_order(tensors: Sequence[StagedRange]) -> None:
    pieces = [piece for pieces in plan_rounds(tuple(tensors), CAPACITY) for piece in pieces]
    for index, tensor in enumerate(tensors):
        elements = [e for piece in pieces if piece.tensor == index for e in range(piece.start, piece.stop)]
        assert elements == list(range(tensor.numel))


@given(extents)
def test_rows_of_a_staging_slot_are_on_separate_cache_lines(tensors: Sequence[StagedRange]) -> None:
    for pieces in plan_rounds(tuple(tensors), CAPACITY):
        end = 0
        for piece in pieces:
            tensor = tensors[piece.tensor]
            for row in range(tensor.rows):
                begin = piece.offset + row * piece.stride
                assert begin >= end
                assert begin % 64 == 0
                end = begin + (piece.stop - piece.start) * tensor.itemsize
        assert end <= CAPACITY


@given(extents)
def test_there_is_at_least_one_staging_round_and_no_other_is_empty(tensors: Sequence[StagedRange]) -> None:
    rounds = plan_rounds(tuple(tensors), CAPACITY)
    assert rounds
    assert all(rounds) or rounds == ((),)
