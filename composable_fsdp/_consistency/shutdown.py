"""``shutdown``: the end of a program on all ranks together, and the search for ranks that do not come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from composable_fsdp._consistency.rank_report import (
    OperationId,
    RankReport,
    WarningTimes,
    ranks_text,
    reports_with_places,
)
from composable_fsdp._consistency.rendezvous import StoreRendezvous, world_store
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp.errors import PeerError, printable

# -- Search for the ranks that have not come to a rendezvous, while others wait there

_ASK_AFTER = 5.0
"""Seconds of waiting before rank reports are collected. Each further interval is twice as long."""
_ASK_AGAIN = 2.0
"""Seconds until reports are collected again if a missing rank seems to wait for a rank that is present."""

logger = logging.getLogger(__name__)


class MissingRanks:
    """Finds out where the ranks are that have not come to a rendezvous.

    Args:
        call: the call that all ranks must make, for warnings.
        timeout: the seconds after which the rendezvous ends, for warnings.
        rank: this rank.
        size: the number of ranks in the job.
    """

    def __init__(self, call: str, timeout: float, rank: int, size: int) -> None:
        self._call, self._timeout = call, timeout
        self._rank, self._size = rank, size
        self._begin = time.monotonic()
        self._due = _ASK_AFTER
        self._warnings = WarningTimes()
        self._suspects: dict[int, OperationId] = {}
        """Missing ranks that waited for a rank that is present, with the operation they waited in."""

    def explain(self, find_missing: Callable[[], list[int]]) -> str:
        """Return why ranks cannot come any more, else empty. The first rank that is present asks, now and then.

        Warns about late ranks, as :func:`set_wait_warning` says.
        """
        waited = time.monotonic() - self._begin
        asks, warns = waited >= self._due, self._warnings.is_due(self, waited)
        missing = find_missing() if asks or warns else []
        if asks:
            self._due += max(waited, _ASK_AFTER)
        present = [rank for rank in range(self._size) if rank not in missing]
        watchdog = job_watchdog() if missing and self._rank == min(present) else None
        if watchdog is None:
            return ""
        reports = watchdog.collect_reports(range(self._size))
        if asks and (reason := self._cannot_come(missing, present, reports)):
            return reason
        if warns:
            lines = reports_with_places(reports, missing)
            text = "%s: waiting for %s, for %.1f s so far and up to %g s.%s"
            logger.warning(text, self._call, ranks_text(missing), waited, self._timeout, printable(lines))
        return ""

    def _cannot_come(self, missing: Sequence[int], present: Sequence[int], reports: Mapping[int, RankReport]) -> str:
        """Return which ranks of ``missing`` have left, or wait for a rank that is present since the last call."""
        found = {other: reports[other] for other in missing if other in reports}
        stuck = {rank: each.waiting for rank, each in found.items() if each.waiting and _waits(each, present, reports)}
        gone = [other for other, each in found.items() if each.left]
        gone += [other for other, operation in stuck.items() if self._suspects.get(other) == operation]
        if gone:
            lines = "".join(f"\n  {_report_text(found[other], present)}" for other in sorted(gone))
            return f"{ranks_text(sorted(gone))} did not make this call, and cannot any more.{lines}\n"
        self._suspects = stuck
        if stuck:
            self._due = time.monotonic() - self._begin + _ASK_AGAIN
        return ""


def _waits(report: RankReport, present: Sequence[int], reports: Mapping[int, RankReport]) -> bool:
    """Return True if a rank waits in an operation that a rank of ``present``, which waits here, has not done."""
    operation = report.waiting
    if operation is None:
        return False
    here = [reports[rank].last for rank in operation.ranks if rank in present and rank in reports]
    return any(last is None or last.line != operation.line or last.number < operation.number for last in here)


def _report_text(report: RankReport, present: Sequence[int]) -> str:
    if report.left or report.waiting is None:
        return str(report)
    here = [rank for rank in report.waiting.ranks if rank in present]
    return f"{report}, which needs {ranks_text(here)}"


# -- ``shutdown``: the end of a program on all ranks together

_CALL = "composable_fsdp.shutdown()"


def shutdown(timeout: float = 1800.0) -> None:
    """Wait until all ranks have come to the end of the program, and destroy the default process group.

    Call it last, on all ranks, instead of ``dist.barrier()`` and ``dist.destroy_process_group()``. A barrier waits for
    the timeout of its process group if a rank cannot come to it, for instance because it has a batch more and waits for
    this one. Here ranks meet in the store of the job, and find that out within seconds.

    Args:
        timeout: the most seconds to wait for ranks that are late.

    Raises:
        PeerError: a rank cannot come, or did not within ``timeout``. The text says what it does. Ranks that wait for
            this one raise it, too.
    """
    watchdog = job_watchdog()
    if watchdog is not None:
        rank, size = dist.get_rank(), dist.get_world_size()
        rendezvous = StoreRendezvous("shutdown", rank, range(size))
        missing_ranks = MissingRanks(_CALL, timeout, rank, size)
        try:
            verdict = rendezvous.meet(world_store(), "", timeout, missing_ranks.explain)
        except dist.DistError as error:
            raise PeerError(f"{_CALL}: the store of the job cannot be reached any more ({error}).") from error
        if verdict.missing:
            late = f"{ranks_text(verdict.missing)} did not make this call within {timeout:g} s. "
            advice = "All ranks must make it, after as many batches as the others."
            unmet = PeerError(f"{_CALL}: {verdict.reason or late}{advice}", verdict.missing)
            watchdog.give_up(unmet)  # ranks that wait for this one need not wait longer
            raise unmet
        if dist.get_backend() == "gloo":
            dist.barrier()  # or its threads may still hold tensors when Python ends, and abort it
    dist.destroy_process_group()
