"""The watchdog: finds out where every rank of the job is when one waits for too long.

Nothing is sent while all goes well: a rank records its state in its own memory. A rank that has waited for ``PATIENCE``
seconds requests rank reports through the store of the job, and a thread of every live rank writes one there. So a rank
that raised, one that runs other modules, and one that is gone are distinguished by name within seconds, whatever the
timeout of the process group.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # not the built-in before Python 3.11
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch.distributed as dist

from composable_fsdp._consistency.main_thread import has_ended, main_thread_line
from composable_fsdp._consistency.process_identity import exit_text, has_died, process_identity
from composable_fsdp._consistency.rank_report import (
    OperationId,
    RankReport,
    WarningTimes,
    diagnose,
    error_summary,
    format_ranks,
    reports_with_places,
    wait_text,
)
from composable_fsdp._consistency.rendezvous import StoreRendezvous, own_client
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError, printable

PATIENCE = 1.0
"""Seconds of waiting after which a rank requests reports."""
_PERIOD = 0.25
_RANKS_PER_PERIOD = 1000
"""Each rank of a large job polls less often, so that the store serves this many polls per second."""
_ANSWER_SECONDS = 1.5
"""The time in which every rank whose threads run has answered."""
_STORE_SECONDS = _ANSWER_SECONDS + 1.0
"""The time that the training thread waits for the watchdog thread, in case the store does not answer."""
_STORE_FAILURES = 3
"""Consecutive failures after which the store is considered gone, with the rank or launcher that hosts it."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
GiveUp = Callable[[str], None]
"""Closes the connection of a wait, which ends it, for a reason."""


@dataclass(slots=True, eq=False)
class RunningPass:
    """A forward or backward of a root.

    Args:
        kind: ``"forward"`` or ``"backward"``.
        module: the root module of a forward; of a backward, the module that it reached last, once it has failed.
        caller: the Python frame that runs a forward; ``None`` for a backward, which has an :class:`EndOfRun`.
        began: the time at which it began, for traces.
    """

    kind: str
    module: str
    caller: FrameType | None = None
    began: float | None = None
    run_has_ended: bool = False
    """True if autograd's run of a backward is over."""
    failure: str = ""
    """The text that reports the last noted exception as the end of the pass."""
    _raised: int = 0

    def note(self, error: BaseException, module: str) -> None:
        """Note that ``error`` left ``module``, and perhaps the modules around it. It may still be caught."""
        if self._raised != id(error):
            self._raised = id(error)
            self.failure = f"raised {error_summary(error)} in the {self.kind} of {module}"

    @property
    def left(self) -> str:
        """The report of an unexpected end, for other ranks; empty while the pass runs. Any thread may read it."""
        if self.caller is not None:
            return f"was interrupted in the {self.kind} of {self.module}" if has_ended(self.caller) else ""
        return (self.failure or f"raised in the {self.kind} of {self.module}") if self.run_has_ended else ""


class EndOfRun:
    """A callback of autograd that tells ``running`` of the end of its run, and the name of its ``current`` module.

    Only autograd may hold a reference. Then it is deleted when the run ends, before the exception of a failed run is
    raised in the thread that called autograd.
    """

    __slots__ = ("_current", "_running")

    def __init__(self, running: RunningPass, current: Callable[[], str]) -> None:
        self._running, self._current = running, current

    def __call__(self) -> None:
        """Do nothing: a backward that succeeds is ended by its root."""

    def __del__(self) -> None:
        self._running.module = self._current()
        self._running.run_has_ended = True


