"""Draws heat maps of the cells of ``schedule_sweep.py``: ours over FSDP2, and ours over the lower bound.

    python benchmarks/plot_sweep.py benchmarks/results/2026-11-26-schedule-sweep.jsonl docs/schedule-sweep.png

Each field is the largest value over the numbers of ranks of the file. This program needs matplotlib, but not torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

QUANTITIES = {
    "time, ours/fsdp2": ("step time, ours / FSDP2", "RdYlGn_r", 0.9, 1.1),
    "ours/bound": ("step time, ours / lower bound", "viridis_r", 1.0, 1.6),
}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("cells", type=Path, help="the file that schedule_sweep.py wrote with --cells")
    options.add_argument("out", type=Path, help="the picture")
    arguments = options.parse_args()
    rows = [json.loads(line) for line in arguments.cells.read_text().splitlines()]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(len(QUANTITIES), len(models), figsize=(2.9 * len(models), 6.4), squeeze=False)
    for line, (quantity, (title, colors, low, high)) in zip(axes, QUANTITIES.items(), strict=True):
        for axis, model in zip(line, models, strict=True):
            draw(axis, [row for row in rows if row["model"] == model], quantity, colors, low, high)
        line[0].set_ylabel(f"{title}\nlatency of a collective, µs")
    for axis, model in zip(axes[0], models, strict=True):
        ranks = sorted({row["ranks"] for row in rows if row["model"] == model})
        axis.set_title(f"{model}\n{', '.join(map(str, ranks))} ranks", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("Gbit/s of a rank")
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=80)
    print(f"written: {arguments.out}")


def draw(axis: Any, rows: list[dict[str, Any]], quantity: str, colors: str, low: float, high: float) -> None:
    """Draw the largest ``quantity`` of ``rows`` for each latency and bandwidth."""
    latencies = sorted({row["latency us"] for row in rows})
    gbits = sorted({row["Gbit/s"] for row in rows})
    largest = [
        [max(row[quantity] for row in rows if (row["latency us"], row["Gbit/s"]) == (latency, gbit)) for gbit in gbits]
        for latency in latencies
    ]
    axis.imshow(largest, cmap=colors, vmin=low, vmax=high, aspect="auto")
    for y, line in enumerate(largest):
        for x, value in enumerate(line):
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
    axis.set_xticks(range(len(gbits)), gbits, fontsize=7)
    axis.set_yticks(range(len(latencies)), latencies, fontsize=7)


if __name__ == "__main__":
    main()
