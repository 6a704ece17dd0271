"""Which groups to unshard ahead of their turn. Decides on names alone; never acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "PREFETCH_LIMIT",
    "ForwardRecord",
    "Lockstep",
    "PrefetchScheduler",
    "Turn",
    "batch_before_prefetch",
    "merge_adjacent",
    "prefetch_targets",
]

PREFETCH_LIMIT = 1
"""Groups ahead of the one that runs. Each more costs its unsharded size, and is worth it where gradients keep the wire
busy for longer than the modules compute.
"""


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


def batch_before_prefetch(num_batches: int, nbytes: int, ahead: int) -> int | None:
    """The batch of a group's gradients after which backward gathers what comes next; ``None``: when it begins.

    The last one that leaves while the group still computes: what comes next then meets no gradients but the last
    batch's in memory. It has the rest of the group's backward to arrive in.

    Args:
        num_batches: of the group's gradients.
        nbytes: of its full parameters.
        ahead: bytes that what comes next takes in memory. Less than a batch is not worth the later start.
    """
    if num_batches < 2 or ahead * num_batches < nbytes:
        return None
    return num_batches - 2


def merge_adjacent(order: Sequence[str], nbytes: Mapping[str, int], limit: int) -> dict[str, tuple[str, ...]]:
    """For each group that travels together with others, these and itself, as they follow each other in ``order``.

    Args:
        order: of groups, of which the first occurrence of each counts.
        nbytes: of those that may travel with others; one that is not among them separates its neighbours.
        limit: the most bytes that travel together.
    """
    runs: list[list[str]] = [[]]
    filled = 0
    for group in dict.fromkeys(order):
        size = nbytes.get(group, limit + 1)
        if filled + size > limit:
            runs.append([])
            filled = 0
        if size <= limit:
            runs[-1].append(group)
            filled += size
    return {group: tuple(run) for run in runs if len(run) > 1 for group in run}


class ForwardRecord:
    """The order in which groups ended their forward, of one forward pass. Kept alive by the graph that it made."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self._backward = -1
        self._lowest = 0

    def reach(self, position: int, backward: int) -> range:
        """The ``backward``-th backward comes to ``position``: the later ones that it has not come to, last first.

        Also ``position`` itself, as the last, unless it has come to that or to an earlier one before.
        """
        if backward != self._backward:
            self._backward, self._lowest = backward, len(self.ended)
        reached = range(self._lowest - 1, position - 1, -1)
        self._lowest = min(self._lowest, position)
        return reached

    def append(self, group: str) -> int:
        """Notes the end of ``group``'s forward and returns its position."""
        self.ended.append(group)
        return len(self.ended) - 1


class PrefetchScheduler:
    """Forward goes by the order of the previous forward pass, backward by the reverse of its own forward's.

    When a pass leaves the known order, prediction resumes at the next place in it where the running group occurs.
    """

    def __init__(self) -> None:
        self.limit = PREFETCH_LIMIT
        """Groups ahead of the one that runs."""
        self._known: list[str] = []
        self._seen: list[str] = []
        self._next = 0

    def begin_forward(self) -> None:
        """A forward pass begins."""
        self._seen, self._next = [], 0

    @property
    def expected(self) -> Sequence[str]:
        """The order in which groups are expected to run their forward."""
        return self._known

    def forward(self, group: str) -> tuple[str, ...]:
        """Groups to unshard while ``group`` runs its forward."""
        self._seen.append(group)
        try:
            here = self._known.index(group, self._next)
        except ValueError:
            return ()
        self._next = here + 1
        return prefetch_targets(self._known, here, step=1, limit=self.limit)

    def stay(self, group: str) -> Sequence[str]:
        """``group`` and those after it, if it is among the last of forward: backward would gather them anew at once."""
        last = self._known[max(0, len(self._known) - self.limit) :]
        return last[last.index(group) :] if group in last else ()

    def end_forward(self) -> None:
        """The forward pass ran to its end: the next one is expected to go the same way."""
        self._known = self._seen

    def backward(self, record: ForwardRecord, position: int) -> tuple[str, ...]:
        """Groups to unshard while the group at ``position`` of ``record`` runs its backward."""
        return prefetch_targets(record.ended, position, step=-1, limit=self.limit)


class Turn(NamedTuple):
    """A group that this rank skips has its turn: it begins, or it ends after those inside it."""

    group: str
    begins: bool


class Lockstep:
    """Where ranks may skip groups: which ones this rank skips, so that it can take part in their collectives.

    Every rank then begins all groups in one order, and ends each after those inside it, whatever it runs itself.

    Args:
        order: the groups, each before those inside it, with the number of these.
    """

    def __init__(self, order: Sequence[tuple[str, int]]) -> None:
        self._order = [group for group, _ in order]
        self._place = {group: place for place, group in enumerate(self._order)}
        self._end = [place + 1 + inside for place, (_, inside) in enumerate(order)]
        self._next = 0
        self._open: list[int] = []

    def is_late(self, group: str) -> bool:
        """Whether the turn of ``group`` is over, because it ran or because a later one did."""
        return self._place.get(group, self._next) < self._next

    def before(self, group: str) -> list[Turn]:
        """``group`` begins: the turns that come before it."""
        place = self._place.get(group)
        if place is None:
            return []
        turns = self._up_to(place)
        self._next = place + 1
        return turns

    def inside(self, group: str) -> list[Turn]:
        """``group`` ends: the turns of those inside it that it did not run."""
        place = self._place.get(group)
        return [] if place is None else self._up_to(self._end[place])

    def rest(self) -> list[Turn]:
        """The forward is over: all turns that are left."""
        return self._up_to(len(self._order))

    def _up_to(self, end: int) -> list[Turn]:
        turns: list[Turn] = []
        for place in range(self._next, end):
            turns += self._close(place)
            turns.append(Turn(self._order[place], begins=True))
            self._open.append(place)
        self._next = max(self._next, end)
        return turns + self._close(end)

    def _close(self, place: int) -> list[Turn]:
        turns = []
        while self._open and self._end[self._open[-1]] <= place:
            turns.append(Turn(self._order[self._open.pop()], begins=False))
        return turns