class Watchdog:
    """Records the state of this rank, reports it to other ranks, and collects their reports.

    Only the watchdog thread uses the store, since a call of it may block forever once its host is gone.

    Args:
        store: the store of the job.
        rank: the global rank.
        size: the number of ranks in the job.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.here = RankReport(rank, process=process_identity())
        """This rank's state, written by the training thread and read by the watchdog thread."""
        self.passes: dict[RunningPass, None] = {}
        """The running passes, in order."""
        self._since = 0.0
        self._interrupt: GiveUp | None = None
        """When the wait began, and what ends it."""
        self._done: list[OperationId] = []
        """The last completed operation over each connection."""
        self._verdict: FSDPError | None = None
        self._store = store
        self._period = max(_PERIOD, size / _RANKS_PER_PERIOD)
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Calls for the watchdog thread; ``None`` stops it."""
        self._answered = -1  # the first answer tells of the process
        self._rendezvous: dict[str, StoreRendezvous] = {}
        self._due = 0.0
        self._processes: dict[int, str] = {}
        """The identities of other ranks' processes, as far as known."""
        self._exits: dict[int, str] = {}
        """The exit texts of processes that have ended."""
        self._warnings = WarningTimes()
        _pipe()  # before the thread, which reads it
        self._thread = threading.Thread(target=self._run, name="composable_fsdp watch", daemon=True)
        self._thread.start()
        with _lock:
            _live.add(self)
            _leave_at_exit()

    # -- called by the training thread

    def warn_within(self, seconds: float) -> None:
        """Warn of waits after ``seconds`` at the latest, if at all."""
        self._warnings.latest = min(self._warnings.latest, seconds)

    def begin_wait(self, operation: OperationId, end: GiveUp | None = None, seconds: float = 0.0) -> None:
        """Record a wait for ``operation``, ``seconds`` so far. The watchdog thread may abort it by ``end(reason)``."""
        self._since, self._interrupt, self.here.waiting = time.monotonic() - seconds, end, operation
        if end is not None:
            listen()

    def end_wait(self, *, done: bool) -> None:
        if self._interrupt is not None:
            stop_listening()
        operation = self.here.waiting
        if done and operation is not None:
            self.here.last = operation
            for index, other in enumerate(self._done):
                # Mostly the same object: to compare or hash thousands of ranks would take microseconds in each wait.
                if other.line == operation.line and (other.ranks is operation.ranks or other.ranks == operation.ranks):
                    self._done[index] = operation
                    break
            else:
                self._done.append(operation)
        self.here.waiting = self._interrupt = None

    def begin_pass(self, begun: RunningPass) -> None:
        """Record that a pass begins. A forward clears earlier failures."""
        if begun.kind == "forward" and (self.here.failure or self._verdict or self.passes):
            self.go_on()
        self.passes[begun] = None

    def end_pass(self, ended: RunningPass, steps: int = 0) -> None:
        """Record that a pass has ended, or failed after :meth:`fail`. ``steps`` counts backward passes of its root."""
        self.passes.pop(ended, None)
        self.here.steps = steps or self.here.steps

    def fail(self, failure: str, meeting: tuple[int, ...] = ()) -> None:
        """Record that a pass of this rank failed, and publish it. ``meeting``: it waits for these ranks."""
        if not self.here.failure:
            self.here.failure, self.here.meeting = failure, meeting
            self._publish()

    def go_on(self) -> None:
        """Clear earlier failures."""
        left = [each for each in list(self.passes) if each.left]
        if self.here.failure or self._verdict or left:
            here, self._verdict, self._done = self.here, None, []
            # The watchdog thread may be about to report it: no field is cleared of a report that it has copied.
            self.here = RankReport(self.rank, here.steps, here.waiting, last=here.last, process=here.process)
            for each in left:
                self.passes.pop(each, None)
            self._publish()

    @property
    def _left(self) -> str:
        """The text that reports a pass that ended unexpectedly, or an empty one."""
        for each in list(self.passes):
            if (left := each.left) and each in self.passes:  # it has not ended normally meanwhile
                return left
        return ""

    @property
    def has_failed(self) -> bool:
        """True if this rank's last pass failed, here or because of another rank."""
        return bool(self.here.failure or self._verdict or self._left)

    def diagnose_failure(self, operation: OperationId, lost: str, *, timed_out: bool) -> FSDPError | None:
        """Return and publish why the wait for ``operation`` failed with the transport's error ``lost``."""
        if self._verdict is None:
            self.give_up(self.diagnose_wait(operation, lost, timed_out=timed_out))
        return self._verdict

    def give_up(self, verdict: FSDPError | None) -> None:
        """Record and publish why this rank gave up a wait, so that other ranks do not continue either."""
        if verdict is not None and self._verdict is None:
            self._verdict = verdict
            self.here.diverged = isinstance(verdict, DivergenceError)
            self.here.at_fault = verdict.ranks if isinstance(verdict, PeerError) else ()
            self.here.verdict = str(verdict)  # after these, which go with it
            self._publish()

    def meet(self, ranks: Sequence[int], own: str, seconds: float, occasion: str) -> Mapping[str, list[int]]:
        """Wait until all of ``ranks`` have called this too, and return their distinct ``own``, each with its ranks.

        Raises:
            PeerError: some ranks, named in the text, did not come within ``seconds``.
        """
        name = f"meeting/{crc32(repr(tuple(ranks)).encode()):08x}"
        rendezvous = self._rendezvous.setdefault(name, StoreRendezvous(name, self.rank, ranks))
        missing = MissingRanks(self, occasion, seconds, ranks, ends=False)
        try:
            verdict = rendezvous.meet(StoreOnThread(self, seconds), own, seconds, missing.explain)
        except RuntimeError as error:
            raise PeerError(f"{occasion}, but they cannot meet: {error}") from error
        if verdict.missing:
            text = f"{occasion}, and in {seconds:g} s {format_ranks(verdict.missing)} did not."
            raise PeerError(text, verdict.missing)
        return verdict.notes

    # -- reports

    def report(self) -> RankReport:
        here, on_thread = replace(self.here), threading.current_thread() is self._thread
        here.seconds = time.monotonic() - self._since if here.waiting is not None else 0.0
        here.failure = here.failure or self._left
        here.place = main_thread_line() if on_thread else ""
        here.done = tuple(self._done) if here.meeting else ()
        return here

    def collect_reports(self, ranks: Iterable[int], seconds: float = _ANSWER_SECONDS) -> dict[int, RankReport]:
        """Return fresh or final reports of ``ranks``.

        Waits for up to ``seconds`` until all of them have answered, or one has given up with a verdict for all.
        """
        found = {self.rank: self.report()}
        wanted = [rank for rank in ranks if rank != self.rank]
        with suppress(RuntimeError):  # the rank that hosts the store is gone
            self._call(lambda: self._read_reports(wanted, found, seconds))
        return dict(found)

    def _read_reports(self, wanted: Sequence[int], found: dict[int, RankReport], seconds: float) -> None:
        number = int(self._store.add("call", 1))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # The last report of a rank is written before its process ends.
            gone = {rank for rank in wanted if self._has_died(rank)}
            self._answer()  # other ranks may be collecting too
            for rank in wanted:
                if rank not in found and (report := self._fresh_report(rank, number)) is not None:
                    found[rank] = report
            has_verdict = any(found[rank].verdict for rank in wanted if rank in found)
            if has_verdict or gone.union(found).issuperset(wanted) or not self._serve(0.02):
                return

    def diagnose_wait(self, operation: OperationId, lost: str = "", *, timed_out: bool = False) -> FSDPError | None:
        """Collect reports and diagnose why ``operation``, for which this rank waits, does not complete.

        Warns of a long wait without an error. ``lost`` is the transport's error, if it has one.
        """
        reports = self.collect_reports(operation.ranks)
        missing = [rank for rank in operation.ranks if rank not in reports]
        gone = {rank: self._exits[rank] for rank in missing if self._has_died(rank)}
        error = diagnose(operation, reports, lost=lost, timed_out=timed_out, gone=gone)
        seconds = reports[self.rank].seconds
        is_due = error is None and self._warnings.is_due(operation, seconds)
        if is_due and (text := wait_text(self.rank, operation, seconds, reports)):
            logger.warning("%s", printable(text))
        return error

    def _has_died(self, rank: int) -> bool:
        identity = self._processes.get(rank, "")
        if died := has_died(identity):
            self._exits.setdefault(rank, exit_text(identity))  # its parent may wait for it soon
        return died

    def _fresh_report(self, rank: int, number: int) -> RankReport | None:
        key = f"report/{rank}"
        if not self._store.check([key]):
            return None
        answered, text = self._store.get(key).decode().split("\n", 1)
        report = RankReport.decoded(text)
        self._processes[rank] = report.process
        return report if int(answered) >= number or report.failure or report.verdict else None

    def _publish(self) -> Future[None]:
        report = self.report()
        return self._submit(lambda: self._write(report))

    def _write(self, report: RankReport) -> None:
        self._store.set(f"report/{self.rank}", f"{self._answered}\n{report.encoded()}")

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call``, which uses the store, on the watchdog thread."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except RuntimeError as error:
                    future.set_exception(error)
                    raise

        if threading.current_thread() is self._thread:
            run()
        else:
            self._requests.put(run)
        return future

    def _call(self, call: Callable[[], T], seconds: float = _STORE_SECONDS) -> T:
        """Return the result of ``call``, run on the watchdog thread.

        Raises:
            RuntimeError: the store is gone, or does not answer in ``seconds``.
        """
        future = self._submit(call)
        end = time.monotonic() + max(seconds, _STORE_SECONDS)
        while not future.done() and self._thread.is_alive() and time.monotonic() < end:
            with suppress(FutureTimeout):
                return future.result(0.1)
        if not future.done():
            future.cancel()
            raise dist.DistNetworkError("the store of the job does not answer.")
        return future.result()

    def _run(self) -> None:
        """Serve requests, and make the periodic checks, until the thread is stopped or the store is gone."""
        failures = 0
        while failures < _STORE_FAILURES:
            try:
                if not self._serve(max(0.0, self._due - time.monotonic())):
                    return
                if time.monotonic() >= self._due:
                    self._due = time.monotonic() + self._period
                    self._check_own_wait()
                    self._answer()
                failures = 0
            except RuntimeError as error:  # noqa: PERF203 (of seldom requests)
                logger.debug("rank %d: the store of the job: %s", self.rank, error)
                failures += 1

    def _serve(self, seconds: float) -> bool:
        """Run the next request, if one comes within ``seconds``. Return False if it is to stop."""
        with suppress(Empty):
            request = self._requests.get(timeout=seconds)
            if request is None:
                self._requests.put(None)  # also for the caller of a caller
                return False
            request()
        return True

    def _answer(self) -> None:
        called = int(self._store.add("call", 0))
        if called > self._answered:
            self._answered = called
            self._write(self.report())

    def _check_own_wait(self) -> None:
        """Abort a wait that was interrupted or cannot complete."""
        operation, end = self.here.waiting, self._interrupt
        if operation is None or end is None:
            return
        if arrived():
            end(f"rank {self.rank} was interrupted")
        elif time.monotonic() - self._since >= PATIENCE:
            error = self.diagnose_wait(operation)
            if error is not None and self.here.waiting is operation:
                self.give_up(error)
                end(str(error).split("\n", 1)[0])

    def leave(self) -> None:
        """Report that the program has ended, and stop."""
        if not self.here.failure:
            self.here.failure, self.here.left = _exit_text(list(self.passes)), True
        published = self._publish()
        with suppress(RuntimeError, FutureTimeout):
            published.result(_STORE_SECONDS if self._thread.is_alive() else 0.0)
        self.stop()

    def stop(self) -> None:
        """Stop the thread after its current requests."""
        self._requests.put(None)

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the thread to end, after :meth:`stop`."""
        self._thread.join(max(0.0, seconds))


class StoreOnThread:
    """The store of a watchdog, for any thread. Each call may take ``seconds``, and raises after that."""

    def __init__(self, watchdog: Watchdog, seconds: float) -> None:
        self._watchdog, self._seconds = watchdog, seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._watchdog._store, name)
        return lambda *args: self._watchdog._call(lambda: method(*args), self._seconds)


def _exit_text(passes: Sequence[RunningPass]) -> str:
    """Return how the program ended, from the exception that the interpreter keeps."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "has come to the end of its program"
    where = f" in the {passes[-1].kind} of {passes[-1].module}" if passes else ""
    return f"raised {error_summary(error).removesuffix('.')}{where}, which ended its program"


