"""The contents of one rank's file of diagnostics, and its format: JSON, one record per line.

Invariant: ``decode(encode(dump)) == dump``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composable_fsdp._consistency.rank_report import RankReport
from composable_fsdp.diagnostics.timeline import Lanes, Slice
from composable_fsdp.trace import Operation, Position, TraceEvent

__all__ = ["Dump", "Fault", "Header", "NumberedEvent", "Stack", "decode", "encode", "file_name"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Header:
    """The rank that wrote the file, and the time and reason.

    Args:
        rank: the global rank.
        world_size: the number of ranks in the job.
        attempt: the number of restarts by torchrun.
        host: the name of the host.
        process: the process id.
        reason: the reason for writing.
        written: the time of writing, in seconds since 1970.
        clock: ``time.perf_counter`` at that time, to which the times of events relate.
        events: the number of events since recording began.
        groups: parameter groups, in the order of their first use.
        versions: versions of installed packages by name.
    """

    rank: int
    world_size: int
    attempt: int
    host: str
    process: int
    reason: str
    written: float
    clock: float
    events: int
    groups: tuple[str, ...]
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
class Stack:
    """The stack of a thread, the innermost frame last."""

    thread: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """The ``index``-th event since recording began."""

    index: int
    event: TraceEvent


@dataclass(frozen=True, slots=True)
class Dump:
    """The contents of a file.

    Args:
        header: the rank that wrote it.
        report: the rank report, if the job has several ranks.
        latest: the last collective that the rank launched in each process group.
        faults: faults, oldest first.
        stacks: stacks of all threads.
        events: the last events, oldest first.
        predicted: the step that was predicted for the schedule in use, if settings were chosen by costs.
    """

    header: Header
    report: RankReport | None = None
    latest: tuple[TraceEvent, ...] = ()
    faults: tuple[Fault, ...] = ()
    stacks: tuple[Stack, ...] = ()
    events: tuple[NumberedEvent, ...] = ()
    predicted: Lanes | None = None


def file_name(rank: int) -> str:
    """Return the name of the file of ``rank``."""
    return f"rank-{rank:05d}.jsonl"


def encode(dump: Dump) -> Iterator[str]:
    """Yield the lines of the file, without newlines."""
    yield _line("rank", {"format": _FORMAT, **asdict(dump.header)})
    if dump.report is not None:
        yield _line("report", {**json.loads(dump.report.encoded()), "text": str(dump.report)})
    for event in dump.latest:
        yield _line("latest", _event_values(event))
    for fault in dump.faults:
        yield _line("fault", asdict(fault))
    for stack in dump.stacks:
        yield _line("stack", asdict(stack))
    if dump.predicted is not None:
        yield _line("predicted", asdict(dump.predicted))
    for numbered in dump.events:
        yield _line("event", {"index": numbered.index, **_event_values(numbered.event)})


def decode(lines: Iterable[str]) -> Dump:
    """Parse the lines of a file.

    Raises:
        ValueError: the lines are not the output of :func:`encode`, or of a newer version of it.
    """
    header: Header | None = None
    report: RankReport | None = None
    predicted: Lanes | None = None
    parts: dict[str, list[Any]] = {kind: [] for kind in _READERS}
    try:
        for line in lines:
            values = json.loads(line)
            kind = values.pop("kind")
            if kind == "rank":
                header = _header(values)
            elif kind == "report":
                report = RankReport.decoded(json.dumps({key: values[key] for key in values if key != "text"}))
            elif kind == "predicted":
                slices, memory = (Slice(**each) for each in values["slices"]), map(tuple, values["memory"])
                predicted = Lanes(**{**values, "slices": tuple(slices), "memory": tuple(memory)})
            else:
                parts[kind].append(_READERS[kind](values))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a file of diagnostics: {type(error).__name__}: {error}") from error
    if header is None:
        raise ValueError("not a file of diagnostics: it does not say whose it is")
    latest, faults, stacks, events = (tuple(parts[kind]) for kind in _READERS)
    return Dump(header, report, latest, faults, stacks, events, predicted)


def _line(kind: str, values: Mapping[str, Any]) -> str:
    return json.dumps({"kind": kind, **values})


def _event_values(event: TraceEvent) -> dict[str, Any]:
    values = {**asdict(event), "operation": event.operation.value}
    if event.position is None:
        del values["position"]
    return values


def _header(values: dict[str, Any]) -> Header:
    if (found := values.pop("format")) != _FORMAT:
        raise ValueError(f"format {found}, which this version does not know: it reads {_FORMAT}")
    return Header(**{**values, "groups": tuple(values["groups"])})


def _position(values: dict[str, Any] | None) -> Position | None:
    return None if values is None else Position(**{**values, "ranks": tuple(values["ranks"])})


def _event(values: dict[str, Any]) -> TraceEvent:
    position = _position(values.get("position"))
    return TraceEvent(**{**values, "operation": Operation(values["operation"]), "position": position})


def _numbered(values: dict[str, Any]) -> NumberedEvent:
    return NumberedEvent(values.pop("index"), _event(values))


def _fault(values: dict[str, Any]) -> Fault:
    return Fault(**{**values, "position": _position(values["position"]), "stack": tuple(values["stack"])})


def _stack(values: dict[str, Any]) -> Stack:
    return Stack(values["thread"], tuple(values["frames"]))


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "latest": _event,
    "fault": _fault,
    "stack": _stack,
    "event": _numbered,
}
