"""Where every rank of the job is, told through the store of the job when somebody waits for too long.

Nothing is told while all goes well: a rank notes where it is in its own memory. One that has waited for ``PATIENCE``
seconds *calls the roll*: a thread of every rank that can still run then writes down where that rank is, and whoever
waits reads it. So a rank that raised and goes on, one that runs other modules, and one that is gone are told apart in
seconds, whatever the timeout of the process group, and by name.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # until Python 3.11 another one than the built-in
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._consistency import interrupt
from composable_fsdp._consistency.rank_report import OperationId, RankReport, diagnose, ranks_text
from composable_fsdp._consistency.running_pass import RunningPass, said_of
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError

__all__ = ["PATIENCE", "Watchdog", "job_watchdog", "known_watchdog"]

PATIENCE = 1.0
"""Seconds of waiting after which a rank asks where the others are."""
_PERIOD = 0.25
_RANKS_PER_PERIOD = 1000
"""Of a large job, the store hears each rank less often."""
_ANSWER_SECONDS = 1.5
"""In which every rank whose threads run has answered."""
_STORE_SECONDS = _ANSWER_SECONDS + 1.0
"""For which the thread that trains waits for the one that asks the store, which may not answer any more."""

_STORE_FAILURES = 3
"""In a row: then the store is gone, with the rank or the launcher that has it."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Here:
    """What this rank knows of itself; written by the thread that trains, read by the one that answers."""

    waiting: OperationId | None = None
    since: float = 0.0
    last: OperationId | None = None
    steps: int = 0
    failure: str = ""
    has_left: bool = False
    """Whether its program has come to its end."""
    verdict: FSDPError | None = None
    passes: dict[RunningPass, None] = field(default_factory=dict)
    """Under way."""
    interrupt: Callable[[str], None] | None = None

    @property
    def left(self) -> str:
        """What is told of a pass that nobody runs any more, if there is one."""
        for each in list(self.passes):
            if (left := each.left) and each in self.passes:  # else it has ended meanwhile, as it should
                return left
        return ""


