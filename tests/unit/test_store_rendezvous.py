"""Rendezvous of ranks over a store, and the store of the job, without processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests._internals import StoreRendezvous, Verdict, world_store
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


@contextmanager
def default_group(store: dist.Store) -> Iterator[None]:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_second_default_group_over_a_store_reads_no_keys_of_the_first() -> None:
    store = dist.HashStore()
    with default_group(store):
        world_store().set("key", "first")
        assert world_store().get("key") == b"first"
    with default_group(store):
        assert not world_store().check(["key"])


def test_the_number_of_a_default_group_is_that_of_its_store_and_not_of_the_process() -> None:
    """A process that is new to the job, and one that had other default groups before, use the same keys."""
    prefixes = []
    for groups_before in (0, 2):
        for _ in range(groups_before):
            with default_group(dist.HashStore()):
                world_store()
        store = dist.HashStore()
        with default_group(store):
            world_store().set("key", "")
        prefixes += [key for key in store.list_keys() if key.endswith("/key")]
    assert len(prefixes) == 2
    assert prefixes[0] == prefixes[1]


@pytest.mark.parametrize(("keeps_store", "are_equal"), [("True", False), ("False", True)])
def test_counts_of_restarts_matter_only_if_torchrun_keeps_its_store(monkeypatch, keeps_store: str, are_equal) -> None:
    """The torchrun of each host counts for itself, so ranks of one attempt may have different counts."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", keeps_store)
    keys = []
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        store = dist.HashStore()
        with default_group(store):
            world_store().set("key", "")
        keys += [key for key in store.list_keys() if key.endswith("/key")]
    assert len(keys) == 2
    assert (keys[0] == keys[1]) is are_equal
