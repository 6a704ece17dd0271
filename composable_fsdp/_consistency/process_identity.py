"""The identity of a process, by which another process on the same host finds out that it has ended.

Linux only: elsewhere no process is known to have ended. The id of a process is used again, so its start time belongs to
its identity. Each time namespace has a clock of its own, so start times are compared only within one. A process of
another time namespace has ended if no process has its id.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_ENDED = ("Z", "X")
"""States of a process that has ended, but that its parent has not waited for."""


def process_identity() -> str:
    """Return a text for this process, or an empty one where there is no ``/proc``."""
    place, start = _place(), _start_time(os.getpid())
    return f"{place} {_clock()} {os.getpid()} {start}" if place and start else ""


def has_died(identity: str) -> bool:
    """Return whether the process of ``identity`` is one of this host and has ended."""
    if not is_of_this_host(identity):
        return False
    _, clock, process, start = identity.rsplit(" ", 3)
    now = _start_time(int(process))
    return now != start if clock == _clock() else not now


def exit_text(identity: str) -> str:
    """Return the signal that ended the process of ``identity``, which has died, as `` (signal 9, Killed)``.

    Empty if there was none, and once the parent has waited for the process. Linux shows it to the same user only.
    """
    state, *values = _stat(int(identity.rsplit(" ", 2)[1]))
    number = int(values[-1]) & 0x7F if state in _ENDED else 0
    return f" (signal {number}, {signal.strsignal(number)})" if number else ""


def is_of_this_host(identity: str) -> bool:
    """Return whether the process of ``identity`` is one of this host."""
    return bool(identity) and identity.rsplit(" ", 3)[0] == _place()


@cache
def _place() -> str:
    """Return the boot of this host and the namespace of process ids."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


@cache
def _clock() -> str:
    """Return the time namespace, in whose clock this process reads start times. Linux has them from 5.6."""
    clock = Path("/proc/self/ns/time")
    return str(clock.stat().st_ino) if clock.exists() else "-"


def _start_time(process: int) -> str:
    """Return when ``process`` started, or an empty text if it has ended."""
    state, *values = _stat(process)
    return "" if state in ("", *_ENDED) else values[18]


def _stat(process: int) -> list[str]:
    """Return the state of ``process`` and the values after it, or one empty text if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")  # a name is cut to 15 bytes
    except OSError:
        return [""]
    return text.rpartition(")")[2].split()  # a name in brackets comes before, with any characters


# -- The end of a process by another rank's fault, after the end of that rank
#
# Launchers report the process that failed first as the root cause. torchrun compares the times in error files, in whole
# seconds, and takes the time at which it saw the end of a process that wrote none. Then it sends SIGTERM to the others.

_MOST_SECONDS = 10.0
"""The longest wait for the end of other processes."""
_TORCHRUN_SECONDS = 10.0
"""The time in which torchrun sees the end of a process and sends SIGTERM.

It looks ten times a second, but 3 s were too short once with 25 runnable processes per core.
"""
_PERIOD = 0.02

_record: list[Callable[[], None]] = []
"""Writes the error file, if :func:`record_at_end` was called."""


def wait_for_ends(identities: Collection[str]) -> None:
    """Wait until the processes with ``identities`` have ended and torchrun, if it runs this rank, has seen it."""
    end = time.monotonic() + _MOST_SECONDS
    while not all(map(has_died, identities)):
        if time.monotonic() >= end:
            return
        time.sleep(_PERIOD)
    if dist.is_torchelastic_launched():
        time.sleep(_TORCHRUN_SECONDS)


def record_at_end(error: BaseException) -> None:
    """Let SIGTERM or :func:`record_now` write torchrun's error file, if torchrun runs this rank.

    ``torch.distributed.elastic.multiprocessing.errors.record`` has written it when ``error`` left the program, which
    may be earlier than the end of the rank at fault.
    """
    before = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    if _record or "TORCHELASTIC_ERROR_FILE" not in os.environ or before is None or not in_main:
        return

    def record() -> None:
        signal.signal(signal.SIGTERM, before)
        try:
            raise error
        except BaseException:  # the handler formats the exception that is being handled
            with suppress(OSError):
                get_error_handler().record_exception(error)

    def record_and_end(number: int, _: object) -> None:
        record_now()
        os.kill(os.getpid(), number)

    _record.append(record)
    signal.signal(signal.SIGTERM, record_and_end)


def record_now() -> None:
    """Write the error file with the current time, and restore the handler of SIGTERM."""
    while _record:
        _record.pop()()
