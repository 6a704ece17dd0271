"""Warnings that a rank logs while it waits, and another rank that waits until the expected one has been logged."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from composable_fsdp import set_wait_warning
from tests._internals import world_store

LIMIT = 120.0
"""Seconds after which the other rank is released without the expected warning."""


@contextmanager
def warned(seconds: float) -> Iterator[list[str]]:
    """Set the time of the first warning, and return what is logged inside."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("composable_fsdp")
    logger.addHandler(handler)
    set_wait_warning(seconds)
    try:
        yield records
    finally:
        set_wait_warning(30.0)
        logger.removeHandler(handler)


def find_warning(records: Sequence[str], pattern: str) -> str | None:
    """Return the first record that ``pattern`` matches completely. Others may come before it: on a loaded machine a
    rank may not answer in time with what it does."""
    return next((record for record in records if re.fullmatch(pattern, record)), None)


def release_after(records: Sequence[str], pattern: str) -> None:
    """Let a thread end :func:`wait_for_release` of other ranks once a record matches ``pattern``."""

    def run() -> None:
        end = time.monotonic() + LIMIT
        while find_warning(records, pattern) is None and time.monotonic() < end:
            time.sleep(0.02)
        world_store().set("released", "yes")

    threading.Thread(target=run).start()


def wait_for_release() -> None:
    world_store().wait(["released"])
    world_store().delete_key("released")  # the next test may use the same store
