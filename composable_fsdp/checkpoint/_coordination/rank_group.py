"""All ranks of a job in step: how they meet for a checkpoint, tell each other what they have, and fail together.

They meet through the default store, before anything collective, so that a rank that does not come is named and nobody
hangs. After some seconds of waiting one of those that came calls the roll (``watchdog.py``). It warns of the missing
ranks and says where they are; a rank that can no longer come is an error. After the meeting they talk over a gloo
process group of their own, from point to point with rank 0: nothing mixes with the collectives of training, which may
go on meanwhile, and the group serves on after ``destroy_process_group``.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp._consistency.rank_report import OperationId, RankReport
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp.checkpoint._coordination.mismatch import joined, named, said
from composable_fsdp.checkpoint._coordination.pending_save import finish_earlier
from composable_fsdp.errors import CheckpointError, FSDPError

__all__ = ["TIMEOUT", "Ranks", "meet"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = 1800.0
"""Seconds that ranks wait for each other if users do not say."""

_TAG = 6
_LONGEST_PAUSE = 0.02
_ASK_AFTER = 5.0
"""Seconds of waiting after which one asks where the missing ranks are. The next times are twice as far away each."""
_ASK_AGAIN = 2.0
"""Seconds until then, if a missing rank seems to wait for one that is here."""


@dataclass(frozen=True)
class _Failure:
    """What went wrong on a rank, as it is told to the others."""

    text: str
    kind: type[FSDPError] = CheckpointError

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, FSDPError):
            return _Failure(str(error), type(error))
        return _Failure(said(error))


class Ranks:
    """The ranks that have met. Invariant: all of them make the same exchanges, in the same order.

    Args:
        rank: this one.
        size: how many there are.
        group: the process group that only checkpoints use; ``None`` for a rank by itself.
        timeout: seconds that one waits for another within an exchange.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = group
        self._timeout = timeout

    def exchange(self, what: str, each: Callable[[], T], central: Callable[[list[T]], Sequence[R]]) -> R:
        """What ``central`` on rank 0 makes for this rank out of what ``each`` returned on every rank.

        Args:
            what: is being done, for errors.
            each: called on every rank. The results travel pickled.
            central: called on rank 0 with all results by rank; returns one value per rank.

        Raises:
            FSDPError: either of them raised anywhere: of the kind that the first rank raised, or else
                ``CheckpointError``, with the texts of all; or a rank was lost. The same on every rank that is left.
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
            reply = self._ask(what, outcome)
        if isinstance(reply, _Failure):
            raise reply.kind(f"{what}: {reply.text}") from error
        return cast(R, reply)

    def agree(self, what: str, each: Callable[[], object] = lambda: None) -> None:
        """Calls ``each`` on every rank and goes on when all have returned. Raises as :meth:`exchange` does."""

        def act() -> None:
            each()

        self.exchange(what, act, lambda results: results)

    def from_first(self, what: str, central: Callable[[], R]) -> R:
        """What ``central`` returns on rank 0, on all ranks."""
        return self.exchange(what, lambda: None, lambda results: [central()] * len(results))

    def _receive_outcome(self, peer: int) -> Any:
        try:
            return self._receive(peer)
        except RuntimeError as error:
            return _Failure(self._lost(error))

    def _reply(self, reply: object, peer: int) -> None:
        try:
            self._send(reply, peer)
        except RuntimeError as error:  # it cannot be told; the next exchange, if there is one, names it to the others
            logger.warning("rank %d: %s", peer, self._lost(error))

    def _ask(self, what: str, outcome: object) -> Any:
        try:
            self._send(outcome, 0)
            return self._receive(0)
        except RuntimeError as error:
            raise CheckpointError(f"{what}: rank 0: {self._lost(error)}") from error

    def _lost(self, error: RuntimeError) -> str:
        """What became of a peer. Notes that the group is of no more use."""
        reason = (str(error).partition("] ")[2] or str(error)).partition(". ")[0]  # gloo: "[file:line] reason. advice"
        world = dist.group.WORLD
        meetings = _meetings.get(world) if world is not None else None
        if meetings is not None and meetings.group is self._group:
            meetings.group = None
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
    """The replies, and the exception behind them if they are failures and it was raised here."""
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)}
    if failures:
        text = joined({rank: failure.text for rank, failure in failures.items()}, len(outcomes))
        return [_Failure(text, next(iter(failures.values())).kind)] * len(outcomes), error
    try:
        return central(outcomes), None
    except Exception as raised:
        return [_Failure.of(raised)] * len(outcomes), raised


class _Meetings:
    """Of the ranks of one default process group and its store: how many there were, and the group that they made."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.number = 0
        self.group: dist.ProcessGroup | None = None
        self.keys: list[str] = []
        """In the store, of meetings that may be over."""


