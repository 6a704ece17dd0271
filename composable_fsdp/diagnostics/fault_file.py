"""The file of a rank, written when something fails: its last events and its state; and the comparison of all ranks.

Torch's flight recorder serves NCCL. Most of our collectives on a CPU are none of a torch backend, so it has no record
of them, and it records no passes, errors or stacks. Hence this file, one JSON document:

    rank, world_size, host, process, versions
    attempt: the restarts by torchrun before
    reason: why it was written
    written, clock: when, in seconds since 1970 and by ``time.perf_counter``, by which events are timed
    state: what the rank waits for, or has done last
    faults: the errors that ended a pass or a collective, each with its text, place, time and stack, the oldest first
    stacks: the name of each thread, and its frames, the innermost last
    events: the last ones, and the last collective in each process group
"""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import logging
import os
import platform
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import trace
from composable_fsdp._consistency.main_thread import Frame, thread_stacks
from composable_fsdp._consistency.watchdog import known_watchdog
from composable_fsdp._core.seams import Observer
from composable_fsdp._files import read_text, replace_file
from composable_fsdp.diagnostics._signals import SignalWatch
from composable_fsdp.errors import ConfigurationError, DivergenceError, PeerError, printable
from composable_fsdp.plugins.explain_errors import hook_uncaught
from composable_fsdp.trace import Operation, Position, TraceEvent

__all__ = [
    "ABSENT",
    "FORGOTTEN",
    "Dump",
    "Files",
    "Recorder",
    "Sequences",
    "decode",
    "disable",
    "dump",
    "enable",
    "file_name",
    "read",
    "recorded_events",
    "sequences",
    "versions",
]

_FOLDER_VARIABLE = "COMPOSABLE_FSDP_DIAGNOSTICS"
_TIMELINE_VARIABLE = "COMPOSABLE_FSDP_TIMELINE"
_DEFAULT_FOLDER = "diagnostics"
_KEPT_EVENTS = 1000
_KEPT_FAULTS = 10
_TIMELINE_EVENTS = 20_000
"""The events of a timeline. A group has about ten in a step: these are 20 steps of a model with 100 groups."""
_FORMAT = 4
_MOST_RANKS = 10**6

ABSENT = "not launched"
FORGOTTEN = "…"
"""A collective that was launched so long ago that it is no longer recorded."""

logger = logging.getLogger(__name__)


Dump: TypeAlias = dict[str, Any]


def file_name(rank: int) -> str:
    """Return the name of the file of ``rank``."""
    return f"rank-{rank:05d}.json"


# -- reading

_Check: TypeAlias = Callable[[Any], Any]
"""Returns a value of a file, its texts printable and its times as ``float``, or raises a ``ValueError``."""


def _value(what: str, kinds: tuple[type, ...], fits: _Check = lambda value: True, made: _Check | None = None) -> _Check:
    def check(value: Any) -> Any:
        if type(value) not in kinds or not fits(value):
            raise ValueError(f"it is not {what}")
        return made(value) if made is not None else value

    return check


def _checked(name: str, value: Any, check: _Check) -> Any:
    """Return the checked ``value``. Errors name it."""
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _list(entry: _Check) -> _Check:
    def made(values: list[Any]) -> list[Any]:
        return [_checked(f"entry {number}", value, entry) for number, value in enumerate(values)]

    return _value("a list", (list,), made=made)


def _record(fields: Mapping[str, _Check]) -> _Check:
    def made(values: Dump) -> Dump:
        for name in fields:
            if name not in values:
                raise ValueError(f"it has no {name!r}")
        return {name: _checked(name, values[name], check) for name, check in fields.items()}

    return _value("an object", (dict,), made=made)


def _made_thread(value: list[Any]) -> list[Any]:
    return [_checked("name", value[0], _TEXT), _checked("frames", value[1], _list(_TEXT))]


def _made_texts(values: dict[str, Any]) -> dict[str, str]:
    return {printable(name): _checked(printable(name), value, _TEXT) for name, value in values.items()}


def _event(value: Any) -> Dump:
    found: Dump = _EVENT(value)
    if found["end"] < found["begin"]:
        raise ValueError("it ends before it begins")
    return found


