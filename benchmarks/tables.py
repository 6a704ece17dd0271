"""Statistics and tables of benchmarks. Pure, and without torch."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["ratios", "show", "spread", "table"]

RESAMPLES = 2000


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return the median of ``samples`` and its 95 % interval, by percentile bootstrap (Efron, Tibshirani 1993, 13.3).

    The resamples are drawn from a fixed seed, so the same samples always give the same interval.
    """
    draw = random.Random(0).choices
    medians = sorted(statistics.median(draw(samples, k=len(samples))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return {"median": statistics.median(samples), "low": low, "high": high, "runs": len(samples)}


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return median and interval of the ratios of paired samples."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def show(value: object) -> str:
    """Return a cell of a table: ``median [low, high]`` of a result of :func:`spread`, numbers with three digits."""
    if isinstance(value, dict):
        return f"{show(value['median'])} [{show(value['low'])}, {show(value['high'])}]"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Return ``rows`` in Markdown. A missing value is a dash."""
    lines = [list(columns), ["---"] * len(columns), *([show(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
