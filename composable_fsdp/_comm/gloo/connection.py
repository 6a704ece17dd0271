"""Gloo connections between the ranks of one process group, and the order check of the operations over them.

The connections are separate from those of the user's process group. A hopeless wait can only be ended by closing the
connections, and this leaves the user's open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._comm.comm_debug import notify_comm_debug
from composable_fsdp._comm.communicator import Transfer, Work
from composable_fsdp._consistency.order_check import OrderCheck, OrderChecker
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._consistency.watchdog import Watchdog
from composable_fsdp._consistency.world_store import world_store
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError

__all__ = ["GlooConnection"]

_NUMBER, _TEXT, _CLOSE, _DATA = 0x46534451, 0x46534452, 0x46534453, 0x46540000
"""Tags of our messages: digests to compare, texts that explain a difference, a tag that is never sent, and the first of
``_DATA_TAGS`` for data.
"""
_DATA_TAGS = 1 << 16

_TEXT_BYTES = 4096

Backend = Any
"""``dist.ProcessGroupGloo``, most of whose methods are unknown to the type checker.

It is not registered with torch. Torch would keep it alive, or reuse its name, and with it the old addresses, for the
next one.
"""

_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""The generation of the connections per process group. Each has its own keys, because keys stay in the store."""


class GlooConnection:
    """The connections and the order checker that all communicators over one process group on this rank share. Final.

    Args:
        group: the user's process group.
        watchdog: the watchdog of this process, or ``None`` for none.
        level: how much ranks compare before an operation.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog | None, level: OrderCheck) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.ranks = tuple(ranks)
        self.rank, self.size = dist.get_rank(group), len(ranks)
        options = cast(Any, group._get_backend(torch.device("cpu"))).options
        self._timeout: timedelta = options._timeout
        self._watchdog, self._level = watchdog, level
        self._name, self._numbers = group.group_name, _numbers.setdefault(group, count())
        self._close_lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._generation = next(self._numbers)
        self._id = f"{self._name}/{self._generation}"
        store = dist.PrefixStore(f"connection/{self._id}", world_store())
        self.backend: Backend = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        self._order_checker = OrderChecker(self._exchange_digests, self._exchange_texts, self._level)
        self._broken = ""
        self._kept: dict[OperationId, Sequence[Work]] = {}
        """Works in flight that have not been waited for, by operation."""

    def abandon(self) -> None:
        """Abort operations in flight, so that gloo no longer writes to their memory. Call it before :meth:`reopen`."""
        self._give_up("this rank connects anew after a failed pass")
        self._kept.clear()

    def reopen(self) -> None:
        """Replace the connections by new ones. All ranks must call it together."""
        self._close()
        self._open()

    @property
    def position(self) -> str:
        """The number of operations begun so far, as text, or ``"broken"``."""
        return "broken" if self._broken else str(self._order_checker.number)

    @property
    def compared(self) -> int:
        """The number of operations that ranks compared before they began."""
        return self._order_checker.compared

    def set_order_check(self, level: OrderCheck) -> None:
        """Set how much ranks compare from now on. It must be the same on every rank."""
        self._level = self._order_checker.level = level

    def begin(self, label: str, transfers: Sequence[Transfer]) -> OperationId:
        """Return the id of the next operation, once the order check allows it.

        Raises:
            DivergenceError: another rank is about to run a different operation.
            PeerError: a rank is gone, or an earlier operation has failed.
        """
        if self._broken:
            raise PeerError(f"ranks {list(self.ranks)} cannot go on together, since {self._broken}")
        sizes = tuple([transfer.input.nbytes for transfer in transfers])
        self._label = label
        operation = OperationId(self.ranks, self._order_checker.number + 1, label, self._id)
        if torch._C._len_torch_dispatch_stack():
            notify_comm_debug(label)
        if trace.listeners:
            trace.emit(trace.Operation.COLLECTIVE, label, sum(sizes), position=self._position_of(operation))
        try:
            self._order_checker.begin(label, sizes)
        except DivergenceError as error:
            trace.emit_fault(error, str(operation), self._position_of(operation))
            raise
        return operation

    def _position_of(self, operation: OperationId) -> trace.Position:
        return trace.Position(self._name, self.ranks, self._generation, operation.number)

    def keep(self, operation: OperationId, works: Sequence[Work]) -> None:
        """Keep ``works`` of ``operation`` alive until they are waited for."""
        self._kept[operation] = works

    def wait(self, operation: OperationId) -> None:
        """Wait for the kept works of ``operation``. Call it once per operation.

        The watchdog can abort the wait; gloo's errors are translated.

        Raises:
            PeerError: a rank failed, is gone, or did not answer within the timeout of the process group; or the
                connection is broken or was reopened: gloo itself would wait for the full timeout.
            DivergenceError: a rank is about to run a different operation.
        """
        if self._broken:
            raise PeerError(f"{operation} cannot be done, since {self._broken}")
        works = self._kept.get(operation)
        if works is None:
            raise PeerError(f"{operation} was given up when the ranks connected anew. Begin the step again.")
        begin = time.monotonic()
        if self._watchdog is not None:
            self._watchdog.begin_wait(operation, self._give_up)
        done = False
        try:
            for work in works:
                work.wait()
            done = True
        except RuntimeError as error:
            raise self.translate_error(operation, error, time.monotonic() - begin) from error
        except BaseException as error:
            self._give_up(f"the wait for {operation} was ended by {type(error).__name__}")
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.end_wait(done=done)
        del self._kept[operation]

    def tag(self, operation: OperationId) -> int:
        """Return the tag of the messages of ``operation``, so that they cannot be matched with those of another one."""
        return _DATA + operation.number % _DATA_TAGS

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int) -> list[Work]:
        """Exchange ``sent[r]`` for ``received[r]`` with each rank r, zero-copy. Neighbors first, to spread the load."""
        works: list[Work] = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works.append(self.backend.recv([received[source]], source, tag))
            works.append(self.backend.send([sent[target]], target, tag))
        return works

    def launching(self, operation: OperationId) -> Launching:
        """Return a context for launching ``operation``, which translates gloo's errors, such as a closed connection."""
        return Launching(self, operation)

    def translate_error(self, operation: OperationId, error: RuntimeError, seconds: float) -> FSDPError:
        """Return our error for gloo's ``error`` after ``seconds`` of waiting, and close the broken connection."""
        watchdog, found = self._watchdog, None
        if watchdog is not None:
            timed_out = seconds >= self._timeout.total_seconds()
            found = watchdog.diagnose_failure(
                operation, f"After {seconds:.1f} s gloo says: {error}", timed_out=timed_out
            )
        if found is None:
            found = PeerError(
                f"{operation} failed after {seconds:.1f} s of waiting: a rank is gone, or did not answer within the "
                f"timeout of the process group. Look at the output of each for the first error. Gloo says: {error}"
            )
        self._give_up(str(found).split("\n", 1)[0])
        trace.emit_fault(found, str(operation), self._position_of(operation))
        return found

    def _give_up(self, reason: str) -> None:
        """Close the connection for good, which ends all waits. Gloo closes a connection when a wait on it times out.

        Invariant: a connection is closed before ``_broken`` is set, so that gloo no longer writes to its memory. A
        thread that sees ``_broken`` may free that memory, even while another thread is still in this method.
        """
        with self._close_lock:
            self._close()
            self._broken = self._broken or reason

    def _close(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.backend.recv([torch.empty(1)], peer, _CLOSE).wait(timedelta(milliseconds=1))

    def _exchange_digests(self, own: int) -> list[int]:
        sent = torch.tensor([own])
        received = torch.empty(self.size, dtype=torch.int64)
        self._exchange_control(sent, list(received.split(1)), _NUMBER)
        received[self.rank] = own
        return cast(list[int], received.tolist())

    def _exchange_texts(self, own: str) -> dict[int, str]:
        text = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._exchange_control(sent, received, _TEXT)
        received[self.rank] = sent
        texts = (bytes(each.numpy()).rstrip(b"\0").decode(errors="replace") for each in received)
        return dict(zip(self.ranks, texts, strict=True))

    def _exchange_control(self, sent: torch.Tensor, received: Sequence[torch.Tensor], tag: int) -> None:
        operation = OperationId(self.ranks, self._order_checker.number, self._label, self._id)
        with self.launching(operation):
            self.keep(operation, self.exchange([sent] * self.size, received, tag))
        self.wait(operation)


@dataclass(frozen=True, slots=True)
class Launching:
    """The context of :meth:`GlooConnection.launching`."""

    connection: GlooConnection
    operation: OperationId

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Translate gloo's errors, and close the connection after any other exception.

        Raises:
            PeerError: a rank failed, or is gone.
            DivergenceError: a rank is about to run a different operation.
        """
        if isinstance(error, RuntimeError):
            raise self.connection.translate_error(self.operation, error, 0.0) from error
        if error is not None:  # part of the operation may be in flight
            self.connection._give_up(f"{type(error).__name__} ended the launch of {self.operation}")
