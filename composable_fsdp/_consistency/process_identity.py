"""The identity of a process, by which another process on the same host finds out that it has ended.

Linux only: elsewhere no process is known to have ended. The id of a process is used again, so its start time belongs to
its identity. Each time namespace has a clock of its own, so start times are compared only within one.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path

_ENDED = ("Z", "X")
"""States of a process that has ended, but that its parent has not waited for."""


def process_identity() -> str:
    """Return a text for this process, or an empty one where there is no ``/proc``."""
    place, start = _place(), _start_time(os.getpid())
    return f"{place} {os.getpid()} {start}" if place and start else ""


def has_died(identity: str) -> bool:
    """Return whether the process of ``identity`` is one of this host and has ended."""
    place, *values = identity.rsplit(" ", 2)
    return bool(place) and place == _place() and _start_time(int(values[0])) != values[1]


def exit_text(identity: str) -> str:
    """Return the signal that ended the process of ``identity``, which has died, as `` (signal 9, Killed)``.

    Empty if there was none, and once the parent has waited for the process. Linux shows it to the same user only.
    """
    state, *values = _stat(int(identity.rsplit(" ", 2)[1]))
    number = int(values[-1]) & 0x7F if state in _ENDED else 0
    return f" (signal {number}, {signal.strsignal(number)})" if number else ""


@cache
def _place() -> str:
    """Return the boot of this host, and the namespaces of process ids and, from Linux 5.6 on, of start times."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        time = Path("/proc/self/ns/time")
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {time.stat().st_ino if time.exists() else '-'}"
    return ""


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
