"""Stacks of threads, also of those that run or hang, and Ctrl-C while the main thread waits in C++."""

from __future__ import annotations

import gc
import linecache
import os
import select
import signal
import sys
import sysconfig
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from traceback import walk_stack

import torch

# -- Stacks of this process's threads, also of those that run or hang
#
# Two other ways have crashed ranks. ``faulthandler`` reads without a lock: a thread of C++ that enters Python meanwhile
# ends the process. Python 3.11 makes frame objects for ``f_back``: if that collects garbage, a finalizer can let the
# other thread change its stack. So nothing is collected while stacks are read.

_TORCH = Path(torch.__file__).parent
_LIBRARIES = (
    "<",  # code without a file
    *{f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib")},
    f"{_TORCH}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
)
_COLLECTIVES = f"{_TORCH / 'distributed'}{os.sep}"
_MOST_FRAMES = 100
_WAITING_FRAMES = 6
"""The innermost frames of which one is torch's collective. A custom operator such as ``wait_tensor`` has four below."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of code that a thread executes."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.name}: {linecache.getline(self.path, self.line).strip()}"


def main_thread_frames() -> tuple[Frame, ...]:
    """Return the frames of the main thread, the innermost last."""
    collects = gc.isenabled()
    gc.disable()
    try:
        top = sys._current_frames().get(threading.main_thread().ident or 0)
        walked = islice(walk_stack(top), _MOST_FRAMES) if top is not None else ()
        return tuple(Frame(each.f_code.co_filename, line or 0, each.f_code.co_name) for each, line in walked)[::-1]
    finally:
        if collects:
            gc.enable()


def user_line(frames: tuple[Frame, ...]) -> str:
    """Return the innermost of ``frames`` outside of Python, torch and this library, or an empty text."""
    return next((str(frame) for frame in reversed(frames) if not frame.path.startswith(_LIBRARIES)), "")


def waits_in_torch(frames: tuple[Frame, ...]) -> bool:
    """Return whether ``frames`` end in a function of ``torch.distributed``."""
    return any(frame.path.startswith(_COLLECTIVES) for frame in frames[-_WAITING_FRAMES:])


# -- Ctrl-C while the main thread waits in C++, where Python cannot run its signal handler
#
# The interpreter writes the number of a signal to a file descriptor at once, so another thread can read it and end the
# wait. Nothing is installed if that descriptor is in use, as by asyncio, and nothing is reported if the user handles
# Ctrl-C.

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
