"""Timelines as files: Chrome traces and pictures, of recorded events of this rank or of the files of all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from composable_fsdp import trace
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp.diagnostics._compare import read
from composable_fsdp.diagnostics.communication_report import states_of
from composable_fsdp.diagnostics.timeline import (
    COMPUTE,
    GATHER,
    LANES,
    PASSES,
    REDUCE,
    REPLICATE,
    WAITS,
    Lanes,
    aligned,
    performed,
    predicted,
    with_prediction,
)
from composable_fsdp.errors import ConfigurationError, UnsupportedError
from composable_fsdp.plugins.tuning.tuning import choice_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_step", "merged", "write_chrome_trace", "write_timeline"]

_COLORS = {COMPUTE: "#8fb9dd", GATHER: "#7cc39a", REDUCE: "#f0b26b", REPLICATE: "#c9a0dc", WAITS: "#d9534f"}
_MOST_PROCESSES = 8
_LETTERS_PER_WIDTH = 130
"""The letters of a label that fit into the width of the picture."""
_MICROSECONDS = 1e6


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


def write_chrome_trace(path: str | os.PathLike[str], processes: Sequence[Lanes]) -> None:
    """Write ``processes``, each with its lanes, as a Chrome trace that begins at 0."""
    origin = min((each.begin for lanes in processes for each in lanes.slices), default=0.0)
    events = [event for number, lanes in enumerate(processes) for event in _chrome_events(number, lanes, origin)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _chrome_events(process: int, lanes: Lanes, origin: float) -> Iterator[dict[str, Any]]:
    def of(kind: str, name: str, lane: str = "", **values: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": process, "tid": 1 + LANES.index(lane) if lane else 0, **values}

    def time(moment: float) -> float:
        return round(_MICROSECONDS * (moment - origin), 3)

    yield of("M", "process_name", args={"name": lanes.title})
    yield of("M", "process_sort_index", args={"sort_index": process})
    for lane in LANES:
        if lanes.lane(lane):
            yield of("M", "thread_name", lane, args={"name": lane})
            yield of("M", "thread_sort_index", lane, args={"sort_index": LANES.index(lane)})
    for each in lanes.slices:
        duration = round(_MICROSECONDS * each.seconds, 3)
        yield of("X", each.name, each.lane, cat=each.lane, ts=time(each.begin), dur=duration, args=each.details)
    for moment, held in lanes.memory:
        yield of("C", lanes.counted, ts=time(moment), args={"bytes": held})


# -- pictures


def draw_step(path: str | os.PathLike[str], processes: Sequence[Lanes], step: int = -1) -> None:
    """Draw one training step as a picture, the processes one above the other, and their memory below.

    Args:
        path: the file. Its ending chooses the format, such as ``.png`` or ``.svg``.
        processes: timelines with one clock: a predicted one, which is moved to the step, and those of up to 8 ranks.
        step: the number of the step of the first rank, from 0; negative numbers count from the end.

    Raises:
        ConfigurationError: there is no such step.
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnsupportedError('a picture needs matplotlib: pip install "composable_fsdp[plot]"') from error
    ranks = [lanes for lanes in processes if lanes.title != "predicted"]
    steps = ranks[0].steps if ranks else []
    if not -len(steps) <= step < len(steps):
        raise ConfigurationError(f"there is no step {step}: {len(steps)} training steps were recorded.")
    begin, end = steps[step]
    simulated = [lanes.moved(begin - lanes.steps[0][0]) for lanes in processes if lanes.title == "predicted"]
    end = max([end, *(lanes.steps[0][1] for lanes in simulated)])
    shown = [*simulated, *ranks][:_MOST_PROCESSES]
    heights = [max(1, len(_lanes_of(lanes))) for lanes in shown]
    figure = Figure(figsize=(13, 1.5 + 0.42 * sum(heights) + 1.6), layout="constrained")
    rows = figure.subplots(len(shown) + 1, 1, sharex=True, gridspec_kw={"height_ratios": [*heights, 4]})
    for axes, lanes in zip(rows, shown, strict=False):
        _draw_lanes(axes, lanes, begin, end)
        _draw_memory(rows[-1], lanes, begin, end)
    rows[-1].set(xlabel="ms", ylabel="MiB", xlim=(0, 1e3 * (end - begin)), ylim=(0, None))
    rows[-1].grid(alpha=0.3)
    if any(lanes.memory for lanes in shown):
        rows[-1].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=120)


def _lanes_of(lanes: Lanes) -> list[str]:
    return [lane for lane in _COLORS if lanes.lane(lane)]


def _draw_lanes(axes: Axes, lanes: Lanes, begin: float, end: float) -> None:
    names = _lanes_of(lanes)
    for row, lane in enumerate(names):
        inside = [each for each in lanes.lane(lane) if each.end > begin and each.begin < end]
        bars = [(1e3 * (each.begin - begin), 1e3 * each.seconds) for each in inside]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLORS[lane], edgecolor="white", linewidth=0.4)
        for each, (left, width) in zip(inside, bars, strict=True):
            label = each.name.removeprefix(f"{lane} ")
            if len(label) <= _LETTERS_PER_WIDTH * each.seconds / (end - begin):
                axes.text(left + width / 2, row, label, ha="center", va="center", fontsize=6, clip_on=True)
    for each in lanes.lane(PASSES):
        if begin <= each.end <= end:
            axes.axvline(1e3 * (each.end - begin), color="grey", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set_title(_title(lanes), loc="left", fontsize="medium")


def _title(lanes: Lanes) -> str:
    found = lanes.summary()
    steps = "" if found["steps"] <= 1 else f", median of {found['steps']} steps"
    return f"{lanes.title}: {1e3 * found['seconds']:.1f} ms per step, {found['exposed_share']:.0%} exposed{steps}"


def _draw_memory(axes: Axes, lanes: Lanes, begin: float, end: float) -> None:
    before = [held for moment, held in lanes.memory if moment < begin]
    inside = [(moment, held) for moment, held in lanes.memory if begin <= moment <= end]
    if inside:
        times = [0.0, *(1e3 * (moment - begin) for moment, _ in inside)]
        values = [held / 2**20 for held in [before[-1] if before else 0, *(held for _, held in inside)]]
        axes.step(times, values, where="post", linewidth=1.0, label=f"{lanes.title}: {lanes.counted}")