class Watchdog:
    """This rank's part in the roll call. Final.

    Only a thread of its own uses the store: a call of it may take for ever, once the host that has it is gone.

    Args:
        store: of the whole job.
        rank: in the whole job.
        size: ranks in the job.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.here = _Here()
        self._store = store
        self._period = max(_PERIOD, size / _RANKS_PER_PERIOD)
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """For the thread; ``None`` ends it."""
        self._answered = 0
        self._meetings: dict[tuple[int, ...], int] = {}
        self._due = 0.0
        self._thread = threading.Thread(target=self._run, name="composable_fsdp watch", daemon=True)
        self._thread.start()
        with _lock:
            _all.add(self)
            _leave_at_exit()

    # -- what the training thread notes

    def begin_wait(self, place: OperationId, end: Callable[[str], None] | None = None, seconds: float = 0.0) -> None:
        """This rank waits for ``place``, ``seconds`` already. ``end``, on the other thread, ends that for a reason."""
        here = self.here
        here.since, here.interrupt, here.waiting = time.monotonic() - seconds, end, place
        if end is not None:
            interrupt.listen()

    def end_wait(self, *, done: bool) -> None:
        here = self.here
        if here.interrupt is not None:
            interrupt.stop_listening()
        here.last = here.waiting if done else here.last
        here.waiting = here.interrupt = None

    def begin_pass(self, begun: RunningPass) -> None:
        """What failed before is over, if it is a forward."""
        here = self.here
        if begun.kind == "forward" and (here.failure or here.verdict or here.passes):
            self.go_on()
        here.passes[begun] = None

    def end_pass(self, ended: RunningPass | None, steps: int = 0) -> None:
        """By its end, or by what :meth:`fail` tells of. ``steps``: backwards that its root has completed now."""
        if ended is not None:
            self.here.passes.pop(ended, None)
            self.here.steps = steps or self.here.steps

    def fail(self, failure: str) -> None:
        """A pass of this rank ended so. Others are told at once, if they look."""
        if not self.here.failure:
            self.here.failure = failure
            self._tell()

    def go_on(self) -> None:
        """What failed before is over."""
        here = self.here
        left = [each for each in list(here.passes) if each.left]
        if here.failure or here.verdict or left:
            here.failure, here.verdict = "", None
            for each in left:
                here.passes.pop(each, None)
            self._tell()

    @property
    def has_failed(self) -> bool:
        """Whether this rank's last pass ended before its end, here or because of another rank."""
        return bool(self.here.failure or self.here.verdict or self.here.left)

    def find(self, place: OperationId, lost: str, *, timed_out: bool) -> FSDPError | None:
        """Why the wait for ``place`` has just failed, the transport having said ``lost``. The others are told."""
        if self.here.verdict is None:
            self.give_up(diagnose(place, self.collect_reports(place.ranks), lost=lost, timed_out=timed_out))
        return self.here.verdict

    def give_up(self, verdict: FSDPError | None) -> None:
        """Notes why this rank waits no longer, and tells the others, whom this will keep from going on."""
        if verdict is not None and self.here.verdict is None:
            self.here.verdict = verdict
            self._tell()

    def meet(self, ranks: Sequence[int], own: str, seconds: float, occasion: str) -> list[str]:
        """Waits until all of ``ranks`` have come to their next meeting, and gives what each brought, ``own`` here.

        Raises:
            PeerError: some have not come in ``seconds``. Named in the text.
        """
        number = self._meetings[tuple(ranks)] = self._meetings.get(tuple(ranks), 0) + 1
        name = f"meeting/{crc32(repr(tuple(ranks)).encode()):08x}"
        keys = {rank: f"{name}/{number}/{rank}" for rank in ranks}
        store = self._store
        try:
            end = time.monotonic() + seconds
            self._ask(lambda: store.set(keys[self.rank], own), seconds)
            while missing := self._ask(lambda: [rank for rank, key in keys.items() if not store.check([key])], seconds):
                if time.monotonic() > end:
                    raise PeerError(f"{occasion}, and in {seconds:g} s {ranks_text(missing)} did not.")
                time.sleep(0.02)
            brought = self._ask(lambda: [store.get(key).decode() for key in keys.values()], seconds)
            if number > 1:  # who has come to this one has left that
                self._request(lambda: store.delete_key(f"{name}/{number - 1}/{self.rank}"))
            return brought
        except RuntimeError as error:
            if isinstance(error, FSDPError):
                raise
            raise PeerError(f"{occasion}, but they cannot meet: {error}") from error

    # -- the roll

    def report(self) -> RankReport:
        here, waiting = self.here, self.here.waiting
        failure = here.failure or here.left
        seconds = time.monotonic() - here.since if waiting is not None else 0.0
        verdict, diverged = str(here.verdict or ""), isinstance(here.verdict, DivergenceError)
        return RankReport(self.rank, here.steps, waiting, seconds, here.last, failure, here.has_left, verdict, diverged)

    def collect_reports(self, ranks: Iterable[int], seconds: float = _ANSWER_SECONDS) -> dict[int, RankReport]:
        """Reports of ``ranks`` that are fresh, or final; waits for up to ``seconds`` until all have come, or one that
        says for all why nobody can go on.
        """
        found = {self.rank: self.report()}
        wanted = [rank for rank in ranks if rank != self.rank]
        with suppress(RuntimeError):  # the store is gone with the rank that has it
            self._ask(lambda: self._hear(wanted, found, seconds))
        return dict(found)

    def _hear(self, wanted: Sequence[int], found: dict[int, RankReport], seconds: float) -> None:
        number = int(self._store.add("call", 1))
        end = time.monotonic() + seconds
        while len(found) <= len(wanted) and time.monotonic() < end:
            if any(found[rank].verdict for rank in wanted if rank in found):
                return
            self._answer()  # others may be calling too
            for rank in wanted:
                if rank not in found and (report := self._fresh(rank, number)) is not None:
                    found[rank] = report
            time.sleep(0.02)

    def look(self, place: OperationId) -> FSDPError | None:
        """Calls the roll and judges it, for a rank that waits for ``place``."""
        return diagnose(place, self.collect_reports(place.ranks))

    def failure_of(self, rank: int) -> str:
        """What ``rank`` said when it failed, if it did; it need not be there any more."""
        with suppress(RuntimeError):
            report = self._ask(lambda: self._fresh(rank, 0))
            return str(report) if report is not None and report.failure else ""
        return ""

    def _fresh(self, rank: int, number: int) -> RankReport | None:
        key = f"report/{rank}"
        if not self._store.check([key]):
            return None
        answered, text = self._store.get(key).decode().split("\n", 1)
        report = RankReport.decoded(text)
        return report if int(answered) >= number or report.failure or report.verdict else None

    def _tell(self) -> Future[None]:
        report = self.report()
        return self._request(lambda: self._write(report))

    def _write(self, report: RankReport) -> None:
        self._store.set(f"report/{self.rank}", f"{self._answered}\n{report.encoded()}")

    def _request(self, call: Callable[[], T]) -> Future[T]:
        """``call``, which uses the store, in the thread that may."""
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

    def _ask(self, call: Callable[[], T], seconds: float = _STORE_SECONDS) -> T:
        """What ``call`` gives.

        Raises:
            RuntimeError: the store is gone, or does not answer in ``seconds``.
        """
        future = self._request(call)
        end = time.monotonic() + max(seconds, _STORE_SECONDS)
        while not future.done() and self._thread.is_alive() and time.monotonic() < end:
            with suppress(NotYet):
                return future.result(0.1)
        if not future.done():
            future.cancel()
            raise dist.DistNetworkError("the store of the job does not answer.")
        return future.result()

    def _run(self) -> None:
        failures: int | None = 0
        while failures is not None and failures < _STORE_FAILURES:
            failures = self._turn(failures)

    def _turn(self, failures: int) -> int | None:
        """Does what is asked for next, and what is due.

        Returns:
            How often the store has failed now without a success in between, or ``None`` at the end.
        """
        try:
            with suppress(Empty):
                request = self._requests.get(timeout=max(0.0, self._due - time.monotonic()))
                if request is None:
                    return None
                request()
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + self._period
                self._look_out()
                self._answer()
                if trace.fault_listeners:
                    self._look_back()
        except RuntimeError as error:
            logger.debug("rank %d: the store of the job: %s", self.rank, error)
            return failures + 1
        return 0

    def _answer(self) -> None:
        called = int(self._store.add("call", 0))
        if called > self._answered:
            self._answered = called
            self._write(self.report())

    def _look_out(self) -> None:
        """Interrupts a wait that will not end."""
        here = self.here
        place, end = here.waiting, here.interrupt
        if place is None or end is None:
            return
        if interrupt.has_come():
            end(f"rank {self.rank} was interrupted")
        elif time.monotonic() - here.since >= PATIENCE:
            error = self.look(place)
            if error is not None and here.waiting is place:
                self.give_up(error)
                end(str(error).split("\n", 1)[0])

    def _look_back(self) -> None:
        """Tells of passes that were left by an exception of this rank, which nobody has told of."""
        for each in list(self.here.passes):
            if not each.is_told and self.here.verdict is None and (left := each.left) and each in self.here.passes:
                each.is_told = True
                trace.tell_fault(None, left)

    def leave(self) -> None:
        """The program has come to its end."""
        if not self.here.failure:
            self.here.failure, self.here.has_left = _ending(list(self.here.passes)), True
        told = self._tell()
        with suppress(RuntimeError, NotYet):
            told.result(_STORE_SECONDS if self._thread.is_alive() else 0.0)
        self.stop()

    def stop(self) -> None:
        """Answers no more, once it has done what it was asked for before."""
        self._requests.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the thread to end, after :meth:`stop`; not for longer than ``seconds``."""
        self._thread.join(max(0.0, seconds))


def _ending(passes: Sequence[RunningPass]) -> str:
    """How the program ends: the interpreter keeps the exception that ended it."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "has come to the end of its program"
    where = f" in the {passes[-1].kind} of {passes[-1].module}" if passes else ""
    return f"raised {said_of(error)}{where}, which ended its program"


