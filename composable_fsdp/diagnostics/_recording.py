"""Recording of this rank's last events in memory, and writing them to a file when something fails."""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import platform
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch import nn

from composable_fsdp import trace
from composable_fsdp._consistency.stacks import Frame, thread_stacks
from composable_fsdp._consistency.watchdog import known_watchdog
from composable_fsdp._core.seams import Observer
from composable_fsdp.diagnostics._records import Dump, Fault, encode, file_name
from composable_fsdp.diagnostics._signals import SignalWatch
from composable_fsdp.errors import ConfigurationError, DivergenceError, PeerError
from composable_fsdp.plugins.explain_errors import hook_uncaught

__all__ = [
    "FOLDER_VARIABLE",
    "TIMELINE_VARIABLE",
    "Recorder",
    "disable",
    "dump",
    "enable",
    "enable_from_environment",
    "versions",
]

FOLDER_VARIABLE = "COMPOSABLE_FSDP_DIAGNOSTICS"
TIMELINE_VARIABLE = "COMPOSABLE_FSDP_TIMELINE"

_DEFAULT_FOLDER = "diagnostics"
_KEPT_EVENTS = 1000
_KEPT_FAULTS = 10
_TIMELINE_EVENTS = 20_000
"""The events of a timeline. A group has about ten in a step: these are 20 steps of a model with 100 groups."""

logger = logging.getLogger(__name__)


class _Recording:
    """The recorded events and faults of this rank, and the hooks that write them. Final."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder = folder
        self.events: deque[trace.TraceEvent] = deque(maxlen=last)
        self.faults: deque[Fault] = deque(maxlen=_KEPT_FAULTS)
        self.latest: dict[str, trace.TraceEvent] = {}
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

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def note(self, event: trace.TraceEvent) -> None:
        """Record an event. A trace listener."""
        self.events.append(event)
        if event.position is not None:
            self.latest[event.position.group] = event

    def on_fault(self, error: BaseException | None, where: str, position: trace.Position | None = None) -> None:
        """Write a file once for each fault. A fault listener: every module that the error passes through reports it."""
        watchdog = known_watchdog()
        kind, text = ("", where) if error is None else (type(error).__name__, str(error))
        fault = (kind, text, watchdog.here.steps if watchdog is not None else 0)
        if fault == self._last_reported:
            return
        frames = () if error is None else traceback.extract_tb(error.__traceback__)
        stack = tuple(str(Frame(frame.filename, frame.lineno or 0, frame.name)) for frame in frames)
        self.faults.append(Fault(kind, text, where, time.time(), position, stack))
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
            path = folder / file_name(found.rank)
            partial = folder / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
            folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(encode(found))
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except Exception:  # it must not hide the error for which the program fails
            logger.warning("diagnostics could not be written to %s", folder, exc_info=True)
            return None
        return path

    def _collected(self, reason: str) -> Dump:
        watchdog = known_watchdog()
        events = tuple(self.events)
        oldest = events[0].end if events else 0.0
        return Dump(
            *(_rank_and_world_size() if dist.is_initialized() else self._rank_and_world_size),
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            host=socket.gethostname(),
            process=os.getpid(),
            reason=reason,
            written=time.time(),
            clock=trace.now(),
            versions=versions(),
            report=watchdog.report() if watchdog is not None else None,
            faults=tuple(self.faults),
            stacks=tuple((name, tuple(map(str, frames))) for name, frames in thread_stacks()),
            events=(*(event for event in tuple(self.latest.values()) if event.end < oldest), *events),
        )


_recording: _Recording | None = None


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
        enable_from_environment()


def enable_from_environment() -> None:
    """Begin the recordings that environment variables ask for."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and (_recording is None or not _recording.is_own):
        enable(folder)
    if os.environ.get(TIMELINE_VARIABLE):
        _record_timeline(os.environ[TIMELINE_VARIABLE])


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
    recording = _recording or _Recording(Path(os.environ.get(FOLDER_VARIABLE) or _DEFAULT_FOLDER), 1)
    return recording.write("asked for", Path(folder) if folder is not None else None)


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages."""
    packages = {name: _version(name) for name in ("torch", "numpy", "composable_fsdp")}
    return {"python": platform.python_version(), **packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _add_path(path: Path, error: BaseException) -> None:
    """Add the path of the file to the error's text."""
    note = f"{path} has what this rank did until then; composable-fsdp diagnostics merge {path.parent}"
    if isinstance(error, (PeerError, DivergenceError)):
        if note not in str(error):
            error.args = (f"{error}\n{note}", *error.args[1:])
    elif hasattr(error, "add_note"):
        error.add_note(note)
