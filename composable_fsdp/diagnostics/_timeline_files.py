"""Timelines as files, from recorded events of this rank or from the files of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from composable_fsdp import trace
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp.diagnostics._compare import read
from composable_fsdp.diagnostics._timeline_picture import draw_step
from composable_fsdp.diagnostics.communication_report import states_of
from composable_fsdp.diagnostics.timeline import (
    Lanes,
    aligned,
    performed,
    predicted,
    with_prediction,
    write_chrome_trace,
)
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plugins.tuning.tuning import choice_of

__all__ = ["merged", "write_timeline"]


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
    choice = None if model is None else choice_of(iteration_of(states_of(model)[0][1]))
    processes = with_prediction([performed(events, title)], predicted(choice.timeline) if choice else None)
    if os.fspath(path).endswith(".json"):
        write_chrome_trace(path, processes)
    else:
        draw_step(path, processes)


def merged(folder: Path) -> list[Lanes]:
    """Return the timelines of all ranks in ``folder`` by one clock, after the predicted step.

    The files are those of diagnostics, which ranks write when the program ends or, with fewer events, on an error.

    Raises:
        ConfigurationError: there is no file in ``folder``, or one is damaged.
    """
    files = read(folder)
    for name, problem in files.damaged.items():
        raise ConfigurationError(f"{folder / name} cannot be read: {problem}")
    if not files.dumps:
        raise ConfigurationError(
            f"there is no timeline in {folder}. Set COMPOSABLE_FSDP_TIMELINE={folder} for a run; ranks write when they "
            "end."
        )
    ranks = [
        performed(dump.events, f"rank {rank}").moved(dump.header.written - dump.header.clock)
        for rank, dump in sorted(files.dumps.items())
    ]
    simulated = next((dump.predicted for dump in files.dumps.values() if dump.predicted is not None), None)
    return with_prediction(aligned(ranks), simulated)
