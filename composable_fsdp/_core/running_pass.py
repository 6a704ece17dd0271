"""Running forward and backward passes of sharded modules, and how each of them ends.

The thread that runs a pass publishes its end. No hook sees an interrupt that ends a forward, or an exception that ends
a backward. Both are detected without reading the stack of a running thread.

- Autograd holds a callback for the end of its run, and releases it with the run, also after an exception.
  :class:`EndOfRun` is this callback; its finalizer publishes the end.
- A frame object knows whether it still executes. :func:`has_ended` asks only the frame that runs the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType

__all__ = ["EndOfRun", "RunningPass", "error_summary", "has_ended"]


class RunningPass:
    """A forward or backward pass of a root. Final.

    Args:
        kind: ``"forward"`` or ``"backward"``.
        module: the root module of a forward; the current module of a backward.
        caller: the Python frame that runs a forward; ``None`` for a backward, which has an :class:`EndOfRun`.
    """

    __slots__ = (
        "_caller",
        "_raised",
        "_summary",
        "began",
        "is_reported",
        "kind",
        "module",
        "raised_in",
        "run_has_ended",
        "succeeded",
    )

    def __init__(self, kind: str, module: str, caller: FrameType | None) -> None:
        self.kind = kind
        self.module = module
        self.raised_in = module
        """The module in which the last exception was raised."""
        self.is_reported = False
        """True if fault listeners have been notified of its failure."""
        self.run_has_ended = False
        """True if autograd's run of a backward is over. Set by :class:`EndOfRun`."""
        self.succeeded = False
        """True if it has ended without an exception."""
        self.began: float | None = None
        """The time at which it began, for traces."""
        self._caller = caller
        self._raised = 0
        self._summary = ""

    def note(self, error: BaseException, module: str) -> None:
        """Note that ``error`` left ``module``. It ends the pass unless it is caught further up."""
        if self._raised != id(error):
            self._raised, self._summary, self.raised_in = id(error), error_summary(error), module

    @property
    def failure(self) -> str:
        """The text that reports the last noted exception as the end of the pass."""
        return f"raised {self._summary} in the {self.kind} of {self.raised_in}"

    @property
    def left(self) -> str:
        """The report of an unexpected end, for other ranks; empty while the pass runs. Any thread may read it."""
        if self._caller is not None:
            return f"was interrupted in the {self.kind} of {self.module}" if has_ended(self._caller) else ""
        if not self.run_has_ended:
            return ""
        return self.failure if self._summary else f"raised in the {self.kind} of {self.module}"


class EndOfRun:
    """The callback that autograd calls when its run of the backward ``running`` succeeds. Final.

    Only autograd may hold a reference. Then it is deleted when the run ends, before the exception of a failed run is
    raised in the thread that called autograd.
    """

    __slots__ = ("_end", "_running")

    def __init__(self, end: Callable[[], None], running: RunningPass) -> None:
        self._end, self._running = end, running

    def __call__(self) -> None:
        try:
            self._end()
        except BaseException:  # its traceback may keep this object alive for long
            self._running.run_has_ended = True
            raise

    def __del__(self) -> None:
        self._running.run_has_ended = True


def error_summary(error: BaseException) -> str:
    """Return the type of ``error`` and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


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
