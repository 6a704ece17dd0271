"""Hooks in the process that exist while it has FSDP states: installed with the first, removed with the last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import ref

from composable_fsdp._runtime.groups.state import FSDPState

__all__ = ["GlobalHooks"]


class GlobalHooks:
    """Hooks that ``install`` adds to the process. It returns the function that removes them.

    A state ends wherever Python frees it: in any thread, or in the garbage collector. So the lock is reentrant. Torch
    must not lose an optimizer hook while it runs the hooks, so they stay if the last state ends inside of ``with`` this
    object. The next state to end then removes them.
    """

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        self._remove: Callable[[], None] | None = None
        self._states: set[ref[FSDPState]] = set()
        self._running = 0
        self._lock = threading.RLock()

    def keep_for(self, state: FSDPState) -> None:
        """Install the hooks, if they are not installed, and keep them until ``state`` has been freed."""
        with self._lock:
            self._states.add(ref(state, self._forget))
            if self._remove is None:
                self._remove = self._install()

    def _forget(self, state: ref[FSDPState]) -> None:
        with self._lock:
            self._states.discard(state)
            if not self._states and not self._running and self._remove is not None:
                remove, self._remove = self._remove, None
                remove()

    def __enter__(self) -> None:
        """Keep the hooks until the end of the block, even without a state."""
        with self._lock:
            self._running += 1

    def __exit__(self, *_: object) -> None:
        """Allow the hooks to be removed again."""
        with self._lock:
            self._running -= 1
