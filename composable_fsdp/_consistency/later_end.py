"""The end of a process by another rank's fault, after the end of that rank.

Launchers report the process that failed first as the root cause. torchrun compares the times in error files, in whole
seconds, and takes the time at which it saw the end of a process that wrote none. Then it sends SIGTERM to the others.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from composable_fsdp._consistency.process_identity import has_died

__all__ = ["record_at_end", "record_now", "wait_for_ends"]

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
