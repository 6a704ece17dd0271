"""Signals that are noticed whatever the main thread does, and then do what they did before.

Python runs a handler in the main thread, between two of its instructions: not while that waits in gloo or NCCL, which
is when one wants to know. The part of the interpreter that does run at once writes the signal's number to a socket
(``signal.set_wakeup_fd``); a thread waits at its other end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from types import FrameType

__all__ = ["SignalWatch"]

_SECONDS = 5.0
"""For which a handler of the user waits until the signal has been told."""

_MEANT_FOR_USERS = {getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)}
"""Their default action, to end the process, is not what who sends them wants."""


class SignalWatch:
    """Tells of signals, then has them do what they did before. Make and stop it in the main thread. Final.

    Args:
        signals: which. One whose handler was not set by Python is left alone, since it could not be called.
        tell: takes the signal's name, in a thread of its own.
    """

    def __init__(self, signals: Iterable[signal.Signals], tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._outer_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        found = {each: signal.getsignal(each) for each in signals}
        self._before = {each: handler for each, handler in found.items() if handler is not None}
        self._told = {each: threading.Event() for each in self._before}
        for each in self._before:
            signal.signal(each, self._handle)
        threading.Thread(target=self._run, name="composable_fsdp signals", daemon=True).start()
        _active.append(self)
        _leave_in_forked_processes()

    def stop(self) -> None:
        """Puts back what was there before, unless somebody has replaced it since. Does nothing the second time."""
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
        """In the main thread, as soon as that runs Python."""
        each = signal.Signals(number)
        before = self._before[each]
        if callable(before):
            self._told[each].wait(_SECONDS)
            self._told[each].clear()
            before(number, frame)

    def _run(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(64):
                for number in numbers:
                    self._come(number)

    def _come(self, number: int) -> None:
        if self._outer_fd != -1:
            with suppress(OSError):  # full, or closed by whoever put it there
                os.write(self._outer_fd, bytes([number]))
        each = next((each for each in self._before if each == number), None)
        if each is None:
            return
        self._tell(each.name)
        self._told[each].set()
        if self._before[each] is signal.SIG_DFL and each not in _MEANT_FOR_USERS:
            _do_default(each)

    def leave_to_parent(self) -> None:
        """In a process forked from this one, whose signals are its own."""
        self.stop()
        self._reader.close()


def _do_default(number: signal.Signals) -> None:
    """What happens where nobody handles the signal. ``signal.signal`` would work in the main thread only."""
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(number, None)
    os.kill(os.getpid(), number)


_active: list[SignalWatch] = []
_in_thread = threading.local()


def _hold_signals() -> None:
    """A child that is signalled before it let go of the socket would have its parent told."""
    _in_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() if _active else ())


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _in_thread.mask)


def _leave_to_parent() -> None:
    for watchdog in tuple(_active):
        watchdog.leave_to_parent()
    _release_signals()


@cache
def _leave_in_forked_processes() -> None:
    if sys.platform != "win32":
        os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_leave_to_parent)
