"""The level at which the ranks of a root compare their operations."""

from __future__ import annotations

from composable_fsdp._comm.factory import compare
from composable_fsdp._runtime.groups.state import connections
from composable_fsdp._runtime.root.observer import Observer, Root

__all__ = ["OrderCheckLevel"]


class OrderCheckLevel(Observer):
    """Sets the level of each root that is assembled: an earlier model may have set another for its process groups."""

    def of(self, root: Root) -> Observer | None:
        compare(connections(root.states.values()), root.root.options.order_check)
        return None
