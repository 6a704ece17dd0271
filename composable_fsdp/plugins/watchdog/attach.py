"""Attach the watchdog of the job and the order check to communicators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import torch.distributed as dist
from torch import nn

from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.process_groups import timeout_of
from composable_fsdp._consistency.wait_warning import ENDED_AT, REPORTED_AT
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp._core.comm import Communicator, GroupCommunicator, communicators, find
from composable_fsdp._core.seams import HookHandles, ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState, connections
from composable_fsdp.plugins.watchdog.decorators import Exchange, OrderChecked, StoreExchange, Watched

__all__ = ["OrderCheckLevel", "compare", "compared", "order_checked", "watched"]


def watched(communicator: Communicator) -> Communicator:
    if communicator.traits.checks:
        return communicator
    return Watched(cast(GroupCommunicator, communicator), job_watchdog())


def order_checked(communicator: Communicator) -> Communicator:
    if not isinstance(communicator, Watched):
        return communicator
    exchange = find(communicator, Exchange)  # type: ignore[type-abstract]
    watchdog = job_watchdog()
    if exchange is None and watchdog is not None:
        timeout = timeout_of(communicator.group)
        watchdog.warn_within(REPORTED_AT * timeout)
        exchange = StoreExchange(communicator.group, watchdog, ENDED_AT * timeout)
    return OrderChecked(communicator, exchange, order_check_from()) if exchange is not None else communicator


def compare(groups: Collection[dist.ProcessGroup], level: OrderCheck) -> None:
    """Set how much ranks compare before an operation over ``groups``. In shared memory, they always compare."""
    for known in communicators(groups):
        checked = find(known, OrderChecked)
        if checked is not None:
            checked.set_level(level)


def compared(group: dist.ProcessGroup) -> int:
    """Return the number of messages exchanged over ``group`` since it last connected to compare operations."""
    checked = (find(known, OrderChecked) for known in communicators([group]))
    return sum(each.checker.compared for each in checked if each is not None)


class OrderCheckLevel(Observer):
    """Sets the level of each root that is assembled: an earlier model may have set another for its process groups."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        state.change_for_plugin("order check", order_check_from())

    def for_root(self, root: ObservedRoot) -> Observer | None:
        compare(connections(root.states.values()), root.root_state.options.of_plugins["order check"])
        return None
