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

_reader, _writer = os.pipe()
os.set_blocking(_reader, False)
os.set_blocking(_writer, False)
_NO_DESCRIPTOR = -1


def listen() -> None:
    """Start listening if this is the main thread, and forget earlier signals, which were handled."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    previous = signal.set_wakeup_fd(_writer, warn_on_full_buffer=False)
    if previous not in (_NO_DESCRIPTOR, _writer):
        signal.set_wakeup_fd(previous)
    else:
        arrived()


def stop_listening() -> None:
    """Stop listening. The main thread runs Python again."""
    if threading.current_thread() is threading.main_thread():
        previous = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if previous not in (_NO_DESCRIPTOR, _writer):
            signal.set_wakeup_fd(previous)


def arrived() -> bool:
    """Return whether Ctrl-C was pressed since the last call, while listening."""
    with suppress(BlockingIOError):
        return signal.SIGINT in os.read(_reader, 4096)
    return False
