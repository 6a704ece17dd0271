"""Counts the bytes and calls of each collective in the methods of the communicators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests._internals import GlooCommunicator, SharedMemoryCommunicator

__all__ = ["COMMUNICATORS", "counted_collectives"]

COMMUNICATORS = (GlooCommunicator, SharedMemoryCommunicator)
"""The communicator classes that an axis of several ranks may use."""


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the calls of each collective of all groups inside the context.

    Collectives that compare ranks are counted separately.

    ``"reduced"`` counts the messages of all reduce-scatters.
    """
    counts: Counter[str] = Counter()

    def counting(communicator: type, name: str) -> Callable[..., Any]:
        original = getattr(communicator, name)

        def call(self: object, *args: Any) -> Any:
            compares = len(args) > 1 and str(args[1]).startswith("comparison of")
            counts["comparison" if compares else name] += 1
            if name == "reduce_scatter":
                counts["reduced"] += len(args[0])
            return original(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for communicator in COMMUNICATORS:
            for name in ("all_gather", "reduce_scatter", "all_reduce", "barrier"):
                if hasattr(communicator, name):
                    patch.setattr(communicator, name, counting(communicator, name))
        yield counts
