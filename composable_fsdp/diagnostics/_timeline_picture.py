"""Pictures of one training step of a timeline. They need matplotlib, an optional dependency."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from composable_fsdp.diagnostics.timeline import COMPUTE, GATHER, PASSES, REDUCE, REPLICATE, WAITS, Lanes
from composable_fsdp.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_step"]

_COLORS = {COMPUTE: "#8fb9dd", GATHER: "#7cc39a", REDUCE: "#f0b26b", REPLICATE: "#c9a0dc", WAITS: "#d9534f"}
_MOST_PROCESSES = 8
_LETTERS_PER_WIDTH = 130
"""The letters of a label that fit into the width of the picture."""


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
