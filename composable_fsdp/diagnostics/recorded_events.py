"""The recorded events of each rank, of which timelines are made, and their files.

``COMPOSABLE_FSDP_TIMELINE=folder`` makes every rank record from the first use of a sharded model on, and write a file
to the folder when its program ends. The file is one JSON document:

    rank, world_size
    attempt: the restarts by torchrun before
    written, clock: when, in seconds since 1970 and by ``time.perf_counter``, by which events are timed
    events: the last ones, the oldest first
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._consistency.rank_report import MOST_RANKS
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._files import read_text, replace_file
from composable_fsdp.errors import ConfigurationError, printable
from composable_fsdp.trace import Operation, TraceEvent

_VARIABLE = "COMPOSABLE_FSDP_TIMELINE"
_FORMER_VARIABLE = "COMPOSABLE_FSDP_DIAGNOSTICS"
_KEPT_EVENTS = 20_000
"""The last events that are kept. A group has about ten in a step: these are 20 steps of a model with 100 groups."""
_FORMAT = 5

logger = logging.getLogger(__name__)


class RecordedEvents(NamedTuple):
    """The file of a rank. ``clock`` is the time of the events at which it was ``written``, in seconds since 1970."""

    rank: int
    attempt: int
    written: float
    clock: float
    events: Sequence[TraceEvent]


def file_name(rank: int) -> str:
    """Return the name of the file of ``rank``."""
    return f"rank-{rank:05d}.json"


# -- recording


class TimelineRecorder(Observer):
    """Begins the recording that the environment variable asks for."""

    def for_root(self, root: ObservedRoot) -> None:
        if folder := os.environ.get(_VARIABLE):
            _record(folder)
        if os.environ.get(_FORMER_VARIABLE):
            _warn_of_former_variable()


@cache
def _warn_of_former_variable() -> None:
    """Log once that the variable of the former flight recorder has no effect. Goes with the next release."""
    logger.warning(
        "%s has no effect: the flight recorder is gone. Errors and warnings have the operation of each rank, %s records"
        " events, and Python's faulthandler.register(signal.SIGUSR1) shows stacks.",
        _FORMER_VARIABLE,
        _VARIABLE,
    )


@cache
def _record(folder: str) -> None:
    """Record the last events from now on, and write them to ``folder`` when the program ends."""
    events: deque[TraceEvent] = deque(maxlen=_KEPT_EVENTS)
    trace.listeners.append(events.append)
    at_begin, process = _rank_and_world_size(), os.getpid()

    def write_own() -> None:
        if events and os.getpid() == process:  # a forked process, such as a worker of a data loader, is no rank
            rank, world_size = _rank_and_world_size() if dist.is_initialized() else at_begin
            write(Path(folder), rank, world_size, list(events))

    atexit.register(write_own)


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def write(folder: Path, rank: int, world_size: int, events: Sequence[TraceEvent]) -> None:
    """Write the file of ``rank`` atomically. Log if it cannot be written: the program itself has not failed."""
    document = {
        "format": _FORMAT,
        "rank": rank,
        "world_size": world_size,
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "written": time.time(),
        "clock": trace.now(),
        "events": [asdict(event) for event in events],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / file_name(rank), json.dumps(document))
    except OSError:
        logger.warning("the timeline could not be written to %s", folder, exc_info=True)


# -- reading

_Check: TypeAlias = tuple[str, Callable[[Any], bool]]
"""The words for a valid value, and the function that says if a value of a file is one."""

_TEXT: _Check = "a text", lambda value: isinstance(value, str)
_NUMBER: _Check = "a whole number from 0 to 2^63", lambda value: type(value) is int and 0 <= value <= 2**63
_TIME: _Check = "a time that a clock shows", lambda value: type(value) in (int, float) and abs(value) < 1e11
_OPERATIONS = frozenset(each.value for each in Operation)
_EVENT: Mapping[str, _Check] = {
    "operation": ("an operation of this version", lambda value: isinstance(value, str) and value in _OPERATIONS),
    **dict.fromkeys(("group", "stream"), _TEXT),
    **dict.fromkeys(("bytes", "plain_bytes"), _NUMBER),
    **dict.fromkeys(("begin", "end"), _TIME),
}
_FILE: Mapping[str, _Check] = {
    **dict.fromkeys(("attempt", "rank", "world_size"), _NUMBER),
    **dict.fromkeys(("written", "clock"), _TIME),
    "events": ("a list", lambda value: isinstance(value, list)),
}


def decode(text: str) -> RecordedEvents:
    """Parse the text of a file. Its texts become printable.

    Raises:
        ValueError: it is not the file of a rank, or that of another version, or an entry is damaged.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError("not a file of a timeline")
    if values["format"] != _FORMAT:
        raise ValueError(f"format {values['format']}, which this version does not know: it reads {_FORMAT}")
    _check(values, _FILE)
    if not values["rank"] < values["world_size"] <= MOST_RANKS:
        raise ValueError(f"it is of rank {values['rank']} of {values['world_size']}")
    events = [_event(each, f"events: entry {number}: ") for number, each in enumerate(values["events"])]
    return RecordedEvents(values["rank"], values["attempt"], float(values["written"]), float(values["clock"]), events)


def _event(values: Any, where: str) -> TraceEvent:
    _check(values, _EVENT, where)
    begin, end = float(values["begin"]), float(values["end"])
    if end < begin:
        raise ValueError(f"{where}it ends before it begins")
    group, stream = printable(values["group"]), printable(values["stream"])
    return TraceEvent(Operation(values["operation"]), group, values["bytes"], stream, begin, end, values["plain_bytes"])


def _check(values: Any, checks: Mapping[str, _Check], where: str = "") -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where}it is not an object")
    for name, (what, fits) in checks.items():
        if name not in values:
            raise ValueError(f"{where}it has no {name!r}")
        if not fits(values[name]):
            raise ValueError(f"{where}{name}: it is not {what}")


def read(folder: Path) -> list[RecordedEvents]:
    """Read the files in ``folder`` of the job's last attempt, by rank.

    Raises:
        ConfigurationError: there is no file in ``folder``, or one is damaged.
    """
    found: dict[int, RecordedEvents] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            recorded = decode(read_text(folder, path.name))
        except (ValueError, OSError, RecursionError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        found[recorded.rank] = recorded
    if not found:
        raise ConfigurationError(
            f"there is no timeline in {folder}. Set {_VARIABLE}={folder} for a run; ranks write when they end."
        )
    attempt = max(each.attempt for each in found.values())
    return [found[rank] for rank in sorted(found) if found[rank].attempt == attempt]
