"""The transport in memory that the ranks of one host share.

Operations run in order: launched without waiting, executed by the thread that waits. There is no background thread. A
rank that waits executes all operations up to the awaited one. Meanwhile it advances the operations that its thread
launched on other axes, so that ranks may wait for several axes in different orders.
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
import torch.distributed as dist

from composable_fsdp._consistency.process_groups import timeout_of
from composable_fsdp._consistency.rank_report import OperationId, error_summary, format_ranks, order_text
from composable_fsdp._consistency.watchdog import PATIENCE, job_watchdog
from composable_fsdp._core.comm import (
    DONE,
    SUM,
    Collective,
    GroupCommunicator,
    OverGroup,
    Traits,
    Transfer,
    has_own_transports,
)
from composable_fsdp._core.layout import ReduceOp
from composable_fsdp._core.memory import Work
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError, UnsupportedError
from composable_fsdp.plugins.shared_memory.collective import Barrier, Operation, StagedCollective
from composable_fsdp.plugins.shared_memory.connect import Connection, connect
from composable_fsdp.plugins.shared_memory.segment import NUM_SLOTS, SLOT_BYTES, Segment
from composable_fsdp.plugins.shared_memory.shm_socket import PROGRESS_ONLY

_ZERO_COPY_BYTES = 1 << 18
"""Zero-copy and copied-in transfers cost the same at this size (2 and 4 ranks, ``benchmarks/collectives.py``)."""

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

    communicator: SharedMemoryCommunicator
    number: int

    def wait(self) -> None:
        """Run this rank's operations up to this one.

        Raises:
            PeerError: a rank is gone, or did not answer within the timeout of the process group.
            DivergenceError: ranks launched different operations.
        """
        self.communicator.complete(self.number)


def in_shared_memory(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator | None:
    """Return a communicator for CPU tensors over gloo if all ranks are on one host, and the user has not refused."""
    connection = connect(group) if has_own_transports(group, device_type) else None
    return None if connection is None else SharedMemoryCommunicator(group, connection)


class SharedMemoryCommunicator(OverGroup):
    """Collectives of CPU tensors between ranks on one host.

    Sums are accumulated in fp32 and in rank order and are bitwise identical to those over gloo. Waiting for an
    operation also completes those launched before it.

    The rounds of all operations, in order, are *steps*. Every rank tells every other one that it has staged a step, in
    which of its slots, and how many steps it has completed. A slot is free again once all ranks have completed its
    step. A rank without a free slot stages later, and tells the others what it has completed meanwhile: they may wait
    for that to stage theirs.
    """

    def __init__(self, group: dist.ProcessGroup, connection: Connection) -> None:
        super().__init__(group)
        self.traits = Traits(
            widens=True, aliases=connection.aliases, coalesces=True, checks=True, zero_copy_min_bytes=_ZERO_COPY_BYTES
        )
        self._timeout, self._watchdog = timeout_of(group), job_watchdog()
        self.generation = -1
        self._open(connection)
        _open.add(self)
        _abandon_in_forked_processes()

    def _open(self, connection: Connection) -> None:
        self.generation += 1
        self.epoch = 0
        """The number of barriers that ended an epoch of shared memory."""
        self.broken = ""
        """Why the connection cannot be used any more."""
        self._socket, staging = connection.shm_socket, connection.staging
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
        self._launch(Barrier("connecting", segment=staging))

    def reopen(self) -> None:
        self._slots = []  # their address space is free for those of the new connection
        connection = connect(self.group)
        if connection is None:
            raise PeerError(f"ranks {list(self.ranks)} shared memory before, and cannot connect to each other again.")
        self._open(connection)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        if op is not ReduceOp.SUM:
            raise UnsupportedError("a communicator in shared memory does not average: look at its traits, or divide.")
        label = label or kind.label
        if kind is Collective.BARRIER:
            return self._launch(Barrier(label))
        if not transfers:
            return DONE
        return self._launch(StagedCollective(kind, self.rank, self.size, transfers, label))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def share(self, nbytes: int) -> torch.Tensor:
        """Return zeros that all ranks share. Pages take memory once written, until no rank has a view of the tensor.

        Raises:
            OSError: no such memory is available. The other ranks raise ``PeerError``.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            segment = Segment(nbytes) if self.rank == 0 else None
        except OSError as error:
            self._give_up(error, "sharing of memory")
            raise
        barrier = Barrier("sharing of memory", nbytes, segment)
        self._launch(barrier).wait()
        return barrier.memories[0]

    def end_epoch(self) -> None:
        """Count a barrier that ends an epoch of shared memory."""
        self.epoch += 1

    def _launch(self, operation: Operation) -> ShmWork:
        """Stage the first rounds of ``operation`` and notify the peers. Never waits."""
        self.check()
        self.launched += 1
        self._unstaged += [_Step(operation, self.launched, round) for round in range(len(operation.rounds))]
        try:
            self._stage()
        except BaseException as error:
            self._give_up(error, operation.label)
            raise
        _in_thread.communicators.add(self)
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
            others = [each for each in _in_thread.communicators if each is not self]
            for each in others:
                with suppress(FSDPError):  # raised again to the thread that waits for that operation
                    each._advance(_LAST)
            left = since + self._timeout - time.monotonic()
            if left <= 0:
                missing = [self.ranks[peer] for peer in self._socket.peers if not self._socket.inbox[peer]]
                error = self._failure(missing, "and did not go on in the timeout", self._timeout)
                self._give_up(error)
                raise error
            if self._timeout - left > patience:
                self._ask_watchdog(self._timeout - left)
                patience += PATIENCE
            _poll([self, *others], min(left, PATIENCE))

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
            self._give_up(error)
            raise
        if not self._staged and not self._unstaged:
            _in_thread.communicators.discard(self)

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

    @property
    def is_broken(self) -> bool:
        return bool(self.broken)

    def check(self) -> None:
        """Raise a ``PeerError`` if the connection is broken."""
        if self.broken:
            raise PeerError(f"ranks {list(self.ranks)} cannot go on together, since {self.broken}")

    @property
    def _current(self) -> OperationId | None:
        """The oldest operation in flight."""
        for step in (*self._staged, *self._unstaged):
            return OperationId(self.ranks, step.number, step.operation.label, f"{self.name}/{self.generation}")
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
            self._give_up(error)
            raise error

    def give_up(self, reason: str) -> None:
        self._give_up(PeerError(reason))

    def _give_up(self, error: BaseException, failed: str = "") -> None:
        """Close the connection because of ``error``, raised by ``failed`` or else by the oldest operation in flight."""
        is_ours = isinstance(error, FSDPError)
        self.broken = self.broken or (str(error) if is_ours else error_summary(error))
        where = failed or self._current or "an operation"
        said = f"gave up: {error}" if is_ours else f"raised {error_summary(error)} in {where}"
        self._socket.give_up(f"rank {self.ranks[self.rank]} {said}")
        self._unstaged.clear()
        self._staged.clear()
        _in_thread.communicators.discard(self)

    def descriptors(self) -> list[int]:
        """Return the file descriptors from which messages are awaited."""
        return self._socket.descriptors(of_missing=bool(self._staged))

    def abandon(self) -> None:
        """Do nothing: only this rank writes to its memory, so work in flight need not be aborted."""

    def leave_to_parent(self) -> None:
        """Close the sockets silently. A forked child must, because its parent still uses the connection."""
        self.broken = "this process was forked from the one that had the connection."
        self._socket.close()


_open: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


class _InThread(threading.local):
    """The communicators with operations in flight that this thread launched."""

    def __init__(self) -> None:
        self.communicators: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


_in_thread = _InThread()


def _poll(communicators: Sequence[SharedMemoryCommunicator], seconds: float) -> None:
    """Wait for up to ``seconds`` until one of ``communicators`` can advance."""
    poll = select.poll()
    for communicator in communicators:
        for descriptor in communicator.descriptors():
            poll.register(descriptor, select.POLLIN)
    poll.poll(min(math.ceil(seconds * 1000), 1 << 30))


def _abandon_all() -> None:
    for each in list(_open):
        each.leave_to_parent()


@cache
def _abandon_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_abandon_all)
