"""What travels, by collective: seen where process groups are asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from composable_fsdp.comm.c10d import ProcessGroupCommunicator

__all__ = ["counted_collectives"]


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Counts the calls of each collective, of all groups, while it is entered."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(ProcessGroupCommunicator, name)

        def call(self: ProcessGroupCommunicator, *args: Any) -> Any:
            counts[name] += 1
            return original(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            patch.setattr(ProcessGroupCommunicator, name, counting(name))
        yield counts
