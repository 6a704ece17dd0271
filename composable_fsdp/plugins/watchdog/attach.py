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
from composable_fsdp.plugins.watchdog.decorators import Exchange, StoreExchange, Watched

__all__ = ["OrderCheckLevel", "compare", "compared", "watched"]


def watched(communicator: Communicator) -> Communicator:
    if communicator.traits.checks:
        return communicator
    base, watchdog = cast(GroupCommunicator, communicator), job_watchdog()
    exchange = find(communicator, Exchange)  # type: ignore[type-abstract]
    if exchange is None and watchdog is not None:
        timeout = timeout_of(base.group)
        watchdog.warn_within(REPORTED_AT * timeout)
        exchange = StoreExchange(base.group, watchdog, ENDED_AT * timeout)
    return Watched(base, watchdog, exchange, order_check_from())


def compare(groups: Collection[dist.ProcessGroup], level: OrderCheck) -> None:
    """Set how much ranks compare before an operation over ``groups``. In shared memory, they always compare."""
    for known in communicators(groups):
        found = find(known, Watched)
        if found is not None:
            found.set_level(level)


def compared(group: dist.ProcessGroup) -> int:
    """Return the number of messages exchanged over ``group`` since it last connected to compare operations."""
    found = (find(known, Watched) for known in communicators([group]))
    return sum(each.checker.compared for each in found if each is not None and each.checker is not None)


class OrderCheckLevel(Observer):
    """Sets the level of each root that is assembled: an earlier model may have set another for its process groups."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        state.change_for_plugin("order check", order_check_from())

    def for_root(self, root: ObservedRoot) -> Observer | None:
        compare(connections(root.states.values()), root.root_state.options.of_plugins["order check"])
        return None
