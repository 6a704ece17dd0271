"""The sequence of operations of the ranks of one axis: launched without waiting, done by whoever waits.

There is no thread. A rank that waits takes part in all operations up to the one that it waits for, and meanwhile in
those that its thread launched on other axes, so that ranks may wait for operations of several axes in other orders.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import torch

from composable_fsdp import trace
from composable_fsdp._comm.comm_debug import show
from composable_fsdp._comm.shm.collective import Operation
from composable_fsdp._comm.shm.peer_errors import Peers
from composable_fsdp._comm.shm.segment import Blocks, Segment
from composable_fsdp._comm.shm.shm_socket import NO_BLOCK, Message, ShmSocket
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._consistency.running_pass import said_of
from composable_fsdp._consistency.watchdog import PATIENCE, Watchdog
from composable_fsdp.errors import FSDPError

__all__ = ["Launched", "ShmEngine"]

_LAST = 1 << 62


@dataclass(slots=True)
class _Running:
    """An operation that was launched. Invariant: ``round`` rounds have been delivered."""

    sequence: int
    operation: Operation
    block: int
    own: torch.Tensor | None
    """What this rank stages in, or shows."""
    round: int = 0
    memories: list[torch.Tensor | None] = field(default_factory=list)
    """By rank, known since the first round."""

    def __str__(self) -> str:
        operation = self.operation
        where = f", round {self.round + 1} of {operation.num_rounds}" if operation.num_rounds > 1 else ""
        return f"{operation.label} (operation {self.sequence}, {operation.nbytes} bytes{where})"


@dataclass(frozen=True, slots=True)
class Launched:
    """The work of one operation."""

    engine: ShmEngine
    sequence: int

    def wait(self) -> None:
        """
        Raises:
            PeerError: a rank is gone, or did not answer within the timeout of the process group.
            DivergenceError: ranks launched different operations.
        """
        self.engine.complete(self.sequence)


class ShmEngine:
    """This rank's end. Final.

    Every rank sends every other one message per round. That for round r says that the sender's part of round r is
    staged and that it has read round r - 1; the first one, sent at launch, covers the first two rounds.

    Args:
        rank: this rank's place on the axis.
        wire: to the other ranks.
        timeout: seconds for which a rank waits for another.
        peers: how to call the ranks.
        aliases: whether shards may lie in memory that ranks have in common.
        watchdog: tells where ranks are that do not come.
        name: of the process group.
    """

    def __init__(
        self,
        rank: int,
        wire: ShmSocket,
        timeout: float,
        peers: Peers,
        *,
        aliases: bool = True,
        watchdog: Watchdog | None = None,
        name: str = "",
    ) -> None:
        self.aliases = aliases
        self.rank, self.size = rank, len(peers.ranks)
        self._timeout, self._peers, self._watchdog = timeout, peers, watchdog
        self._name, self._connection = name, -1
        self.reopen(wire)
        _engines.add(self)
        _abandon_in_forked_processes()

    def reopen(self, wire: ShmSocket) -> None:
        """Begins anew over ``wire``, after the one before was given up. All ranks must do so together."""
        self._connection += 1
        self.completed = 0
        """Operations that are done, which are the first ones."""
        self.partings = 0
        """Barriers at which no rank read what others wrote, as its communicators count them."""
        self.blocks = Blocks()
        self._wire = wire
        self._launched = 0
        self._running: deque[_Running] = deque()
        self._seen: dict[int, list[torch.Tensor]] = {peer: [] for peer in wire.peers}
        """By peer, its blocks."""
        self._broken = ""
        self._last_done = ""
        """The operation that was completed last."""
        self._looks = False
        """Whether it has told the watch what it waits for."""

    @property
    def position(self) -> str:
        """Where this rank is in the sequence of operations; the same on all ranks that are about to do the same."""
        return "broken" if self._broken else str(self._launched)

    def segment(self, nbytes: int) -> Segment:
        """Memory to show to the peers."""
        self._check_working()
        try:
            return Segment(nbytes)
        except OSError as error:
            self._give_up(error, "sharing of memory")
            raise

    def launch(self, operation: Operation) -> Launched:
        """Stages the first rounds and tells the peers. Never waits."""
        self._check_working()
        running = _Running(self._launched, operation, NO_BLOCK, None)
        self._launched += 1
        show(operation.label)
        if trace.listeners:
            position = self._position(running.sequence)
            trace.emit(trace.Operation.COLLECTIVE, operation.label, operation.nbytes, position=position)
        try:
            self._begin(running)
        except BaseException as error:
            self._give_up(error, running)
            raise
        self._running.append(running)
        _mine().add(self)
        return Launched(self, running.sequence)

    def _begin(self, running: _Running) -> None:
        operation, segment = running.operation, running.operation.segment
        if segment is not None:
            running.own = segment.memory
        elif operation.staged_bytes:
            known = len(self.blocks.segments)
            running.block = self._take_block(running)
            block = self.blocks.segments[running.block]
            segment = block if running.block >= known else None
            running.own = block.memory
            for round in range(min(2, operation.num_rounds)):
                operation.stage(round, block.memory)
        first = Message(
            running.sequence, 0, self.completed, operation.nbytes, operation.shape, running.block, operation.label
        )
        self._wire.broadcast(first, segment)

    def _take_block(self, running: _Running) -> int:
        self.blocks.release(min(self.completed, *self._wire.completed.values()))
        if not self.blocks.has_free:
            self._wire.receive_all()
            self.blocks.release(min(self.completed, *self._wire.completed.values()))
        return self.blocks.take(running.sequence, running.operation.staged_bytes)

    def complete(self, sequence: int) -> None:
        """Returns when the operation ``sequence`` and all before it are done."""
        try:
            self._wait(sequence)
        finally:
            if self._looks and self._watchdog is not None:
                self._looks = False
                self._watchdog.end_wait(done=self.completed > sequence)

    def _wait(self, sequence: int) -> None:
        reached, since, patience = None, 0.0, PATIENCE
        while self.completed <= sequence:
            self._check_working()
            self._advance(sequence)
            if self.completed > sequence:
                return
            if reached != (reached := (self.completed, self._running[0].round)):
                since, patience = time.monotonic(), PATIENCE
            others = [engine for engine in _mine() if engine is not self]
            for engine in others:
                with suppress(FSDPError):  # which whoever waits for that operation gets
                    engine._advance(_LAST)
            left = since + self._timeout - time.monotonic()
            if left <= 0:
                self._time_out()
            if self._timeout - left > patience:
                self._look(self._timeout - left)
                patience += PATIENCE
            _sleep([self, *others], min(left, PATIENCE))

    def _advance(self, last: int) -> None:
        """Does what can be done without waiting, of the operations up to ``last``."""
        try:
            self._wire.flush()
            while self._running and self._running[0].sequence <= last and self._run(self._running[0]):
                self._last_done = self._running.popleft().operation.label
                self.completed += 1
        except BaseException as error:
            self._give_up(error)
            raise
        if not self._running and not self._wire.has_unsent:
            _mine().discard(self)

    def _run(self, running: _Running) -> bool:
        """Goes on with an operation, as far as all peers have come. True when it is done."""
        operation, sequence = running.operation, running.sequence
        while running.round < operation.num_rounds:
            round = running.round
            missing = [peer for peer in self._wire.peers if not self._wire.has(peer, sequence, round)]
            if missing:
                self._check_present(running, missing)
                return False
            messages = {peer: self._wire.pop(peer, sequence, round) for peer in self._wire.peers}
            if round == 0:
                running.memories = [self._memory(running, rank, messages.get(rank)) for rank in range(self.size)]
            elif round + 1 < operation.num_rounds:
                assert running.own is not None
                operation.stage(round + 1, running.own)
            operation.deliver(round, running.memories)
            running.round += 1
            if running.round < operation.num_rounds:
                self._wire.broadcast(Message(sequence, running.round, self.completed))
        return True

    def _memory(self, running: _Running, rank: int, message: Message | None) -> torch.Tensor | None:
        """Where ``rank`` stages for the operation."""
        if message is None:
            return running.own
        operation = running.operation
        here, there = (operation.label, operation.nbytes), (message.label, message.nbytes)
        if (here, operation.shape) != (there, message.shape):
            alike = here[0] == there[0]
            own, other = (f"{label} ({nbytes} bytes)" if alike else label for label, nbytes in (here, there))
            divided = ", divided into other tensors" if here == there else ""
            raise self._peers.diverged(running.sequence, (self.rank, own), (rank, other + divided))
        if message.block == NO_BLOCK:
            return message.memory
        if message.memory is not None:
            self._seen[rank].append(message.memory)
        return self._seen[rank][message.block]

    # -- what can go wrong

    def _check_working(self) -> None:
        if self._broken:
            raise self._peers.stopped(self._broken)

    def _check_present(self, running: _Running, missing: Sequence[int]) -> None:
        ended = {peer: self._wire.ended[peer] for peer in missing if peer in self._wire.ended}
        if ended:
            first = min(ended, key=lambda peer: ended[peer] != "")  # one that is gone, not one that gave up for that
            told = self._watchdog.failure_of(self._peers.ranks[first]) if self._watchdog is not None else ""
            raise self._peers.gone(first, ended[first] or told, running, self._last_known(first))

    def _last_known(self, peer: int) -> str:
        """The last operation that ``peer`` has launched, as far as this rank has read."""
        launched = self._wire.last_label(peer)
        if not launched and self._running and self._running[0].round:
            return self._running[0].operation.label
        return launched or self._last_done

    def _time_out(self) -> None:
        reports = self._watchdog.collect_reports(self._peers.ranks) if self._watchdog is not None else {}
        known = {peer: self._last_known(peer) for peer in self._silent()}
        error = self._peers.silent(known, self._timeout, self._running[0], reports)
        self._give_up(error)
        raise error

    def _look(self, seconds: float) -> None:
        """Asks where the others are after ``seconds`` of waiting, and gives up if they will not come."""
        if self._watchdog is None or not self._running:
            return
        line, first = f"{self._name}/{self._connection}", self._running[0]
        place = OperationId(tuple(self._peers.ranks), first.sequence, first.operation.label, line)
        self._looks = True
        self._watchdog.begin_wait(place, seconds=seconds)
        error = self._watchdog.look(place)
        if error is not None:
            self._watchdog.give_up(error)
            self._give_up(error)
            raise error

    def _silent(self) -> list[int]:
        """The peers that the next round waits for, as far as read."""
        if not self._running:
            return []
        running = self._running[0]
        return [peer for peer in self._wire.peers if not self._wire.has_read(peer, running.sequence, running.round)]

    def _give_up(self, error: BaseException, failed: object = "") -> None:
        """``error`` ends the connection. ``failed`` is what raised it, if not the first operation under way."""
        self._broken = self._broken or (str(error) if isinstance(error, FSDPError) else said_of(error))
        operation = failed or (self._running[0] if self._running else "an operation")
        self._wire.give_up(self._peers.farewell(self.rank, error, operation))
        place, position = self._place_of_next(), self._position(self.completed)
        self._running.clear()
        _mine().discard(self)
        trace.tell_fault(error, place, position)

    def _place_of_next(self) -> str:
        """What is under way, in words."""
        return f"{self._running[0]} over {self._peers}" if self._running else f"an operation over {self._peers}"

    def _position(self, sequence: int) -> trace.Position:
        return trace.Position(self._name, tuple(self._peers.ranks), self._connection, sequence)

    def awaited(self) -> dict[int, int]:
        """What to poll for until there is something to do: events by file descriptor."""
        return {socket.fileno(): events for socket, events in self._wire.awaited(self._silent())}

    def abandon(self) -> None:
        """Lets go of the sockets without a word, as a forked process must: they are its parent's."""
        self._broken = "this process was forked from the one that had the connection."
        self._wire.close()


_engines: weakref.WeakSet[ShmEngine] = weakref.WeakSet()
_in_thread = threading.local()


def _mine() -> weakref.WeakSet[ShmEngine]:
    """Those with operations under way that this thread launched."""
    if not hasattr(_in_thread, "engines"):
        _in_thread.engines = weakref.WeakSet()
    engines: weakref.WeakSet[ShmEngine] = _in_thread.engines
    return engines


def _sleep(engines: Sequence[ShmEngine], seconds: float) -> None:
    """Until one of ``engines`` has something to do."""
    poll = select.poll()
    for engine in engines:
        for descriptor, events in engine.awaited().items():
            poll.register(descriptor, events)
    poll.poll(min(math.ceil(seconds * 1000), 1 << 30))


def _abandon_all() -> None:
    for engine in list(_engines):
        engine.abandon()


@cache
def _abandon_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_abandon_all)
