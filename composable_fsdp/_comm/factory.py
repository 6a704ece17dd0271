"""Choose the communicator of a process group, and reconnect it after a failure."""

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
from composable_fsdp._memory.streams import backend_for

__all__ = ["abandon", "communicator_over", "compare", "compared", "duplicate", "position", "reopen"]

# Values do not reference their process group, so an entry is freed with it. Never iterate over these: another
# thread may be adding a group.
_known: WeakKeyDictionary[dist.ProcessGroup, ShmEngine | GlooConnection] = WeakKeyDictionary()
_creation_order: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Process groups in the order in which this rank first requested them."""
_next_index = count()


def communicator_over(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator:
    """Return the communicator of ``group``. CPU tensors over gloo use shared memory if all ranks are on one host.

    All ranks must make the first call for a group together. Its connection is cached.
    """
    if device_type != "cpu" or backend_for(group, device_type) != "gloo" or dist.get_world_size(group) == 1:
        return ProcessGroupCommunicator(group, device_type)
    if group not in _known:
        _creation_order[group] = next(_next_index)
        _known[group] = connect(group) or GlooConnection(group, job_watchdog(), order_check_from())
    known = _known[group]
    return (
        GlooCommunicator(group, known) if isinstance(known, GlooConnection) else SharedMemoryCommunicator(group, known)
    )


def position(group: dist.ProcessGroup) -> str:
    """Return this rank's position in the sequence of operations over ``group``, or ``"broken"`` if one has failed."""
    return _known[group].position if group in _known else ""


def abandon(groups: Collection[dist.ProcessGroup]) -> None:
    """Abort operations in flight over ``groups``, before their memory is freed and :func:`reopen` is called.

    In shared memory there is nothing to abort: only this rank writes to its memory.
    """
    for group in groups:
        known = _known.get(group)
        if isinstance(known, GlooConnection):
            known.abandon()


def reopen(groups: Collection[dist.ProcessGroup]) -> None:
    """Reconnect all communicators over ``groups``. All ranks of each group must call it together.

    Raises:
        PeerError: some rank cannot connect.
    """
    # The order is the same on all ranks.
    for group in sorted((group for group in groups if group in _known), key=_creation_order.__getitem__):
        known = _known[group]
        if isinstance(known, GlooConnection):
            known.reopen()
        else:
            reconnect(group, known)


def compare(groups: Collection[dist.ProcessGroup], level: OrderCheck) -> None:
    """Set how much ranks compare before an operation over ``groups``. In shared memory, they always compare."""
    for group in groups:
        known = _known.get(group)
        if isinstance(known, GlooConnection):
            known.set_order_check(level)


def compared(group: dist.ProcessGroup) -> int:
    """Return the number of messages exchanged over ``group`` since it last connected to compare operations."""
    known = _known.get(group)
    return known.compared if isinstance(known, GlooConnection) else 0


def duplicate(communicator: GroupCommunicator, device_type: str) -> GroupCommunicator:
    """Return a communicator of the same ranks on a new process group. All ranks must call it together."""
    ranks = dist.get_process_group_ranks(communicator.group)
    return communicator_over(dist.new_group(ranks, use_local_synchronization=True), device_type)
