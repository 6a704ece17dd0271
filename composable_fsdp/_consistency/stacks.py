"""Stacks of this process's threads, also of those that run or hang.

Two other ways have crashed ranks. ``faulthandler`` reads without a lock: a thread of C++ that enters Python meanwhile
ends the process. Python 3.11 makes frame objects for ``f_back``: if that collects garbage, a finalizer can let the
other thread change its stack. So nothing is collected while stacks are read.
"""

from __future__ import annotations

import gc
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch

__all__ = ["Frame", "main_thread_frames", "thread_stacks", "user_line", "waits_in_torch"]

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


def thread_stacks() -> Iterator[tuple[str, tuple[Frame, ...]]]:
    """Yield the name of each thread and its frames, at most 100, the innermost last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frames in _stacks().items():
        yield names.get(ident, str(ident)), frames


def main_thread_frames() -> tuple[Frame, ...]:
    """Return the frames of the main thread, the innermost last."""
    main = threading.main_thread().ident
    return _stacks(main).get(main or 0, ())


def user_line(frames: tuple[Frame, ...]) -> str:
    """Return the innermost of ``frames`` outside of Python, torch and this library, or an empty text."""
    return next((str(frame) for frame in reversed(frames) if not frame.path.startswith(_LIBRARIES)), "")


def waits_in_torch(frames: tuple[Frame, ...]) -> bool:
    """Return whether ``frames`` end in a function of ``torch.distributed``."""
    return any(frame.path.startswith(_COLLECTIVES) for frame in frames[-_WAITING_FRAMES:])


def _stacks(only: int | None = None) -> dict[int, tuple[Frame, ...]]:
    """Return the frames of each thread, or of one ``only``, by identifier."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return {ident: _frames(top) for ident, top in sys._current_frames().items() if only in (None, ident)}
    finally:
        if collects:
            gc.enable()


def _frames(top: FrameType) -> tuple[Frame, ...]:
    walked = islice(walk_stack(top), _MOST_FRAMES)
    return tuple(Frame(each.f_code.co_filename, line or 0, each.f_code.co_name) for each, line in walked)[::-1]
