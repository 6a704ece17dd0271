"""Each default process group has keys of its own in the store of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from tests._internals import world_store


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
def test_counts_of_restarts_matter_only_if_torchrun_keeps_its_store(
    monkeypatch: pytest.MonkeyPatch, keeps_store: str, are_equal: bool
) -> None:
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
