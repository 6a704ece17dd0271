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
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

import torch

from composable_fsdp._consistency.rank_report import OperationId, error_summary, format_ranks, order_text
from composable_fsdp._consistency.watchdog import PATIENCE, Watchdog
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError
from composable_fsdp.plugins.shared_memory.collective import Barrier, Operation
from composable_fsdp.plugins.shared_memory.segment import NUM_SLOTS, SLOT_BYTES, Segment
from composable_fsdp.plugins.shared_memory.shm_socket import PROGRESS_ONLY, ShmSocket

_LAST = 1 << 62

_STEPS_AHEAD = 2
"""The steps of a long operation that are staged at a time, so that they stay in the cache."""


@dataclass(slots=True)
class _Step:
    """One round of the operation ``number``, to be staged in ``slot``."""

    operation: Operation
    number: int
    round: int
    slot: int = -1


@dataclass(frozen=True, slots=True)
class ShmWork:
    """The work of one operation."""

    engine: ShmEngine
    number: int

    def wait(self) -> None:
        """Run this rank's operations up to this one.

        Raises:
            PeerError: a rank is gone, or did not answer within the timeout of the process group.
            DivergenceError: ranks launched different operations.
        """
        self.engine.complete(self.number)


class ShmEngine:
    """This rank's end of the connection between the ranks of one axis.

    The rounds of all operations, in order, are *steps*. Every rank tells every other one that it has staged a step, in
    which of its slots, and how many steps it has completed. A slot is free again once all ranks have completed its
    step. A rank without a free slot stages later, and tells the others what it has completed meanwhile: they may wait
    for that to stage theirs.

    Args:
        rank: this rank's index on the axis.
        ranks: the global ranks of the axis.
        shm_socket: the sockets to the other ranks.
        staging: this rank's slots.
        timeout: seconds to wait for another rank.
        aliases: whether shards may be kept in shared memory.
        watchdog: locates ranks that do not answer.
        name: name of the process group.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        shm_socket: ShmSocket,
        staging: Segment,
        timeout: float,
        *,
        aliases: bool = True,
        watchdog: Watchdog | None = None,
        name: str = "",
    ) -> None:
        self.aliases = aliases
        self.rank, self.ranks, self.size = rank, tuple(ranks), len(ranks)
        self._timeout, self._watchdog = timeout, watchdog
        self._name, self.generation = name, -1
        self.reopen(shm_socket, staging)
        _engines.add(self)
        _abandon_in_forked_processes()

    def reopen(self, shm_socket: ShmSocket, staging: Segment) -> None:
        """Restart over ``shm_socket`` after the connection was given up. All ranks must call it together."""
        self.generation += 1
        self.epoch = 0
        """The number of barriers that ended an epoch of shared memory."""
        self.broken = ""
        """Why the connection cannot be used any more."""
        self._socket = shm_socket
        self.launched = self.completed = -1
        """The numbers of the last operations. They complete in order. Operation 0 shares the slots."""
        self._unstaged, self._staged = deque[_Step](), deque[_Step]()
        self._num_staged = self._done = self._told = 0
        """The numbers of steps: staged, completed, and completed as far as the peers were told."""
        self._slots: list[Sequence[torch.Tensor]] = [()] * self.size
        self._slots[self.rank] = staging.memory.split(SLOT_BYTES)
        self._free = list(range(NUM_SLOTS))
        """A heap: low slots first."""
        self._in_use: deque[tuple[int, int]] = deque()
        """The staged steps that some rank has not completed, by number, and their slots."""
        self._last_completed = "connecting"
        """The label of the last completed operation."""
        self._wait_reported = False
        """True while the watchdog knows what this rank waits for."""
        self.launch(Barrier("connecting", segment=staging))

    def launch(self, operation: Operation) -> ShmWork:
        """Stage the first rounds of ``operation`` and notify the peers. Never waits."""
        self.check()
        self.launched += 1
        self._unstaged += [_Step(operation, self.launched, round) for round in range(len(operation.rounds))]
        try:
            self._stage()
        except BaseException as error:
            self.give_up(error, operation.label)
            raise
        _in_thread.engines.add(self)
        return ShmWork(self, self.launched)

    def _stage(self) -> None:
        """Stage steps as far as slots are free."""
        self._free_slots()
        while self._unstaged and (self._unstaged[0].round < _STEPS_AHEAD or len(self._staged) < _STEPS_AHEAD):
            if not self._free:
                self._socket.receive_all()
                self._free_slots()
            if not self._free:
                if self._told < self._done:
                    self._told = self._done
                    self._socket.broadcast(self._done, PROGRESS_ONLY)
                if not self._staged:
                    first = self._in_use[0][0]
                    self._check_present([peer for peer, done in self._socket.completed.items() if done <= first])
                return
            step = self._unstaged.popleft()
            step.slot = heappop(self._free)
            self._in_use.append((self._num_staged, step.slot))
            step.operation.stage(step.round, self._slots[self.rank][step.slot])
            self._num_staged, self._told = self._num_staged + 1, self._done
            self._staged.append(step)
            self._socket.broadcast(self._done, step.slot, step.operation.about, step.operation.segment)

    def _free_slots(self) -> None:
        done = min(self._done, *self._socket.completed.values())
        while self._in_use and self._in_use[0][0] < done:
            heappush(self._free, self._in_use.popleft()[1])

    def complete(self, number: int) -> None:
        """Run operations until ``number`` and all before it are complete."""
        try:
            self._wait(number)
        finally:
            if self._wait_reported and self._watchdog is not None:
                self._wait_reported = False
                self._watchdog.end_wait(done=self.completed >= number)

    def _wait(self, number: int) -> None:
        reached, since, patience = -1, 0.0, PATIENCE
        while self.completed < number:
            self.check()
            self._advance(number)
            if self.completed >= number:
                return
            if reached != self._done:
                reached, since, patience = self._done, time.monotonic(), PATIENCE
            others = [engine for engine in _in_thread.engines if engine is not self]
            for engine in others:
                with suppress(FSDPError):  # raised again to the thread that waits for that operation
                    engine._advance(_LAST)
            left = since + self._timeout - time.monotonic()
            if left <= 0:
                missing = [self.ranks[peer] for peer in self._socket.peers if not self._socket.inbox[peer]]
                error = self._failure(missing, "and did not go on in the timeout", self._timeout)
                self.give_up(error)
                raise error
            if self._timeout - left > patience:
                self._ask_watchdog(self._timeout - left)
                patience += PATIENCE
            _poll_engines([self, *others], min(left, PATIENCE))

    def _advance(self, last: int) -> None:
        """Run operations up to ``last`` as far as possible without waiting."""
        try:
            if self._unstaged:
                self._stage()
            while self._staged and self._staged[0].number <= last and self._deliver(self._staged[0]):
                step = self._staged.popleft()
                self._done += 1
                if step.round + 1 == len(step.operation.rounds):
                    self.completed, self._last_completed = step.number, step.operation.label
                if self._unstaged:
                    self._stage()
        except BaseException as error:
            self.give_up(error)
            raise
        if not self._staged and not self._unstaged:
            _in_thread.engines.discard(self)

    def _deliver(self, step: _Step) -> bool:
        """Use what all ranks staged for ``step``, if their messages are here. Return whether they are."""
        operation, socket = step.operation, self._socket
        missing = [peer for peer in socket.peers if not socket.has(peer)]
        if missing:
            self._check_present(missing)
            return False
        memories = []
        for rank in range(self.size):
            if rank == self.rank:
                shared = None if operation.segment is None else operation.segment.memory
                memories.append(self._slots[rank][step.slot] if shared is None else shared)
                continue
            slot, about, memory = socket.inbox[rank].popleft()
            if about != operation.about:
                texts = {self.rank: operation.about, rank: about}
                where = f", as operation {step.number} of ranks {list(self.ranks)}"
                raise DivergenceError(
                    order_text({self.ranks[r]: t.decode(errors="replace") + where for r, t in texts.items()})
                )
            if step.number == 0 and memory is not None:
                self._slots[rank] = memory.split(SLOT_BYTES)
            memories.append(self._slots[rank][slot] if memory is None else memory)
        operation.deliver(step.round, memories)
        return True

    # -- failures

    def check(self) -> None:
        """Raise a ``PeerError`` if the connection is broken."""
        if self.broken:
            raise PeerError(f"ranks {list(self.ranks)} cannot go on together, since {self.broken}")

    @property
    def _current(self) -> OperationId | None:
        """The oldest operation in flight."""
        for step in (*self._staged, *self._unstaged):
            return OperationId(self.ranks, step.number, step.operation.label, f"{self._name}/{self.generation}")
        return None

    def _check_present(self, missing: Sequence[int]) -> None:
        ended = {peer: self._socket.ended[peer] for peer in missing if peer in self._socket.ended}
        gone = [self.ranks[peer] for peer, reason in ended.items() if not reason]
        if gone:
            raise self._failure(
                gone[:1], "and closed its connection: the process has ended, or dropped the process group"
            )
        for peer, reason in ended.items():
            end = "" if reason.endswith(".") else "."
            raise PeerError(f"{self._current} cannot be done: {reason}{end}", [self.ranks[peer]])

    def _failure(self, missing: Sequence[int], how: str, seconds: float = 0.0) -> FSDPError:
        """Return why the oldest operation in flight fails, after asking the watchdog where the other ranks are.

        Args:
            missing: the ranks whose messages are missing.
            how: what they did, the end of a sentence.
            seconds: the timeout, if it is over.
        """
        current = self._current
        assert current is not None, "only a wait fails"
        lost, found = f"{format_ranks(missing)} last took part in {self._last_completed}, {how}.", None
        if self._watchdog is not None:
            self._watchdog.begin_wait(current, seconds=seconds)
            found = self._watchdog.diagnose_failure(current, lost, timed_out=seconds > 0)
            self._watchdog.end_wait(done=False)
        return found or PeerError(f"{current} cannot be done: {lost}", missing)

    def _ask_watchdog(self, seconds: float) -> None:
        """Ask where the other ranks are after ``seconds`` of waiting, and give up if they cannot go on."""
        current = self._current
        if self._watchdog is None or current is None:
            return
        self._wait_reported = True
        self._watchdog.begin_wait(current, seconds=seconds)
        error = self._watchdog.diagnose_wait(current)
        if error is not None:
            self._watchdog.give_up(error)
            self.give_up(error)
            raise error

    def give_up(self, error: BaseException, failed: str = "") -> None:
        """Close the connection because of ``error``, raised by ``failed`` or else by the oldest operation in flight."""
        is_ours = isinstance(error, FSDPError)
        self.broken = self.broken or (str(error) if is_ours else error_summary(error))
        where = failed or self._current or "an operation"
        said = f"gave up: {error}" if is_ours else f"raised {error_summary(error)} in {where}"
        self._socket.give_up(f"rank {self.ranks[self.rank]} {said}")
        self._unstaged.clear()
        self._staged.clear()
        _in_thread.engines.discard(self)

    def descriptors(self) -> list[int]:
        """Return the file descriptors from which messages are awaited."""
        return self._socket.descriptors(of_missing=bool(self._staged))

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
        for descriptor in engine.descriptors():
            poll.register(descriptor, select.POLLIN)
    poll.poll(min(math.ceil(seconds * 1000), 1 << 30))


def _abandon_all() -> None:
    for engine in list(_engines):
        engine.abandon()


@cache
def _abandon_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_abandon_all)
