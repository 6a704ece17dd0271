"""Which groups are gathered ahead of their turn, and after what: decided on names and numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests._internals import batch_before_prefetch

NBYTES = st.integers(0, 1000)


@given(st.integers(1, 6), NBYTES, NBYTES)
def test_what_comes_next_waits_for_a_batch_after_which_another_one_goes(batches: int, own: int, ahead: int) -> None:
    batch = batch_before_prefetch(batches, own, ahead)
    if batch is not None:
        assert 0 <= batch < batches - 1


def test_what_comes_next_meets_no_gradients_but_those_of_the_last_batch() -> None:
    assert [batch_before_prefetch(batches, 100, 100) for batches in (2, 3, 4)] == [0, 1, 2]


def test_what_comes_next_does_not_wait_for_a_group_of_one_batch() -> None:
    assert batch_before_prefetch(1, 100, 100) is None


def test_what_takes_less_than_a_batch_does_not_wait() -> None:
    assert batch_before_prefetch(4, 100, 25) == 2
    assert batch_before_prefetch(4, 100, 24) is None
    assert batch_before_prefetch(4, 100, 0) is None, "where shards are the full parameters"
