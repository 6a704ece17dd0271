"""Which groups to unshard ahead of their turn. Decides on names alone; never acts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ForwardRecord", "PrefetchScheduler", "prefetch_targets"]

PREFETCH_LIMIT = 1
"""Groups ahead of the one that runs. One is enough to keep the wire busy; each more costs its unsharded size."""


def prefetch_targets(order: Sequence[str], position: int, *, step: int, limit: int) -> tuple[str, ...]:
    """The next ``limit`` different groups after ``order[position]``, walking by ``step`` (1 or -1).

    Groups that are in memory already count against ``limit`` too, so what is unsharded at one time stays bounded.
    """
    ahead: list[str] = []
    current = order[position]
    position += step
    while 0 <= position < len(order) and len(ahead) < limit:
        if order[position] != current and order[position] not in ahead:
            ahead.append(order[position])
        position += step
    return tuple(ahead)


class ForwardRecord:
    """The order in which groups ended their forward, of one forward pass. Kept alive by the graph that it made."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def append(self, group: str) -> int:
        """Notes the end of ``group``'s forward and returns its position."""
        self.ended.append(group)
        return len(self.ended) - 1


class PrefetchScheduler:
    """Forward goes by the order of the previous forward pass, backward by the reverse of its own forward's.

    When a pass leaves the known order, prediction resumes at the next place in it where the running group occurs.
    """

    def __init__(self, limit: int = PREFETCH_LIMIT) -> None:
        self._limit = limit
        self._known: list[str] = []
        self._seen: list[str] = []
        self._next = 0

    def begin_forward(self) -> None:
        """A forward pass begins."""
        self._seen, self._next = [], 0

    def forward(self, group: str) -> tuple[str, ...]:
        """Groups to unshard while ``group`` runs its forward."""
        self._seen.append(group)
        try:
            here = self._known.index(group, self._next)
        except ValueError:
            return ()
        self._next = here + 1
        return prefetch_targets(self._known, here, step=1, limit=self._limit)

    def end_forward(self) -> None:
        """The forward pass ran to its end: the next one is expected to go the same way."""
        self._known = self._seen

    def backward(self, record: ForwardRecord, position: int) -> tuple[str, ...]:
        """Groups to unshard while the group at ``position`` of ``record`` runs its backward."""
        return prefetch_targets(record.ended, position, step=-1, limit=self._limit)
