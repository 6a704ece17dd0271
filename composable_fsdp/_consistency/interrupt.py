"""Detect Ctrl-C while the main thread waits in C++, where Python cannot run its signal handler.

The interpreter writes the number of a signal to a file descriptor at once, so another thread can read it and end the
wait. Nothing is installed if that descriptor is in use, as by asyncio, and nothing is reported if the user handles
Ctrl-C.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress

__all__ = ["arrived", "listen", "stop_listening"]

_NO_DESCRIPTOR = -1


class _Pipe:
    """A pipe from the interpreter to the watchdog thread. The main thread makes it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        for end in (self.reader, self.writer):
            os.set_blocking(end, False)
        self.unread = select.poll()
        self.unread.register(self.reader, select.POLLIN)

    def read(self) -> bytes:
        """Return all that is in the pipe."""
        with suppress(BlockingIOError):
            return os.read(self.reader, 4096)
        return b""


_pipe: _Pipe | None = None


def listen() -> None:
    """Start listening if this is the main thread, and forget earlier signals, which were handled."""
    global _pipe
    if threading.current_thread() is not threading.main_thread():
        return
    pipe = _pipe = _pipe or _Pipe()
    other = signal.set_wakeup_fd(pipe.writer, warn_on_full_buffer=False)
    if other not in (_NO_DESCRIPTOR, pipe.writer):
        signal.set_wakeup_fd(other)
    elif pipe.unread.poll(0):  # reading an empty pipe would cost an exception
        pipe.read()


def stop_listening() -> None:
    """Stop listening. The main thread runs Python again."""
    if threading.current_thread() is threading.main_thread():
        other = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if _pipe is None or other not in (_NO_DESCRIPTOR, _pipe.writer):
            signal.set_wakeup_fd(other)


def arrived() -> bool:
    """Return whether Ctrl-C was pressed since the last call, while listening, and the user does not handle it."""
    if _pipe is None or signal.SIGINT not in _pipe.read():
        return False
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