_watchdogs: WeakKeyDictionary[dist.ProcessGroup, Watchdog | None] = WeakKeyDictionary()
_all: WeakSet[Watchdog] = WeakSet()
"""Also those of jobs that have ended, as long as their threads run."""
_lock = threading.RLock()
"""Held by whoever adds to these two or iterates over them."""


def job_watchdog() -> Watchdog | None:
    """The one of this process, or ``None`` where there is no job, or one of a single rank, or of simulated ones."""
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1:
        return None
    if world not in _watchdogs:
        with _lock:
            if world not in _watchdogs:
                _watchdogs[world] = _begin_watchdog(world)
    return _watchdogs[world]


def _begin_watchdog(world: dist.ProcessGroup) -> Watchdog | None:
    client = _own_client()
    if client is None:
        return None
    # The store of torchrun outlives a restart, and with it what ranks told before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"composable_fsdp/watch/{attempt}", client)
    watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size())
    weakref.finalize(world, watchdog.stop).atexit = False  # then it has to say first that it leaves
    return watchdog


def known_watchdog() -> Watchdog | None:
    """The one of this process, if it was asked for before."""
    world = dist.group.WORLD
    return _watchdogs.get(world) if world is not None else None


def _own_client() -> Any:
    """A connection to the store of the job that only the watch uses: another one's wait would keep it waiting too.

    ``None`` where the store has no connections, as that of simulated ranks.
    """
    try:
        return cast(Any, dist.distributed_c10d._get_default_store()).clone()
    except RuntimeError:  # torch: "Tried to call pure virtual function"
        return None


@cache
def _leave_at_exit() -> None:
    atexit.register(_leave_all)


def _leave_all() -> None:
    """Ends all threads too: one that came back from the store while Python ends would abort the process."""
    end = time.monotonic() + _STORE_SECONDS
    with _lock:  # another thread may still begin one
        current, watchdogs = list(_watchdogs.values()), list(_all)
    for watchdog in current:
        if watchdog is not None:
            watchdog.leave()
    for watchdog in watchdogs:
        watchdog.stop()
    for watchdog in watchdogs:
        watchdog.join(end - time.monotonic())
