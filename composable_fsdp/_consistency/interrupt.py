"""Detect Ctrl-C while the main thread waits in C++, where Python cannot run its signal handler.

The interpreter writes the number of a signal to a file descriptor at once, so another thread can read it and end the
wait. Nothing is installed if that descriptor is in use, as by asyncio, or if the user handles Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

__all__ = ["arrived", "listen", "stop_listening"]

_NO_DESCRIPTOR = -1


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
    """Start listening if this is the main thread, and forget earlier signals, which were handled."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reader, writer = _pipe()
    other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if other not in (_NO_DESCRIPTOR, writer):
        signal.set_wakeup_fd(other)
    else:
        _has_signal(reader)


def stop_listening() -> None:
    """Stop listening. The main thread runs Python again."""
    if threading.current_thread() is threading.main_thread():
        other = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if other not in (_NO_DESCRIPTOR, _pipe()[1]):
            signal.set_wakeup_fd(other)


def arrived() -> bool:
    """Return whether Ctrl-C was pressed since the last call, while listening."""
    return _has_signal(_pipe()[0])


def _has_signal(reader: int) -> bool:
    """Read all signals from ``reader`` and return whether one of them was Ctrl-C."""
    with suppress(BlockingIOError):
        return signal.SIGINT in os.read(reader, 4096)
    return False
