"""The check that a rank runs its modules in the order of its first iteration.

``_consistency/order_check.py`` compares the order across ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist

from composable_fsdp._consistency.order_check import OrderCheck
from composable_fsdp._core.events import RunningPass
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp.errors import ExecutionOrderWarning

__all__ = ["ForwardOrder"]


class ForwardOrder(Observer):
    """The order of post-forwards in the first forward that led to a backward."""

    def __init__(self) -> None:
        self._first: tuple[str, ...] = ()
        self._has_warned = False

    def for_root(self, root: ObservedRoot) -> Observer:
        return ForwardOrder()

    def end_pass(self, root: ObservedRoot, running: RunningPass) -> None:
        is_whole = running.kind == "forward" and running.module == root.root_state.name and running.succeeded
        if is_whole and root.root_state.options.of_plugins.get("order check") is not OrderCheck.OFF:
            self.compare(root.plans.record.ended)

    def compare(self, order: Sequence[str]) -> None:
        """Compare ``order``, that of a completed forward, with the first one.

        Warns:
            ExecutionOrderWarning: they differ. It is warned once.
        """
        if self._has_warned or not order:
            return
        if not self._first:
            self._first = tuple(order)
            return
        if self._first == tuple(order):
            return
        self._has_warned = True
        rank = dist.get_rank() if dist.is_initialized() else 0
        pairs = enumerate(zip_longest(self._first, order, fillvalue="the end of forward"))
        place, (then, now) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {rank}: number {place + 1} was "
            f"{then} and is {now} now. The groups prefetched were not the next ones, which costs time in each "
            "iteration whose order is new. If the new order differs between ranks, an error says so. "
            'model.set_order_check("off") silences this.',
            ExecutionOrderWarning,
            stacklevel=2,
        )
