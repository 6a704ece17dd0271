"""The running passes of a root, and the report of their end to other ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.checkpoint import _StopRecomputationError

from composable_fsdp import trace
from composable_fsdp._consistency.running_pass import EndOfRun, RunningPass
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp._runtime.groups.state import FSDPState

__all__ = ["PassesUnderway"]


class PassesUnderway:
    """The forward, the backward, or one inside the other, of the states below ``root``. Final."""

    def __init__(self, root: FSDPState) -> None:
        self._root = root
        self._watchdog = job_watchdog()
        self._forward: RunningPass | None = None
        self._backward: RunningPass | None = None
        self._completed = 0
        """The number of completed backwards."""

    def begin_forward(self, outermost: FSDPState) -> None:
        """Begin the forward of ``outermost``. No other pass is running."""
        self.end()
        self._forward = RunningPass("forward", outermost.name, outermost.calls_under_way[-1].caller)
        if self._watchdog is not None:
            self._watchdog.begin_pass(self._forward)

    def begin_backward(self, end: Callable[[], None]) -> EndOfRun:
        """Begin a backward. Return the callback for autograd, which calls ``end`` if the autograd run succeeds."""
        self._backward = RunningPass("backward", self._root.name, None)
        if self._watchdog is not None:
            self._watchdog.begin_pass(self._backward)
        return EndOfRun(end, self._backward)

    @property
    def runs_backward(self) -> bool:
        """True if autograd still runs the last backward."""
        return self._backward is not None and not self._backward.run_has_ended

    def reach(self, state: FSDPState) -> None:
        """Note that backward has reached ``state``."""
        if self._backward is not None and state is not self._root:
            self._backward.module = state.group.name

    def end_backward(self) -> None:
        """End the backward, which succeeded."""
        self._completed += 1
        if self._watchdog is not None:
            self._watchdog.end_pass(self._backward, self._completed)
        self._backward = None

    def end(self) -> None:
        """End all passes."""
        if self._watchdog is not None:
            self._watchdog.end_pass(self._forward)
            self._watchdog.end_pass(self._backward)
        self._forward = self._backward = None

    def note(self, error: BaseException, state: FSDPState, *, in_backward: bool, ends_forward: bool) -> None:
        """Note that ``error`` came out of ``state``. The caller may still catch it, unless it ends the forward."""
        running = self._backward if in_backward else self._forward
        if running is None or isinstance(error, _StopRecomputationError):
            return  # refused before it began, or a checkpoint stopped its recomputation early
        running.note(error, state.name)
        if not in_backward and not ends_forward:
            return
        if self._watchdog is not None and not in_backward:
            self._watchdog.fail(running.failure)
        running.is_reported = True
        trace.emit_fault(error, f"the {running.kind} of {running.raised_in}")
