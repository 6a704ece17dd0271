"""Stacks and frames of threads, also of those that run or hang."""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import sys
import sysconfig
import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType

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


def has_ended(frame: FrameType) -> bool:
    """Return whether ``frame``, of any thread, has returned or raised. If so, its locals are released.

    ``frame.clear()`` is Python's only test for it: it raises for a frame that executes. Frames of generators and
    coroutines count as running, because it would close a suspended one.
    """
    if frame.f_code.co_flags & _MAY_BE_SUSPENDED:
        return False
    try:
        frame.clear()
    except RuntimeError:  # the frame executes
        return False
    return True


_MAY_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
