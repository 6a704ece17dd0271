"""The watchdog of the job and the order check, around communicators, and reports of the running passes to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, TypeVar, cast, runtime_checkable

import torch.distributed as dist
from torch.autograd import Variable
from torch.utils.checkpoint import _StopRecomputationError

from composable_fsdp import trace
from composable_fsdp._consistency.order_check import OrderCheck, OrderChecker, order_check_from
from composable_fsdp._consistency.process_groups import LostError, timeout_of
from composable_fsdp._consistency.rank_report import ENDED_AT, REPORTED_AT, OperationId
from composable_fsdp._consistency.rendezvous import StoreRendezvous
from composable_fsdp._consistency.watchdog import EndOfRun, GiveUp, RunningPass, StoreOnThread, Watchdog, job_watchdog
from composable_fsdp._core.comm import (
    SUM,
    Around,
    Collective,
    Communicator,
    GroupCommunicator,
    Transfer,
    communicators,
    find,
)
from composable_fsdp._core.group_plan import Pass
from composable_fsdp._core.layout import ReduceOp
from composable_fsdp._core.memory import Work
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import ForwardCall, connections
from composable_fsdp.errors import FSDPError, PeerError

# -- The decorator of communicators that reports waits to the watchdog of the job, and lets ranks compare operations

R = TypeVar("R")
T = TypeVar("T")


class Watched(Around):
    """Ranks compare operations, ``watchdog`` ends waits that cannot complete, and errors say what other ranks did.

    Args:
        base: the communicator.
        watchdog: the watchdog of the job, if it has one.
        exchange: exchanges what ranks compare before a launch; ``None`` to compare nothing.
        level: how much is compared. See ``OrderChecker``.
    """

    def __init__(
        self,
        base: GroupCommunicator,
        watchdog: Watchdog | None,
        exchange: Exchange | None = None,
        level: OrderCheck = OrderCheck.FIRST,
    ) -> None:
        super().__init__(base, watchdog)
        self.watchdog, self._ranks, self._exchange, self._level = watchdog, base.ranks, exchange, level
        self.end_wait = base.give_up
        """Ends a wait. For any thread."""
        self._begin()

    def _begin(self) -> None:
        self._number, self._line = 0, f"{self.name}/{self.generation}"
        self.checker: OrderChecker | None = None
        if self._exchange is not None:
            numbers, texts = self._exchange.exchange_numbers, self._exchange.exchange_texts
            exchanges = partial(self._exchanged, numbers), partial(self._exchanged, texts)
            self.checker = OrderChecker(*exchanges, self._exchange.level(self._level))

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        label = label or kind.label
        operation = OperationId(self._ranks, self._number + 1, label, self._line)
        if self.checker is not None:
            self._next = operation
            self.checker.begin(label, tuple([transfer.input.nbytes for transfer in transfers]))
        self._number += 1
        try:
            return _WatchedWork(self, operation, self.base.launch(kind, transfers, label, op), self.end_wait)
        except BaseException as error:
            self.fail(operation, error, "the launch of", self.end_wait)

    def set_level(self, level: OrderCheck) -> None:
        """Set how much ranks compare from now on. It must be the same on every rank."""
        self._level = level
        if self.checker is not None and self._exchange is not None:
            self.checker.level = self._exchange.level(level)

    def reopen(self) -> None:
        """Connect anew, and forget the order. All ranks must call it together."""
        cast(GroupCommunicator, self.base).reopen()
        self._begin()

    def _exchanged(self, exchange: Callable[[T], R], own: T) -> R:
        """Return ``exchange(own)``, a wait for the ranks that are to run the next operation."""
        found: list[R] = []
        work: Any = SimpleNamespace(wait=lambda: found.append(exchange(own)))
        _WatchedWork(self, self._next, work, cast(Exchange, self._exchange).give_up).wait()
        return found[0]

    def fail(self, operation: OperationId, error: BaseException, during: str, give_up: GiveUp) -> NoReturn:
        """Raise why ``operation`` failed, and give up, which closes the connection unless it was not used.

        Raises:
            PeerError: a rank failed, is gone, or did not answer within the timeout of the process group.
            DivergenceError: a rank is about to run a different operation.
        """
        if isinstance(error, FSDPError) and not isinstance(error, LostError):
            raise error
        if not isinstance(error, (LostError, dist.DistError)):
            if not self.traits.dispatches:  # part of the operation may be in flight, and write to memory that is freed
                give_up(f"{during} {operation} was ended by {type(error).__name__}")
            raise error
        found = None
        if self.watchdog is not None:
            late = isinstance(error, LostError) and error.timed_out
            found = self.watchdog.diagnose_failure(operation, str(error), timed_out=late)
        if found is None:
            found = PeerError(
                f"{operation} failed: a rank is gone, or did not answer within the timeout of the process group. Look "
                f"at the output of each for the first error. {error}"
            )
        give_up(str(found).split("\n", 1)[0])
        raise found from error


class _WatchedWork:
    """The work of ``operation``, which any thread may end by ``end(reason)``. Waiting again does nothing.

    ``wait`` raises what :meth:`Watched.fail` does.
    """

    __slots__ = ("_end", "_operation", "_watched", "_work")

    def __init__(self, watched: Watched, operation: OperationId, work: Work, end: GiveUp) -> None:
        self._watched, self._operation, self._end = watched, operation, end
        self._work: Work | None = work

    def wait(self) -> None:
        if self._work is None:
            return
        watched, operation, done = self._watched, self._operation, False
        watchdog = watched.watchdog
        if watchdog is not None:
            watchdog.begin_wait(operation, self._end)
        try:
            self._work.wait()
            done = True
        except BaseException as error:
            watched.fail(operation, error, "the wait for", self._end)
        finally:
            if watchdog is not None:
                watchdog.end_wait(done=done)
        self._work = None


_MOST_COMPARED_RANKS = 64
"""The ranks from which on ``FIRST`` compares nothing through the store.

