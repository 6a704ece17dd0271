"""Which communicator serves a process group."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable_fsdp._comm.c10d import ProcessGroupCommunicator
from composable_fsdp._comm.communicator import GroupCommunicator
from composable_fsdp._comm.gloo.connection import GlooConnection
from composable_fsdp._comm.gloo.gloo_communicator import GlooCommunicator
from composable_fsdp._comm.shm.connect import connect, reconnect
from composable_fsdp._comm.shm.engine import ShmEngine
from composable_fsdp._comm.shm.shm_communicator import SharedMemoryCommunicator
from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.watchdog import job_watchdog

__all__ = ["abandon", "communicator_over", "compare", "compared", "duplicate", "position", "reopen"]

# Neither knows the process group that it belongs to, so that it goes with it. They are not iterated: another thread may
# ask for a group of its own meanwhile.
_known: WeakKeyDictionary[dist.ProcessGroup, ShmEngine | GlooConnection] = WeakKeyDictionary()
_places: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""In the order in which this rank first asked for them."""
_next_place = count()


def communicator_over(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator:
    """Through shared memory where the backend is gloo and all ranks are on one host, else over the backend.

    All ranks must ask together when they first ask for a group; after that it is known.
    """
    if device_type != "cpu" or dist.get_backend(group) != "gloo" or dist.get_world_size(group) == 1:
        return ProcessGroupCommunicator(group, device_type)
    if group not in _known:
        _places[group] = next(_next_place)
        _known[group] = connect(group) or GlooConnection(group, job_watchdog(), order_check_from())
    known = _known[group]
    return (
        GlooCommunicator(group, known) if isinstance(known, GlooConnection) else SharedMemoryCommunicator(group, known)
    )


def position(group: dist.ProcessGroup) -> str:
    """Where this rank is in the operations over ``group``: ``"broken"`` where they have failed."""
    return _known[group].position if group in _known else ""


def abandon(groups: Collection[dist.ProcessGroup]) -> None:
    """Ends what is under way over ``groups``, before :func:`reopen`, which does so where this rank alone writes to its
    memory.
    """
    for group in groups:
        known = _known.get(group)
        if isinstance(known, GlooConnection):
            known.abandon()


def reopen(groups: Collection[dist.ProcessGroup]) -> None:
    """Gives all communicators over ``groups`` new connections. All ranks of each must call it together.

    Raises:
        PeerError: these cannot be had on some rank.
    """
    for group in sorted((group for group in groups if group in _known), key=_places.__getitem__):  # alike on all ranks
        known = _known[group]
        if isinstance(known, GlooConnection):
            known.reopen()
        else:
            reconnect(group, known)


def compare(groups: Collection[dist.ProcessGroup], level: OrderCheck) -> None:
    """How much ranks compare before they begin an operation over ``groups``. In shared memory they always do."""
    for group in groups:
        known = _known.get(group)
        if isinstance(known, GlooConnection):
            known.compare(level)


def compared(group: dist.ProcessGroup) -> int:
    """Messages that ranks have exchanged over ``group``, since it last connected, only to compare what comes next."""
    known = _known.get(group)
    return known.compared if isinstance(known, GlooConnection) else 0


def duplicate(communicator: GroupCommunicator, device_type: str) -> GroupCommunicator:
    """The same ranks on a process group of their own. All of them must ask together."""
    ranks = dist.get_process_group_ranks(communicator.group)
    return communicator_over(dist.new_group(ranks, use_local_synchronization=True), device_type)
