"""Reports of the running passes: to the watchdog of the job, which other ranks ask, and to traces."""

from __future__ import annotations

from composable_fsdp import trace
from composable_fsdp._consistency.watchdog import Watchdog, job_watchdog
from composable_fsdp._core.events import RunningPass
from composable_fsdp._core.seams import ObservedRoot, Observer

__all__ = ["ReportedPasses", "TracedPasses"]


class ReportedPasses(Observer):
    """Tells the watchdog of the job which passes of a root run, and how they end."""

    def for_root(self, root: ObservedRoot) -> Observer | None:
        watchdog = job_watchdog()
        return None if watchdog is None else _RootReports(watchdog)


class _RootReports(Observer):
    """Tells ``watchdog`` of the passes of one root."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._completed = 0
        """The number of completed backwards."""

    def begin_pass(self, root: ObservedRoot, running: RunningPass) -> None:
        self._watchdog.begin_pass(running)

    def end_pass(self, root: ObservedRoot, running: RunningPass) -> None:
        ends_step = running.succeeded and running.kind == "backward"
        self._completed += ends_step
        self._watchdog.end_pass(running, self._completed if ends_step else 0)

    def failed(self, root: ObservedRoot, running: RunningPass) -> None:
        self._watchdog.fail(running.failure)


class TracedPasses(Observer):
    """Emits a trace event for each pass that succeeds."""

    def begin_pass(self, root: ObservedRoot, running: RunningPass) -> None:
        if trace.listeners:
            running.began = trace.now()

    def end_pass(self, root: ObservedRoot, running: RunningPass) -> None:
        if trace.listeners and running.succeeded:
            operation = trace.Operation.FORWARD if running.kind == "forward" else trace.Operation.BACKWARD
            name = running.module if running.kind == "forward" else root.root_state.name
            trace.emit(operation, name, begin=running.began)
