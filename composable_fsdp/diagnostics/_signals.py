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
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType

__all__ = ["SignalWatch"]

_REPORT_TIMEOUT = 5.0
"""Seconds for which the user's handler waits until the signal has been reported."""

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class SignalWatch:
    """Reports SIGTERM and SIGUSR1, then runs their previous handlers. Create and stop it in the main thread. Final.

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
        _active.append(self)
        _register_at_fork()

    def stop(self) -> None:
        """Restore the previous handlers, unless they were replaced since. Idempotent."""
        if self not in _active:
            return
        for each, before in self._before.items():
            if signal.getsignal(each) == self._handle:
                signal.signal(each, before)
        current = signal.set_wakeup_fd(self._outer_fd)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)
        self._writer.close()
        _active.remove(self)

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
        each = next((each for each in self._before if each == number), None)
        if each is None:
            return
        self._report(each.name)
        self._reported[each].set()
        if self._before[each] is signal.SIG_DFL and each is signal.SIGTERM:  # SIGUSR1 is sent for the report alone
            _do_default(each)

    def stop_in_child(self) -> None:
        """Stop in a forked child, which has its own signals."""
        self.stop()
        self._reader.close()


def _do_default(number: signal.Signals) -> None:
    """Perform the signal's default action. ``signal.signal`` would work in the main thread only."""
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(number, None)
    os.kill(os.getpid(), number)


_active: list[SignalWatch] = []
_in_thread = threading.local()


def _block_signals() -> None:
    """Block signals during a fork: a child that still has the socket would report its signals to the parent."""
    _in_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() if _active else ())


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _in_thread.mask)


def _stop_in_child() -> None:
    for watch in tuple(_active):
        watch.stop_in_child()
    _unblock_signals()


@cache
def _register_at_fork() -> None:
    if sys.platform != "win32":
        os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_stop_in_child)
