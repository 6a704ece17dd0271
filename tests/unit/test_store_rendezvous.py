"""Rendezvous of ranks over a store, without processes."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests._internals import StoreRendezvous, Verdict
from tests.helpers.threads import run_in_threads

RANKS = (2, 5)


def rendezvous_of_two() -> tuple[dist.Store, StoreRendezvous, StoreRendezvous]:
    return dist.HashStore(), StoreRendezvous("point", 2, RANKS), StoreRendezvous("point", 5, RANKS)


def test_ranks_get_the_notes_of_all_ranks_and_leave_only_the_keys_of_the_last_rendezvous() -> None:
    store, *both = rendezvous_of_two()
    for notes in ("aa", "bc", "cb"):
        expected = Verdict({"a": [2, 5]} if notes == "aa" else {notes[0]: [2], notes[1]: [5]})
        calls = [partial(each.meet, store, note, 30.0) for each, note in zip(both, notes, strict=True)]
        assert run_in_threads(calls, 1e-3) == [expected] * 2
    assert store.num_keys() == 4  # two notes, the count and the verdict


@pytest.mark.behaviour("H-05")
def test_a_rank_that_comes_too_late_meets_the_next_call_of_the_others() -> None:
    """It must not take the note that they left when they gave up for their coming."""
    store, first, late = rendezvous_of_two()
    assert first.meet(store, "steps 0", 0.0) == Verdict(missing=[5])
    calls = [partial(first.meet, store, "steps 1", 30.0), partial(late.meet, store, "steps 0", 30.0)]
    assert run_in_threads(calls, 1e-3) == [Verdict({"steps 1": [2], "steps 0": [5]})] * 2


@pytest.mark.behaviour("F-12")
def test_a_rank_that_arrived_last_but_announced_nothing_is_not_missing() -> None:
    """The last rank may be killed or exceed the deadline before it announces that all ranks have arrived."""
    store, first, _ = rendezvous_of_two()

    def arrive() -> None:
        store.wait(["point/0/2"])
        store.set("point/0/5", "save")

    other = threading.Thread(target=arrive)
    other.start()
    assert first.meet(store, "save", 0.5) == Verdict({"save": [2, 5]})
    other.join()


class FailingOnce:
    """A store whose first ``check`` fails."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._fails = store, True

    def check(self, keys: list[str]) -> bool:
        if self._fails:
            self._fails = False
            raise dist.DistNetworkError("no route to host")
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_rank_whose_store_failed_comes_again_to_the_same_rendezvous() -> None:
    store, first, second = rendezvous_of_two()
    failing = FailingOnce(store)
    with pytest.raises(dist.DistNetworkError):
        first.meet(failing, "save", 30.0)
    assert run_in_threads([partial(each.meet, failing, "save", 30.0) for each in (first, second)], 1e-3) == (
        [Verdict({"save": [2, 5]})] * 2
    )


def test_a_reason_to_wait_no_longer_ends_a_rendezvous() -> None:
    store, first, _ = rendezvous_of_two()
    assert first.meet(store, "save", 30.0, lambda missing: f"{missing()} are gone") == (
        Verdict(missing=[5], reason="[5] are gone")
    )
