"""Runs functions concurrently in threads of one process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def run_in_threads(calls: Sequence[Callable[[], T]], switch_interval: float) -> list[T]:
    """Run each call in its own thread and return the results. The switch interval is in seconds (Python's: 5 ms)."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    begin = threading.Barrier(len(calls))

    def run(number: int) -> None:
        try:
            begin.wait()
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]
