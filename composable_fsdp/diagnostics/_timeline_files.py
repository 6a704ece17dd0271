"""Files of timelines: of recorded events, of a run with an environment variable, and of all ranks of a job."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from weakref import WeakSet

from torch import nn

from composable_fsdp import trace
from composable_fsdp._runtime.groups.state import find_state
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp._runtime.schedule.simulate import Timeline as Simulated
from composable_fsdp.diagnostics._recording import rank_and_world_size
from composable_fsdp.diagnostics._timeline_picture import draw_step
from composable_fsdp.diagnostics.communication_report import states_of
from composable_fsdp.diagnostics.timeline import (
    Lanes,
    aligned,
    performed,
    read_timeline,
    with_prediction,
    write_chrome_trace,
)
from composable_fsdp.errors import ConfigurationError

__all__ = ["FOLDER_VARIABLE", "merged", "record_timeline", "write_timeline"]

FOLDER_VARIABLE = "COMPOSABLE_FSDP_TIMELINE"
"""The environment variable with the folder of :func:`record_timeline`, which the first ``fully_shard`` reads."""

_KEPT_EVENTS = 100_000
"""A group has about ten in a step: these are 100 steps of a model with 100 groups."""
_PREDICTED = "predicted"

logger = logging.getLogger(__name__)


def write_timeline(
    events: Iterable[trace.TraceEvent],
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    title: str = "rank 0",
) -> None:
    """Write recorded events as a timeline: a Chrome trace, or a picture of the last training step.

    Perfetto (ui.perfetto.dev) and chrome://tracing show Chrome traces.

    Args:
        events: a ``Recorder``, or its events.
        path: the file, a Chrome trace if it ends in ``.json``, else a picture such as ``.png``. Its folder must exist.
        model: the root of the sharded modules. If settings were chosen for it by costs, the predicted step is shown
            above the last recorded one.
        title: the name of this rank in the file.

    Raises:
        ConfigurationError: ``model`` is not sharded, or there is no training step to draw.
        UnsupportedError: a picture was asked for without matplotlib.
    """
    choice = None if model is None else iteration_of(states_of(model)[0][1]).choice
    processes = with_prediction(performed(events, title), choice.timeline if choice else None)
    if os.fspath(path).endswith(".json"):
        write_chrome_trace(path, processes)
    else:
        draw_step(path, processes)


class _Recording:
    """The last events of this rank, which are written when the program ends. Final."""

    def __init__(self, folder: Path) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()
        """The modules that were sharded."""
        self._folder = folder
        self._rank, self._world_size = rank_and_world_size()
        self._events: deque[trace.TraceEvent] = deque(maxlen=_KEPT_EVENTS)
        self._simulated: Simulated | None = None
        self._process = os.getpid()
        trace.listeners.append(self._note)
        atexit.register(self._write)

    def _note(self, event: trace.TraceEvent) -> None:
        self._events.append(event)
        if event.operation is trace.Operation.CHOOSE:
            states = [state for model in self.models if (state := find_state(model)) is not None]
            choices = [iteration_of(state).choice for state in states if iteration_of(state).root is state]
            self._simulated = next((each.timeline for each in choices if each is not None), self._simulated)

    def _write(self) -> None:
        if os.getpid() != self._process or not self._events:  # a forked worker of a data loader is no rank
            return
        path = self._folder / f"rank-{self._rank:05}.timeline.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lanes = performed(self._events, f"rank {self._rank}")
            clock = time.time() - trace.now()
            notes = {"rank": self._rank, "world_size": self._world_size, "clock": clock}
            write_chrome_trace(path, with_prediction(lanes, self._simulated), **notes)
        except OSError as error:
            logger.warning("the timeline of rank %d could not be written to %s: %s", self._rank, path, error)


def record_timeline(folder: str, model: nn.Module | Sequence[nn.Module]) -> None:
    """Record from now on, to write to ``folder`` when the program ends, and note that ``model`` is sharded."""
    _recording_in(folder).models.update([model] if isinstance(model, nn.Module) else model)


@cache
def _recording_in(folder: str) -> _Recording:
    return _Recording(Path(folder))


def merged(folder: Path) -> list[Lanes]:
    """Return the timelines of all ranks in ``folder`` by one clock, after the predicted step of the first rank.

    Raises:
        ConfigurationError: there is no file of a timeline in ``folder``, or one is damaged.
    """
    paths = sorted(folder.glob("rank-*.timeline.json"))
    if not paths:
        raise ConfigurationError(
            f"there is no timeline in {folder}. Set {FOLDER_VARIABLE}={folder} for a run; ranks write when they end."
        )
    simulated: list[Lanes] = []
    ranks: list[Lanes] = []
    for path in paths:
        processes, notes = read_timeline(path)
        for lanes in processes:
            (simulated if lanes.title == _PREDICTED else ranks).append(lanes.moved(notes["origin"] + notes["clock"]))
    return [*simulated[:1], *aligned(ranks)]
