"""Choose the communicator of a process group, and reconnect it after a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable_fsdp._comm.c10d import ProcessGroupCommunicator
from composable_fsdp._comm.communicator import GroupCommunicator
from composable_fsdp._comm.device_connection import DeviceConnection, aborted
from composable_fsdp._comm.gloo.connection import GlooConnection
from composable_fsdp._comm.gloo.gloo_communicator import GlooCommunicator
from composable_fsdp._comm.shm.connect import connect, reconnect
from composable_fsdp._comm.shm.engine import ShmEngine
from composable_fsdp._comm.shm.shm_communicator import SharedMemoryCommunicator
from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp._memory.device_capabilities import backend_capabilities

__all__ = ["abandon", "check_aborted", "communicator_over", "compare", "compared", "duplicate", "position", "reopen"]

_Connection: TypeAlias = ShmEngine | GlooConnection | DeviceConnection

# Values do not reference their process group, so an entry is freed with it. Never iterate over these: another
# thread may be adding a group.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Connection]] = WeakKeyDictionary()
"""The connection of each process group for each type of device: ``"cpu:gloo,cuda:nccl"`` has two."""
_creation_order: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Process groups in the order in which this rank first requested them."""
_next_index = count()
C = TypeVar("C", bound=_Connection)
_WATCHED = (GlooConnection, DeviceConnection)
"""Connections whose ranks compare operations before they launch them."""


def communicator_over(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator:
    """Return the communicator of ``group``. CPU tensors over gloo use shared memory if all ranks are on one host.

    All ranks must make the first call for a group together. Its connection is cached.
    """
    if dist.get_world_size(group) == 1:
        return ProcessGroupCommunicator(group, device_type)
    if not backend_capabilities(group, device_type).has_own_transports:
        return ProcessGroupCommunicator(group, device_type, connection=_device_connection(group, device_type))
    known = _known.get(group, {}).get(device_type)
    if known is None:
        known = _remember(
            group, device_type, connect(group) or GlooConnection(group, job_watchdog(), order_check_from())
        )
    if isinstance(known, GlooConnection):
        return GlooCommunicator(group, known)
    return SharedMemoryCommunicator(group, cast(ShmEngine, known))


def _device_connection(group: dist.ProcessGroup, device_type: str) -> DeviceConnection | None:
    watchdog, known = job_watchdog(), _known.get(group, {}).get(device_type)
    if known is None and watchdog is not None and backend_capabilities(group, device_type).is_watchable:
        return _remember(group, device_type, DeviceConnection(group, device_type, watchdog, order_check_from()))
    return cast("DeviceConnection | None", known)


def _remember(group: dist.ProcessGroup, device_type: str, connection: C) -> C:
    if group not in _known:
        _creation_order[group] = next(_next_index)
    _known.setdefault(group, {})[device_type] = connection
    return connection


def _connections(groups: Collection[dist.ProcessGroup]) -> Iterator[_Connection]:
    for group in groups:
        yield from _known.get(group, {}).values()


def position(group: dist.ProcessGroup) -> str:
    """Return this rank's position in the sequence of operations over ``group``, or ``"broken"`` if one has failed."""
    positions = [known.position for known in _connections([group])]
    return "broken" if "broken" in positions else ",".join(positions)


def check_aborted(groups: Callable[[], Collection[dist.ProcessGroup]]) -> None:
    """Raise if operations on the device over one of ``groups`` were aborted. ``groups`` is called if any were.

    Raises:
        PeerError: a rank failed or is gone.
        DivergenceError: ranks were about to run different operations.
    """
    if aborted:
        for known in _connections(groups()):
            if isinstance(known, DeviceConnection):
                known.check()


def abandon(groups: Collection[dist.ProcessGroup]) -> None:
    """Abort operations in flight over ``groups``, before their memory is freed and :func:`reopen` is called.

    In shared memory there is nothing to abort: only this rank writes to its memory.
    """
    for known in _connections(groups):
        if isinstance(known, _WATCHED):
            known.abandon()


def reopen(groups: Collection[dist.ProcessGroup]) -> None:
    """Reconnect all communicators over ``groups``. All ranks of each group must call it together.

    Raises:
        PeerError: some rank cannot connect.
    """
    # The order is the same on all ranks.
    for group in sorted((group for group in groups if group in _known), key=_creation_order.__getitem__):
        for known in _connections([group]):
            if isinstance(known, _WATCHED):
                known.reopen()
            else:
                reconnect(group, known)


def compare(groups: Collection[dist.ProcessGroup], level: OrderCheck) -> None:
    """Set how much ranks compare before an operation over ``groups``. In shared memory, they always compare."""
    for known in _connections(groups):
        if isinstance(known, _WATCHED):
            known.set_order_check(level)


def compared(group: dist.ProcessGroup) -> int:
    """Return the number of messages exchanged over ``group`` since it last connected to compare operations."""
    return sum(known.compared for known in _connections([group]) if isinstance(known, _WATCHED))


def duplicate(communicator: GroupCommunicator, device_type: str) -> GroupCommunicator:
    """Return a communicator of the same ranks on a new process group. All ranks must call it together."""
    ranks = dist.get_process_group_ranks(communicator.group)
    return communicator_over(dist.new_group(ranks, use_local_synchronization=True), device_type)