_TEXT = _value("a text", (str,), made=printable)
_NUMBER = _value("a whole number from 0 to 2^63", (int,), lambda value: 0 <= value <= 2**63)
_TIME = _value("a time that a clock shows", (int, float), lambda value: abs(value) < 1e11, float)
_POSITION = _record({"group": _TEXT, "ranks": _list(_NUMBER), "connection": _NUMBER, "number": _NUMBER})
_EVENT = _record(
    {
        "operation": _value("an operation of this version", (str,), {each.value for each in Operation}.__contains__),
        **dict.fromkeys(("group", "stream"), _TEXT),
        **dict.fromkeys(("bytes", "plain_bytes"), _NUMBER),
        **dict.fromkeys(("begin", "end"), _TIME),
        "position": lambda value: value if value is None else _POSITION(value),
    }
)
_FILE = _record(
    {
        **dict.fromkeys(("attempt", "process", "rank", "world_size"), _NUMBER),
        **dict.fromkeys(("host", "reason", "state"), _TEXT),
        **dict.fromkeys(("written", "clock"), _TIME),
        "events": _list(_event),
        "faults": _list(_record({**dict.fromkeys(("error", "text", "where"), _TEXT), "time": _TIME})),
        "stacks": _list(_value("a name with frames", (list,), lambda value: len(value) == 2, _made_thread)),
        "versions": _value("an object", (dict,), made=_made_texts),
    }
)
"""The check of each field of a file. Fields that are unknown here are left out."""


def decode(text: str) -> Dump:
    """Parse the text of a file. Its texts become printable.

    Raises:
        ValueError: it is not the file of a rank, or that of another version, or an entry is damaged.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError("not a file of diagnostics")
    if values["format"] != _FORMAT:
        raise ValueError(f"format {values['format']}, which this version does not know: it reads {_FORMAT}")
    found: Dump = _FILE(values)
    if not found["rank"] < found["world_size"] <= _MOST_RANKS:
        raise ValueError(f"it is of rank {found['rank']} of {found['world_size']}")
    return found


def recorded_events(dump: Dump) -> list[TraceEvent]:
    """Return the events of a file."""
    found = []
    for each in dump["events"]:
        at = each["position"]
        position = at and Position(at["group"], tuple(at["ranks"]), at["connection"], at["number"])
        found.append(TraceEvent(**{**each, "operation": Operation(each["operation"]), "position": position}))
    return found


# -- recording


class _Recording:
    """The recorded events and faults of this rank, and the hooks that write them."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder = folder
        self.events: deque[TraceEvent] = deque(maxlen=last)
        self.faults: deque[dict[str, Any]] = deque(maxlen=_KEPT_FAULTS)
        self.latest: dict[str, TraceEvent] = {}
        """The last collective of each process group."""
        self._last_reported: tuple[str, str, int] | None = None
        self._rank_and_world_size, self._process = _rank_and_world_size(), os.getpid()
        self._undo: list[Callable[[], None]] = []

    @property
    def is_own(self) -> bool:
        """False in a forked process, such as a worker of a data loader. It is no rank, and writes nothing."""
        return os.getpid() == self._process

    def start(self) -> None:
        """Record, and write a file on errors and signals."""
        if threading.current_thread() is threading.main_thread():
            self._undo.append(SignalWatch(self.write).stop)
        trace.listeners.append(self.note)
        self._undo.append(lambda: trace.listeners.remove(self.note))
        trace.fault_listeners.append(self.on_fault)
        self._undo.append(lambda: trace.fault_listeners.remove(self.on_fault))
        self._undo.append(hook_uncaught(lambda error: self.on_fault(error, "the program")))
        _stop_in_children()

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def note(self, event: TraceEvent) -> None:
        """Record an event. A trace listener."""
        self.events.append(event)
        if event.position is not None:
            self.latest[event.position.group] = event

    def on_fault(self, error: BaseException | None, where: str) -> None:
        """Write a file once for each fault. A fault listener: every module that the error passes through reports it."""
        watchdog = known_watchdog()
        kind, text = ("", where) if error is None else (type(error).__name__, str(error))
        fault = (kind, text, watchdog.here.steps if watchdog is not None else 0)
        if fault == self._last_reported:
            return
        frames = () if error is None else traceback.extract_tb(error.__traceback__)
        stack = [str(Frame(frame.filename, frame.lineno or 0, frame.name)) for frame in frames]
        self.faults.append({"error": kind, "text": text, "where": where, "time": time.time(), "stack": stack})
        path = self.write(f"{kind}: {text}" if kind else text)
        if error is not None and path is not None:
            _add_path(path, error)
        self._last_reported = fault if error is None else (kind, str(error), fault[2])

    def write(self, reason: str, folder: Path | None = None) -> Path | None:
        """Write this rank's file atomically, and return its path, or ``None`` if it could not be written."""
        if not self.is_own:
            return None
        folder = folder or self.folder
        try:
            found = self._collected(reason)
            path = folder / file_name(found["rank"])
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(found))
        except Exception:  # it must not hide the error for which the program fails
            logger.warning("diagnostics could not be written to %s", folder, exc_info=True)
            return None
        return path

    def _collected(self, reason: str) -> Dump:
        watchdog = known_watchdog()
        events = list(self.events)
        oldest = events[0].end if events else 0.0
        rank, world_size = _rank_and_world_size() if dist.is_initialized() else self._rank_and_world_size
        events = [*(event for event in tuple(self.latest.values()) if event.end < oldest), *events]
        return {
            "format": _FORMAT,
            "rank": rank,
            "world_size": world_size,
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "reason": reason,
            "written": time.time(),
            "clock": trace.now(),
            "versions": versions(),
            "state": str(watchdog.report()) if watchdog is not None else "",
            "faults": list(self.faults),
            "stacks": [[name, [str(frame) for frame in frames]] for name, frames in thread_stacks()],
            "events": [asdict(event) for event in events],
        }


