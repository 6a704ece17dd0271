"""The order check and the operations in flight of a process group whose backend is not gloo, such as NCCL.

On a device with streams a wait for a collective returns at once, and a collective that cannot complete blocks the host
only where it synchronizes, in any code. So nothing is compared on the device: ranks compare new operations through the
store of the job. The watchdog thread queries the events of operations in flight. If one cannot complete, it aborts the
process group, which ends the wait of the host, and the next operation raises the error.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._comm.communicator import Work
from composable_fsdp._consistency.order_check import OrderCheck, OrderChecker
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._consistency.store_rendezvous import StoreRendezvous
from composable_fsdp._consistency.watchdog import Watchdog
from composable_fsdp._memory.device_capabilities import device_capabilities
from composable_fsdp.errors import FSDPError, PeerError

__all__ = ["DeviceConnection", "aborted", "level_on_device", "timeout_of_backend"]

logger = logging.getLogger(__name__)

_MOST_COMPARED_RANKS = 64
"""The ranks of a process group from which on ``FIRST`` compares nothing.

Each operation of the first step takes several requests of each rank to the one store of the job. Estimated.
"""

_ABORTED = (
    "Operations on the device were aborted, so their results are undefined, and this process group cannot be used any "
    "more. End the job, and restart it from a checkpoint."
)

aborted: weakref.WeakSet[DeviceConnection] = weakref.WeakSet()
"""Connections whose operations were aborted."""


def level_on_device(level: OrderCheck, num_ranks: int) -> OrderCheck:
    """Return how much ``num_ranks`` ranks compare through the store at ``level``: nothing if they are very many."""
    return OrderCheck.OFF if level is OrderCheck.FIRST and num_ranks > _MOST_COMPARED_RANKS else level


class _InFlight:
    """A launched operation, and how to find out if it is done. Its tensors are not kept.

    A waited-for work is replaced by an event, since NCCL's works keep the outputs.
    """

    __slots__ = ("begin", "is_done", "operation")

    def __init__(self, operation: OperationId, is_done: Callable[[], bool]) -> None:
        self.operation, self.is_done, self.begin = operation, is_done, time.monotonic()


class DeviceWork:
    """The work of one operation."""

    __slots__ = ("_connection", "_flight", "_work")

    def __init__(self, connection: DeviceConnection, flight: _InFlight, work: Work) -> None:
        self._connection, self._flight, self._work = connection, flight, work

    def wait(self) -> None:
        """Order the current stream after the work; on a device without streams, block the host.

        Raises:
            PeerError: a rank failed or is gone, so that some operation of this rank was aborted.
            DivergenceError: ranks are about to run different operations.
        """
        self._connection.wait(self._flight, self._work)


class DeviceConnection:
    """The operations of all communicators of this rank over one process group. Final.

    Args:
        group: the user's process group.
        device_type: device type of the tensors.
        watchdog: the watchdog of this process.
        level: how much ranks compare before an operation.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str, watchdog: Watchdog, level: OrderCheck) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        device, is_python = torch.device(device_type), type(group) is not dist.ProcessGroup
        self.timeout = timeout_of_backend(group if is_python else cast(Any, group)._get_backend(device))
        self._group = weakref.ref(group)
        self._name = group.group_name
        self._device = device_capabilities(device)
        self._watchdog = watchdog
        self._meeting = StoreRendezvous(f"order/{self._name}", dist.get_rank(), self.ranks)
        level = level_on_device(level, len(self.ranks))
        self._order_checker = OrderChecker(self._exchange_numbers, self._exchange_texts, level)
        self._flights: dict[int, _InFlight] = {}
        """Operations that may be in flight, in order. Only the watchdog thread removes them."""
        self._last_change = 0.0
        self.last: OperationId | None = None
        """The last operation known to be done."""
        self._verdict: FSDPError | None = None
        self._lock = threading.Lock()
        watchdog.watch(self)

    @property
    def position(self) -> str:
        """The number of operations begun so far, as text, or ``"broken"``."""
        return "broken" if self._verdict is not None else str(self._order_checker.number)

    @property
    def compared(self) -> int:
        """The number of operations that ranks compared before they began."""
        return self._order_checker.compared

    def set_order_check(self, level: OrderCheck) -> None:
        """Set how much ranks compare from now on. It must be the same on every rank."""
        self._order_checker.level = level_on_device(level, len(self.ranks))

    def begin(self, label: str, sizes: tuple[int, ...]) -> OperationId:
        """Return the id of the next operation, once the order check allows it.

        Raises:
            DivergenceError: another rank is about to run a different operation.
            PeerError: a rank is gone, or an earlier operation was aborted.
        """
        self.check()
        self._current = OperationId(self.ranks, self._order_checker.number + 1, label, self._name)
        try:
            self._order_checker.begin(label, sizes)
        except FSDPError as error:
            trace.emit_fault(error, str(self._current), self._position_of(self._current))
            raise
        return self._current

    def launched(self, operation: OperationId, work: Work) -> Work:
        """Return ``work`` of ``operation``, watched from now on. A stream that is being captured is not watched."""
        if self._device.is_capturing():
            return work
        flight = _InFlight(operation, _completion(work))
        if self._device.has_streams:
            self._flights[operation.number] = flight
        return DeviceWork(self, flight, work)

    def wait(self, flight: _InFlight, work: Work) -> None:
        self.check()
        if not self._device.has_streams:
            self._wait_on_host(flight.operation, work)
            return
        work.wait()
        event = self._device.module.current_stream().record_event()
        flight.is_done = event.query

    def _wait_on_host(self, operation: OperationId, work: Work) -> None:
        begin, done = time.monotonic(), False
        self._watchdog.begin_wait(operation, self._abort)
        try:
            work.wait()
            self.check()
            done = True
        except dist.DistError as error:
            raise self.failure(operation, str(error), time.monotonic() - begin) from error
        finally:
            self._watchdog.end_wait(done=done)

    def oldest(self) -> tuple[OperationId, float, float] | None:
        """Return the oldest operation in flight, the seconds without progress, and those since its launch.

        For the watchdog thread. Operations of one process group complete in order.
        """
        if self._verdict is not None:
            return None
        flights, now = list(self._flights.values()), time.monotonic()
        done = next((i for i in range(len(flights), 0, -1) if flights[i - 1].is_done()), 0) if flights else 0
        for flight in flights[:done]:
            self._flights.pop(flight.operation.number, None)
            self.last, self._last_change = flight.operation, now
        if done == len(flights):
            return None
        oldest = flights[done]
        return oldest.operation, now - max(oldest.begin, self._last_change), now - oldest.begin

    def end(self, verdict: FSDPError) -> None:
        """Let every later operation raise ``verdict``, and abort those in flight. For any thread."""
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = type(verdict)(f"{verdict}\n{_ABORTED}")
            aborted.add(self)
        trace.emit_fault(self._verdict, "an operation on the device")
        # The watchdog thread must go on answering, and NCCL may take its time to abort.
        threading.Thread(target=self._abort, name="composable_fsdp abort", daemon=True).start()

    def failure(self, operation: OperationId, lost: str, seconds: float = 0.0) -> FSDPError:
        """Return why ``operation`` failed with the backend's error ``lost`` after ``seconds``, and abort the others."""
        if self._verdict is None:
            found = self._watchdog.diagnose_failure(
                operation, f"After {seconds:.1f} s: {lost}", timed_out=seconds >= self.timeout
            )
            self.end(found or PeerError(f"{operation} failed after {seconds:.1f} s: {lost}"))
        return cast(FSDPError, self._verdict)

    def abandon(self) -> None:
        """Abort operations in flight, before their memory is freed."""
        self.end(PeerError(f"operations of ranks {list(self.ranks)} were given up after a failed pass."))

    def reopen(self) -> None:
        """Refuse to connect again, which only the owner of the process group can do.

        Raises:
            PeerError: always.
        """
        raise PeerError(
            f"ranks {list(self.ranks)} cannot connect again over the backend of their process group after they failed "
            "at different operations. End the job, and restart it from a checkpoint."
        )

    def _abort(self, reason: str = "") -> None:
        group: Any = self._group()
        try:
            if hasattr(group, "abort"):
                group.abort()
            else:  # torch has it from 2.6, but a backend in Python need not
                group.shutdown()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            logger.warning("the process group of ranks %s cannot be aborted: %s", list(self.ranks), error)

    def check(self) -> None:
        """Raise why operations were aborted, if they were.

        Raises:
            PeerError: a rank failed or is gone.
            DivergenceError: ranks were about to run different operations.
        """
        if self._verdict is not None:
            raise type(self._verdict)(str(self._verdict))

    def _position_of(self, operation: OperationId) -> trace.Position:
        return trace.Position(self._name, self.ranks, 0, operation.number)

    def _exchange_numbers(self, own: int) -> list[int]:
        return list(map(int, self._exchange_texts(str(own)).values()))

    def _exchange_texts(self, own: str) -> dict[int, str]:
        """Exchange ``own`` through the store.

        Raises:
            PeerError: a rank does not come to it, and why.
            DivergenceError: a rank waits for another operation instead.
        """
        operation, begin, reasons = self._current, time.monotonic(), list[str]()
        self._watchdog.begin_wait(operation, reasons.append)
        try:
            store = self._watchdog.store_on_thread(self.timeout)
            verdict = self._meeting.meet(store, own, self.timeout, lambda _: "".join(reasons[:1]))
            if verdict.missing:
                lost = verdict.reason or "not all ranks came to compare their next operation."
                raise self.failure(operation, lost, time.monotonic() - begin)
        except RuntimeError as error:
            if isinstance(error, FSDPError):
                raise
            lost = f"the store of the job says: {error}"
            raise self.failure(operation, lost, time.monotonic() - begin) from error
        finally:
            self._watchdog.end_wait(done=False)
        return dict(sorted((rank, note) for note, ranks in verdict.notes.items() for rank in ranks))


def _completion(work: Any) -> Callable[[], bool]:
    """Return the function that tells whether ``work``, or all works of a coalesced launch, are done."""
    works = getattr(work, "works", None)
    if works is None:
        return cast(Callable[[], bool], work.is_completed)
    return lambda: all(_completion(each)() for each in works)


def timeout_of_backend(backend: Any) -> float:
    """Return the timeout of a backend in seconds; the default one if it does not tell."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.distributed_c10d.default_pg_timeout)
    return cast(timedelta, timeout).total_seconds()