_watchdogs: WeakKeyDictionary[dist.ProcessGroup, Watchdog | None] = WeakKeyDictionary()
_live: WeakSet[Watchdog] = WeakSet()
"""Watchdogs whose threads run, including those of finished jobs."""
_lock = threading.RLock()
"""Guards additions to and iterations over these two."""


def job_watchdog() -> Watchdog | None:
    """Return the watchdog of this process, or ``None`` for no job, one of a single rank, or simulated ranks."""
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1:
        return None
    if world not in _watchdogs:
        with _lock:
            if world not in _watchdogs:
                _watchdogs[world], client = None, own_client()
                if client is not None:
                    store = dist.PrefixStore("watchdog", client)
                    watchdog = _watchdogs[world] = Watchdog(store, dist.get_rank(), dist.get_world_size())
                    weakref.finalize(world, watchdog.stop).atexit = False  # _leave_at_exit reports the end first
    return _watchdogs[world]


@cache
def _leave_at_exit() -> None:
    atexit.register(_leave_all)


def _leave_all() -> None:
    """Stop all watchdog threads. One that returned from the store during finalization would abort the process."""
    end = time.monotonic() + _STORE_SECONDS
    with _lock:  # another thread may be creating one
        current, watchdogs = list(_watchdogs.values()), list(_live)
    for watchdog in current:
        if watchdog is not None:
            watchdog.leave()
    for watchdog in watchdogs:
        watchdog.stop()
    for watchdog in watchdogs:
        watchdog.join(end - time.monotonic())


