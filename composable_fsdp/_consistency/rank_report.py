"""Reports of ranks about themselves, and the diagnosis of a wait from them. Numbers and texts only.

A rank reports one of these states: WAITING for an operation; AT WORK between operations; FAILED after an exception in a
pass of a sharded module, until its next pass begins; LEFT after the end of its program.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any

from composable_fsdp.errors import ConfigurationError, DivergenceError, FSDPError, PeerError

MOST_RANKS = 10**6
"""More than any job has: larger numbers in files and variables are damaged, or sent by somebody."""

RESET = "called reset_iter_state()"
"""The failure of a rank whose program begins the step again outside of all passes, with no backward to come."""
ABANDONED = f"{RESET} between a forward and its backward"

_SHOWN_RANGES = 8


@dataclass(frozen=True, slots=True)
class OperationId:
    """The label of an operation and its number among those of ``ranks`` over one connection, ``line``."""

    ranks: tuple[int, ...]
    number: int
    label: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.label} (operation {self.number} of ranks {list(self.ranks)})"


@dataclass(slots=True)
class RankReport:
    """The state of one rank.

    Args:
        rank: the global rank.
        steps: number of completed backward passes.
        waiting: the operation it waits for.
        seconds: how long it has waited.
        last: the last completed operation.
        failure: the exception that ended its pass, or how its program ended.
        left: whether its program has ended.
        verdict: why it gave up a wait, which also breaks the connection.
        diverged: whether it gave up because ranks were about to run different operations.
        at_fault: the ranks because of which it gave up.
        place: the line of its program that it executes, if known.
        meeting: the ranks that it waits for in ``reset_iter_state``, if its failure is that it called it.
        done: then, the last operation over each connection that it has completed after a wait.
        process: the identity of its process.
    """

    rank: int
    steps: int = 0
    waiting: OperationId | None = None
    seconds: float = 0.0
    last: OperationId | None = None
    failure: str = ""
    left: bool = False
    verdict: str = ""
    diverged: bool = False
    at_fault: tuple[int, ...] = ()
    place: str = ""
    meeting: tuple[int, ...] = ()
    done: tuple[OperationId, ...] = ()
    process: str = ""

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decoded(text: str) -> RankReport:
        values = json.loads(text)
        for name in ("waiting", "last"):
            values[name] = None if values[name] is None else _operation(values[name])
        values["done"] = tuple(map(_operation, values.get("done", ())))
        return RankReport(**values | {name: tuple(values.get(name, ())) for name in ("at_fault", "meeting")})

    def __str__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)} done"
        if self.failure:
            return f"rank {self.rank} {self.failure} ({steps})"
        if self.waiting is not None:
            return f"rank {self.rank} waits in {self.waiting}, for {self.seconds:.1f} s ({steps})"
        since = f" since {self.last}" if self.last is not None else ""
        return f"rank {self.rank} is at work{since} ({steps})"


def error_summary(error: BaseException) -> str:
    """Return the type of ``error`` and the first line of its text, and the last exception of a traceback in it."""
    try:
        text = str(error)
    except Exception:  # of the class of the program
        text = "<its text cannot be read>"
    _, header, inner = text.rpartition("Traceback (most recent call last):\n")
    raised = [line for line in inner.splitlines() if header and line[:1].strip()]  # lines of the stack are indented
    return " ".join([": ".join([type(error).__name__, *text.splitlines()[:1]]), *raised[:1]])


def _operation(values: Mapping[str, Any]) -> OperationId:
    return OperationId(**{**values, "ranks": tuple(values["ranks"])})


def diagnose(
    own: OperationId,
    reports: Mapping[int, RankReport],
    *,
    lost: str = "",
    timed_out: bool = False,
    gone: Mapping[int, str] = MappingProxyType({}),
) -> FSDPError | None:
    """Return the error that explains why ``own`` cannot complete, or ``None`` if the reports do not show one.

    Args:
        own: the operation that this rank waits for.
        reports: reports of the ranks that answered, by rank.
        lost: the transport's error, if it lost a connection. Then ranks that did not answer are considered gone.
        timed_out: whether that error was a timeout.
        gone: ranks without a report whose processes are known to have ended, each with its exit text.
    """
    for report in reports.values():
        if report.verdict:  # the first rank to find the cause decides for all
            if report.diverged:
                return DivergenceError(report.verdict)
            return PeerError(report.verdict, report.at_fault)
    missing = list(gone) or [rank for rank in own.ranks if rank not in reports]
    lost = lost or ("The process has ended without a report." if gone else "")
    timed_out = timed_out and not gone
    failed = [report for report in reports.values() if report.failure and not _still_comes(report, own)]
    failed.sort(key=lambda report: (report.left, report.rank not in own.ranks))
    lines = {rank: str(report) for rank, report in reports.items()}
    if failed and not (failed[0].left and lost and missing):
        del lines[failed[0].rank]
        return PeerError(f"{own} cannot be done: {failed[0]}.{_text(lines)}", [failed[0].rank])
    waiting = {rank: report.waiting for rank, report in reports.items() if report.waiting and rank in own.ranks}
    if any(each.label != own.label and replace(each, label=own.label) == own for each in waiting.values()):
        return DivergenceError(order_text({rank: each.label for rank, each in waiting.items()}))
    if not lost:
        return None
    late = [rank for rank in own.ranks if rank in reports and reports[rank].waiting != own]
    if timed_out and not missing and not late:  # all have arrived by now: name the last one
        late = [min(own.ranks, key=lambda rank: reports[rank].seconds)]
    for rank in missing:  # name the last operation that any rank completed with it, over this connection if possible
        shared = [each.last for each in reports.values() if each.last is not None and rank in each.last.ranks]
        if shared:
            last = max(shared, key=lambda operation: (operation.line == own.line, operation.number))
            lines[rank] = f"rank {rank} last took part in {last}"
    absence = _absence(missing, late, gone.values(), timed_out=timed_out)
    return PeerError(f"{own} cannot be done: {absence}{_text(lines)}\n  {lost}", missing or late)


def _still_comes(report: RankReport, own: OperationId) -> bool:
    """Return whether a rank that has called ``reset_iter_state`` has done its part of ``own``, or will do it later."""
    if not report.meeting:
        return False
    if not set(own.ranks) <= set(report.meeting):  # of another model: it comes once the ranks of this one have met
        return True
    return any((d.ranks, d.line) == (own.ranks, own.line) and d.number >= own.number for d in report.done)


def _text(lines: Mapping[int, str]) -> str:
    return "".join(f"\n  {line}" for _, line in sorted(lines.items()))


def _absence(missing: Sequence[int], late: Sequence[int], exits: Iterable[str], *, timed_out: bool) -> str:
    """Return which ranks are missing and what to do. ``missing`` do not answer; ``late`` do, but are elsewhere."""
    who = format_ranks(missing or late)
    if missing and timed_out:
        return (
            f"{who} did not answer in time. The process is stopped or gone, or its host cannot be reached: look there."
        )
    if missing:
        return (
            f"{who} {'is' if len(missing) == 1 else 'are'} gone{''.join(sorted(set(exits)))}. Look for the first error "
            "in its output. Without one, look in dmesg: if memory runs out, the kernel ends processes by signal 9."
        )
    if late:
        return f"{who} did not come to it in time. If slow, not stuck, give the process group a longer timeout."
    return "a connection was lost. Look for the first error in the output of each rank."


def order_text(about: Mapping[int, str]) -> str:
    """Return the error text for ranks that are ``about`` to run different operations."""
    kind = "Forward order" if all(" in forward" in label for label in about.values()) else "The order of collectives"
    lines = {rank: f"rank {rank}: {label}" for rank, label in about.items()}
    return (
        f"{kind} differs across ranks. About to be done:{_text(lines)}\nAll ranks must run the same modules in the "
        "same order. Usual reasons: a branch that depends on data, batches that one rank has and another has not, or "
        "modules that are wrapped differently. Where ranks are meant to skip modules, call "
        "set_reduce_scatter_unused_params(True) on the root."
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a text for ``ranks``, with consecutive ones as ranges.

    >>> format_ranks([3])
    'rank 3'
    >>> format_ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    ranges: list[list[int]] = []
    ordered = sorted(ranks)
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_SHOWN_RANGES])
    left_out = sum(b - a + 1 for a, b in ranges[_SHOWN_RANGES:])
    return f"rank{'s'[: len(ordered) != 1]} {shown}" + (f" and {left_out} more" if left_out else "")


# -- Warnings about ranks that wait for others: when they are due, and their text

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
    no_report = "does not answer: its process is gone or stopped, or it has sharded no model so far"
    lines = []
    for rank in ranks:
        report = reports.get(rank)
        place = report.place if report is not None and not report.left else ""
        lines.append(f"{report or f'rank {rank} {no_report}'}{place and f', and executes {place}'}")
    if len(lines) > _SHOWN_REPORTS:
        lines[_SHOWN_REPORTS:] = [f"... and {len(lines) - _SHOWN_REPORTS} more ranks"]
    return "".join(f"\n  {line}" for line in lines)