_recording: _Recording | None = None


@cache
def _stop_in_children() -> None:
    """Stop recording in forked children, which would write their signals to the parent's socket."""

    def stop() -> None:
        if _recording is not None:
            _recording.stop()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=stop)


def enable(folder: str | os.PathLike[str], *, last: int = _KEPT_EVENTS) -> None:
    """Start recording the last events of this rank. Call it on every rank, in the main thread.

    The environment variable ``COMPOSABLE_FSDP_DIAGNOSTICS`` with a folder does the same at the first ``fully_shard``.
    A file is written when an exception ends the program or a forward or backward of a sharded module, or when one of
    our collectives fails. The error then names the file. Called in the main thread, it is also written on SIGTERM and
    SIGUSR1. Their previous action follows: SIGTERM still ends the process. A handler that was not set by Python is left
    alone. The default action of SIGUSR1, to end the process, is suppressed.

    Args:
        folder: the folder that :func:`dump` writes to, shared by all ranks or one per host.
        last: the number of events to keep. A parameter group has about ten in a step.

    Raises:
        ConfigurationError: ``last`` is below 1.
    """
    global _recording
    if last < 1:
        raise ConfigurationError(f"diagnostics.enable: last must be at least 1, not {last}.")
    disable()
    _recording = _Recording(Path(folder), last)
    _recording.start()


def disable() -> None:
    """Stop recording, and restore the previous signal handlers and ``sys.excepthook``."""
    global _recording
    if _recording is not None:
        _recording.stop()
        _recording = None


class Recorder(Observer):
    """Begins the recordings that environment variables ask for."""

    def before_sharding(self, modules: Sequence[nn.Module]) -> None:
        folder = os.environ.get(_FOLDER_VARIABLE)
        if folder and (_recording is None or not _recording.is_own):
            enable(folder)
        if os.environ.get(_TIMELINE_VARIABLE):
            _record_timeline(os.environ[_TIMELINE_VARIABLE])


@cache
def _record_timeline(folder: str) -> None:
    """Record the last events from now on, and write them to ``folder`` when the program ends."""
    recording = _Recording(Path(folder), _TIMELINE_EVENTS)
    trace.listeners.append(recording.note)
    atexit.register(lambda: recording.events and recording.write("the end of the program"))