# -- Search for the ranks that have not come to a rendezvous, while others wait there

_ASK_AFTER = 5.0
"""Seconds of waiting before rank reports are collected. Each further interval is twice as long."""
_ASK_AGAIN = 2.0
"""Seconds until reports are collected again if a missing rank seems to wait for a rank that is present."""


class MissingRanks:
    """Finds out where the ranks are that have not come to a rendezvous.

    Args:
        watchdog: the watchdog of the job; without one, nothing is found out.
        call: the call that all ranks must make, for warnings.
        timeout: the seconds after which the rendezvous ends, for warnings.
        ranks: the ranks that must come.
        ends: whether to end a rendezvous to which ranks cannot come. Otherwise only warn of it.
    """

    def __init__(
        self, watchdog: Watchdog | None, call: str, timeout: float, ranks: Sequence[int], *, ends: bool = True
    ) -> None:
        self._watchdog, self._call, self._timeout, self._ranks = watchdog, call, timeout, ranks
        self._begin = time.monotonic()
        self._due = _ASK_AFTER if ends else inf
        self._warnings = WarningTimes()
        self._suspects: dict[int, OperationId] = {}
        """Missing ranks that waited for a rank that is present, with the operation they waited in."""

    def explain(self, find_missing: Callable[[], list[int]]) -> str:
        """Return why ranks cannot come any more, else empty. The first rank that is present asks, now and then.

        Warns about late ranks, as :func:`set_wait_warning` says.
        """
        waited = time.monotonic() - self._begin
        asks, warns = waited >= self._due, self._warnings.is_due(self, waited)
        missing = find_missing() if asks or warns else []
        if asks:
            self._due += max(waited, _ASK_AFTER)
        present = [rank for rank in self._ranks if rank not in missing]
        if not missing or self._watchdog is None or self._watchdog.rank != present[0]:
            return ""
        reports = self._watchdog.collect_reports(self._ranks)
        if asks and (reason := self._cannot_come(missing, present, reports)):
            return reason
        if warns:
            lines = printable(reports_with_places(reports, missing))
            text = "%s: waiting for %s, for %.1f s so far and up to %g s.%s"
            logger.warning(text, self._call, format_ranks(missing), waited, self._timeout, lines)
        return ""

    def _cannot_come(self, missing: Sequence[int], present: Sequence[int], reports: Mapping[int, RankReport]) -> str:
        """Return which ranks of ``missing`` have left, or wait for a rank that is present since the last call."""
        found = {other: reports[other] for other in missing if other in reports}
        waiting = {rank: each.waiting for rank, each in found.items() if each.waiting is not None}
        stuck = {rank: operation for rank, operation in waiting.items() if _waits(operation, present, reports)}
        gone = [other for other, each in found.items() if each.left]
        gone += [other for other, operation in stuck.items() if self._suspects.get(other) == operation]
        if gone:
            lines = "".join(f"\n  {found[other]}" for other in sorted(gone))
            return f"{format_ranks(sorted(gone))} did not make this call, and cannot any more.{lines}\n"
        self._suspects = stuck
        if stuck:
            self._due = time.monotonic() - self._begin + _ASK_AGAIN
        return ""


