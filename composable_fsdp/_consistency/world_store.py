"""The key-value store of the current default process group, apart from earlier default groups of the job."""

from __future__ import annotations

import os
from weakref import ref

import torch.distributed as dist

__all__ = ["world_store"]

_world: ref[dist.ProcessGroup] | None = None
_number = 0


def world_store() -> dist.Store:
    """Return the store of the default process group, with a prefix of its own for each default group of this process.

    A job may destroy its default group and initialize another over the same store, and the store of torchrun survives a
    restart of the job. Keys stay in a store, so ranks would read what an earlier group has left.
    """
    global _world, _number
    world = dist.group.WORLD
    assert world is not None
    if _world is None or _world() is not world:
        _world, _number = ref(world), _number + 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"composable_fsdp/{attempt}/{_number}", dist.distributed_c10d._get_default_store())
