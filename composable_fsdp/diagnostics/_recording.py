"""The last events of this rank, kept in memory, and written down when something goes wrong."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import linecache
import logging
import os
import platform
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._consistency.watchdog import known_watchdog
from composable_fsdp.diagnostics._records import Dump, Fault, Header, NumberedEvent, Stack, encode, file_name
from composable_fsdp.diagnostics._signals import SignalWatch
from composable_fsdp.errors import ConfigurationError, DivergenceError, PeerError

__all__ = ["FOLDER_VARIABLE", "disable", "dump", "enable", "enable_from_environment"]

FOLDER_VARIABLE = "COMPOSABLE_FSDP_DIAGNOSTICS"

_DEFAULT_FOLDER = "diagnostics"
_LAST = 1000
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_FAULTS = 10

logger = logging.getLogger(__name__)


class _Recording:
    """What there is to write down, and when to do so. Final."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder = folder
        self.events: deque[NumberedEvent] = deque(maxlen=last)
        self.faults: deque[Fault] = deque(maxlen=_FAULTS)
        self.latest: dict[str, trace.TraceEvent] = {}
        """By process group, the last collective."""
        self.groups: dict[str, None] = {}
        self.count = 0
        self._told: tuple[str, str, int] | None = None
        self.undo: list[Callable[[], None]] = []

    def start(self, *, on_error: bool, signals: Sequence[signal.Signals]) -> None:
        if signals:  # first, as it is what can be refused
            self.undo.append(SignalWatch(signals, self._on_signal).stop)
        trace.listeners.append(self.note)
        self.undo.append(lambda: trace.listeners.remove(self.note))
        if on_error:
            trace.fault_listeners.append(self.on_fault)
            self.undo.append(lambda: trace.fault_listeners.remove(self.on_fault))
            self.undo.append(_watch_uncaught(self.on_fault))

    def stop(self) -> None:
        while self.undo:
            self.undo.pop()()

    def note(self, event: trace.TraceEvent) -> None:
        """A listener of the trace."""
        self.count += 1
        self.events.append(NumberedEvent(self.count, event))
        if event.position is not None:
            self.latest[event.position.group] = event
        else:
            self.groups.setdefault(event.group)

    def on_fault(self, error: BaseException | None, where: str, position: trace.Position | None = None) -> None:
        """A fault listener: writes once for each fault, though all modules around it tell of it too."""
        watchdog = known_watchdog()
        kind, text = ("", where) if error is None else (type(error).__name__, str(error))
        told = (kind, text, watchdog.here.steps if watchdog is not None else 0)
        if told == self._told:
            return
        walked = () if error is None else traceback.extract_tb(error.__traceback__)
        stack = tuple(_frame(frame.filename, frame.lineno or 0, frame.name) for frame in walked)
        self.faults.append(Fault(kind, text, where, time.time(), position, stack))
        path = write(self.folder, f"{kind}: {text}" if kind else text, self)
        if error is not None and path is not None:
            _point_to(path, error)
        self._told = told if error is None else (kind, str(error), told[2])

    def _on_signal(self, name: str) -> None:
        write(self.folder, name, self)


_recording: _Recording | None = None


def enable(
    folder: str | os.PathLike[str],
    *,
    last: int = _LAST,
    on_error: bool = True,
    signals: Iterable[signal.Signals] = _SIGNALS,
) -> None:
    """Records the last events of this rank from now on. Call it on every rank, in the main thread.

    The environment variable ``COMPOSABLE_FSDP_DIAGNOSTICS`` with a folder does the same at the first ``fully_shard``.

    Args:
        folder: where :func:`dump` writes; of all ranks, or of each host.
        last: events to keep. A group of parameters has about ten in a step.
        on_error: write when an exception ends a pass of a sharded module or the program, or a collective of ours fails.
            The error then says where the file is.
        signals: upon which to write. What they did before they do then too: SIGTERM still ends the process. A handler
            that Python did not set is left alone, and so is the default of SIGUSR1 and SIGUSR2, to end the process.

    Raises:
        ConfigurationError: ``last`` is below 1, or signals are asked for in another thread than the main one.
    """
    global _recording
    if last < 1:
        raise ConfigurationError(f"diagnostics.enable: last must be at least 1, not {last}.")
    wanted = tuple(signal.Signals(each) for each in signals)
    if wanted and threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "diagnostics.enable: signals can be noticed only where the main thread asks for it. Call it there, or with "
            "signals=()."
        )
    disable()
    recording = _Recording(Path(folder), last)
    recording.start(on_error=on_error, signals=wanted)
    _recording = recording
    _leave_in_forked_processes()


