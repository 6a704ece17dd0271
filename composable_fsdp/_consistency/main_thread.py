"""Stacks and frames of threads, also of those that run or hang."""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import sys
import sysconfig
import threading
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

_LIBRARIES = (
    "<",  # code without a file
    *{f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib")},
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
)
_MOST_FRAMES = 100


def main_thread_line() -> str:
    """Return the innermost line of code outside of Python, torch and this library that the main thread executes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        path, line, name = _innermost(sys._current_frames().get(threading.main_thread().ident or 0))
    finally:
        if collects:
            gc.enable()
    # Reading a file lets other threads run, so it comes last.
    return f"{path}:{line} in {name}: {linecache.getline(path, line).strip()}" if path else ""


def _innermost(top: FrameType | None) -> tuple[str, int, str]:
    for frame, line in islice(walk_stack(top), _MOST_FRAMES) if top is not None else ():
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return frame.f_code.co_filename, line or 0, frame.f_code.co_name
    return "", 0, ""


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
