"""The order in which ranks that run different modules go through all groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SkippedGroup", "UnusedGroups"]


class SkippedGroup(NamedTuple):
    """The beginning of a group that this rank skips, or its end, after the groups inside it."""

    group: str
    begins: bool


class UnusedGroups:
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

    def before(self, group: str) -> list[SkippedGroup]:
        """Begin ``group`` and return the skipped groups before it."""
        place = self._place.get(group)
        if place is None:
            return []
        skipped = self._up_to(place)
        self._next = place + 1
        return skipped

    def inside(self, group: str) -> list[SkippedGroup]:
        """End ``group`` and return the skipped groups inside it."""
        place = self._place.get(group)
        return [] if place is None else self._up_to(self._end[place])

    def rest(self) -> list[SkippedGroup]:
        """Return all groups that are left at the end of forward."""
        return self._up_to(len(self._order))

    def _up_to(self, end: int) -> list[SkippedGroup]:
        skipped: list[SkippedGroup] = []
        for place in range(self._next, end):
            skipped += self._close(place)
            skipped.append(SkippedGroup(self._order[place], begins=True))
            self._open.append(place)
        self._next = max(self._next, end)
        return skipped + self._close(end)

    def _close(self, place: int) -> list[SkippedGroup]:
        skipped = []
        while self._open and self._end[self._open[-1]] <= place:
            skipped.append(SkippedGroup(self._order[self._open.pop()], begins=False))
        return skipped
