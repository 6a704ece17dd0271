"""The file of a rank, one JSON document, and the comparison of the files of all ranks.

Invariant: ``decode(encode(dump)) == dump``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composable_fsdp._consistency.rank_report import RankReport
from composable_fsdp.trace import Operation, Position, TraceEvent

__all__ = [
    "ABSENT",
    "FORGOTTEN",
    "Dump",
    "Fault",
    "Files",
    "Row",
    "Sequences",
    "decode",
    "encode",
    "faults_in_order",
    "file_name",
    "read",
    "sequences",
]

_FORMAT = 3

ABSENT = "not launched"
FORGOTTEN = "…"
"""A collective that was launched so long ago that it is no longer recorded."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error that ended a pass or a collective, with its ``text``, place, time and stack.

    ``position`` is that of the collective.
    """

    error: str
    text: str
    where: str
    time: float
    position: Position | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dump:
    """The contents of the file of ``rank``. Faults and events are in order, the oldest first.

    Args:
        attempt: the restarts by torchrun before.
        reason: why it was written.
        written: when, in seconds since 1970.
        clock: the same moment by ``time.perf_counter``, by which events are timed.
        versions: those of packages.
        stacks: the name of each thread, and its frames, the innermost last.
        events: the last ones, and the last collective in each process group.
    """

    rank: int
    world_size: int
    attempt: int
    host: str
    process: int
    reason: str
    written: float
    clock: float
    versions: Mapping[str, str]
    report: RankReport | None = None
    faults: tuple[Fault, ...] = ()
    stacks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    events: tuple[TraceEvent, ...] = ()


def file_name(rank: int) -> str:
    """Return the name of the file of ``rank``."""
    return f"rank-{rank:05d}.json"


def encode(dump: Dump) -> str:
    """Return the text of the file."""
    return json.dumps({"format": _FORMAT, **asdict(dump)})


def decode(text: str) -> Dump:
    """Parse the text of a file.

    Raises:
        ValueError: it is not the output of :func:`encode`, or of another version of it.
    """
    try:
        values = json.loads(text)
        if (version := values.pop("format")) != _FORMAT:
            raise ValueError(f"format {version}, which this version does not know: it reads {_FORMAT}")
        report = values["report"] and RankReport.decoded(json.dumps(values["report"]))
        faults = (Fault(**{**_positioned(each), "stack": tuple(each["stack"])}) for each in values["faults"])
        stacks = ((thread, tuple(frames)) for thread, frames in values["stacks"])
        events = (TraceEvent(**_positioned(e) | {"operation": Operation(e["operation"])}) for e in values["events"])
        parts = {"report": report, "faults": tuple(faults), "stacks": tuple(stacks), "events": tuple(events)}
        return Dump(**{**values, **parts})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a file of diagnostics: {type(error).__name__}: {error}") from error


def _positioned(values: dict[str, Any]) -> dict[str, Any]:
    position = values["position"]
    if position is not None:
        position = Position(**position | {"ranks": tuple(position["ranks"])})
    return values | {"position": position}


# -- the files of several ranks


@dataclass(frozen=True, slots=True)
class Files:
    """The files of diagnostics in a folder.

    Args:
        dumps: the dumps of the job's last attempt, by rank.
        missing: ranks of the job that left no file in it.
        damaged: the problems of unreadable files, by file name.
    """

    dumps: Mapping[int, Dump]
    missing: tuple[int, ...]
    damaged: Mapping[str, str]


def read(folder: Path) -> Files:
    """Read the files of all ranks in ``folder``."""
    found: dict[int, Dump] = {}
    damaged = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            dump = decode(path.read_text())
        except (ValueError, OSError) as error:
            damaged[path.name] = str(error)
            continue
        found[dump.rank] = dump
    attempt = max((dump.attempt for dump in found.values()), default=0)
    dumps = {rank: dump for rank, dump in found.items() if dump.attempt == attempt}
    world = max((dump.world_size for dump in dumps.values()), default=0)
    return Files(dumps, tuple(rank for rank in range(world) if rank not in dumps), damaged)


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
    launched = {rank: {e.position: e.group for e in dump.events if e.position} for rank, dump in dumps.items()}
    groups = {position.group: position.ranks for own in launched.values() for position in own}
    found = [_sequences(group, ranks, launched) for group, ranks in groups.items()]
    return sorted(found, key=lambda each: each.first_difference is None)


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


def _newest(launched: Iterable[Position], group: str) -> tuple[int, int]:
    """Return the connection and number of the group's last collective, or ``(-1, -1)`` if there is none."""
    return max(((each.connection, each.number) for each in launched if each.group == group), default=(-1, -1))


def faults_in_order(dumps: Mapping[int, Dump]) -> list[tuple[int, Fault]]:
    """Return the rank and the fault of all faults, oldest first. Clocks of hosts may differ."""
    found = [(rank, fault) for rank, dump in dumps.items() for fault in dump.faults]
    return sorted(found, key=lambda each: (each[1].time, each[0]))
