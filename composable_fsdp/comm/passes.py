"""Passes of sharded modules that are under way, and which of them nobody runs any more.

No hook sees an interrupt that ends a forward, nor whatever ends a backward. So whoever wants to know looks for the
code that runs the pass on the stacks of all threads: on accelerators hooks run in one of autograd's own, while another
waits.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["RunningPass", "is_in_backward", "said_of"]


class RunningPass:
    """A forward or backward of a root. Final.

    Args:
        kind: ``"forward"`` or ``"backward"``.
        unit: the outermost; in backward the one that it has come to.
        caller: the Python frame that runs it; ``None`` where that is autograd.
    """

    __slots__ = ("_caller", "_raised", "_said", "is_told", "kind", "raised_in", "unit")

    def __init__(self, kind: str, unit: str, caller: FrameType | None) -> None:
        self.kind = kind
        self.unit = unit
        self.raised_in = unit
        """The unit out of which the last exception came first."""
        self.is_told = False
        """Whether fault listeners know how it ended."""
        self._caller = caller
        self._raised = 0
        self._said = ""

    def note(self, error: BaseException, unit: str) -> None:
        """``error`` comes out of ``unit``. The pass ends with it, unless somebody catches it on its way."""
        if self._raised != id(error):
            self._raised, self._said, self.raised_in = id(error), said_of(error), unit

    @property
    def failure(self) -> str:
        """What is told of the pass, once it has ended with what was noted last."""
        return f"raised {self._said} in the {self.kind} of {self.raised_in}"

    @property
    def left(self) -> str:
        """What is told of it if nobody runs it any more, and else nothing."""
        if self._caller is not None:
            return "" if _runs(self._caller) else f"was interrupted in the {self.kind} of {self.unit}"
        if any(map(_runs_backward, sys._current_frames().values())):
            return ""
        return self.failure if self._said else f"raised in the {self.kind} of {self.unit}"


def said_of(error: BaseException) -> str:
    """Its type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def is_in_backward(thread: int | None) -> bool:
    """Whether the Python thread of this number has called autograd, and not come back."""
    return thread is not None and _runs_backward(sys._current_frames().get(thread))


def _runs(frame: FrameType) -> bool:
    for top in sys._current_frames().values():
        running: FrameType | None = top
        while running is not None:
            if running is frame:
                return True
            running = running.f_back
    return False


def _runs_backward(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        frame = frame.f_back
    return frame is not None


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
