"""Reset a worker before each call, so that every function starts alike."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tests.helpers.known_watchdog import known_watchdog
from tests.helpers.mesh_caches import forget_meshes

_stores: list[dist.Store] = []
"""The store of the default process group, once :func:`reset` has replaced it."""


def reset(number: int, path: Sequence[str], directory: str) -> None:
    """Reset global state. This is a job of its own: every rank has then finished with the groups destroyed here.
    ``number``: the number of the call, the same on all ranks. ``path``: what ``sys.path`` becomes. ``directory``: what
    the working directory becomes. Raises ``RuntimeError``: an earlier function has destroyed the default process
    group."""
    if not dist.is_initialized():
        raise RuntimeError("an earlier function has destroyed the default process group")
    sys.path[:] = path
    os.chdir(directory)
    importlib.invalidate_caches()
    made = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        forget_meshes()
    watchdog = known_watchdog()
    if watchdog is not None:
        watchdog.go_on()  # other ranks would give the failure of an earlier call as the reason of a process' end
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    _separate_store(number)
    gc.collect()
    gc.freeze()  # the rest is modules and caches: torch's alone make a collection take 0.2 s


def _separate_store(number: int) -> None:
    """Give process groups of this call their own keys in the store. ``new_group(use_local_synchronization=True)`` names
    a group by its ranks and the number of existing groups. A group could otherwise have the name of an earlier call's
    group, read its stale address, and wait for it forever."""
    world = dist.group.WORLD
    assert world is not None
    groups = dist.distributed_c10d._world.pg_map
    backend, store = groups[world]
    if not _stores:
        _stores.append(store)
    groups[world] = (backend, dist.PrefixStore(f"call {number}", _stores[0]))