Each operation of the first step takes several requests of each rank to the one store of the job. Estimated.
"""


@runtime_checkable
class Exchange(Protocol):
    """Exchanges what ranks compare. All of them must call it together."""

    def exchange_numbers(self, own: int) -> Sequence[int]:
        """Return the numbers of all ranks, in rank order."""
        ...

    def exchange_texts(self, own: str) -> Mapping[int, str]:
        """Return the texts of all ranks by global rank."""
        ...

    def level(self, level: OrderCheck) -> OrderCheck:
        """Return how much is compared if the user wants ``level``."""
        ...

    def give_up(self, reason: str) -> None:
        """End an exchange. Any thread may call it."""
        ...


class StoreExchange:
    """An exchange through the store of the job, for devices with streams, on which a comparison would block the host.

    Args:
        group: the process group.
        watchdog: the watchdog of the job.
        seconds: the time in which all ranks must come.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog, seconds: float) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        name = f"order/{group.group_name}/{self._ranks[0]}"  # groups that are split from others may have equal names
        self._meeting = StoreRendezvous(name, dist.get_rank(), self._ranks)
        self._store, self._seconds = StoreOnThread(watchdog, seconds), seconds
        self._reason = ""
        """Why the exchange was given up."""

    def level(self, level: OrderCheck) -> OrderCheck:
        is_many = len(self._ranks) > _MOST_COMPARED_RANKS
        return OrderCheck.OFF if level is OrderCheck.FIRST and is_many else level

    def exchange_numbers(self, own: int) -> Sequence[int]:
        return list(map(int, self.exchange_texts(str(own)).values()))

    def exchange_texts(self, own: str) -> Mapping[int, str]:
        begin, self._reason = time.monotonic(), ""
        verdict = self._meeting.meet(self._store, own, self._seconds, lambda _: self._reason)
        if verdict.missing:
            late = time.monotonic() - begin >= self._seconds
            raise LostError(verdict.reason or "not all ranks came to compare their next operation.", timed_out=late)
        return dict(sorted((rank, note) for note, ranks in verdict.notes.items() for rank in ranks))

    def give_up(self, reason: str) -> None:
        """End an exchange. The process group stays in use: nothing was launched."""
        self._reason = reason


# -- Attachment of the watchdog of the job and the order check to communicators


def watched(communicator: Communicator) -> Communicator:
    if communicator.traits.checks:
        return communicator
    base, watchdog = cast(GroupCommunicator, communicator), job_watchdog()
    exchange = find(communicator, Exchange)  # type: ignore[type-abstract]
    if exchange is None and watchdog is not None:
        timeout = timeout_of(base.group)
        watchdog.warn_within(REPORTED_AT * timeout)
        exchange = StoreExchange(base.group, watchdog, ENDED_AT * timeout)
    return Watched(base, watchdog, exchange, order_check_from())


def compare(groups: Collection[dist.ProcessGroup], level: OrderCheck) -> None:
    """Set how much ranks compare before an operation over ``groups``. In shared memory, they always compare."""
    for known in communicators(groups):
        found = find(known, Watched)
        if found is not None:
            found.set_level(level)


class OrderCheckLevel(Observer):
    """Sets the level of each root that is assembled: an earlier model may have set another for its process groups."""

    def for_root(self, root: ObservedRoot) -> None:
        level = root.root_state.options.of_plugins.get("order check") or order_check_from()
        root.root_state.change_for_plugin("order check", level)
        compare(connections(root.states.values()), level)


# -- Reports of the running passes: to the watchdog of the job, which other ranks ask, and to traces


class ReportedPasses(Observer):
    """Tells the watchdog of the job which passes of a root run, and how they end. Those that succeed are traced."""

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self._watchdog = watchdog
        self._running: dict[Pass, RunningPass] = {}
        self._completed = 0
        """The number of completed backwards."""

    def for_root(self, root: ObservedRoot) -> Observer:
        return ReportedPasses(job_watchdog())

    def begin_pass(self, root: ObservedRoot, which: Pass) -> None:
        state = root.root_state if root.outermost is None else root.outermost
        running = self._running[which] = RunningPass(which.value, state.name)
        if trace.listeners:
            running.began = trace.now()
        if which is Pass.FORWARD:
            running.caller = state.calls_under_way[-1].caller
        if self._watchdog is None:
            return
        if which is Pass.BACKWARD:
            engine: Any = Variable._execution_engine
            engine.queue_callback(EndOfRun(running, lambda: (root.progress.current or state).name))
        self._watchdog.begin_pass(running)

    def end_pass(self, root: ObservedRoot, which: Pass, succeeded: bool) -> None:
        running = self._running.pop(which, None)
        if running is None:
            return
        ends_step = succeeded and which is Pass.BACKWARD
        self._completed += ends_step
        if self._watchdog is not None:
            self._watchdog.end_pass(running, self._completed if ends_step else 0)
        if trace.listeners and succeeded:
            operation = trace.Operation.BACKWARD if ends_step else trace.Operation.FORWARD
            name = root.root_state.name if ends_step else running.module
            trace.emit(operation, name, begin=running.began)

    def raised(self, root: ObservedRoot, call: ForwardCall, error: BaseException) -> None:
        running = self._running.get(root.current_pass)
        if running is None or isinstance(error, _StopRecomputationError):
            return  # refused before it began, or a checkpoint stopped its recomputation early
        running.note(error, call.name)
        if self._watchdog is not None and running.caller is not None and call.state is root.outermost:
            self._watchdog.fail(running.failure)
