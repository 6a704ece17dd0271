"""Comparison of the files of several ranks: their first difference, and which rank waited for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from composable_fsdp.diagnostics._records import Dump, Fault, decode
from composable_fsdp.trace import Position

__all__ = ["ABSENT", "FORGOTTEN", "Files", "Row", "Sequences", "Wait", "faults_in_order", "read", "sequences", "waits"]

ABSENT = "not launched"
FORGOTTEN = "…"
"""A collective that was launched so long ago that it is no longer recorded."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of diagnostics in a folder.

    Args:
        dumps: the dumps of the job's last attempt, by rank.
        missing: ranks of the job that left no file.
        stale: ranks whose file is from an earlier attempt.
        damaged: the problems of unreadable files, by file name.
    """

    dumps: Mapping[int, Dump]
    missing: tuple[int, ...]
    stale: tuple[int, ...]
    damaged: Mapping[str, str]


def read(folder: Path) -> Files:
    """Read the files of all ranks in ``folder``."""
    found: dict[int, Dump] = {}
    damaged = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        try:
            dump = decode(path.read_text().splitlines())
        except (ValueError, OSError) as error:
            damaged[path.name] = str(error)
            continue
        found[dump.header.rank] = dump
    attempt = max((dump.header.attempt for dump in found.values()), default=0)
    dumps = {rank: dump for rank, dump in found.items() if dump.header.attempt == attempt}
    world = max((dump.header.world_size for dump in dumps.values()), default=0)
    missing = tuple(rank for rank in range(world) if rank not in found)
    return Files(dumps, missing, tuple(rank for rank in found if rank not in dumps), damaged)


@dataclass(frozen=True, slots=True)
class Row:
    """The collective ``number`` of a process group, with its label on each rank."""

    number: int
    labels: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Sequences:
    """The collectives that the ranks of a process group launched over their newest connection, by number.

    Invariant: every row has the same ranks: those of the group that left a file.
    """

    group: str
    ranks: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def first_difference(self) -> Row | None:
        """The first row in which ranks called different operations. Forgotten ones are ignored."""
        return next((row for row in self.rows if len({*row.labels.values()} - {FORGOTTEN}) > 1), None)


def sequences(dumps: Mapping[int, Dump]) -> list[Sequences]:
    """Return the sequences of every process group: first those that differ."""
    launched = {rank: _collectives(dump) for rank, dump in dumps.items()}
    groups = {position.group: position.ranks for own in launched.values() for position in own}
    found = [_sequences(group, ranks, launched) for group, ranks in groups.items()]
    return sorted(found, key=lambda each: each.first_difference is None)


def _collectives(dump: Dump) -> dict[Position, str]:
    """Return the labels of the recorded collectives of a rank by position."""
    return {event.position: event.group for event in dump.events if event.position is not None}


def _sequences(group: str, ranks: tuple[int, ...], launched: Mapping[int, Mapping[Position, str]]) -> Sequences:
    connection = max(_newest(own, group)[0] for own in launched.values())
    labels = {
        rank: {
            position.number: label
            for position, label in launched[rank].items()
            if (position.group, position.connection) == (group, connection)
        }
        for rank in ranks
        if rank in launched
    }
    rows = (
        Row(number, {rank: _label(own, number) for rank, own in labels.items()})
        for number in sorted({number for own in labels.values() for number in own})
    )
    return Sequences(group, ranks, tuple(rows))


def _label(own: Mapping[int, str], number: int) -> str:
    return own.get(number, FORGOTTEN if number < min(own, default=0) else ABSENT)


@dataclass(frozen=True, slots=True)
class Wait:
    """``rank`` waited for the ranks ``awaited`` in ``label``, the collective ``number`` of ``ranks``."""

    rank: int
    label: str
    number: int
    ranks: tuple[int, ...]
    awaited: tuple[int, ...]


def waits(dumps: Mapping[int, Dump]) -> list[Wait]:
    """Find which ranks waited for which, in collectives that they were still in or had just given up.

    A rank waited for those that had not launched the collective, or, if all had, for those with an error of their own.
    """
    launched = {rank: _collectives(dump) for rank, dump in dumps.items()}
    found = []
    for rank, dump in sorted(dumps.items()):
        waiting = dump.report.waiting if dump.report is not None else None
        given_up = dump.faults[-1].position if dump.faults else None
        for at, label in launched[rank].items():
            waits_here = waiting is not None and (waiting.ranks, waiting.number) == (at.ranks, at.number)
            if at.connection != _newest(launched[rank], at.group)[0] or not (waits_here or at == given_up):
                continue
            others = [other for other in at.ranks if other != rank]
            here = (at.connection, at.number)
            late = [other for other in others if _newest(launched.get(other, ()), at.group) < here]
            awaited = late or [other for other in others if _has_own_fault(dumps[other])]
            if awaited:
                found.append(Wait(rank, label, at.number, at.ranks, tuple(awaited)))
    return found


def _newest(launched: Iterable[Position], group: str) -> tuple[int, int]:
    """Return the connection and number of the group's last collective, or ``(-1, -1)`` if there is none."""
    return max(((each.connection, each.number) for each in launched if each.group == group), default=(-1, -1))


def _has_own_fault(dump: Dump) -> bool:
    last = dump.faults[-1].error if dump.faults else ""
    return dump.header.reason == "SIGTERM" or (bool(dump.faults) and last not in ("PeerError", "DivergenceError"))


def faults_in_order(dumps: Mapping[int, Dump]) -> list[tuple[int, Fault]]:
    """Return the rank and the fault of all faults, oldest first. Clocks of hosts may differ."""
    found = [(rank, fault) for rank, dump in dumps.items() for fault in dump.faults]
    return sorted(found, key=lambda each: (each[1].time, each[0]))
