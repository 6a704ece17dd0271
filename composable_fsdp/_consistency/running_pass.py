"""The forward and backward passes of sharded modules that are under way, and how each of them ends.

The thread that runs a pass publishes its end, except for two endings that no hook sees: an interrupt that ends a
forward and an exception that ends a backward. Both are found without looking at the stack of a running thread: CPython
makes frame objects for that while the stack changes, and a rank has crashed there.

- Autograd holds a callback for the end of its run and releases it together with the run, also after an exception.
  :class:`EndOfRun` is this callback; its finalizer publishes the end.
- A frame object knows whether it still executes. :func:`has_ended` asks only the frame that runs the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType

__all__ = ["EndOfRun", "RunningPass", "has_ended", "said_of"]


class RunningPass:
    """A forward or backward of a root. Final.

    Args:
        kind: ``"forward"`` or ``"backward"``.
        module: the outermost; in backward the one that it has come to.
        caller: the Python frame that runs it; ``None`` where that is autograd, which has an :class:`EndOfRun`.
    """

    __slots__ = ("_caller", "_raised", "_said", "is_told", "kind", "module", "raised_in", "run_has_ended")

    def __init__(self, kind: str, module: str, caller: FrameType | None) -> None:
        self.kind = kind
        self.module = module
        self.raised_in = module
        """The unit out of which the last exception came first."""
        self.is_told = False
        """Whether fault listeners know how it ended."""
        self.run_has_ended = False
        """Whether autograd's run of a backward is over. Set by :class:`EndOfRun`."""
        self._caller = caller
        self._raised = 0
        self._said = ""

    def note(self, error: BaseException, module: str) -> None:
        """``error`` comes out of ``module``. The pass ends with it, unless somebody catches it on its way."""
        if self._raised != id(error):
            self._raised, self._said, self.raised_in = id(error), said_of(error), module

    @property
    def failure(self) -> str:
        """What is told of the pass, once it has ended with what was noted last."""
        return f"raised {self._said} in the {self.kind} of {self.raised_in}"

    @property
    def left(self) -> str:
        """How the pass was left, for other ranks; empty while it runs. Any thread may ask, before the pass is ended."""
        if self._caller is not None:
            return f"was interrupted in the {self.kind} of {self.module}" if has_ended(self._caller) else ""
        if not self.run_has_ended:
            return ""
        return self.failure if self._said else f"raised in the {self.kind} of {self.module}"


class EndOfRun:
    """The callback that autograd calls when its run of the backward ``running`` succeeds. Final.

    Only autograd may hold it: then it is deleted when the run ends, before the exception of a failed run is raised in
    the thread that called autograd.
    """

    __slots__ = ("_end", "_running")

    def __init__(self, end: Callable[[], None], running: RunningPass) -> None:
        self._end, self._running = end, running

    def __call__(self) -> None:
        try:
            self._end()
        except BaseException:  # its traceback holds this object, maybe for long
            self._running.run_has_ended = True
            raise

    def __del__(self) -> None:
        self._running.run_has_ended = True


def said_of(error: BaseException) -> str:
    """Its type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def has_ended(frame: FrameType) -> bool:
    """Whether ``frame``, of any thread, has returned or was left by an exception. If so, its locals are released.

    ``frame.clear()`` is what Python offers for the question: it refuses a frame that executes. Frames of generators and
    coroutines count as running, as a suspended one would be closed by it.
    """
    if frame.f_code.co_flags & _MAY_BE_SUSPENDED:
        return False
    try:
        frame.clear()
    except RuntimeError:  # it executes
        return False
    return True


_MAY_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
