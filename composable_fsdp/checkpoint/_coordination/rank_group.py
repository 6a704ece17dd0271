"""Coordination of all ranks during a save or load: rendezvous, exchange of Python objects, and common errors.

Ranks first rendezvous through the default store, before any collective, so a missing rank is reported by name and no
rank hangs. After some seconds of waiting, one of the waiting ranks collects rank reports (``missing_ranks.py``): it
warns about late ranks, and a rank that cannot come any more is an error. After the rendezvous, ranks exchange
point-to-point messages with rank 0 over a separate gloo process group. These messages do not mix with the collectives
of training, which may continue meanwhile, and the group outlives ``destroy_process_group``.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp._consistency.missing_ranks import MissingRanks
from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp._consistency.store_rendezvous import StoreRendezvous
from composable_fsdp._consistency.world_store import world_store
from composable_fsdp.checkpoint._coordination.mismatch import join_rank_texts, said
from composable_fsdp.checkpoint._coordination.pending_save import finish_earlier
from composable_fsdp.errors import CheckpointError, FSDPError

__all__ = ["TIMEOUT", "RankGroup", "meet"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = 1800.0
"""The default number of seconds that ranks wait for each other."""

_TAG = 6


@dataclass(frozen=True)
class _Failure:
    """An error on one rank, in the form that is sent to the other ranks."""

    text: str
    kind: type[FSDPError] = CheckpointError

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, FSDPError):
            return _Failure(str(error), type(error))
        return _Failure(said(error))


class RankGroup:
    """The ranks that take part in one save or load. Invariant: all of them make the same exchanges in the same order.

    Args:
        rank: this process's rank.
        size: number of ranks.
        group: process group used by checkpoints only; ``None`` if there is one rank.
        timeout: seconds to wait for another rank within an exchange.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = group
        self._timeout = timeout

    def exchange(self, what: str, each: Callable[[], T], central: Callable[[list[T]], Sequence[R]]) -> R:
        """Call ``each`` on every rank, combine the results on rank 0 with ``central``, and return this rank's reply.

        Args:
            what: the operation, for error texts.
            each: called on every rank. Its results are pickled.
            central: called on rank 0 with all results in rank order. Returns one reply per rank.

        Raises:
            FSDPError: ``each`` or ``central`` raised on some rank, or a rank was lost. All remaining ranks raise it,
                with the texts of all failures. The type is that of the first failed rank if that is an ``FSDPError``,
                else ``CheckpointError``.
        """
        error: Exception | None = None
        outcome: T | _Failure
        try:
            outcome = each()
        except Exception as raised:
            error, outcome = raised, _Failure.of(raised)
        if self.rank == 0:
            outcomes = [outcome, *(self._receive_outcome(peer) for peer in range(1, self.size))]
            replies, error = _decide(outcomes, central, error)
            for peer in range(1, self.size):
                self._reply(replies[peer], peer)
            reply = replies[0]
        else:
            reply = self._ask_rank0(what, outcome)
        if isinstance(reply, _Failure):
            raise reply.kind(f"{what}: {reply.text}") from error
        return cast(R, reply)

    def combine(self, what: str, each: Callable[[], T], central: Callable[[list[T]], R]) -> R:
        """As :meth:`exchange`, with one reply for all ranks."""
        return self.exchange(what, each, lambda results: [central(results)] * len(results))

    def agree(self, what: str, each: Callable[[], object] = lambda: None) -> None:
        """Call ``each`` on every rank and wait until all calls have returned. Raises as :meth:`exchange` does."""

        def act() -> None:
            each()

        self.combine(what, act, lambda results: None)

    def from_rank0(self, what: str, central: Callable[[], R]) -> R:
        """Call ``central`` on rank 0 and return its result on all ranks."""
        return self.combine(what, lambda: None, lambda results: central())

    def _receive_outcome(self, peer: int) -> Any:
        try:
            return self._receive(peer)
        except RuntimeError as error:
            return _Failure(self._connection_lost(error))

    def _reply(self, reply: object, peer: int) -> None:
        try:
            self._send(reply, peer)
        except RuntimeError as error:  # the next exchange reports this rank to the others
            logger.warning("rank %d: %s", peer, self._connection_lost(error))

    def _ask_rank0(self, what: str, outcome: object) -> Any:
        try:
            self._send(outcome, 0)
            return self._receive(0)
        except RuntimeError as error:
            raise CheckpointError(f"{what}: rank 0: {self._connection_lost(error)}") from error

    def _connection_lost(self, error: RuntimeError) -> str:
        """Describe a failed connection. The process group is discarded, since it cannot be used again."""
        reason = (str(error).partition("] ")[2] or str(error)).partition(". ")[0]  # gloo: "[file:line] reason. advice"
        world = dist.group.WORLD
        job = _job_ranks.get(world) if world is not None else None
        if job is not None and job.group is self._group:
            job.group = None
        return f"gone, or did not answer within {self._timeout:g} s ({reason})"

    def _send(self, value: object, peer: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for message in (torch.tensor([data.numel()]), data):
            self._group.send([message], peer, _TAG).wait(timedelta(seconds=self._timeout))

    def _receive(self, peer: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._group.recv([length], peer, _TAG).wait(timedelta(seconds=self._timeout))
        data = torch.empty(int(length), dtype=torch.uint8)
        self._group.recv([data], peer, _TAG).wait(timedelta(seconds=self._timeout))
        return pickle.loads(data.numpy().data)


def _decide(
    outcomes: list[Any], central: Callable[[list[Any]], Sequence[Any]], error: Exception | None
) -> tuple[Sequence[Any], Exception | None]:
    """Return the replies, and the exception raised on rank 0 if the replies are failures."""
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)}
    if failures:
        text = join_rank_texts({rank: failure.text for rank, failure in failures.items()}, len(outcomes))
        return [_Failure(text, next(iter(failures.values())).kind)] * len(outcomes), error
    try:
        return central(outcomes), None
    except Exception as raised:
        return [_Failure.of(raised)] * len(outcomes), raised


