"""Ranks that meet through a store, at the moment when they have waited long enough."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from tests._internals import rank_group as ranks


@pytest.mark.behaviour("F-12")
def test_a_rank_that_came_and_did_not_open_the_meeting_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one to come may be killed, or slower than the deadline, before it says that all are there."""
    store: Any = dist.HashStore()
    place, note = "composable_fsdp/checkpoint/0", {"call": "save", "group": True}
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def comes() -> None:
        store.wait([f"{place}/0"])
        store.set(f"{place}/1", json.dumps(note))

    other = threading.Thread(target=comes)
    other.start()
    assert ranks._assemble(ranks._Rendezvous(store), note, 0.5) == {"group": True}
    other.join()
