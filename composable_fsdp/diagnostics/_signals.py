"""Signal handling that does not depend on the main thread, and chains to the previous handlers.

Python runs a handler in the main thread, between two bytecodes: not while that thread waits in gloo or NCCL, when it is
needed most. The C handler of the interpreter runs at once and writes the signal's number to a socket
(``signal.set_wakeup_fd``). A thread reads it from the other end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

__all__ = ["SignalWatch"]

_REPORT_TIMEOUT = 5.0
"""Seconds for which the user's handler waits until the signal has been reported."""

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class SignalWatch:
    """Reports SIGTERM and SIGUSR1, then runs their previous handlers. Create and stop it in the main thread.

    A signal whose handler was not set by Python is ignored, since it could not be called.

    Args:
        report: called with the signal's name, in a separate thread.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._outer_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        found = {each: signal.getsignal(each) for each in _SIGNALS}
        self._before = {each: handler for each, handler in found.items() if handler is not None}
        self._reported = {each: threading.Event() for each in self._before}
        for each in self._before:
            signal.signal(each, self._handle)
        threading.Thread(target=self._run, name="composable_fsdp signals", daemon=True).start()

    def stop(self) -> None:
        """Restore the previous handlers, unless they were replaced since. A forked child must, which would write its
        signals to the parent's socket.
        """
        for each, before in self._before.items():
            if signal.getsignal(each) == self._handle:
                signal.signal(each, before)
        current = signal.set_wakeup_fd(self._outer_fd)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)
        self._writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run the previous handler, in the main thread, once the signal has been reported."""
        each = signal.Signals(number)
        before = self._before[each]
        if callable(before):
            self._reported[each].wait(_REPORT_TIMEOUT)
            self._reported[each].clear()
            before(number, frame)

    def _run(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(64):
                for number in numbers:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if self._outer_fd != -1:
            with suppress(OSError):  # full, or closed by its owner
                os.write(self._outer_fd, bytes([number]))
        if number not in self._before:
            return
        each = signal.Signals(number)
        self._report(each.name)
        self._reported[each].set()
        if self._before[each] is signal.SIG_DFL and each is signal.SIGTERM:  # SIGUSR1 is sent for the report alone
            # ``signal.signal`` would work in the main thread only.
            set_handler = ctypes.pythonapi.PyOS_setsig
            set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
            set_handler(number, None)
            os.kill(os.getpid(), number)
