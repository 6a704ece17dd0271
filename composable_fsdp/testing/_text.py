"""Formatting of ranks and stacks as text."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator

__all__ = ["format_ranks", "function_stack"]

_SHOWN = 8

_THREAD = re.compile(r"^(?=Current thread |Thread )", re.MULTILINE)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a text for ``ranks``, with consecutive ones as ranges.

    >>> format_ranks([3])
    'rank 3'
    >>> format_ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    ranges: list[list[int]] = []
    ordered = sorted(ranks)
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_SHOWN])
    left_out = sum(b - a + 1 for a, b in ranges[_SHOWN:])
    return f"rank{'s'[: len(ordered) != 1]} {shown}" + (f" and {left_out} more" if left_out else "")


def function_stack(dump: str) -> str:
    """Extract the stack of the function that ran from faulthandler's text, formatted as in a traceback.

    Empty if no thread has the frame of the worker's ``_run``, which is also missing if a deep stack was truncated.
    """
    for thread in _THREAD.split(dump):
        frames = [match for line in thread.splitlines() if (match := _FRAME.fullmatch(line))]
        for depth, frame in enumerate(frames):
            if frame["name"] == "_run" and frame["file"].endswith("testing/_worker.py"):
                return "\n".join(line for inner in reversed(frames[:depth]) for line in _traceback_lines(inner))
    return ""


def _traceback_lines(frame: re.Match[str]) -> Iterator[str]:
    yield f'  File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}'
    if source := linecache.getline(frame["file"], int(frame["line"])).strip():
        yield f"    {source}"
