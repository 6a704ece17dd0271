"""Choose the communicator of a process group, decorate it, and reconnect it after a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable_fsdp._comm.c10d import ProcessGroupCommunicator, timeout_of_backend
from composable_fsdp._comm.communicator import Communicator, GroupCommunicator, find
from composable_fsdp._comm.decorators import Exchange, OrderChecked, StoreExchange, Visible, Watched
from composable_fsdp._comm.gloo.gloo_communicator import GlooCommunicator
from composable_fsdp._comm.loopback import LoopbackCommunicator
from composable_fsdp._comm.shm.connect import connect
from composable_fsdp._comm.shm.shm_communicator import SharedMemoryCommunicator
from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp._memory.device_capabilities import backend_capabilities, is_host

__all__ = [
    "AROUND",
    "TRANSPORTS",
    "abandon",
    "communicator_over",
    "compare",
    "compared",
    "duplicate",
    "loopback",
    "position",
    "reopen",
    "timeout_of",
]


def _in_shared_memory(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator | None:
    engine = connect(group) if _has_own_transports(group, device_type) else None
    return None if engine is None else SharedMemoryCommunicator(group, engine)


def _over_gloo(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator | None:
    return GlooCommunicator(group) if _has_own_transports(group, device_type) else None


def _has_own_transports(group: dist.ProcessGroup, device_type: str) -> bool:
    return dist.get_world_size(group) > 1 and backend_capabilities(group, device_type).has_own_transports


TRANSPORTS: list[Callable[[dist.ProcessGroup, str], GroupCommunicator | None]] = [
    _in_shared_memory,
    _over_gloo,
    ProcessGroupCommunicator,
]
"""Each makes the communicator of a process group for a type of device, or returns ``None``. The first answer counts."""


def _watched(communicator: Communicator) -> Communicator:
    if communicator.traits.checks:
        return communicator
    return Watched(cast(GroupCommunicator, communicator), job_watchdog())


def _order_checked(communicator: Communicator) -> Communicator:
    if not isinstance(communicator, Watched):
        return communicator
    exchange: Exchange | None = find(communicator, GlooCommunicator)
    watchdog = job_watchdog()
    if exchange is None and watchdog is not None:
        exchange = StoreExchange(communicator.group, watchdog, timeout_of(communicator.group))
    return OrderChecked(communicator, exchange, order_check_from()) if exchange is not None else communicator


AROUND: list[Callable[[Communicator], Communicator]] = [_watched, _order_checked, Visible]
"""Each decorates a new communicator or returns it unchanged. The last is the outermost."""


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
    """Return the communicator of ``group``. CPU tensors over gloo use shared memory if all ranks are on one host.

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


def _communicators(groups: Collection[dist.ProcessGroup]) -> Iterator[GroupCommunicator]:
    for group in groups:
        yield from _known.get(group, {}).values()


def position(group: dist.ProcessGroup) -> str:
    """Return this rank's position in the sequence of operations over ``group``, or ``"broken"`` if one has failed."""
    known = list(_communicators([group]))
    return "broken" if any(each.is_broken for each in known) else ",".join(str(each.launched) for each in known)


def abandon(groups: Collection[dist.ProcessGroup]) -> None:
    """Abort operations in flight over ``groups``, before their memory is freed and :func:`reopen` is called."""
    for known in _communicators(groups):
        known.abandon()


def reopen(groups: Collection[dist.ProcessGroup]) -> None:
    """Reconnect all communicators over ``groups``. All ranks of each group must call it together.

    Raises:
        PeerError: some rank cannot connect.
    """
    # The order is the same on all ranks.
    for group in sorted((group for group in groups if group in _known), key=_creation_order.__getitem__):
        for known in _communicators([group]):
            known.reopen()


def compare(groups: Collection[dist.ProcessGroup], level: OrderCheck) -> None:
    """Set how much ranks compare before an operation over ``groups``. In shared memory, they always compare."""
    for known in _communicators(groups):
        checked = find(known, OrderChecked)
        if checked is not None:
            checked.set_level(level)


def compared(group: dist.ProcessGroup) -> int:
    """Return the number of messages exchanged over ``group`` since it last connected to compare operations."""
    checked = (find(known, OrderChecked) for known in _communicators([group]))
    return sum(each.checker.compared for each in checked if each is not None)


def duplicate(communicator: GroupCommunicator, device_type: str) -> GroupCommunicator:
    """Return a communicator of the same ranks on a new process group. All ranks must call it together."""
    return communicator_over(dist.new_group(list(communicator.ranks), use_local_synchronization=True), device_type)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of ``group`` in seconds, that of its CPU backend if it has one."""
    if type(group) is not dist.ProcessGroup:
        return timeout_of_backend(group)
    device = min(group._device_types, key=lambda device: not is_host(device))
    return timeout_of_backend(group._get_backend(device))