def dump(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Write this rank's last events and current stacks to ``folder/rank-00000.json``, replacing an earlier file.

    It needs no other rank, may be called from any thread, and raises no error about files: it is meant for programs
    that are failing. Without :func:`enable` the file has no events, but everything else.

    Args:
        folder: the default is the folder given to :func:`enable`, else ``diagnostics``.

    Returns:
        The path of the file, or ``None`` if it could not be written, which is logged, or in a forked process.
    """
    recording = _recording or _Recording(Path(os.environ.get(_FOLDER_VARIABLE) or _DEFAULT_FOLDER), 1)
    return recording.write("asked for", Path(folder) if folder is not None else None)


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages, that of torch with its build, such as ``2.15.0+cu132``."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["composable_fsdp"] = importlib.metadata.version("composable_fsdp")
    return found


def _add_path(path: Path, error: BaseException) -> None:
    """Add the path of the file to the error's text."""
    note = f"{path} has what this rank did until then; composable-fsdp diagnostics {path.parent}"
    if isinstance(error, (PeerError, DivergenceError)):
        if note not in str(error):
            error.args = (f"{error}\n{note}", *error.args[1:])
    elif hasattr(error, "add_note"):
        error.add_note(note)


# -- the files of several ranks


class Files(NamedTuple):
    """The files of diagnostics in a folder.

    Args:
        dumps: the dumps of the job's last attempt, by rank.
        missing: ranks of the job that left no file in it.
        damaged: the problems of unreadable files, by file name.
    """

    dumps: dict[int, Dump]
    missing: list[int]
    damaged: dict[str, str]


def read(folder: Path) -> Files:
    """Read the files of all ranks in ``folder``."""
    found: dict[int, Dump] = {}
    damaged = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            dump = decode(read_text(folder, path.name))
        except (ValueError, OSError, RecursionError) as error:
            damaged[path.name] = str(error)
            continue
        found[dump["rank"]] = dump
    attempt = max((dump["attempt"] for dump in found.values()), default=0)
    dumps = {rank: dump for rank, dump in found.items() if dump["attempt"] == attempt}
    world = max((dump["world_size"] for dump in dumps.values()), default=0)
    return Files(dumps, [rank for rank in range(world) if rank not in dumps], damaged)


class Row(NamedTuple):
    """The collective ``number`` of a process group, with its label on each rank."""

    number: int
    labels: Mapping[int, str]


class Sequences(NamedTuple):
    """The collectives that the ranks of a process group launched over their newest connection, by number.

    Invariant: every row has the same ranks: those of the group that left a file.
    """

    group: str
    ranks: tuple[int, ...]
    rows: list[Row]

    @property
    def first_difference(self) -> Row | None:
        """The first row in which ranks called different operations. Forgotten ones are ignored."""
        return next((row for row in self.rows if len({*row.labels.values()} - {FORGOTTEN}) > 1), None)


def sequences(dumps: Mapping[int, Dump]) -> list[Sequences]:
    """Return the sequences of every process group: first those that differ."""
    launched: dict[tuple[str, tuple[int, ...]], dict[int, list[tuple[int, int, str]]]] = {}
    for rank, dump in dumps.items():
        for event in recorded_events(dump):
            if at := event.position:
                launches = launched.setdefault((at.group, at.ranks), {}).setdefault(rank, [])
                launches.append((at.connection, at.number, event.group))
    found = []
    for (group, ranks), by_rank in launched.items():
        newest = max(connection for own in by_rank.values() for connection, _, _ in own)
        labels = {
            rank: {number: label for connection, number, label in by_rank.get(rank, ()) if connection == newest}
            for rank in ranks
            if rank in dumps
        }
        first = {rank: min(own, default=0) for rank, own in labels.items()}
        rows = [
            Row(n, {rank: own.get(n, FORGOTTEN if n < first[rank] else ABSENT) for rank, own in labels.items()})
            for n in sorted({number for own in labels.values() for number in own})
        ]
        if rows:  # else a file of a rank that is none of the group
            found.append(Sequences(group, ranks, rows))
    return sorted(found, key=lambda each: each.first_difference is None)
