"""The running passes of a root, and the end of the reductions of a step."""

from __future__ import annotations

import threading

import torch
from torch.utils.checkpoint import _StopRecomputationError

from composable_fsdp import trace
from composable_fsdp._core.running_pass import EndOfRun, RunningPass
from composable_fsdp._core.seams import Root
from composable_fsdp._runtime.groups.state import ForwardCall, FSDPState
from composable_fsdp.errors import LifecycleError

__all__ = ["Finalization", "PassesUnderway"]


class PassesUnderway:
    """The forward, the backward, or one inside the other, of a root. Its observers are told of both. Final."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        """The thread that began the current pass."""
        self._forward: RunningPass | None = None
        self._backward: RunningPass | None = None

    def begin_forward(self, root: Root, outermost: ForwardCall) -> None:
        """Begin the forward of which ``outermost`` is the outermost call, and end passes that an exception left."""
        self.end(root)
        self.thread = threading.current_thread()
        self._forward = _begun(root, RunningPass("forward", outermost.state.name, outermost.caller))

    def begin_backward(self, root: Root) -> EndOfRun:
        """Begin a backward. Return the callback for autograd, which ends it if the autograd run succeeds."""
        self.thread = threading.current_thread()
        self._backward = _begun(root, RunningPass("backward", root.root.name, None))
        return EndOfRun(root.end_backward, self._backward)

    @property
    def runs_backward(self) -> bool:
        """True if autograd still runs the last backward."""
        return self._backward is not None and not self._backward.run_has_ended

    @property
    def is_outside_autograd(self) -> bool:
        """True outside of autograd, where no backward runs."""
        return torch._C._current_graph_task_id() == -1

    def reach(self, root: Root, state: FSDPState) -> None:
        """Note that backward has reached ``state``."""
        if self._backward is not None and state is not root.root:
            self._backward.module = state.group.name

    def end_backward(self, root: Root) -> None:
        """End the backward, which succeeded."""
        running, self._backward = self._backward, None
        _end(root, running, succeeded=True)

    def end(self, root: Root, *, succeeded: bool = False) -> None:
        """End all passes. ``succeeded``: the forward has."""
        running, self._forward, self._backward = (self._forward, self._backward), None, None
        for each in running:
            _end(root, each, succeeded=succeeded and each is running[0])

    def note(
        self, root: Root, error: BaseException, state: FSDPState, *, in_backward: bool, ends_forward: bool
    ) -> None:
        """Note that ``error`` came out of ``state``. The caller may still catch it, unless it ends the forward."""
        running = self._backward if in_backward else self._forward
        if running is None or isinstance(error, _StopRecomputationError):
            return  # refused before it began, or a checkpoint stopped its recomputation early
        running.note(error, state.name)
        if not in_backward and not ends_forward:
            return
        if not in_backward:
            for observe in root.events.failed:
                observe(root, running)
        running.is_reported = True
        trace.emit_fault(error, f"the {running.kind} of {running.raised_in}")


def _begun(root: Root, running: RunningPass) -> RunningPass:
    for observe in root.events.begin_pass:
        observe(root, running)
    return running


def _end(root: Root, running: RunningPass | None, *, succeeded: bool) -> None:
    if running is not None:
        running.succeeded = succeeded
        for observe in root.events.end_pass:
            observe(root, running)


class Finalization:
    """The state of manual finalization of a root's backwards. Final.

    Attributes:
        is_manual: backwards leave their last reductions in flight.
        is_last_backward: the next backward is the last one of its step, and waits for the reductions of all.
    """

    def __init__(self) -> None:
        self.is_manual = False
        self.is_last_backward = True
        self._is_due = False
        """True if a backward has ended since the last finalization."""
        self._in_flight: object = None
        """The token of the finalization whose reductions the user has not waited for."""

    def take_settings(self, former: Finalization) -> None:
        """Take the settings of ``former``, that of a root which is now inside of this one."""
        self.is_manual |= former.is_manual
        self.is_last_backward &= former.is_last_backward

    def set_manual(self, enabled: bool) -> None:
        """Set :attr:`is_manual`. Raises a ``LifecycleError`` if a backward has not been finalized."""
        if self._is_due or self._in_flight is not None:
            raise LifecycleError(
                "set_manual_backward_finalization was called between a backward and the end of its finalization. Call "
                "finalize_backward() first, and wait() of its handle."
            )
        self.is_manual = enabled

    def end_backward(self) -> None:
        """Record the end of a backward."""
        self._is_due = self.is_manual

    def check_due(self) -> None:
        """Raise a ``LifecycleError`` unless backwards are finalized by hand and the last finalization has ended."""
        if not self.is_manual:
            raise LifecycleError(
                "finalize_backward() was called after a backward that has finalized itself. Call "
                "set_manual_backward_finalization(True) before the step."
            )
        if self._in_flight is not None:
            raise LifecycleError("finalize_backward() was called again. Call wait() of its last handle first.")

    def begin(self) -> object:
        """Record that the reductions are launched, and return a token for :meth:`end`."""
        self._is_due, self._in_flight = False, object()
        return self._in_flight

    def end(self, token: object) -> None:
        """Record the end of the wait. Raises a ``LifecycleError`` if :meth:`forget` was called since :meth:`begin`."""
        if self._in_flight is not token:
            raise LifecycleError("wait() was called after reset_iter_state() has dropped the reductions of the handle.")
        self._in_flight = None

    def forget(self) -> None:
        """Forget backwards and reductions: the iteration was reset."""
        self._is_due, self._in_flight = False, None
