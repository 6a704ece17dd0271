"""Counts the bytes and calls of each collective in the methods of the communicators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests._internals import (
    Collective,
    GlooCommunicator,
    SharedMemoryCommunicator,
    Transfer,
    Watched,
    communicators,
    find,
)
from tests.helpers.fake_world import FakeCommunicator

COMMUNICATORS = (GlooCommunicator, SharedMemoryCommunicator, FakeCommunicator)
"""The communicator classes that an axis of several ranks may use."""


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the calls of each collective of all groups inside the context. Collectives that compare ranks are counted
    separately. ``"reduced"`` counts the messages of all reduce-scatters."""
    counts: Counter[str] = Counter()

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(
            self: object, kind: Collective, transfers: Sequence[Transfer], label: str = "", *op: Any, **named: Any
        ) -> Any:
            counts["comparison" if label.startswith("comparison of") else kind.value] += 1
            if kind is Collective.REDUCE_SCATTER:
                counts["reduced"] += len(transfers)
            return original(self, kind, transfers, label, *op, **named)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for communicator in COMMUNICATORS:
            patch.setattr(communicator, "launch", counting(communicator.launch))
        yield counts


def compared(group: dist.ProcessGroup) -> int:
    """Return the number of messages exchanged over ``group`` since it last connected to compare operations."""
    found = (find(known, Watched) for known in communicators([group]))
    return sum(each.checker.compared for each in found if each is not None and each.checker is not None)
