"""The reports of a plan: HTML, and a picture of its memory and streams with matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plugins.tuning.simulate import Span

__all__ = ["html_page", "picture"]

_MOST_POINTS = 2000
"""The number of points of the curve that are drawn."""
_COLORS = ("#4c78a8", "#72b7b2", "#54a24b", "#f58518", "#eeca3b", "#b279a2")
_LANES = ("compute", "gather", "reduce", "replicate")
_STYLE = "body{font-family:sans-serif;margin:2em}td,th{text-align:left;padding:.2em 1em}img{max-width:100%}"


def html_page(title: str, body: str) -> str:
    """Return a page of HTML."""
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return f"{head}<h1>{title}</h1>{body}\n"


def picture(
    title: str,
    kinds: Sequence[str],
    curve: Sequence[tuple[float, tuple[int, ...]]],
    limit: int,
    spans: Sequence[Span],
) -> bytes:
    """Return a PNG of the memory over the computation, and of the streams over the predicted time.

    Args:
        title: the title.
        kinds: the names of the kinds of memory.
        curve: the bytes of each kind over the seconds of computation.
        limit: the bytes of the device.
        spans: the intervals of the streams.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError('a PNG needs matplotlib: pip install "composable_fsdp[plot]".')
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    memory, lanes = figure.subplots(2, 1, height_ratios=(2, 1))
    memory.set(title=title, ylabel="GiB", xlabel="ms of computation: optimizer, forward, backward")
    _draw_memory(memory, kinds, curve, limit)
    _draw_lanes(lanes, spans)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _draw_memory(axes: Any, kinds: Sequence[str], curve: Sequence[tuple[float, tuple[int, ...]]], limit: int) -> None:
    step = max(1, len(curve) // _MOST_POINTS)
    # Of each run of points, the one with the most bytes is drawn, so that no peak is lost.
    points = [max(curve[i : i + step], key=lambda point: sum(point[1])) for i in range(0, len(curve), step)]
    series = [[held[place] / 2**30 for _, held in points] for place in range(len(kinds))]
    axes.stackplot([1e3 * seconds for seconds, _ in points], series, labels=kinds, colors=_COLORS)
    if max((sum(held) for _, held in points), default=0) > limit / 4:  # else it would flatten the curve
        axes.axhline(limit / 2**30, color="#e45756", linestyle="--", label="memory of the device")
    axes.margins(x=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_lanes(axes: Any, spans: Sequence[Span]) -> None:
    for place, lane in enumerate(_LANES):
        bars = [(1e3 * each.begin, 1e3 * (each.end - each.begin)) for each in spans if each.stream == lane]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=_COLORS[place], edgecolors="white", linewidth=0.3)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set(xlabel="ms of forward and backward, predicted")
    axes.invert_yaxis()
    axes.margins(x=0)