_meetings: WeakKeyDictionary[dist.ProcessGroup, _Meetings] = WeakKeyDictionary()


def meet(call: str, timeout: float) -> Ranks:
    """Waits until all ranks of the default process group have made the same call, and for the save before it.

    An asynchronous save exchanges messages over the same group, in a thread: who has met can be sure that it is over.

    Args:
        call: what was called and with what, as errors show it. Must be the same on all ranks.
        timeout: seconds, for the others to come and for every answer afterwards.

    Raises:
        CheckpointError: ranks did not come in time, or made another call. They are named, on every rank that came. Or
            the save before failed, and nobody has seen that yet.
    """
    ranks = _gathered(call, timeout)
    ranks.agree(f"the save before {call}", finish_earlier)
    return ranks


def _gathered(call: str, timeout: float) -> Ranks:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks(0, 1, None, timeout)
    world = dist.group.WORLD
    assert world is not None
    store = dist.distributed_c10d._get_default_store()
    meetings = _meetings.get(world)
    if meetings is None or meetings.store is not store:
        meetings = _meetings[world] = _Meetings(store)
    if meetings.group is not None and not _is_registered(meetings.group):
        meetings.group = None
    try:
        verdict = _assemble(meetings, {"call": call, "group": meetings.group is not None}, timeout)
    except dist.DistError as error:
        raise CheckpointError(f"{call}: the store of rank 0 cannot be reached any more ({error}).") from error
    if "calls" in verdict:
        raise CheckpointError(f"the ranks did not make the same call: {verdict['calls']}.")
    if not verdict["group"]:
        meetings.group = dist.new_group(backend="gloo", group_desc="composable_fsdp checkpoints")
    return Ranks(dist.get_rank(), dist.get_world_size(), meetings.group, timeout)


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _assemble(meetings: _Meetings, note: dict[str, Any], timeout: float) -> dict[str, Any]:
    """What the ranks decided at the first meeting that is not over yet.

    Whoever comes last opens a meeting, whoever waited too long ends it; the store lets only one of them decide, and
    all go by that. A rank that comes to a meeting that ended without it goes on to the next.
    """
    store, rank = meetings.store, dist.get_rank()
    verdict: dict[str, Any]
    search = _Search(note["call"], timeout)
    size, deadline = dist.get_world_size(), time.monotonic() + timeout
    while True:
        place = f"composable_fsdp/checkpoint/{meetings.number}"
        meetings.number += 1
        meetings.keys.append(f"{place}/{rank}")
        if rank == 0:
            meetings.keys += [f"{place}/arrived", f"{place}/verdict"]
        store.set(f"{place}/{rank}", json.dumps(note))
        if store.add(f"{place}/arrived", 1) == size:
            store.compare_set(f"{place}/verdict", "", json.dumps(_open(store, place, size)))
        pause = 0.001
        while not store.check([f"{place}/verdict"]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if search.is_due():
                present = [r for r in range(size) if store.check([f"{place}/{r}"])]
                if reason := search.ask(present, rank, size):
                    verdict = {"missing": [r for r in range(size) if r not in present], "reason": reason}
                    store.compare_set(f"{place}/verdict", "", json.dumps(verdict))
            if time.monotonic() > deadline:
                missing = [r for r in range(size) if not store.check([f"{place}/{r}"])]
                verdict = {"missing": missing} if missing else _open(store, place, size)
                store.compare_set(f"{place}/verdict", "", json.dumps(verdict))
        verdict = json.loads(store.get(f"{place}/verdict"))
        missing = verdict.get("missing", [])
        if missing and rank not in missing:
            reason = verdict.get("reason", f"{named(missing)} did not make this call within {timeout:g} s. ")
            raise CheckpointError(
                f"{note['call']}: {reason}All {size} ranks of the default process group must make it, also those that "
                "have no part of the model."
            )
        if not missing:
            _forget(store, meetings, place)
            return verdict


class _Search:
    """Finds out where the ranks are that have not come to a meeting."""

    def __init__(self, call: str, timeout: float) -> None:
        self._call = call
        self._timeout = timeout
        self._begin = time.monotonic()
        self._due = self._begin + _ASK_AFTER
        self._suspects: dict[int, OperationId] = {}
        """Missing ranks that waited for a rank that is here, and in which operation."""

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def ask(self, present: Sequence[int], rank: int, size: int) -> str:
        """Why some ranks can no longer come, as far as is known. Warns of those that may be late. The first of
        ``present`` asks for all.
        """
        waited = time.monotonic() - self._begin
        self._due += max(waited, _ASK_AFTER)
        missing = [other for other in range(size) if other not in present]
        watchdog = job_watchdog() if missing and rank == min(present, default=rank) else None
        if watchdog is None:
            return ""
        reports = watchdog.collect_reports(range(size))
        found = {other: reports[other] for other in missing if other in reports}
        stuck = {
            other: each.waiting for other, each in found.items() if each.waiting and _waits(each, present, reports)
        }
        gone = [other for other, each in found.items() if each.left]
        gone += [other for other, place in stuck.items() if self._suspects.get(other) == place]
        if gone:
            lines = "".join(f"\n  {_told(found[other], present)}" for other in sorted(gone))
            return f"{named(sorted(gone))} did not make this call, and cannot any more.{lines}\n"
        self._suspects = stuck
        if stuck:
            self._due = time.monotonic() + _ASK_AGAIN
        places = "".join(f"\n  {reports.get(other) or _silent(other)}" for other in missing)
        text = "%s: waiting for %s, for %.1f s so far and up to %g s.%s"
        logger.warning(text, self._call, named(missing), waited, self._timeout, places)
        return ""


def _waits(report: RankReport, present: Sequence[int], reports: Mapping[int, RankReport]) -> bool:
    """Whether a rank waits in an operation that one of ``present`` has not done: that one waits in the meeting."""
    place = report.waiting
    if place is None:
        return False
    here = [reports[rank].last for rank in place.ranks if rank in present and rank in reports]
    return any(last is None or last.line != place.line or last.number < place.number for last in here)


def _told(report: RankReport, present: Sequence[int]) -> str:
    if report.left or report.waiting is None:
        return str(report)
    here = [rank for rank in report.waiting.ranks if rank in present]
    return f"{report}, which needs {named(here)}"


def _silent(rank: int) -> str:
    return f"rank {rank} does not answer: its process is gone or stopped, or it has sharded no model so far"


def _open(store: dist.Store, place: str, size: int) -> dict[str, Any]:
    notes = [json.loads(store.get(f"{place}/{rank}")) for rank in range(size)]
    ranks: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        ranks.setdefault(note["call"], []).append(rank)
    if len(ranks) > 1:
        return {"calls": ", ".join(f"{named(who)} {call}" for call, who in ranks.items())}
    return {"group": all(note["group"] for note in notes)}


def _forget(store: dist.Store, meetings: _Meetings, place: str) -> None:
    """Deletes this rank's keys of earlier meetings. All ranks are at ``place``, so nobody looks at those any more."""
    for key in [key for key in meetings.keys if not key.startswith(f"{place}/")]:
        store.delete_key(key)
        meetings.keys.remove(key)
