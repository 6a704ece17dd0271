"""Process groups of torch: parts of them, their timeouts, and the error of an operation that is lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from composable_fsdp._core.memory import is_host
from composable_fsdp.errors import PeerError


class LostError(PeerError):
    """An operation failed in the backend, for a reason that other ranks know.

    Args:
        text: what the backend says.
        timed_out: the timeout of the process group is over.
    """

    def __init__(self, text: str, *, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


def timeout_of_backend(backend: Any) -> float:
    """Return the timeout of a backend in seconds; the default one if it does not tell."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.distributed_c10d.default_pg_timeout)
    return cast(timedelta, timeout).total_seconds()


def part_of(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Return a new process group of ``size`` neighbouring ranks of ``group``, this one among them.

    ``size`` divides the number of ranks. All ranks of ``group`` must call it together, and no other rank of the job.
    ``new_group`` would wait for those where a device is bound to the default group; torchcomms has no other way.
    """
    world, known = cast(Any, dist.group.WORLD), cast(Any, group)
    bound, number = world.bound_device_id, dist.get_world_size(group)
    is_bound = bound is not None and torch.device(bound.type) in known._device_types
    is_torchcomms = getattr(getattr(dist, "config", None), "use_torchcomms", False)
    if is_torchcomms or (is_bound and known._get_backend(bound).supports_splitting):
        parts = [list(range(first, first + size)) for first in range(0, number, size)]
        return cast(dist.ProcessGroup, cast(Any, dist).split_group(group, parts))
    first = dist.get_rank(group) // size * size
    ranks = dist.get_process_group_ranks(group)[first : first + size]
    return cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of ``group`` in seconds, that of its CPU backend if it has one."""
    if type(group) is not dist.ProcessGroup:
        return timeout_of_backend(group)
    device = min(group._device_types, key=lambda device: not is_host(device))
    return timeout_of_backend(group._get_backend(device))
