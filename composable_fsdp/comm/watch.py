"""Where every rank of the job is, told through the store of the job when somebody waits for too long.

Nothing is told while all goes well: a rank notes where it is in its own memory. One that has waited for ``PATIENCE``
seconds *calls the roll*: a thread of every rank that can still run then writes down where that rank is, and whoever
waits reads it. So a rank that raised and goes on, one that runs other modules, and one that is gone are told apart in
seconds, whatever the timeout of the process group, and by name.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp.comm import interrupt
from composable_fsdp.comm.roll import Place, Report, judge, ranks_text
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError

__all__ = ["PATIENCE", "Watch", "is_in_backward", "known_watch", "watch_of_job"]

PATIENCE = 1.0
"""Seconds of waiting after which a rank asks where the others are."""
_PERIOD = 0.25
_RANKS_PER_PERIOD = 1000
"""Of a large job, the store hears each rank less often."""
_ANSWER_SECONDS = 1.5
"""In which every rank whose threads run has answered."""
_STORE_SECONDS = _ANSWER_SECONDS + 1.0
"""For which the thread that trains waits for the one that asks the store, which may not answer any more."""

T = TypeVar("T")


@dataclass(slots=True)
class _Here:
    """What this rank knows of itself; written by the thread that trains, read by the one that answers."""

    waiting: Place | None = None
    since: float = 0.0
    last: Place | None = None
    steps: int = 0
    failure: str = ""
    left: bool = False
    verdict: FSDPError | None = None
    backward: tuple[int, str] | None = None
    """The number of the backward that is under way, and how far it is."""
    interrupt: Callable[[str], None] | None = None


class Watch:
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
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._answered = 0
        self._meetings: dict[tuple[int, ...], int] = {}
        self._left_backward: tuple[int, str] | None = None
        """Of which fault listeners know."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="composable_fsdp watch", daemon=True)
        self._thread.start()

    # -- what the training thread notes

    def begin_wait(self, place: Place, end: Callable[[str], None] | None = None, seconds: float = 0.0) -> None:
        """This rank waits for ``place``, ``seconds`` already. ``end``, on the other thread, ends that for a reason."""
        here = self.here
        here.since, here.interrupt, here.waiting = time.monotonic() - seconds, end, place
        if end is not None:
            interrupt.listen()

    def end_wait(self) -> None:
        here = self.here
        if here.interrupt is not None:
            interrupt.stop_listening()
        here.last, here.waiting, here.interrupt = here.waiting, None, None

    def reach_in_backward(self, unit: str) -> None:
        """A backward has come to ``unit``."""
        self.here.backward = (self.here.steps, unit)

    def end_backward(self) -> None:
        self.here.backward = None
        self.here.steps += 1

    def find(self, place: Place, lost: str, *, timed_out: bool) -> FSDPError | None:
        """Why the wait for ``place`` has just failed, the transport having said ``lost``. The others are told."""
        if self.here.verdict is None:
            self.give_up(judge(place, self.call_roll(place.ranks), lost=lost, timed_out=timed_out))
        return self.here.verdict

    def give_up(self, verdict: FSDPError | None) -> None:
        """Notes why this rank waits no longer, and tells the others, whom this will keep from going on."""
        if verdict is not None and self.here.verdict is None:
            self.here.verdict = verdict
            self._tell()

    def fail(self, error: BaseException, where: str) -> None:
        """A pass of this rank ended in ``error``. Others are told at once, if they look."""
        if not self.here.failure:
            self.here.failure = f"raised {type(error).__name__}: {_first_line(error)} in {where}"
            self._tell()

    def go_on(self) -> None:
        """This rank begins a new pass: what failed before is over."""
        here = self.here
        if here.failure or here.verdict or here.backward is not None:
            here.failure, here.verdict, here.backward = "", None, None
            self._tell()

    @property
    def has_failed(self) -> bool:
        """Whether this rank's last pass ended before its end, here or because of another rank."""
        here = self.here
        return bool(here.failure or here.verdict or _left_backward(here.backward))

    def meet(self, ranks: Sequence[int], own: str, seconds: float, occasion: str) -> list[str]:
        """Waits until all of ``ranks`` have come to their next meeting, and gives what each brought, ``own`` here.

        Raises:
            PeerError: some have not come in ``seconds``. Named in the text.
        """
        number = self._meetings[tuple(ranks)] = self._meetings.get(tuple(ranks), 0) + 1
        keys = {rank: f"meeting/{min(ranks)}-{max(ranks)}-{len(ranks)}/{number}/{rank}" for rank in ranks}
        store = self._store
        try:
            self._ask(lambda: store.set(keys[self.rank], own))
            end = time.monotonic() + seconds
            while missing := self._ask(lambda: [rank for rank, key in keys.items() if not store.check([key])]):
                if time.monotonic() > end:
                    raise PeerError(f"{occasion}, and in {seconds:g} s {ranks_text(missing)} did not.")
                time.sleep(0.02)
            return self._ask(lambda: [store.get(key).decode() for key in keys.values()])
        except RuntimeError as error:
            if isinstance(error, FSDPError):
                raise
            raise PeerError(f"{occasion}, but they cannot meet: {error}") from error

    # -- the roll

    def report(self) -> Report:
        here, waiting = self.here, self.here.waiting
        failure = here.failure or _left_backward(here.backward)
        seconds = time.monotonic() - here.since if waiting is not None else 0.0
        verdict, diverged = str(here.verdict or ""), isinstance(here.verdict, DivergenceError)
        return Report(self.rank, here.steps, waiting, seconds, here.last, failure, here.left, verdict, diverged)

    def call_roll(self, ranks: Iterable[int], seconds: float = _ANSWER_SECONDS) -> dict[int, Report]:
        """Reports of ``ranks`` that are fresh, or final; waits for up to ``seconds`` until all have come, or one that
        says for all why nobody can go on.
        """
        found = {self.rank: self.report()}
        wanted = [rank for rank in ranks if rank != self.rank]
        with suppress(RuntimeError):  # the store is gone with the rank that has it
            self._ask(lambda: self._hear(wanted, found, seconds))
        return dict(found)

    def _hear(self, wanted: Sequence[int], found: dict[int, Report], seconds: float) -> None:
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

    def look(self, place: Place) -> FSDPError | None:
        """Calls the roll and judges it, for a rank that waits for ``place``."""
        return judge(place, self.call_roll(place.ranks))

    def failure_of(self, rank: int) -> str:
        """What ``rank`` said when it failed, if it did; it need not be there any more."""
        with suppress(RuntimeError):
            report = self._ask(lambda: self._fresh(rank, 0))
            return str(report) if report is not None and report.failure else ""
        return ""

    def _fresh(self, rank: int, number: int) -> Report | None:
        key = f"report/{rank}"
        if not self._store.check([key]):
            return None
        answered, text = self._store.get(key).decode().split("\n", 1)
        report = Report.decoded(text)
        return report if int(answered) >= number or report.failure or report.verdict else None

    def _tell(self) -> Future[None]:
        report = self.report()
        return self._request(lambda: self._write(report))

    def _write(self, report: Report) -> None:
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

    def _ask(self, call: Callable[[], T]) -> T:
        """What ``call`` gives.

        Raises:
            RuntimeError: the store is gone, or does not answer.
        """
        future = self._request(call)
        end = time.monotonic() + _STORE_SECONDS
        while not future.done() and self._thread.is_alive() and time.monotonic() < end:
            with suppress(TimeoutError):
                return future.result(0.1)
        if not future.done():
            future.cancel()
            raise dist.DistNetworkError("the store of the job does not answer.")
        return future.result()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, so there is nobody to tell
            due = 0.0
            while not self._stop.is_set():
                with suppress(Empty):
                    self._requests.get(timeout=max(0.0, due - time.monotonic()))()
                if time.monotonic() >= due and not self._stop.is_set():
                    self._look_out()
                    self._answer()
                    if trace.fault_listeners:
                        self._look_back()
                    due = time.monotonic() + self._period

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
                end(_first_line(error))

    def _look_back(self) -> None:
        """Tells of a backward that was left by an exception of this rank, which nobody has told of."""
        backward = self.here.backward
        if self.here.verdict is None and backward is not self._left_backward and (left := _left_backward(backward)):
            self._left_backward = backward
            trace.tell_fault(None, left)

    def leave(self) -> None:
        """The program has come to its end."""
        if not self.here.failure:
            self.here.failure, self.here.left = _ending(self.here.backward), True
        end = time.monotonic() + _STORE_SECONDS
        told = self._tell()
        with suppress(RuntimeError, TimeoutError):
            told.result(_STORE_SECONDS if self._thread.is_alive() else 0.0)
        self.stop()
        # A thread that comes back from torch's store while the interpreter ends aborts the process.
        self._thread.join(max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Answers no more."""
        self._stop.set()
        self._requests.put(lambda: None)


def _ending(backward: tuple[int, str] | None) -> str:
    """How the program ends: the interpreter keeps the exception that ended it."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "has come to the end of its program"
    where = f" in the backward of {backward[1]}" if backward is not None else ""
    return f"raised {type(error).__name__}: {_first_line(error)}{where}, which ended its program"


def _left_backward(backward: tuple[int, str] | None) -> str:
    """What is told of a backward that nobody runs any more. Autograd does not tell that one was left by an exception.
    Any thread counts: hooks run in one of autograd's own on accelerators, while another one waits.
    """
    if backward is None or any(map(_runs_backward, sys._current_frames().values())):
        return ""
    return f"raised in the backward of {backward[1]}"


def is_in_backward(thread: int | None) -> bool:
    """Whether the Python thread of this number has called autograd, and not come back."""
    return thread is not None and _runs_backward(sys._current_frames().get(thread))


def _runs_backward(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        frame = frame.f_back
    return frame is not None


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


_watches: WeakKeyDictionary[dist.ProcessGroup, Watch | None] = WeakKeyDictionary()


def watch_of_job() -> Watch | None:
    """The one of this process, or ``None`` where there is no job, or one of a single rank, or of simulated ones."""
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1:
        return None
    if world not in _watches:
        client = _own_client()
        if client is None:
            _watches[world] = None
            return None
        # The store of torchrun outlives a restart, and with it what ranks told before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"composable_fsdp/watch/{attempt}", client)
        _watches[world] = watch = Watch(store, dist.get_rank(), dist.get_world_size())
        weakref.finalize(world, watch.stop)
    return _watches[world]


def known_watch() -> Watch | None:
    """The one of this process, if it was asked for before."""
    world = dist.group.WORLD
    return _watches.get(world) if world is not None else None


def _own_client() -> Any:
    """A connection to the store of the job that only the watch uses: another one's wait would keep it waiting too.

    ``None`` where the store has no connections, as that of simulated ranks.
    """
    try:
        return cast(Any, dist.distributed_c10d._get_default_store()).clone()
    except RuntimeError:  # torch: "Tried to call pure virtual function"
        return None


@atexit.register
def _leave_all() -> None:
    for watch in list(_watches.values()):
        if watch is not None:
            watch.leave()
