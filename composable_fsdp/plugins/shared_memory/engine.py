"""Run the operations of the ranks of one axis in order: launched without waiting, executed by the thread that waits.

There is no background thread. A rank that waits executes all operations up to the awaited one. Meanwhile it advances
the operations that its thread launched on other axes, so that ranks may wait for several axes in different orders.
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

from composable_fsdp._consistency.rank_report import OperationId, error_summary
from composable_fsdp._consistency.watchdog import PATIENCE, Watchdog
from composable_fsdp.errors import FSDPError, PeerError
from composable_fsdp.plugins.shared_memory.collective import Operation
from composable_fsdp.plugins.shared_memory.peer_errors import Peers
from composable_fsdp.plugins.shared_memory.segment import Blocks, Segment
from composable_fsdp.plugins.shared_memory.shm_socket import NO_BLOCK, Message, ShmSocket, label_in_message

_LAST = 1 << 62


@dataclass(slots=True)
class _Running:
    """A launched operation. Invariant: ``round`` rounds have been delivered."""

    sequence: int
    operation: Operation
    block: int
    own: torch.Tensor | None
    """The memory that this rank stages in or shares."""
    round: int = 0
    memories: list[torch.Tensor | None] = field(default_factory=list)
    """The staging memory by rank. Filled in the first round."""

    def __str__(self) -> str:
        operation = self.operation
        where = f", round {self.round + 1} of {operation.num_rounds}" if operation.num_rounds > 1 else ""
        return f"{operation.label} (operation {self.sequence + 1}, {operation.nbytes} bytes{where})"


@dataclass(frozen=True, slots=True)
class ShmWork:
    """The work of one operation."""

    engine: ShmEngine
    sequence: int

    def wait(self) -> None:
        """Run this rank's operations up to this one.

        Raises:
            PeerError: a rank is gone, or did not answer within the timeout of the process group.
            DivergenceError: ranks launched different operations.
        """
        self.engine.complete(self.sequence)


class ShmEngine:
    """This rank's end of the connection between the ranks of one axis.

    Every rank sends every other one message per round. The message for round r says that the sender has staged round r
    and has read round r - 1. The first message, sent at launch, covers the first two rounds.

    Args:
        rank: this rank's index on the axis.
        shm_socket: the sockets to the other ranks.
        timeout: seconds to wait for another rank.
        peers: the names of the ranks.
        aliases: whether shards may be kept in shared memory.
        watchdog: locates ranks that do not answer.
        name: name of the process group.
    """

    def __init__(
        self,
        rank: int,
        shm_socket: ShmSocket,
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
        self._name, self.generation = name, -1
        self.reopen(shm_socket)
        _engines.add(self)
        _abandon_in_forked_processes()

    def reopen(self, shm_socket: ShmSocket) -> None:
        """Restart over ``shm_socket`` after the connection was given up. All ranks must call it together."""
        self.generation += 1
        self.completed = 0
        """The number of completed operations. Operations complete in order."""
        self.epoch = 0
        """The number of barriers that ended an epoch of shared memory."""
        self.blocks = Blocks()
        self._socket = shm_socket
        self.launched = 0
        self._running: deque[_Running] = deque()
        self._peer_blocks: dict[int, list[torch.Tensor]] = {peer: [] for peer in shm_socket.peers}
        """The staging blocks of each peer."""
        self.broken = ""
        """Why the connection cannot be used any more."""
        self._last_completed = ""
        """The label of the last completed operation."""
        self._wait_reported = False
        """True while the watchdog knows what this rank waits for."""

    def segment(self, nbytes: int) -> Segment:
        """Return new memory to share with the peers."""
        self.check()
        try:
            return Segment(nbytes)
        except OSError as error:
            self.give_up(error, "sharing of memory")
            raise

    def launch(self, operation: Operation) -> ShmWork:
        """Stage the first rounds of ``operation`` and notify the peers. Never waits."""
        self.check()
        running = _Running(self.launched, operation, NO_BLOCK, None)
        self.launched += 1
        try:
            self._begin(running)
        except BaseException as error:
            self.give_up(error, running)
            raise
        self._running.append(running)
        _in_thread.engines.add(self)
        return ShmWork(self, running.sequence)

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
        label = label_in_message(operation.label)
        first = Message(running.sequence, 0, self.completed, operation.nbytes, operation.shape, running.block, label)
        self._socket.broadcast(first, segment)

    def _take_block(self, running: _Running) -> int:
        self.blocks.release(min(self.completed, *self._socket.completed.values()))
        if not self.blocks.free:
            self._socket.receive_all()
            self.blocks.release(min(self.completed, *self._socket.completed.values()))
        return self.blocks.acquire(running.sequence, running.operation.staged_bytes)

    def complete(self, sequence: int) -> None:
        """Run operations until ``sequence`` and all before it are complete."""
        try:
            self._wait(sequence)
        finally:
            if self._wait_reported and self._watchdog is not None:
                self._wait_reported = False
                self._watchdog.end_wait(done=self.completed > sequence)

    def _wait(self, sequence: int) -> None:
        reached, since, patience = None, 0.0, PATIENCE
        while self.completed <= sequence:
            self.check()
            self._advance(sequence)
            if self.completed > sequence:
                return
            if reached != (reached := (self.completed, self._running[0].round)):
                since, patience = time.monotonic(), PATIENCE
            others = [engine for engine in _in_thread.engines if engine is not self]
            for engine in others:
                with suppress(FSDPError):  # raised again to the thread that waits for that operation
                    engine._advance(_LAST)
            left = since + self._timeout - time.monotonic()
            if left <= 0:
                self._time_out()
            if self._timeout - left > patience:
                self._ask_watchdog(self._timeout - left)
                patience += PATIENCE
            _poll_engines([self, *others], min(left, PATIENCE))

    def _advance(self, last: int) -> None:
        """Run operations up to ``last`` as far as possible without waiting."""
        try:
            self._socket.flush()
            while self._running and self._running[0].sequence <= last and self._run(self._running[0]):
                self._last_completed = self._running.popleft().operation.label
                self.completed += 1
        except BaseException as error:
            self.give_up(error)
            raise
        if not self._running and not self._socket.unsent:
            _in_thread.engines.discard(self)

    def _run(self, running: _Running) -> bool:
        """Advance one operation as far as its peers' messages allow. Return ``True`` when it is done."""
        operation, sequence = running.operation, running.sequence
        while running.round < operation.num_rounds:
            round = running.round
            missing = [peer for peer in self._socket.peers if not self._socket.has(peer, sequence, round)]
            if missing:
                self._check_present(running, missing)
                return False
            messages = {peer: self._socket.pop(peer, sequence, round) for peer in self._socket.peers}
            if round == 0:
                running.memories = [self._memory(running, rank, messages.get(rank)) for rank in range(self.size)]
            elif round + 1 < operation.num_rounds:
                assert running.own is not None
                operation.stage(round + 1, running.own)
            operation.deliver(round, running.memories)
            running.round += 1
            if running.round < operation.num_rounds:
                self._socket.broadcast(Message(sequence, running.round, self.completed))
        return True

    def _memory(self, running: _Running, rank: int, message: Message | None) -> torch.Tensor | None:
        """Return the memory in which ``rank`` stages the operation, after checking that it launched the same one."""
        if message is None:
            return running.own
        operation = running.operation
        here, there = (label_in_message(operation.label), operation.nbytes), (message.label, message.nbytes)
        if (here, operation.shape) != (there, message.shape):
            same_label = here[0] == there[0]
            own, other = (f"{label} ({nbytes} bytes)" if same_label else label for label, nbytes in (here, there))
            divided = ", divided into other tensors" if here == there else ""
            raise self._peers.order_error(running.sequence + 1, (self.rank, own), (rank, other + divided))
        if message.block == NO_BLOCK:
            return message.memory
        if message.memory is not None:
            self._peer_blocks[rank].append(message.memory)
        return self._peer_blocks[rank][message.block]

    # -- failures

    def check(self) -> None:
        """Raise a ``PeerError`` if the connection is broken."""
        if self.broken:
            raise PeerError(f"{self._peers} cannot go on together, since {self.broken}")

    def _check_present(self, running: _Running, missing: Sequence[int]) -> None:
        ended = {peer: self._socket.ended[peer] for peer in missing if peer in self._socket.ended}
        if ended:
            first = min(ended, key=lambda peer: ended[peer] != "")  # one that is gone, not one that then gave up
            reason, rank, watchdog, exit_text = ended[first], self._peers.ranks[first], self._watchdog, ""
            if watchdog is not None and not reason and not (reason := watchdog.failure_of(rank)):
                exit_text = watchdog.exit_of(rank)
            raise self._peers.gone_error(first, reason, running, self._last_known(first), exit_text)

    def _last_known(self, peer: int) -> str:
        """Return the label of the last operation that ``peer`` is known to have launched."""
        launched = self._socket.last_label(peer)
        if not launched and self._running and self._running[0].round:
            return self._running[0].operation.label
        return launched or self._last_completed

    def _time_out(self) -> None:
        reports = self._watchdog.collect_reports(self._peers.ranks) if self._watchdog is not None else {}
        known = {peer: self._last_known(peer) for peer in self._missing_peers()}
        error = self._peers.timeout_error(known, self._timeout, self._running[0], reports)
        self.give_up(error)
        raise error

    def _ask_watchdog(self, seconds: float) -> None:
        """Ask where the other ranks are after ``seconds`` of waiting, and give up if they cannot go on."""
        if self._watchdog is None or not self._running:
            return
        connection, first = f"{self._name}/{self.generation}", self._running[0]
        operation = OperationId(tuple(self._peers.ranks), first.sequence + 1, first.operation.label, connection)
        self._wait_reported = True
        self._watchdog.begin_wait(operation, seconds=seconds)
        error = self._watchdog.diagnose_wait(operation)
        if error is not None:
            self._watchdog.give_up(error)
            self.give_up(error)
            raise error

    def _missing_peers(self) -> list[int]:
        """Return the peers whose message for the next round has not been read."""
        if not self._running:
            return []
        running = self._running[0]
        return [peer for peer in self._socket.peers if not self._socket.has_read(peer, running.sequence, running.round)]

    def give_up(self, error: BaseException, failed: object = "") -> None:
        """Close the connection because of ``error``, raised by ``failed`` or else by the oldest operation in flight."""
        self.broken = self.broken or (str(error) if isinstance(error, FSDPError) else error_summary(error))
        if self._watchdog is not None and isinstance(error, PeerError):
            self._watchdog.blame(error.ranks)
        operation = failed or (self._running[0] if self._running else "an operation")
        self._socket.give_up(self._peers.failure_text(self.rank, error, operation))
        self._running.clear()
        _in_thread.engines.discard(self)

    def poll_events(self) -> dict[int, int]:
        """Return the events to poll for, by file descriptor."""
        return {socket.fileno(): events for socket, events in self._socket.poll_events(self._missing_peers())}

    def abandon(self) -> None:
        """Close the sockets silently. A forked child must, because its parent still uses the connection."""
        self.broken = "this process was forked from the one that had the connection."
        self._socket.close()


_engines: weakref.WeakSet[ShmEngine] = weakref.WeakSet()


class _InThread(threading.local):
    """The engines with operations in flight that this thread launched."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[ShmEngine] = weakref.WeakSet()


_in_thread = _InThread()


def _poll_engines(engines: Sequence[ShmEngine], seconds: float) -> None:
    """Wait for up to ``seconds`` until one of ``engines`` can advance."""
    poll = select.poll()
    for engine in engines:
        for descriptor, events in engine.poll_events().items():
            poll.register(descriptor, events)
    poll.poll(min(math.ceil(seconds * 1000), 1 << 30))


def _abandon_all() -> None:
    for engine in list(_engines):
        engine.abandon()


@cache
def _abandon_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_abandon_all)
