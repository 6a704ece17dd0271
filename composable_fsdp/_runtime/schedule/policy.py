"""Prefetch and fusion decisions. Pure: works on names and sizes, launches nothing."""

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
"""The default number of prefetched groups.

Each further one costs its unsharded size. It pays where reductions take longer than the computation of the modules.
"""


def prefetch_targets(order: Sequence[str], position: int, *, step: int, limit: int) -> tuple[str, ...]:
    """Return the next ``limit`` distinct groups after ``order[position]``, in steps of ``step`` (1 or -1).

    Groups that are in memory already count against ``limit`` too, so the unsharded memory stays bounded.
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
    """Return the batch of a group's gradients to prefetch after, or ``None`` to prefetch when its backward begins.

    It is the last batch launched while the group still computes. So the prefetched parameters share memory with the
    last batch only, and have the rest of the group's backward to arrive.

    Args:
        num_batches: the number of batches of the group's gradients.
        nbytes: the size of its full parameters.
        ahead: the size of the prefetched parameters. Less than a batch is not worth the later start.
    """
    if num_batches < 2 or ahead * num_batches < nbytes:
        return None
    return num_batches - 2


def merge_adjacent(order: Sequence[str], nbytes: Mapping[str, int], limit: int) -> dict[str, tuple[str, ...]]:
    """Return, for each group that is fused with others, the groups of its fusion, as they are adjacent in ``order``.

    Args:
        order: the groups; the first occurrence of each counts.
        nbytes: the sizes of the groups that may be fused. Any other group separates its neighbours.
        limit: the maximum number of bytes in one fusion.
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
    """The order of post-forwards in one forward pass. The autograd graph of that forward keeps it alive."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self._backward = -1
        self._lowest = 0

    def reach(self, position: int, backward: int) -> range:
        """Return the later positions that backward number ``backward`` has not reached yet, last first.

        ``position`` itself comes last, unless this backward has reached it or an earlier one.
        """
        if backward != self._backward:
            self._backward, self._lowest = backward, len(self.ended)
        reached = range(self._lowest - 1, position - 1, -1)
        self._lowest = min(self._lowest, position)
        return reached

    def append(self, group: str) -> int:
        """Append ``group``, whose forward ended, and return its position."""
        self.ended.append(group)
        return len(self.ended) - 1


class PrefetchScheduler:
    """Predicts the next groups: forward by the order of the previous forward, backward by the reverse of its own.

    When a pass leaves the known order, prediction resumes at the next position where the running group occurs.
    """

    def __init__(self) -> None:
        self.limit = PREFETCH_LIMIT
        """The number of groups to prefetch."""
        self._known: list[str] = []
        self._seen: list[str] = []
        self._next = 0

    def begin_forward(self) -> None:
        """Begin a forward pass."""
        self._seen, self._next = [], 0

    @property
    def expected(self) -> Sequence[str]:
        """The expected order of groups in forward."""
        return self._known

    def forward(self, group: str) -> tuple[str, ...]:
        """Return the groups to prefetch while ``group`` runs its forward."""
        self._seen.append(group)
        try:
            here = self._known.index(group, self._next)
        except ValueError:
            return ()
        self._next = here + 1
        return prefetch_targets(self._known, here, step=1, limit=self.limit)

    def stay(self, group: str) -> Sequence[str]:
        """Return ``group`` and those after it if ``group`` is among the last of forward, which backward needs first."""
        last = self._known[max(0, len(self._known) - self.limit) :]
        return last[last.index(group) :] if group in last else ()

    def end_forward(self) -> None:
        """End the forward pass, which succeeded: the next one is expected to have the same order."""
        self._known = self._seen

    def backward(self, record: ForwardRecord, position: int) -> tuple[str, ...]:
        """Return the groups to prefetch while the group at ``position`` of ``record`` runs its backward."""
        return prefetch_targets(record.ended, position, step=-1, limit=self.limit)


class Turn(NamedTuple):
    """A skipped group that begins, or that ends after the groups inside it."""

    group: str
    begins: bool


class Lockstep:
    """Computes the groups that this rank skips, so that it can join their collectives.

    Every rank begins all groups in one order and ends each after those inside it, whatever it runs itself.

    Args:
        order: the groups, each before those inside it, with the number of groups inside.
    """

    def __init__(self, order: Sequence[tuple[str, int]]) -> None:
        self._order = [group for group, _ in order]
        self._place = {group: place for place, group in enumerate(self._order)}
        self._end = [place + 1 + inside for place, (_, inside) in enumerate(order)]
        self._next = 0
        self._open: list[int] = []

    def is_late(self, group: str) -> bool:
        """Return whether ``group``, or a later group, has begun already."""
        return self._place.get(group, self._next) < self._next

    def before(self, group: str) -> list[Turn]:
        """Begin ``group`` and return the skipped groups before it."""
        place = self._place.get(group)
        if place is None:
            return []
        turns = self._up_to(place)
        self._next = place + 1
        return turns

    def inside(self, group: str) -> list[Turn]:
        """End ``group`` and return the skipped groups inside it."""
        place = self._place.get(group)
        return [] if place is None else self._up_to(self._end[place])

    def rest(self) -> list[Turn]:
        """Return all groups that are left at the end of forward."""
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
