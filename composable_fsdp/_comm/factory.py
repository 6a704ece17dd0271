"""Choose the communicator of a process group, decorate it, and reconnect it after a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp._comm.c10d import ProcessGroupCommunicator, timeout_of_backend
from composable_fsdp._comm.communicator import Communicator, GroupCommunicator
from composable_fsdp._comm.loopback import LoopbackCommunicator
from composable_fsdp._memory.device_capabilities import backend_capabilities, is_host

__all__ = [
    "AROUND",
    "TRANSPORTS",
    "abandon",
    "communicator_over",
    "communicators",
    "has_own_transports",
    "loopback",
    "part_of",
    "position",
    "reopen",
    "timeout_of",
]


TRANSPORTS: list[Callable[[dist.ProcessGroup, str], GroupCommunicator | None]] = [ProcessGroupCommunicator]
"""Each makes the communicator of a process group for a type of device, or returns ``None``. The first answer counts."""

AROUND: list[Callable[[Communicator], Communicator]] = []
"""Each decorates a new communicator or returns it unchanged. The last is the outermost."""


def has_own_transports(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether plugins may send tensors of ``device_type`` over ``group`` without its own collectives."""
    return dist.get_world_size(group) > 1 and backend_capabilities(group, device_type).has_own_transports


def communicators(groups: Collection[dist.ProcessGroup]) -> Iterator[GroupCommunicator]:
    """Yield the communicators over ``groups`` that exist."""
    for group in groups:
        yield from _known.get(group, {}).values()


def _decorated(communicator: Communicator) -> Communicator:
    for around in AROUND:
        communicator = around(communicator)
    return communicator


# Communicators do not keep their process group alive, so an entry is freed with it. Never iterate over these: another
# thread may be adding a group.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupCommunicator]] = WeakKeyDictionary()
"""The communicator of each process group for each type of device: ``"cpu:gloo,cuda:nccl"`` has two."""
_creation_order: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Process groups in the order in which this rank first requested them."""
_next_index = count()


def communicator_over(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator:
    """Return the communicator of ``group`` for tensors on ``device_type``, decorated.

    All ranks must make the first call for a group together. The communicator is cached.
    """
    known = _known.setdefault(group, {}).get(device_type)
    if known is None:
        _creation_order.setdefault(group, next(_next_index))
        made = (transport(group, device_type) for transport in TRANSPORTS)
        known = cast(GroupCommunicator, _decorated(next(each for each in made if each is not None)))
        _known[group][device_type] = known
    return known


def loopback() -> Communicator:
    """Return the communicator of an axis with one rank."""
    return _decorated(LoopbackCommunicator())


def position(group: dist.ProcessGroup) -> str:
    """Return this rank's position in the sequence of operations over ``group``, or ``"broken"`` if one has failed."""
    known = list(communicators([group]))
    return "broken" if any(each.is_broken for each in known) else ",".join(str(each.launched) for each in known)


def abandon(groups: Collection[dist.ProcessGroup]) -> None:
    """Abort operations in flight over ``groups``, before their memory is freed and :func:`reopen` is called."""
    for known in communicators(groups):
        known.abandon()


def reopen(groups: Collection[dist.ProcessGroup]) -> None:
    """Reconnect all communicators over ``groups``. All ranks of each group must call it together.

    Raises:
        PeerError: some rank cannot connect.
    """
    # The order is the same on all ranks.
    for group in sorted((group for group in groups if group in _known), key=_creation_order.__getitem__):
        for known in communicators([group]):
            known.reopen()


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
