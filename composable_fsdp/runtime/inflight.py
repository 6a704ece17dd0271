"""Reductions that are on the wire."""

from __future__ import annotations

from collections import deque

from composable_fsdp.runtime.gradients import PendingReduction

__all__ = ["InFlight"]


class InFlight:
    """Reductions in the order of their launch. Each has memory until it is complete, so there are at most ``limit``."""

    def __init__(self) -> None:
        self.limit = 1
        self._reductions: deque[PendingReduction] = deque()

    def make_room(self) -> None:
        """Completes the oldest ones, before the next one takes memory."""
        while len(self._reductions) >= self.limit:
            self._reductions.popleft().complete()

    def add(self, reduction: PendingReduction) -> None:
        """Takes in one that was launched."""
        self._start()
        self._reductions.append(reduction)

    def drain(self) -> None:
        """Completes all: afterwards their gradients are set."""
        self._start()
        while self._reductions:
            self._reductions.popleft().complete()

    def abandon(self) -> None:
        """Forgets those that will not come to their end."""
        self._reductions.clear()

    def _start(self) -> None:
        """Launches what had to wait for a first stage. One that raises, in a codec say, is gone: recovery would only
        raise again.
        """
        for _ in range(len(self._reductions)):
            reduction = self._reductions.popleft()
            reduction.start()
            self._reductions.append(reduction)
