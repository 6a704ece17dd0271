"""A line: the connections over gloo between the ranks of one process group, and what these have agreed on.

They are our own, so that a wait that has become hopeless can be ended by closing them, without touching those of the
user. Gloo offers no other way.
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
from composable_fsdp._comm.comm_debug import show
from composable_fsdp._comm.communicator import Transfer, Work
from composable_fsdp._consistency.order_check import OrderCheck, OrderChecker
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._consistency.watchdog import Watchdog
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError

__all__ = ["GlooConnection", "exchange"]

_NUMBER, _TEXT, _CLOSE, _DATA = 0x46534451, 0x46534452, 0x46534453, 0x46540000
"""Tags of our messages: what ranks compare, what they tell when it differs, one that is never sent; and the first of
``_DATA_TAGS`` for data.
"""
_DATA_TAGS = 1 << 16

_TEXT_BYTES = 4096

Backend = Any
"""``dist.ProcessGroupGloo``, of whose methods the type checker knows little.

It is not registered with torch, which would keep it, or give its name, with the old addresses, to the next one.
"""

_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Of the lines over a process group, since what one has in the store stays there."""


class GlooConnection:
    """What the communicators over one process group share on this rank: connections, and what was agreed on. Final.

    Args:
        group: of the user.
        watchdog: of this process; ``None`` has nobody asked.
        level: how much ranks compare before they begin.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog | None, level: OrderCheck) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.ranks = tuple(ranks)
        self.rank, self.size = dist.get_rank(group), len(ranks)
        options = cast(Any, group._get_backend(torch.device("cpu"))).options
        self._timeout: timedelta = options._timeout
        self._watchdog, self._level = watchdog, level
        self._name, self._numbers = group.group_name, _numbers.setdefault(group, count())
        self._closing = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._connection = next(self._numbers)
        self._place_name = f"{self._name}/{self._connection}"
        store = dist.PrefixStore(f"composable_fsdp/line/{self._place_name}", dist.distributed_c10d._get_default_store())
        self.backend: Backend = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        self._order_checker = OrderChecker(self._compare, self._tell, self._level)
        self._broken = ""
        self._kept: dict[OperationId, Sequence[Work]] = {}
        """Works that nobody has waited for, by their operation."""

    def abandon(self) -> None:
        """Ends what is under way: nothing is written to its memory any more. Before :meth:`reopen`."""
        self._give_up("this rank connects anew after a failed pass")
        self._kept.clear()

    def reopen(self) -> None:
        """Begins anew with other connections. All ranks must do so together."""
        self._close()
        self._open()

    @property
    def position(self) -> str:
        """Where this rank is in the sequence of operations; the same on all ranks that are about to do the same."""
        return "broken" if self._broken else str(self._order_checker.number)

    @property
    def compared(self) -> int:
        """Operations before which ranks have compared what they are about to do."""
        return self._order_checker.compared

    def compare(self, level: OrderCheck) -> None:
        """How much is compared from now on. The same on every rank."""
        self._level = self._order_checker.level = level

    def begin(self, label: str, transfers: Sequence[Transfer]) -> OperationId:
        """The next operation, once all ranks are about to do it.

        Raises:
            DivergenceError: some are not.
            PeerError: some are gone, or an earlier operation has failed.
        """
        if self._broken:
            raise PeerError(f"ranks {list(self.ranks)} cannot go on together, since {self._broken}")
        sizes = tuple(transfer.input.numel() * transfer.input.itemsize for transfer in transfers)
        self._label = label
        place = OperationId(self.ranks, self._order_checker.number + 1, label, self._place_name)
        show(label)
        if trace.listeners:
            trace.emit(trace.Operation.COLLECTIVE, label, sum(sizes), position=self._position_of(place))
        try:
            self._order_checker.begin(
                f"{label} ({sum(sizes)} bytes in {len(sizes)} tensors, {hash(sizes) & 0xFFFF:04x})"
            )
        except DivergenceError as error:
            trace.tell_fault(error, str(place), self._position_of(place))
            raise
        return place

    def _position_of(self, place: OperationId) -> trace.Position:
        return trace.Position(self._name, self.ranks, self._connection, place.number)

    def wait(self, place: OperationId, works: Sequence[Work]) -> None:
        """Waits in gloo: turns its errors into ours, and is ended when it has become hopeless.

        Raises:
            PeerError: a rank failed, is gone, or did not come within the timeout of the process group.
            DivergenceError: a rank is about to do something else.
        """
        begin = time.monotonic()
        if self._watchdog is not None:
            self._watchdog.begin_wait(place, self._give_up)
        done = False
        try:
            for work in works:
                work.wait()
            done = True
        except RuntimeError as error:
            raise self.explained(place, error, time.monotonic() - begin) from error
        except BaseException as error:
            self._give_up(f"the wait for {place} was ended by {type(error).__name__}")
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.end_wait(done=done)

    def tag(self, place: OperationId) -> int:
        """Of the messages of the operation ``place``, so that none is taken for another's."""
        return _DATA + place.number % _DATA_TAGS

    def keep(self, place: OperationId, works: Sequence[Work]) -> None:
        """Takes over ``works`` of the operation ``place`` until they are done."""
        self._kept[place] = works

    def wait_for(self, place: OperationId) -> None:
        """As :meth:`wait`, for what is kept of ``place``. Once.

        Raises:
            PeerError: also where the line is broken or has begun anew: gloo would wait for the whole timeout.
        """
        if self._broken:
            raise PeerError(f"{place} cannot be done, since {self._broken}")
        works = self._kept.get(place)
        if works is None:
            raise PeerError(f"{place} was given up when the ranks connected anew. Begin the step again.")
        self.wait(place, works)
        del self._kept[place]

    def launching(self, place: OperationId) -> Launching:
        """A context for what tells gloo to begin ``place``, which may find that a rank has closed its connection."""
        return Launching(self, place)

    def explained(self, place: OperationId, error: RuntimeError, seconds: float) -> FSDPError:
        """What to raise where gloo has failed after ``seconds`` of waiting. The line is of no use any more."""
        watchdog, found = self._watchdog, None
        if watchdog is not None:
            timed_out = seconds >= self._timeout.total_seconds()
            found = watchdog.find(place, f"After {seconds:.1f} s gloo says: {error}", timed_out=timed_out)
        if found is None:
            found = PeerError(
                f"{place} failed after {seconds:.1f} s of waiting: a rank is gone, or did not answer within the "
                f"timeout of the process group. Look at the output of each for the first error. Gloo says: {error}"
            )
        self._give_up(str(found).split("\n", 1)[0])
        trace.tell_fault(found, str(place), self._position_of(place))
        return found

    def _give_up(self, reason: str) -> None:
        """Ends all waits on this line for good: gloo closes a connection on which a wait has timed out.

        Invariant: a line that says it is broken is closed, so that gloo writes to none of its memory any more. Whoever
        finds it broken may free that memory, while another thread may still be closing it.
        """
        with self._closing:
            self._close()
            self._broken = self._broken or reason

    def _close(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.backend.recv([torch.empty(1)], peer, _CLOSE).wait(timedelta(milliseconds=1))

    def _compare(self, own: int) -> list[int]:
        sent = torch.tensor([own])
        received = torch.empty(self.size, dtype=torch.int64)
        self._swap(sent, list(received.split(1)), _NUMBER)
        received[self.rank] = own
        return cast(list[int], received.tolist())

    def _tell(self, own: str) -> dict[int, str]:
        text = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._swap(sent, received, _TEXT)
        received[self.rank] = sent
        texts = (bytes(each.numpy()).rstrip(b"\0").decode(errors="replace") for each in received)
        return dict(zip(self.ranks, texts, strict=True))

    def _swap(self, sent: torch.Tensor, received: Sequence[torch.Tensor], tag: int) -> None:
        place = OperationId(self.ranks, self._order_checker.number, self._label, self._place_name)
        with self.launching(place):
            works = exchange(self.backend, self.rank, [sent] * self.size, received, tag)
        self.wait(place, works)


@dataclass(frozen=True, slots=True)
class Launching:
    """While gloo is told to begin an operation; its errors become ours."""

    connection: GlooConnection
    place: OperationId

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """
        Raises:
            PeerError: a rank failed, or is gone.
            DivergenceError: a rank is about to do something else.
        """
        if isinstance(error, RuntimeError):
            raise self.connection.explained(self.place, error, 0.0) from error
        if error is not None:  # part of the operation may be under way
            self.connection._give_up(f"{type(error).__name__} ended the launch of {self.place}")


def exchange(
    backend: Backend, rank: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int
) -> list[Work]:
    """Each rank's part, straight from where it lies to its place; peers in turn, so that none is everyone's first."""
    size = len(sent)
    works: list[Work] = []
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        works.append(backend.recv([received[source]], source, tag))
        works.append(backend.send([sent[target]], target, tag))
    return works
