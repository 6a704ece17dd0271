"""Records the run that ``COMPOSABLE_FSDP_TIMELINE=folder`` asks for.

Every rank records its last events from the first use of a sharded model on, and writes its timeline to the folder when
its program ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp.trace import TraceEvent

_KEPT_EVENTS = 20_000
"""The last events that are kept. A group has about ten in a step: these are 20 steps of a model with 100 groups."""

logger = logging.getLogger(__name__)


class TimelineRecorder(Observer):
    """Begins the recording that the environment variable asks for."""

    def for_root(self, root: ObservedRoot) -> None:
        if folder := os.environ.get("COMPOSABLE_FSDP_TIMELINE"):
            _record(Path(folder))


@cache
def _record(folder: Path) -> None:
    """Record the last events from now on, and write them to ``folder`` when the program ends."""
    events: deque[TraceEvent] = deque(maxlen=_KEPT_EVENTS)
    trace.listeners.append(events.append)
    atexit.register(partial(_write_at_end, folder, events, _rank(), os.getpid()))


def _write_at_end(folder: Path, events: Sequence[TraceEvent], rank_at_begin: int, process: int) -> None:
    if events and os.getpid() == process:  # a forked process, such as a worker of a data loader, is no rank
        write(folder, _rank() if dist.is_initialized() else rank_at_begin, events)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def write(folder: Path, rank: int, events: Sequence[TraceEvent]) -> None:
    """Write the timeline of ``rank``. Log if it cannot be written: the program itself has not failed."""
    from composable_fsdp.diagnostics.timeline import performed, write_rank  # few programs need it

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_rank(folder, rank, performed(events, f"rank {rank}", ahead=time.time() - trace.now()))
    except OSError:
        logger.warning("the timeline could not be written to %s", folder, exc_info=True)
