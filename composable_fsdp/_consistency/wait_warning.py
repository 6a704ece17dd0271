"""Warnings about ranks that wait for others: when they are due, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from composable_fsdp._consistency.rank_report import OperationId, RankReport, format_ranks
from composable_fsdp.errors import ConfigurationError

__all__ = [
    "ENDED_AT",
    "REPORTED_AT",
    "WarningTimes",
    "reports_with_places",
    "set_wait_warning",
    "wait_text",
    "wait_warning",
]

REPORTED_AT, ENDED_AT = 0.5, 0.8
"""The parts of the timeout of a process group at which a wait is warned of, and at which it ends with an error. At the
timeout itself a backend may end the process, as NCCL does.
"""
_DEFAULT_SECONDS = 30.0
_GROWTH = 2.0
"""The factor from one warning about a wait to the next."""
_SHOWN_REPORTS = 8

_seconds: float | None = _DEFAULT_SECONDS


def set_wait_warning(seconds: float | None) -> None:
    """Set after how many seconds this process warns that it waits for other ranks. The default is 30.

    Each further warning about the same wait comes after twice the time. Warnings are logged by ``composable_fsdp`` at
    the level ``WARNING``, by the first of the ranks that wait in the same operation. They say which ranks are awaited
    in which operation, and the line of the program that each of them executes.

    Args:
        seconds: the seconds of the first warning, in effect at least 1 and, where collectives do not block the host,
            at most half the timeout of the process group; ``None`` for no warnings.

    Raises:
        ConfigurationError: ``seconds`` is not a positive, finite number.
    """
    global _seconds
    given: object = seconds
    if given is not None and not (isinstance(given, (int, float)) and 0 < given < inf):
        raise ConfigurationError(f"set_wait_warning takes a positive number of seconds or None, not {seconds!r}.")
    _seconds = seconds


def wait_warning() -> float | None:
    """Return the seconds of the first warning, or ``None``."""
    return _seconds


class WarningTimes:
    """The times at which one thing waited for is warned of."""

    latest = inf
    """The seconds of the first warning, at most."""

    def __init__(self) -> None:
        self._wait: object = None
        self._last = 0.0

    def is_due(self, wait: object, seconds: float) -> bool:
        """Return whether to warn of ``wait`` after ``seconds``, and if so, count the warning as given."""
        if wait != self._wait:
            self._wait, self._last = wait, 0.0
        if _seconds is None or seconds < max(min(_seconds, self.latest), _GROWTH * self._last):
            return False
        self._last = seconds
        return True


def wait_text(rank: int, operation: OperationId, seconds: float, reports: Mapping[int, RankReport]) -> str:
    """Return the warning that ``rank`` has waited for ``operation``, or an empty text if another rank warns."""
    here = [other for other in operation.ranks if other in reports and reports[other].waiting == operation]
    if any(other < rank for other in here):
        return ""
    late = [other for other in operation.ranks if other != rank and other not in here]
    whom = f"for {format_ranks(late)}" if late else "for data, with all other ranks of it,"
    lines = reports_with_places(reports, late)
    return f"rank {rank} has waited {seconds:.1f} s {whom} in {operation}.{lines}"


def reports_with_places(reports: Mapping[int, RankReport], ranks: Sequence[int]) -> str:
    """Return a line for each of ``ranks``, with the line of the program that it executes, if known."""
    lines = [_with_place(reports[rank]) if rank in reports else _no_report_text(rank) for rank in ranks]
    if len(lines) > _SHOWN_REPORTS:
        lines[_SHOWN_REPORTS:] = [f"... and {len(lines) - _SHOWN_REPORTS} more ranks"]
    return "".join(f"\n  {line}" for line in lines)


def _with_place(report: RankReport) -> str:
    return f"{report}, and executes {report.place}" if report.place and not report.left else str(report)


def _no_report_text(rank: int) -> str:
    return f"rank {rank} does not answer: its process is gone or stopped, or it has sharded no model so far"