def _waits(operation: OperationId, present: Sequence[int], reports: Mapping[int, RankReport]) -> bool:
    """Return True if a rank of ``present``, which waits here, has not done ``operation``."""
    here = [reports[rank].last for rank in operation.ranks if rank in present and rank in reports]
    return any(last is None or last.line != operation.line or last.number < operation.number for last in here)


# -- Ctrl-C while the main thread waits in C++, where Python cannot run its signal handler
#
# The interpreter writes the number of a signal to a file descriptor at once, so another thread can read it and end the
# wait. Nothing is installed if that descriptor is in use, as by asyncio, and nothing is reported if the user handles
# Ctrl-C.

_NO_DESCRIPTOR = -1


@cache
def _pipe() -> tuple[int, int, select.poll]:
    """Return the ends of a pipe from the interpreter to the watchdog thread, and what tells whether it has data."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    unread = select.poll()
    unread.register(reader, select.POLLIN)
    return reader, writer, unread


def _read_signals() -> bytes:
    with suppress(BlockingIOError):
        return os.read(_pipe()[0], 4096)
    return b""


def listen() -> None:
    """Start listening if this is the main thread, and forget earlier signals, which were handled."""
    if threading.current_thread() is threading.main_thread():
        _, writer, unread = _pipe()
        other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if other not in (_NO_DESCRIPTOR, writer):
            signal.set_wakeup_fd(other)
        elif unread.poll(0):  # reading an empty pipe would cost an exception in each wait
            _read_signals()


def stop_listening() -> None:
    """Stop listening. The main thread runs Python again."""
    if threading.current_thread() is threading.main_thread():
        other = signal.set_wakeup_fd(_NO_DESCRIPTOR)
        if other != _pipe()[1]:
            signal.set_wakeup_fd(other)


def arrived() -> bool:
    """Return whether Ctrl-C was pressed since the last call, while listening, and the user does not handle it."""
    return signal.SIGINT in _read_signals() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
