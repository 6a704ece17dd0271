"""The contents of one rank's file of diagnostics, and its format: JSON, one record per line.

Invariant: ``decode(encode(dump)) == dump``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composable_fsdp._consistency.rank_report import RankReport
from composable_fsdp.diagnostics.timeline import Lanes, Slice
from composable_fsdp.trace import Operation, Position, TraceEvent

__all__ = ["Dump", "Fault", "Header", "decode", "encode", "file_name"]

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Header:
    """The rank that wrote the file, the restarts by torchrun before, the reason, and the versions of packages.

    It was ``written`` at that time in seconds since 1970, when ``time.perf_counter``, by which events are timed, was
    ``clock``.
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
    """The contents of a file. Faults and events are in order, the oldest first.

    Args:
        stacks: the name of each thread, and its frames, the innermost last.
        events: the last ones, and the last collective in each process group.
        predicted: the step that was predicted for the schedule in use, if settings were chosen by costs.
    """

    header: Header
    report: RankReport | None = None
    faults: tuple[Fault, ...] = ()
    stacks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    events: tuple[TraceEvent, ...] = ()
    predicted: Lanes | None = None


def file_name(rank: int) -> str:
    """Return the name of the file of ``rank``."""
    return f"rank-{rank:05d}.jsonl"


def encode(dump: Dump) -> Iterator[str]:
    """Yield the lines of the file, without newlines."""
    parts: dict[str, Iterable[Mapping[str, Any]]] = {
        "rank": [{"format": _FORMAT, **asdict(dump.header)}],
        "report": [asdict(dump.report)] if dump.report is not None else [],
        "fault": map(asdict, dump.faults),
        "stack": [{"thread": thread, "frames": frames} for thread, frames in dump.stacks],
        "predicted": [asdict(dump.predicted)] if dump.predicted is not None else [],
        "event": map(asdict, dump.events),
    }
    return (json.dumps({"kind": kind, **each}) for kind, records in parts.items() for each in records)


def decode(lines: Iterable[str]) -> Dump:
    """Parse the lines of a file.

    Raises:
        ValueError: the lines are not the output of :func:`encode`, or of another version of it.
    """
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    try:
        for line in lines:
            values = json.loads(line)
            found[values.pop("kind")].append(values)
        if not found["rank"]:
            raise ValueError("not a file of diagnostics: it does not say whose it is")
        header = found["rank"][0]
        if (version := header.pop("format")) != _FORMAT:
            raise ValueError(f"format {version}, which this version does not know: it reads {_FORMAT}")
        return Dump(
            Header(**header),
            next((RankReport.decoded(json.dumps(each)) for each in found["report"]), None),
            tuple(Fault(**{**_positioned(each), "stack": tuple(each["stack"])}) for each in found["fault"]),
            tuple((each["thread"], tuple(each["frames"])) for each in found["stack"]),
            tuple(TraceEvent(**_positioned(e) | {"operation": Operation(e["operation"])}) for e in found["event"]),
            next(map(_lanes, found["predicted"]), None),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a file of diagnostics: {type(error).__name__}: {error}") from error


def _positioned(values: dict[str, Any]) -> dict[str, Any]:
    position = values["position"]
    if position is not None:
        position = Position(**position | {"ranks": tuple(position["ranks"])})
    return values | {"position": position}


def _lanes(values: dict[str, Any]) -> Lanes:
    slices, memory = (Slice(**each) for each in values["slices"]), map(tuple, values["memory"])
    return Lanes(**values | {"slices": tuple(slices), "memory": tuple(memory)})
