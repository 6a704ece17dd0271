"""The key-value store of the current default process group, apart from earlier default groups of the job."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["is_simulated", "own_client", "world_store"]

_known: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.Store, dist.Store]] = WeakKeyDictionary()
"""The torch store of a default group and the one to use, by default group."""
_lock = threading.Lock()


def world_store() -> dist.Store:
    """Return the store of the default process group, with a prefix of its own for each default group.

    A job may destroy its default group and initialize another over the same store, and the store of torchrun survives a
    restart of the job. Keys stay in a store, so ranks would read what an earlier group has left. Each rank counts its
    default groups in the store itself: a process that replaces another goes on with the number of its rank.
    """
    world = dist.group.WORLD
    assert world is not None
    base = dist.distributed_c10d._get_default_store()
    with _lock:
        known = _known.get(world)
        if known is None or known[0] is not base:
            store = dist.PrefixStore(f"composable_fsdp/{_attempt()}", base)
            number = store.add(f"default groups of rank {dist.get_rank()}", 1)
            known = _known[world] = base, dist.PrefixStore(str(number), store)
        return known[1]


def own_client() -> dist.Store | None:
    """Return the store of :func:`world_store` by a connection of its own.

    All threads that use one client wait behind each other. So if two threads of each rank wait for keys of the other
    rank, neither may set its own. ``None`` if the store has no connections, as that of simulated ranks.
    """
    try:
        store: Any = world_store()
        client: dist.Store | None = None if is_simulated(store) else store.clone()
    except RuntimeError:  # torch before 2.14: "Tried to call pure virtual function"
        return None
    return client


def _attempt() -> str:
    """Return the number of this start of the job, if torchrun keeps its store over restarts; otherwise ``"0"``.

    Each host's torchrun counts for itself, so the numbers of hosts can differ. With a store for each attempt, as
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives, they must not matter.
    """
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if keeps_store else "0"


def is_simulated(store: dist.Store) -> bool:
    """Return whether ``store`` is torch's ``FakeStore``, which from torch 2.14 on takes keys and forgets them."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__ == "FakeStore"
