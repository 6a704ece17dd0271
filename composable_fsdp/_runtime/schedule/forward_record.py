"""The record of one forward: the events of its groups, from which the plan of its backward is made. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from composable_fsdp._runtime.schedule.schedule import Event

__all__ = ["ForwardRecord"]


class ForwardRecord:
    """The events of one forward. The autograd graph of that forward keeps it alive.

    Attributes:
        events: the pre-forward events, which the planner appends, and the post-forward events, in order.
        ended: the groups to which a backward may come back, in the order in which they ended. A *position* counts them.
        fused: the fusions of groups in this forward and its backward.
        unseen: the positions of runs whose inputs needed no gradient, so that no hook shows the end of their backward.
    """

    def __init__(self, fused: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.events: list[Event] = []
        self.ended: list[str] = []
        self.fused = fused or {}
        self.unseen: set[int] = set()
        self._backward = -1
        self._lowest = 0

    def end(self, event: Event, *, leads_to_backward: bool) -> int:
        """Append the post-forward event of a group. Return its position, or -1 if no backward comes back to it."""
        self.events.append(event)
        if not leads_to_backward:
            return -1
        self.ended.append(event.group)
        return len(self.ended) - 1

    def abort(self, event: Event) -> None:
        """Remove the last ``event``, the pre-forward of a group whose forward raised an error."""
        index = len(self.events) - 1 - self.events[::-1].index(event)
        del self.events[index]

    def reach(self, position: int, backward: int) -> range:
        """Return the later positions that backward number ``backward`` has not reached yet, last first.

        ``position`` itself comes last, unless this backward has reached it or an earlier one.
        """
        if backward != self._backward:
            self._backward, self._lowest = backward, len(self.ended)
        reached = range(self._lowest - 1, position - 1, -1)
        self._lowest = min(self._lowest, position)
        return reached
