"""Stacks of this process's threads, read in C by ``faulthandler``.

It creates no frame objects, so it may also read threads that run or hang. CPython's own frames of other threads have
crashed a rank.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Frame", "main_thread_frames", "thread_stacks", "user_line", "waits_in_torch"]

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

_TORCH = Path(torch.__file__).parent
_LIBRARIES = (
    "<",  # code without a file
    *{f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib")},
    f"{_TORCH}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
)
_COLLECTIVES = f"{_TORCH / 'distributed'}{os.sep}"
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
    for ident, frames in _stacks_by_ident():
        yield names.get(ident, str(ident)), frames


def main_thread_frames() -> tuple[Frame, ...]:
    """Return the frames of the main thread, the innermost last."""
    main = threading.main_thread().ident
    return next((frames for ident, frames in _stacks_by_ident() if ident == main), ())


def user_line(frames: tuple[Frame, ...]) -> str:
    """Return the innermost of ``frames`` outside of Python, torch and this library, or an empty text."""
    return next((str(frame) for frame in reversed(frames) if not frame.path.startswith(_LIBRARIES)), "")


def waits_in_torch(frames: tuple[Frame, ...]) -> bool:
    """Return whether ``frames`` end in a function of ``torch.distributed``."""
    return any(frame.path.startswith(_COLLECTIVES) for frame in frames[-_WAITING_FRAMES:])


def _stacks_by_ident() -> Iterator[tuple[int, tuple[Frame, ...]]]:
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    _, *parts = _THREAD.split(text)
    for ident, lines in zip(parts[::2], parts[1::2], strict=True):
        frames = [Frame(path, int(line), name) for path, line, name in _FRAME.findall(lines)]
        yield int(ident, 16), tuple(reversed(frames))