class _JobRanks:
    """The rendezvous of checkpoints of a default process group over its store, and the process group that they use."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.rendezvous = StoreRendezvous("checkpoint", dist.get_rank(), range(dist.get_world_size()))
        self.group: dist.ProcessGroup | None = None


_job_ranks: WeakKeyDictionary[dist.ProcessGroup, _JobRanks] = WeakKeyDictionary()


def meet(call: str, timeout: float) -> RankGroup:
    """Wait until all ranks of the default process group have made the same call and their earlier save has ended.

    An asynchronous save exchanges messages over the same group in a thread, so it has to end first.

    Args:
        call: the call with its arguments, for error texts. Must be equal on all ranks.
        timeout: seconds to wait for the other ranks, here and in each later exchange.

    Raises:
        CheckpointError: ranks did not come in time or made another call; the text names them on every rank that came.
            Or the earlier save failed and its error has not been raised yet.
    """
    ranks = _join(call, timeout)
    ranks.agree(f"the save before {call}", finish_earlier)
    return ranks


def _join(call: str, timeout: float) -> RankGroup:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return RankGroup(0, 1, None, timeout)
    world = dist.group.WORLD
    assert world is not None
    store = world_store()
    job = _job_ranks.get(world)
    if job is None or job.store is not store:
        job = _job_ranks[world] = _JobRanks(store)
    if job.group is not None and not _is_registered(job.group):
        job.group = None
    rank, size = dist.get_rank(), dist.get_world_size()
    missing_ranks = MissingRanks(call, timeout, rank, size)
    note = f"{job.group is not None:d} {call}"
    try:
        verdict = job.rendezvous.meet(store, note, timeout, missing_ranks.explain)
    except dist.DistError as error:
        raise CheckpointError(f"{call}: the store of rank 0 cannot be reached any more ({error}).") from error
    if verdict.missing:
        reason = verdict.reason or f"{ranks_text(verdict.missing)} did not make this call within {timeout:g} s. "
        raise CheckpointError(
            f"{call}: {reason}All {size} ranks of the default process group must make it, also those that have no part "
            "of the model."
        )
    calls: dict[str, list[int]] = {}
    for note, ranks in verdict.notes.items():
        calls.setdefault(note[2:], []).extend(ranks)
    if len(calls) > 1:
        about = ", ".join(f"{ranks_text(sorted(ranks))} {each}" for each, ranks in calls.items())
        raise CheckpointError(f"the ranks did not make the same call: {about}.")
    if not all(note.startswith("1") for note in verdict.notes):
        job.group = dist.new_group(backend="gloo", group_desc="composable_fsdp checkpoints")
    return RankGroup(rank, size, job.group, timeout)


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False
