"""Each default process group has keys of its own in the store of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
