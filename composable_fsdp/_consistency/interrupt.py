"""Ctrl-C while the main thread waits in C++, where Python runs no signal handler until the wait is over.

The interpreter writes the number of a signal to a file descriptor as soon as it has come, so another thread can see it
and end the wait. Nothing is done where somebody else uses that descriptor, as asyncio does, or handles Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

__all__ = ["has_come", "listen", "stop_listening"]

_NOBODY = -1


_lock = threading.Lock()
_ends: tuple[int, int] | None = None


def _pipe() -> tuple[int, int]:
    """Return the reading end and the writing end of a pipe, which the first call makes."""
    global _ends
    with _lock:
        if _ends is None:
            _ends = os.pipe()
            for end in _ends:
                os.set_blocking(end, False)
    return _ends


def listen() -> None:
    """From now on :func:`has_come` knows, if this is the main thread. What came before was seen to."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    _, writer = _pipe()
    other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if other not in (_NOBODY, writer):
        signal.set_wakeup_fd(other)
    else:
        has_come()


def stop_listening() -> None:
    """The main thread is back in Python."""
    if threading.current_thread() is threading.main_thread():
        other = signal.set_wakeup_fd(_NOBODY)
        if other not in (_NOBODY, _pipe()[1]):
            signal.set_wakeup_fd(other)


def has_come() -> bool:
    """Whether Ctrl-C was pressed since the last call, while somebody listened."""
    with suppress(BlockingIOError):
        return signal.SIGINT in os.read(_pipe()[0], 4096)
    return False