def disable() -> None:
    """Records no more, and leaves signals and ``sys.excepthook`` as they were before."""
    global _recording
    if _recording is not None:
        _recording.stop()
        _recording = None


def enable_from_environment() -> None:
    """What ``COMPOSABLE_FSDP_DIAGNOSTICS`` asks for, once."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and _recording is None:
        in_main = threading.current_thread() is threading.main_thread()
        enable(folder, signals=_SIGNALS if in_main else ())


def dump(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Writes what this rank did last, and where it is, to ``folder/rank-00000.jsonl``, in place of what is there.

    It needs no other rank, may be called in any thread, and raises nothing that has to do with files: it is made for
    programs that are failing. Without :func:`enable` there are no events to write, but all else.

    Args:
        folder: if left out, that given to :func:`enable`, else ``diagnostics``.

    Returns:
        The file; ``None`` where it could not be written, which is logged.
    """
    chosen = folder or (_recording.folder if _recording is not None else None)
    return write(Path(chosen or os.environ.get(FOLDER_VARIABLE) or _DEFAULT_FOLDER), "asked for", _recording)


def write(folder: Path, reason: str, recording: _Recording | None) -> Path | None:
    """The file of this rank, complete or as it was before; ``None`` where it could not be written."""
    try:
        found = _collect(reason, recording)
        path = folder / file_name(found.header.rank)
        folder.mkdir(parents=True, exist_ok=True)
        _replace(path, "".join(f"{line}\n" for line in encode(found)))
    except Exception:  # whatever it is, what the program fails for is more important
        logger.warning("diagnostics could not be written to %s", folder, exc_info=True)
        return None
    return path


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _collect(reason: str, recording: _Recording | None) -> Dump:
    watchdog = known_watchdog()
    header = Header(
        *_whoami(),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        host=socket.gethostname(),
        process=os.getpid(),
        reason=reason,
        written=time.time(),
        clock=trace.now(),
        events=recording.count if recording is not None else 0,
        groups=tuple(recording.groups) if recording is not None else (),
        versions=_versions(),
    )
    return Dump(
        header,
        report=watchdog.report() if watchdog is not None else None,
        latest=tuple(recording.latest.values()) if recording is not None else (),
        faults=tuple(recording.faults) if recording is not None else (),
        stacks=tuple(_stacks()),
        events=tuple(recording.events) if recording is not None else (),
    )


def _whoami() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("composable-fsdp")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {"composable_fsdp": own, "torch": torch.__version__, "python": platform.python_version()}


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def _stacks() -> Iterator[Stack]:
    """The stacks of all threads, at most 100 frames of each.

    ``faulthandler`` reads them in C, makes no frame objects, and is meant for threads that run or hang.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    _, *parts = _THREAD.split(text)
    for ident, lines in zip(parts[::2], parts[1::2], strict=True):
        frames = [_frame(path, int(line), name) for path, line, name in _FRAME.findall(lines)]
        yield Stack(names.get(int(ident, 16), str(int(ident, 16))), tuple(reversed(frames)))


def _frame(path: str, line: int, name: str) -> str:
    return f"{path}:{line} in {name}: {linecache.getline(path, line).strip()}"


def _point_to(path: Path, error: BaseException) -> None:
    """Has the error say where the file is."""
    told = f"{path} has what this rank did until then; python -m composable_fsdp.diagnostics merge {path.parent}"
    if isinstance(error, (PeerError, DivergenceError)):
        if told not in str(error):
            error.args = (f"{error}\n{told}", *error.args[1:])
    elif hasattr(error, "add_note"):
        error.add_note(told)


def _watch_uncaught(tell: Callable[[BaseException, str], None]) -> Callable[[], None]:
    """Has ``sys.excepthook`` tell of what ends the program. Gives what undoes that."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
        tell(error, "the program")
        before(kind, error, stack)

    def undo() -> None:
        if sys.excepthook is told:
            sys.excepthook = before

    sys.excepthook = told
    return undo


def _leave_to_parent() -> None:
    """A forked process, of a data loader say, is no rank."""
    global _recording
    if _recording is not None:
        recording, _recording = _recording, None
        recording.stop()


@cache
def _leave_in_forked_processes() -> None:
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_leave_to_parent)
